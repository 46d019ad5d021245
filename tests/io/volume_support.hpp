// What the tests of volumes share: engines of the ram back end, and a collector of results.
#pragma once
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "support.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/volume.hpp"

namespace zg::io::test {

inline constexpr std::int64_t kGrain = 16 * kKiB;

inline VolumeOptions small_pieces() {
  return {.grain = kGrain, .stripe = 2 * kGrain};
}

inline std::unique_ptr<Engine> ram_engine(const std::vector<std::int64_t>& bytes,
                                          const FaultModel& faults = {}, const RamModel& model = {}) {
  EngineOptions options;
  options.backend = Backend::kRam;
  options.block_size = 64 * kKiB;
  options.queue_depth = 8;
  options.ram = model;
  options.faults = faults;
  std::vector<DriveOptions> drives;
  for (std::size_t i = 0; i < bytes.size(); ++i)
    drives.push_back({.path = fmt::format("/mnt/{}", static_cast<char>('a' + i)), .bytes = bytes[i]});
  return make_engine(options, drives);
}

// Collects results by tag.
class Results final : public ExtentCompletion {
 public:
  void on_extent(ExtentId, std::uint64_t tag, ExtentResult result) override {
    std::lock_guard lock(mutex_);
    EXPECT_TRUE(results_.emplace(tag, result).second) << "completed twice";
    thread_ = std::this_thread::get_id();
    changed_.notify_all();
  }
  ExtentResult wait_for(std::uint64_t tag) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return results_.count(tag) > 0; });
    return results_[tag];
  }
  std::size_t count() {
    std::lock_guard lock(mutex_);
    return results_.size();
  }
  std::thread::id thread() {
    std::lock_guard lock(mutex_);
    return thread_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, ExtentResult> results_;
  std::thread::id thread_;
};

inline bool same_bytes(const Memory& a, const Memory& b, std::int64_t bytes) {
  return std::memcmp(a.data(), b.data(), static_cast<std::size_t>(bytes)) == 0;
}

inline std::int64_t used_bytes(const Volume& volume, int drives) {
  std::int64_t used = 0;
  for (int d = 0; d < drives; ++d) used += volume.space(d).used;
  return used;
}

}  // namespace zg::io::test
