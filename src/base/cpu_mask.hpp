// A set of cores in the form of the system's affinity calls. It has a fixed size and allocates nothing.
// Private to base.
#pragma once
#include <sched.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <vector>

#include "ziggurat/base/error.hpp"

namespace zg {

class CpuMask {
 public:
  // The most cores that Linux can be built for. The kernel refuses to fill a set smaller than its own.
  static constexpr std::size_t kMaxCpus = 8192;

  CpuMask() = default;
  explicit CpuMask(const std::vector<int>& cpus) {
    for (const int cpu : cpus) words_[bit(cpu) / kWordBits] |= 1ul << (bit(cpu) % kWordBits);
  }
  bool has(int cpu) const { return (words_[bit(cpu) / kWordBits] >> (bit(cpu) % kWordBits) & 1) != 0; }
  bool operator==(const CpuMask&) const = default;

  // Reads, or sets, the cores of the calling thread. Returns 0 or an errno.
  [[nodiscard]] int read() {
    return sched_getaffinity(0, sizeof(words_), reinterpret_cast<cpu_set_t*>(words_.data())) == 0 ? 0 : errno;
  }
  [[nodiscard]] int apply() const {
    return sched_setaffinity(0, sizeof(words_), reinterpret_cast<const cpu_set_t*>(&words_)) == 0 ? 0 : errno;
  }

 private:
  static constexpr std::size_t kWordBits = 8 * sizeof(unsigned long);
  static std::size_t bit(int cpu) {
    const auto bit = static_cast<std::size_t>(cpu);
    ZG_ASSERT_LT(bit, kMaxCpus);
    return bit;
  }

  std::array<unsigned long, kMaxCpus / kWordBits> words_{};
};

}  // namespace zg
