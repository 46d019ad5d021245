// A simulated drive in memory, for tests and benchmarks, with the speed of its RamModel.
//
// A block occupies a channel for bytes / the channel's bandwidth. That time begins when the channel's block
// before it ends, or now if that is later; one latency after its end the block completes. These times are
// absolute, so as long as the queue is kept full, oversleeping does not accumulate. A model without delays
// reads no clock: its blocks complete when they begin, so a benchmark measures the engine alone.
//
// Threads: only wake() may be called by other threads than the queue's own; all it touches is the WakeFlag.
// Invariant: until reap() returns it, a block that has begun is in pending_, or in ready_ if the model has no
// delays.
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <functional>

#include "io/clock.hpp"
#include "io/delayed_blocks.hpp"
#include "io/queue.hpp"
#include "io/ram_schedule.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

constexpr int kMaxChannels = 65536;

Clock::duration seconds(double s) {
  return duration_of(std::min(s, RamSchedule::kLongest));
}

// Lets one thread sleep and any number of threads wake it. A wake costs one atomic exchange, and a system
// call only if the sleeper sleeps.
//
// No wake is lost. Every change of state_ is a read-modify-write, so all changes have one order, and each
// sees what was written before the earlier ones. There are four cases. A wake before the sleeper's change
// from quiet to asleep makes that change fail, so the sleeper does not sleep. A wake after it finds kAsleep
// and calls the kernel; that wakes the sleeper or, if the sleeper has not reached its FUTEX_WAIT, makes it
// fail, since state_ is no longer kAsleep. A wake before the sleeper's exchange back to quiet is consumed by
// that exchange, which sees all that the waker wrote before. A later wake remains until the next sleep.
class WakeFlag {
 public:
  void wake() {
    if (state_.exchange(kWoken, std::memory_order_acq_rel) == kAsleep) futex(FUTEX_WAKE_PRIVATE, 1, nullptr);
  }
  // Consumes a wake, if there is one. A wake that this just misses remains until the next sleep.
  void take() {
    if (state_.load(std::memory_order_relaxed) == kWoken) state_.exchange(kQuiet, std::memory_order_acq_rel);
  }
  // Sleeps until the deadline or a wake, which is consumed; it may also have come before.
  void sleep(Clock::time_point deadline) {
    std::uint32_t quiet = kQuiet;
    if (state_.compare_exchange_strong(quiet, kAsleep, std::memory_order_acq_rel)) {
      // The timeout is absolute, by CLOCK_MONOTONIC, which is the steady clock.
      const timespec until = timespec_of(deadline.time_since_epoch());
      while (state_.load(std::memory_order_relaxed) == kAsleep) {
        if (futex(FUTEX_WAIT_BITSET_PRIVATE, kAsleep, deadline == Queue::kForever ? nullptr : &until) == 0)
          continue;
        if (errno == ETIMEDOUT) break;
        ZG_ASSERT(errno == EINTR || errno == EAGAIN, "futex: {}", errno_text(errno));
      }
    }
    state_.exchange(kQuiet, std::memory_order_acq_rel);
  }

 private:
  static constexpr std::uint32_t kQuiet = 0, kAsleep = 1, kWoken = 2;

  long futex(int op, std::uint32_t value, const timespec* until) {
    static_assert(sizeof(state_) == sizeof(std::uint32_t) && decltype(state_)::is_always_lock_free);
    return syscall(SYS_futex, &state_, op, value, until, nullptr, FUTEX_BITSET_MATCH_ANY);
  }

  std::atomic<std::uint32_t> state_{kQuiet};
};

const RamModel& checked(const RamModel& m) {
  const auto in_range = [](const char* what, double value, bool ok, const char* hint) {
    if (!ok) throw Error(Errc::kUsage, "ram drive", fmt::format("{} of {}", what, value), hint);
  };
  const auto not_negative = [&](const char* what, double value) {
    in_range(what, value, value >= 0 && std::isfinite(value), "0 or more");
  };
  not_negative("a bandwidth", m.bytes_per_second);
  not_negative("a latency", m.latency_seconds);
  in_range("channels", m.channels, m.channels >= 0 && m.channels <= kMaxChannels, "0 to 65536");
  not_negative("a congested depth", m.congested_depth);
  not_negative("a congestion", m.congestion);
  in_range("a time to slow down", m.slow_after_seconds, std::isfinite(m.slow_after_seconds),
           "negative: never");
  in_range("a slow factor", m.slow_factor, m.slow_factor > 0 && std::isfinite(m.slow_factor), "above 0");
  return m;
}

// When each channel of a drive is free again.
class Channels {
 public:
  explicit Channels(int count) : free_(static_cast<std::size_t>(std::max(count, 1))) {}
  Clock::time_point first_free() const { return free_.front(); }
  void occupy_first(Clock::time_point until) {
    std::pop_heap(free_.begin(), free_.end(), std::greater<>());
    free_.back() = until;
    std::push_heap(free_.begin(), free_.end(), std::greater<>());
  }

 private:
  std::vector<Clock::time_point> free_;  // a heap, the earliest in front
};

