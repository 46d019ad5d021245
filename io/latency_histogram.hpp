// Counts latencies in buckets that are linear within each power of two, as HdrHistogram does: any number of
// samples in fixed memory, with every percentile exact to 1/64.
//
// Threads: one at a time. Histograms of several threads can be merged.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace zg::io {

class LatencyHistogram {
 public:
  static constexpr int kSubBuckets = 64;  // per power of two

  void add(std::int64_t nanoseconds) {
    const std::uint64_t value = nanoseconds > 0 ? static_cast<std::uint64_t>(nanoseconds) : 0;
    ++buckets_[index_of(value)];
    ++count_;
    sum_ += static_cast<double>(value);
    max_ = std::max(max_, value);
  }

  void merge(const LatencyHistogram& other) {
    for (std::size_t i = 0; i < buckets_.size(); ++i) buckets_[i] += other.buckets_[i];
    count_ += other.count_;
    sum_ += other.sum_;
    max_ = std::max(max_, other.max_);
  }

  std::int64_t count() const { return count_; }
  double mean() const { return count_ > 0 ? sum_ / static_cast<double>(count_) : 0; }
  double max() const { return static_cast<double>(max_); }

  // The smallest sample that at least `share` of all samples do not exceed (nearest rank), as the middle of
  // its bucket; 0 without samples.
  double percentile(double share) const {
    if (count_ == 0) return 0;
    const auto rank =
        std::max<std::int64_t>(1, static_cast<std::int64_t>(std::ceil(share * static_cast<double>(count_))));
    if (rank >= count_) return max();
    std::int64_t seen = 0;
    for (std::size_t i = 0; i < buckets_.size(); ++i) {
      seen += buckets_[i];
      if (seen >= rank) return std::min(middle_of(i), max());
    }
    return max();
  }

 private:
  // Values below 128 have a bucket each; above, those with the same highest seven bits share one.
  static std::size_t index_of(std::uint64_t value) {
    const int shift = std::max(0, static_cast<int>(std::bit_width(value)) - 7);
    return static_cast<std::size_t>(shift) * kSubBuckets + static_cast<std::size_t>(value >> shift);
  }
  static double middle_of(std::size_t index) {
    if (index < 2 * kSubBuckets) return static_cast<double>(index);
    const auto shift = static_cast<int>(index / kSubBuckets) - 1;
    const auto lowest = static_cast<double>(index - static_cast<std::size_t>(shift) * kSubBuckets);
    return std::ldexp(lowest + 0.5, shift);
  }

  std::array<std::int64_t, 59 * kSubBuckets> buckets_{};  // to 2^64
  std::int64_t count_ = 0;
  double sum_ = 0;
  std::uint64_t max_ = 0;
};

}  // namespace zg::io
