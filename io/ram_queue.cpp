// A drive made of memory, for tests and benchmarks, as fast or slow as one asks.
//
// Timing is a model clock: a block occupies the link for bytes / bandwidth, from when the block before it
// left the link (or from now, if that is later), and is done one latency afterwards. Due times are absolute,
// so sleeping a little too long now does not add up while the queue is kept full.
#include <sys/mman.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "io/queue.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

Clock::duration seconds(double s) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
}

class RamQueue final : public Queue {
 public:
  RamQueue(std::int64_t bytes, int depth, const RamModel& model)
      : bytes_(static_cast<std::size_t>(bytes)), model_(model) {
    // NORESERVE: pages become real when they are written, as a sparse file's do.
    void* memory =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw Error(Errc::kMemory, "ram drive", fmt::format("{}: {}", format_bytes(bytes), errno_text(errno)));
    }
    memory_ = static_cast<char*>(memory);
    pending_.reserve(static_cast<std::size_t>(depth));
    // The default slack of timers, 50 us, is as long as a fast drive's latency. Best effort.
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  }
  ~RamQueue() override { munmap(memory_, bytes_); }
  RamQueue(const RamQueue&) = delete;
  RamQueue& operator=(const RamQueue&) = delete;

  // The bytes are copied now, which overlaps with the time that the model says they take.
  void begin(const Block& block) override {
    Clock::time_point due = Clock::now();
    if (model_.bytes_per_second > 0) {
      Clock::time_point& link_free = link_free_[model_.duplex ? index_of(block.op) : 0];
      link_free =
          std::max(link_free, due) + seconds(static_cast<double>(block.bytes) / model_.bytes_per_second);
      due = link_free;
    }
    due += seconds(model_.latency_seconds);
    char* const at = memory_ + block.offset;
    const auto n = static_cast<std::size_t>(block.bytes);
    if (block.op == Op::kRead) {
      std::memcpy(block.data, at, n);
    } else {
      std::memcpy(at, block.data, n);
    }
    pending_.push_back({due, {block.id, block.bytes}});
  }

  void reap(std::vector<BlockDone>& done, Clock::time_point deadline) override {
    if (!pending_.empty()) {
      const auto earlier = [](const Pending& a, const Pending& b) { return a.due < b.due; };
      deadline = std::min(deadline, std::min_element(pending_.begin(), pending_.end(), earlier)->due);
    }
    {
      std::unique_lock lock(mutex_);
      if (deadline == kForever) {
        woken_signal_.wait(lock, [&] { return woken_; });
      } else if (deadline > Clock::now()) {
        woken_signal_.wait_until(lock, deadline, [&] { return woken_; });
      }
      woken_ = false;
    }
    const auto now = Clock::now();
    // In order of their time, and stable within it: as a drive would.
    const auto later = std::stable_partition(pending_.begin(), pending_.end(),
                                             [&](const Pending& p) { return p.due <= now; });
    for (auto it = pending_.begin(); it != later; ++it) done.push_back(it->done);
    pending_.erase(pending_.begin(), later);
  }

  void wake() override {
    {
      std::lock_guard lock(mutex_);
      woken_ = true;
    }
    woken_signal_.notify_one();
  }

  std::string features() const override {
    if (model_.bytes_per_second <= 0)
      return fmt::format("memory, latency {}", format_seconds(model_.latency_seconds));
    return fmt::format("memory, {} {}, latency {}", format_rate(model_.bytes_per_second),
                       model_.duplex ? "each way" : "both ways together",
                       format_seconds(model_.latency_seconds));
  }

 private:
  struct Pending {
    Clock::time_point due;
    BlockDone done;
  };
  const std::size_t bytes_;
  const RamModel model_;
  char* memory_ = nullptr;
  Clock::time_point link_free_[2]{};
  std::vector<Pending> pending_;
  std::mutex mutex_;
  std::condition_variable woken_signal_;
  bool woken_ = false;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<Queue> make_ram_queue(std::int64_t bytes, int depth, const RamModel& model) {
  return std::make_unique<RamQueue>(bytes, depth, model);
}

}  // namespace zg::io