class RamQueue final : public Queue {
 public:
  RamQueue(std::int64_t bytes, int depth, const RamModel& model)
      : bytes_(bytes),
        model_(checked(model)),
        schedule_(model),
        has_delays_(model.bytes_per_second > 0 || model.latency_seconds > 0 || schedule_.has_stalls()),
        channels_{Channels(model.channels), Channels(model.channels)} {
    (has_delays_ ? pending_.reserve(static_cast<std::size_t>(depth))
                 : ready_.reserve(static_cast<std::size_t>(depth)));
    if (model.slow_after_seconds >= 0) slow_from_ = Clock::now() + seconds(model.slow_after_seconds);
    // By default a timer may be 50 us late, which is the latency of a fast drive. If this fails, so it
    // remains.
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
    if (model.moves_bytes) map_memory();  // last: nothing after it throws
  }
  ~RamQueue() override {
    if (memory_ != nullptr) munmap(memory_, static_cast<std::size_t>(bytes_));
  }
  RamQueue(const RamQueue&) = delete;
  RamQueue& operator=(const RamQueue&) = delete;

  // Copies the bytes at once, during the time that the model says they take.
  void begin(const Block& block) override {
    ZG_ASSERT_LE(block.offset + block.bytes, bytes_);
    if (has_delays_) {
      pending_.push(due(block), {block.id, block.bytes});
    } else {
      ready_.push_back({block.id, block.bytes});
    }
    if (memory_ == nullptr) return;
    char* const at = memory_ + block.offset;
    const auto n = static_cast<std::size_t>(block.bytes);
    if (block.op == Op::kRead) {
      std::memcpy(block.data, at, n);
    } else {
      std::memcpy(at, block.data, n);
    }
  }

  void reap(std::vector<BlockDone>& done, Clock::time_point deadline) override {
    if (collect(done) || deadline == kNoWait) {
      wake_.take();
      return;
    }
    wake_.sleep(pending_.empty() ? deadline : std::min(deadline, pending_.next_due()));
    collect(done);
  }

  void wake() override { wake_.wake(); }

  std::string features() const override {
    std::string text = "memory";
    if (model_.bytes_per_second > 0) {
      text += fmt::format(", {} {}", format_rate(model_.bytes_per_second),
                          model_.duplex ? "each way" : "both ways together");
      if (model_.channels > 0) text += fmt::format(" in {} channels", model_.channels);
    }
    text += fmt::format(", latency {}", format_seconds(model_.latency_seconds));
    if (model_.congested_depth > 0)
      text += fmt::format(", congested beyond {} blocks", model_.congested_depth);
    if (model_.slow_after_seconds >= 0) {
      text +=
          fmt::format(", {}x slower after {}", model_.slow_factor, format_seconds(model_.slow_after_seconds));
    }
    if (schedule_.has_stalls()) {
      text += fmt::format(", stalls {} every {}", format_seconds(model_.stall_seconds),
                          format_seconds(model_.stall_every_seconds));
    }
    if (model_.change_every_seconds > 0 && model_.change_factor > 1) {
      text += fmt::format(", {}x slower and back every {}", model_.change_factor,
                          format_seconds(model_.change_every_seconds));
    }
    if (!model_.moves_bytes) text += ", moves no bytes";
    return text;
  }

 private:
  void map_memory() {
    // With NORESERVE a page takes memory only when it is written, like a page of a sparse file.
    void* memory = mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw Error(Errc::kMemory, "ram drive", fmt::format("{}: {}", format_bytes(bytes_), errno_text(errno)));
    }
    memory_ = static_cast<char*>(memory);
  }

  // The factor by which the model's times grow for a block served from `start` on.
  double slowness(Clock::time_point start) const {
    double factor = start >= slow_from_ ? model_.slow_factor : 1;
    const auto in_queue = static_cast<int>(pending_.size()) + 1;
    if (model_.congested_depth > 0 && in_queue > model_.congested_depth)
      factor *= 1 + model_.congestion * (in_queue - model_.congested_depth);
    return factor;
  }

  // When work that begins at `start`, and would take `work` seconds at full speed, ends.
  Clock::time_point served(Clock::time_point start, double work) const {
    return schedule_.is_constant() ? start + seconds(work) : schedule_.done(start, work);
  }

  Clock::time_point due(const Block& block) {
    const auto now = Clock::now();
    if (model_.bytes_per_second <= 0) return served(now, 0) + seconds(model_.latency_seconds * slowness(now));
    Channels& channels = channels_[model_.duplex ? index_of(block.op) : 0];
    const auto start = std::max(channels.first_free(), now);
    const double factor = slowness(start);
    const double share = model_.bytes_per_second / std::max(model_.channels, 1);
    const auto end = served(start, static_cast<double>(block.bytes) / share * factor);
    channels.occupy_first(end);
    return end + seconds(model_.latency_seconds * factor);
  }

  bool collect(std::vector<BlockDone>& done) {
    const std::size_t before = done.size();
    done.insert(done.end(), ready_.begin(), ready_.end());
    ready_.clear();
    if (!pending_.empty()) pending_.pop_due(Clock::now(), done);
    return done.size() > before;
  }

  const std::int64_t bytes_;
  const RamModel model_;
  const RamSchedule schedule_;
  const bool has_delays_;
  char* memory_ = nullptr;  // null: the model moves no bytes
  Channels channels_[2];    // the first serves both directions unless duplex
  Clock::time_point slow_from_ = kForever;
  DelayedBlocks pending_;
  std::vector<BlockDone> ready_;
  WakeFlag wake_;
};

}  // namespace

std::unique_ptr<Queue> make_ram_queue(std::int64_t bytes, int depth, const RamModel& model) {
  return std::make_unique<RamQueue>(bytes, depth, model);
}

}  // namespace zg::io
