#include "io/noise_memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

constexpr std::int64_t kHugePage = 2 * kMiB;
constexpr std::int64_t kNoise = kMiB;  // longer than the spans in which file systems compress

}  // namespace

// Even a few small blocks get whole huge pages, since the kernel puts no smaller range into one.
NoiseMemory::NoiseMemory(std::int64_t bytes, bool huge_pages, const Purpose& purpose)
    : bytes_(round_up(bytes, kHugePage)) {
  const auto refuse = [&](const std::string& why) {
    throw Error(Errc::kMemory, purpose.where,
                fmt::format("{} of {}: {}", format_bytes(bytes), purpose.what, why), purpose.hint);
  };
  // The kernel would grant more than there is, and kill some process when the memory is touched.
  const std::int64_t available = available_memory();
  if (bytes > available) refuse(fmt::format("{} of memory available", format_bytes(available)));
  mapping_ = mmap(nullptr, static_cast<std::size_t>(bytes_ + kHugePage), PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) refuse(errno_text(errno));
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(mapping_));
  data_ = static_cast<char*>(mapping_) + (round_up(address, kHugePage) - address);
  // A machine without huge pages refuses, and works all the same.
  (void)madvise(data_, static_cast<std::size_t>(bytes_), huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  fill();
}

NoiseMemory::~NoiseMemory() {
  munmap(mapping_, static_cast<std::size_t>(bytes_ + kHugePage));
}

// Only the first kNoise bytes are drawn, which is slow. The rest repeats them with a different constant xored
// into every word each time, so no two pages are alike.
void NoiseMemory::fill() {
  const std::int64_t drawn = std::min(kNoise, bytes_);
  const NamedRandom random(1, "benchmark noise");
  for (std::int64_t i = 0; i < drawn; i += static_cast<std::int64_t>(sizeof(Philox4))) {
    const Philox4 block = random.block(static_cast<std::uint64_t>(i));
    std::memcpy(data_ + i, &block, sizeof(block));
  }
  for (std::int64_t i = drawn; i < bytes_; i += static_cast<std::int64_t>(sizeof(std::uint64_t))) {
    std::uint64_t word = 0;
    std::memcpy(&word, data_ + i % drawn, sizeof(word));
    word ^= static_cast<std::uint64_t>(i / drawn) * 0x9E3779B97F4A7C15ull;
    std::memcpy(data_ + i, &word, sizeof(word));
  }
}

}  // namespace zg::io
