#include "tests/cuda/fake_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kPage = 4096;
constexpr int kPoison = 0xff;

std::int64_t address(const void* at) {
  return reinterpret_cast<std::int64_t>(at);
}
void* pointer(std::int64_t at) {
  return reinterpret_cast<void*>(at);
}
std::size_t size(std::int64_t bytes) {
  return static_cast<std::size_t>(bytes);
}

void* map_pages(void* at, std::int64_t bytes, int protection, int flags, int file, std::int64_t offset) {
  void* data = mmap(at, size(bytes), protection, flags, file, offset);
  ZG_ASSERT(data != MAP_FAILED, "mmap of {}: {}", bytes, errno_text(errno));
  return data;
}

// Whether the process has memory at all of these addresses.
bool exists(std::int64_t at, std::int64_t bytes) {
  const std::int64_t begin = at / kPage * kPage, end = round_up(at + bytes, kPage);
  std::vector<unsigned char> resident(size((end - begin) / kPage));
  return mincore(pointer(begin), size(end - begin), resident.data()) == 0;
}

}  // namespace

FakeMemory::FakeMemory(int devices, std::int64_t bytes, std::int64_t granule)
    : bytes_(bytes), granule_(granule), used_(size(devices), 0), other_use_(size(devices), 0) {
  ZG_ASSERT(granule >= kPage && granule % kPage == 0, "a granule of {}", granule);
  file_ = memfd_create("zg fake device memory", MFD_CLOEXEC);
  ZG_ASSERT(file_ >= 0, "memfd_create: {}", errno_text(errno));
}

FakeMemory::~FakeMemory() {
  for (const auto& [at, host] : pinned_) {
    if (host.ours) munmap(pointer(at), size(host.bytes + kPage));
  }
  for (const auto& [at, range] : reserved_) munmap(pointer(at), size(range.bytes));
  close(file_);
}

// The first of the ranges that has one of these bytes.
template <class Map>
auto FakeMemory::overlap(Map& ranges, Address at, std::int64_t bytes) -> decltype(ranges.begin()) {
  auto it = ranges.upper_bound(at);
  if (it != ranges.begin()) {
    const auto before = std::prev(it);
    if (before->first + before->second.bytes > at) return before;
  }
  return it != ranges.end() && it->first < at + bytes ? it : ranges.end();
}

void FakeMemory::check_granules(std::int64_t value, const char* what) const {
  if (value <= 0 || value % granule_ != 0)
    throw Misuse{fmt::format("{} {} is no multiple of the granule, {}", what, value, granule_)};
}

void FakeMemory::check_idle(Address at, std::int64_t bytes, const char* what) const {
  for (const auto& [begin, n] : uses_) {
    if (begin < at + bytes && at < begin + n)
      throw Misuse{fmt::format("{} of memory that a copy or fill under way uses", what)};
  }
}

cuda::PhysicalHandle FakeMemory::create(int device, std::int64_t bytes) {
  std::lock_guard lock(mutex_);
  check_granules(bytes, "a size of");
  const std::int64_t free = bytes_ - used_[size(device)] - other_use_[size(device)];
  if (bytes > free) {
    throw Error(Errc::kMemory, "fake device",
                fmt::format("CUDA refused {}: out of memory; {} of {} are free", format_bytes(bytes),
                            format_bytes(std::max<std::int64_t>(0, free)), format_bytes(bytes_)));
  }
  // File offsets are never used again: what was released has no bytes any more.
  const std::int64_t offset = file_bytes_;
  file_bytes_ += bytes;
  ZG_ASSERT(ftruncate(file_, file_bytes_) == 0, "ftruncate: {}", errno_text(errno));
  void* data = map_pages(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, offset);
  std::memset(data, kPoison, size(bytes));
  munmap(data, size(bytes));
  used_[size(device)] += bytes;
  physical_[next_] = {.device = device, .offset = offset, .bytes = bytes};
  return next_++;
}

void FakeMemory::drop_if_unused(std::map<cuda::PhysicalHandle, Physical>::iterator it) {
  const Physical& p = it->second;
  if (p.held || p.mapped) return;
  const int result = fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, p.offset, p.bytes);
  ZG_ASSERT(result == 0, "fallocate: {}", errno_text(errno));
  used_[size(p.device)] -= p.bytes;
  physical_.erase(it);
}

void FakeMemory::release(cuda::PhysicalHandle physical) {
  std::lock_guard lock(mutex_);
  const auto it = physical_.find(physical);
  if (it == physical_.end() || !it->second.held)
    throw Misuse{fmt::format("there is no physical memory {}", physical)};
  it->second.held = false;
  drop_if_unused(it);
}

