#include "device/pages.hpp"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/failure.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/units.hpp"

#if !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23
#endif
#if !defined(MREMAP_DONTUNMAP)
#define MREMAP_DONTUNMAP 4
#endif

namespace zg::pages {
namespace {

void* pointer(std::int64_t at) {
  return reinterpret_cast<void*>(at);
}
std::size_t size(std::int64_t bytes) {
  return static_cast<std::size_t>(bytes);
}

// Whether the error means that a sandbox refuses the call, and not that memory is short.
bool is_forbidden(int error) {
  return error == EPERM || error == EACCES || error == ENOSYS;
}

// Bytes that one thread takes at a time: clearing them takes milliseconds, waking a thread only microseconds.
constexpr std::int64_t kTurn = 8 * kUnit;

int take_alone(std::int64_t begin, std::int64_t bytes) {
  while (madvise(pointer(begin), size(bytes), MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL && !is_forbidden(errno)) return errno;
    // Linux before 5.14 does not know the advice, and a sandbox may forbid it: touch the pages one by one.
    for (std::int64_t at = begin; at < begin + bytes; at += kPage)
      *static_cast<volatile char*>(pointer(at)) = 0;
    break;
  }
  return 0;
}

// Addresses that were free just now, aligned to a unit; null: none. As mremap's hint they let a huge page
// stay huge.
void* aligned_hint() {
  void* const data =
      mmap(nullptr, size(2 * kUnit), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  munmap(data, size(2 * kUnit));
  return pointer(round_up(reinterpret_cast<std::int64_t>(data), kUnit));
}

// Moves pages in two steps, by way of addresses that the kernel chooses. With a fixed target, mremap unmaps
// the target before it checks its source; if it then fails, another thread's mapping may take that place.
int move_alone(std::int64_t from, std::int64_t to, std::int64_t bytes) {
  void* const hint = bytes == kUnit ? aligned_hint() : nullptr;
  void* const between =
      mremap(pointer(from), size(bytes), size(bytes), MREMAP_MAYMOVE | MREMAP_DONTUNMAP, hint);
  if (between == MAP_FAILED) return errno;
  if (mremap(between, size(bytes), size(bytes), MREMAP_MAYMOVE | MREMAP_FIXED, pointer(to)) != MAP_FAILED)
    return 0;
  const int error = errno;
  munmap(between, size(bytes));
  return error;
}

// Moves pages that may span several kernel mappings. The kernel moves only within one mapping, and does not
// report where one ends and the next begins, so a range that it refuses is halved.
int move_halves(std::int64_t from, std::int64_t to, std::int64_t bytes) {
  const int error = move_alone(from, to, bytes);
  if (error != EFAULT || bytes <= kPage) return error;
  const std::int64_t half = round_up(bytes / 2, kPage);
  const int refusal = move_halves(from, to, half);
  return refusal != 0 ? refusal : move_halves(from + half, to + half, bytes - half);
}

// Ends the process. The pages count as given back already, and destructors call this, so it cannot throw.
[[noreturn]] void end_without_pages(int error) {
  log::error("pages of host memory cannot be given back: madvise: {}, mmap: {}", errno_text(error),
             errno_text(errno));
  end_at_once(1);
}

}  // namespace

std::int64_t reserve(std::int64_t bytes) {
  ZG_ASSERT_EQ(bytes % kUnit, 0);
  void* data = mmap(nullptr, size(bytes + kUnit), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return 0;
  const auto got = reinterpret_cast<std::int64_t>(data), begin = round_up(got, kUnit);
  if (begin > got) munmap(data, size(begin - got));
  munmap(pointer(begin + bytes), size(got + kUnit - begin));
  allow_huge(begin, bytes, false);
  return begin;
}

void unreserve(std::int64_t begin, std::int64_t bytes) {
  munmap(pointer(begin), size(bytes));
}

int prefer_node(std::int64_t begin, std::int64_t bytes, int node) {
  constexpr std::size_t kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(static_cast<std::size_t>(node) / kBits + 1);
  mask.back() = 1ul << (static_cast<std::size_t>(node) % kBits);
  // The kernel reads one bit less than the given count.
  return syscall(SYS_mbind, begin, bytes, MPOL_PREFERRED, mask.data(), mask.size() * kBits + 1, 0) == 0
             ? 0
             : errno;
}

void allow_huge(std::int64_t begin, std::int64_t bytes, bool huge) {
  // Errors are ignored: a kernel without huge pages refuses both advices, and needs neither.
  madvise(pointer(begin), size(bytes), huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

int take(std::int64_t begin, std::int64_t bytes) {
  if (bytes < 4 * kTurn) return take_alone(begin, bytes);
  // Turns end at multiples of kTurn, so that no huge page is split between threads.
  const std::int64_t first = begin / kTurn, turns = (begin + bytes + kTurn - 1) / kTurn - first;
  std::atomic<int> error = 0;
  parallel_for(turns, 1, [&](std::int64_t from, std::int64_t to) {
    const std::int64_t at = std::max(begin, (first + from) * kTurn);
    const std::int64_t end = std::min(begin + bytes, (first + to) * kTurn);
    if (error == 0)
      if (const int refusal = take_alone(at, end - at); refusal != 0) error = refusal;
  });
  return error;
}

void give_back(std::int64_t begin, std::int64_t bytes, bool locked) {
  if (locked) munlock(pointer(begin), size(bytes));
  if (madvise(pointer(begin), size(bytes), MADV_DONTNEED) == 0) return;
  // A sandbox may forbid the advice. Then a new mapping replaces the pages; it loses the preferred node and
  // the advice about huge pages.
  const int error = errno;
  ZG_ASSERT(is_forbidden(error), "madvise: {}", errno_text(error));
  if (mmap(pointer(begin), size(bytes), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
    end_without_pages(error);
}

int move(std::int64_t from, std::int64_t to, std::int64_t bytes, bool locked) {
  // Without this the kernel would unlock the whole mapping that the pages leave.
  if (locked) munlock(pointer(from), size(bytes));
  int error = 0;
  for (std::int64_t done = 0; done < bytes && error == 0;) {
    const std::int64_t n = std::min(bytes - done, kUnit - (from + done) % kUnit);
    error = move_halves(from + done, to + done, n);
    done += n;
  }
  if (error == 0 && locked) error = lock(to, bytes);
  if (error != 0) {
    give_back(from, bytes, false);
    give_back(to, bytes, locked);
  }
  return error;
}

int lock(std::int64_t begin, std::int64_t bytes) {
  return mlock(pointer(begin), size(bytes)) == 0 ? 0 : errno;
}

Counts& operator+=(Counts& a, const Counts& b) {
  a.resident += b.resident;
  a.huge += b.huge;
  a.locked += b.locked;
  return a;
}

// "7f0000000000-7f0000200000 rw-p ..." begins each mapping, followed by lines of "Name:  number kB".
Counts count(std::int64_t begin, std::int64_t bytes) {
  Counts counts;
  std::ifstream in("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string name;
    std::int64_t value = 0;
    words >> name;
    if (name.empty() || name.back() != ':') {
      const auto from = static_cast<std::int64_t>(std::strtoull(name.c_str(), nullptr, 16));
      inside = begin <= from && from < begin + bytes;
    } else if (inside && words >> value) {
      if (name == "Rss:") counts.resident += value * kKiB;
      if (name == "AnonHugePages:") counts.huge += value * kKiB;
      if (name == "Locked:") counts.locked += value * kKiB;
    }
  }
  return counts;
}

}  // namespace zg::pages