void* FakeMemory::reserve(std::int64_t bytes) {
  std::lock_guard lock(mutex_);
  check_granules(bytes, "a size of");
  const std::int64_t more = bytes + granule_;
  const std::int64_t got =
      address(map_pages(nullptr, more, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  const std::int64_t begin = round_up(got, granule_);
  if (begin > got) munmap(pointer(got), size(begin - got));
  if (got + more > begin + bytes) munmap(pointer(begin + bytes), size(got + more - begin - bytes));
  reserved_[begin] = {.bytes = bytes};
  return pointer(begin);
}

void FakeMemory::free_addresses(void* at, std::int64_t bytes) {
  std::lock_guard lock(mutex_);
  const auto it = reserved_.find(address(at));
  if (it == reserved_.end() || it->second.bytes != bytes)
    throw Misuse{fmt::format("no {} bytes of addresses were reserved there", bytes)};
  if (overlap(mapped_, it->first, bytes) != mapped_.end()) throw Misuse{"addresses that are still mapped"};
  munmap(at, size(bytes));
  reserved_.erase(it);
}

void FakeMemory::map(void* at, std::int64_t bytes, cuda::PhysicalHandle physical) {
  std::lock_guard lock(mutex_);
  const Address begin = address(at);
  check_granules(bytes, "a size of");
  check_granules(begin, "an address of");
  const auto range = overlap(reserved_, begin, bytes);
  if (range == reserved_.end() || begin < range->first || begin + bytes > range->first + range->second.bytes)
    throw Misuse{"these addresses were not reserved"};
  if (overlap(mapped_, begin, bytes) != mapped_.end()) throw Misuse{"these addresses are mapped already"};
  const auto it = physical_.find(physical);
  if (it == physical_.end() || !it->second.held)
    throw Misuse{fmt::format("there is no physical memory {}", physical)};
  Physical& p = it->second;
  if (p.bytes != bytes) throw Misuse{fmt::format("{} bytes, of physical memory of {}", bytes, p.bytes)};
  if (p.mapped) throw Misuse{fmt::format("physical memory {} is mapped already", physical)};
  map_pages(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_, p.offset);
  p.mapped = true;
  mapped_[begin] = {.bytes = bytes, .physical = physical};
}

void FakeMemory::unmap(void* at, std::int64_t bytes) {
  std::lock_guard lock(mutex_);
  const auto it = mapped_.find(address(at));
  if (it == mapped_.end() || it->second.bytes != bytes)
    throw Misuse{fmt::format("no mapping of {} bytes begins there", bytes)};
  check_idle(it->first, bytes, "unmap");
  map_pages(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  const auto physical = physical_.find(it->second.physical);
  mapped_.erase(it);
  physical->second.mapped = false;
  drop_if_unused(physical);
}

void FakeMemory::register_host(void* at, std::int64_t bytes) {
  std::lock_guard lock(mutex_);
  const Address begin = address(at);
  if (bytes <= 0 || bytes % kPage != 0 || begin % kPage != 0)
    throw Misuse{fmt::format("{} bytes at {:#x} are no whole pages", bytes, begin)};
  if (const auto it = overlap(pinned_, begin, bytes); it != pinned_.end()) {
    const bool same = it->first == begin && it->second.bytes == bytes && !it->second.ours;
    if (!same || it->second.times == devices()) throw Misuse{"a part is registered already"};
    ++it->second.times;
    return;
  }
  if (overlap(reserved_, begin, bytes) != reserved_.end()) throw Misuse{"this is no host memory"};
  if (!exists(begin, bytes)) throw Misuse{"there is no memory at these addresses"};
  pinned_[begin] = {.bytes = bytes};
}

void FakeMemory::unregister_host(void* at) {
  std::lock_guard lock(mutex_);
  const auto it = pinned_.find(address(at));
  if (it == pinned_.end() || it->second.ours) throw Misuse{"nothing that begins there is registered"};
  if (--it->second.times > 0) return;
  check_idle(it->first, it->second.bytes, "unregister_host");
  if (!exists(it->first, it->second.bytes)) throw Misuse{"the memory went before its registration"};
  pinned_.erase(it);
}

void* FakeMemory::allocate_host(std::int64_t bytes) {
  std::lock_guard lock(mutex_);
  if (bytes <= 0) throw Misuse{fmt::format("an allocation of {} bytes", bytes)};
  const std::int64_t whole = round_up(bytes, kPage);
  void* data = map_pages(nullptr, whole + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ZG_ASSERT_EQ(mprotect(pointer(address(data) + whole), size(kPage), PROT_NONE), 0);
  std::memset(data, kPoison, size(whole));
  pinned_[address(data)] = {.bytes = whole, .ours = true};
  return data;
}

void FakeMemory::release_host(void* at) {
  std::lock_guard lock(mutex_);
  const auto it = pinned_.find(address(at));
  if (it == pinned_.end() || !it->second.ours) throw Misuse{"nothing that begins there was allocated"};
  check_idle(it->first, it->second.bytes, "release_host");
  munmap(at, size(it->second.bytes + kPage));
  pinned_.erase(it);
}

FakeMemory::Place FakeMemory::place(const void* at, std::int64_t bytes) const {
  std::lock_guard lock(mutex_);
  return place_locked(address(at), bytes);
}

FakeMemory::Place FakeMemory::place_locked(Address at, std::int64_t bytes) const {
  if (bytes < 0) throw Misuse{fmt::format("{} bytes", bytes)};
  if (bytes == 0) return {};
  const Address end = at + bytes;
  // Neighbours, and holes between them.
  const auto covered = [&](const auto& ranges) {
    std::int64_t n = 0;
    for (auto it = overlap(ranges, at, bytes); it != ranges.end() && it->first < end; ++it)
      n += std::min(end, it->first + it->second.bytes) - std::max(at, it->first);
    return n;
  };
  if (overlap(reserved_, at, bytes) != reserved_.end()) {
    if (covered(mapped_) != bytes)
      throw Misuse{fmt::format("of {} bytes of device memory, {} are mapped", bytes, covered(mapped_))};
    Place place{Kind::kDevice, physical_.at(overlap(mapped_, at, bytes)->second.physical).device};
    for (auto it = overlap(mapped_, at, bytes); it != mapped_.end() && it->first < end; ++it) {
      if (physical_.at(it->second.physical).device != place.device) throw Misuse{"memory of two devices"};
    }
    return place;
  }
  const std::int64_t pinned = covered(pinned_);
  if (pinned == bytes) {
    const auto it = overlap(pinned_, at, bytes);
    if (it->first + it->second.bytes < end) throw Misuse{"two registrations: CUDA does not say that it may"};
    return {Kind::kPinned, -1};
  }
  if (pinned != 0)
    throw Misuse{fmt::format("of {} bytes of host memory, a part of {} is registered", bytes, pinned)};
  if (!exists(at, bytes)) throw Misuse{fmt::format("there is no memory at {:#x}, {} bytes", at, bytes)};
  return {Kind::kPageable, -1};
}

void FakeMemory::begin_use(const void* at, std::int64_t bytes) {
  std::lock_guard lock(mutex_);
  uses_.emplace(address(at), bytes);
}

void FakeMemory::end_use(const void* at, std::int64_t bytes) {
  std::lock_guard lock(mutex_);
  for (auto [it, end] = uses_.equal_range(address(at)); it != end; ++it) {
    if (it->second != bytes) continue;
    uses_.erase(it);
    return;
  }
  ZG_ASSERT(false, "no such use of {} bytes", bytes);
}

cuda::MemoryInfo FakeMemory::info(int device) const {
  std::lock_guard lock(mutex_);
  return {std::max<std::int64_t>(0, bytes_ - used_[size(device)] - other_use_[size(device)]), bytes_};
}

void FakeMemory::set_other_use(int device, std::int64_t bytes) {
  std::lock_guard lock(mutex_);
  other_use_[size(device)] = bytes;
}

std::int64_t FakeMemory::pinned() const {
  std::lock_guard lock(mutex_);
  std::int64_t bytes = 0;
  for (const auto& [at, host] : pinned_) bytes += host.bytes;
  return bytes;
}

std::vector<std::string> FakeMemory::leaks(Of memory) const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> all;
  for (const auto& [at, host] : pinned_)
    all.push_back(fmt::format("{} bytes of host memory at {:#x}, {}", host.bytes, at,
                              host.ours ? "allocated" : "registered"));
  if (memory == Of::kHost) return all;
  for (const auto& [id, p] : physical_)
    all.push_back(fmt::format("physical memory {} of {} bytes", id, p.bytes));
  for (const auto& [at, range] : reserved_)
    all.push_back(fmt::format("{} bytes of addresses at {:#x}", range.bytes, at));
  for (const auto& [at, mapping] : mapped_)
    all.push_back(fmt::format("a mapping of {} bytes at {:#x}", mapping.bytes, at));
  return all;
}

}  // namespace zg::test
