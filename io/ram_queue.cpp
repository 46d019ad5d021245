// A drive made of memory, for tests and benchmarks, as fast or slow as one asks.
//
// Timing is a model clock: a block occupies a channel for bytes / the channel's bandwidth, from when the
// block before it left the channel (or from now, if that is later), and is done one latency afterwards. Due
// times are absolute, so sleeping a little too long now does not add up while the queue is kept full. A model
// without any delay looks at no clock: its blocks are done when they are begun, and what is measured is the
// engine.
//
// Threads: wake() alone may come from elsewhere, and what it touches is WakeFlag.
// Invariant: a block begun is in pending_, or in ready_ when the model has no delays, until reap() hands it
// out.
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

#include "io/queue.hpp"
#include "io/ram_schedule.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

constexpr int kMaxChannels = 65536;

Clock::duration seconds(double s) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::min(s, RamSchedule::kLongest)));
}

// One sleeper, any number of wakers. A wake costs one atomic exchange, and a system call only if somebody
// sleeps.
//
// No wake is lost: every change of state_ is a read-modify-write, so they have one order, and each sees what
// came before the ones before it. A wake before the sleeper's quiet -> asleep makes that fail, and it does
// not sleep. One after it finds kAsleep and calls the kernel, which either wakes the sleeper or, if it is not
// asleep yet, lets its FUTEX_WAIT fail, since state_ is kAsleep no more. One before the sleeper's exchange
// back to quiet is taken by it, with all that the waker wrote before; one after that stands until the next
// sleep.
class WakeFlag {
 public:
  void wake() {
    if (state_.exchange(kWoken, std::memory_order_acq_rel) == kAsleep) futex(FUTEX_WAKE_PRIVATE, 1, nullptr);
  }
  // Takes a wake that came, if any. One that this just misses stays for the next sleep.
  void take() {
    if (state_.load(std::memory_order_relaxed) == kWoken) state_.exchange(kQuiet, std::memory_order_acq_rel);
  }
  // Until a wake (also one that came before, which is taken), or the deadline.
  void sleep(Clock::time_point deadline) {
    std::uint32_t quiet = kQuiet;
    if (state_.compare_exchange_strong(quiet, kAsleep, std::memory_order_acq_rel)) {
      // The steady clock is CLOCK_MONOTONIC, and so is this timeout, absolute.
      std::int64_t ns =
          std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.time_since_epoch()).count();
      ns = std::max<std::int64_t>(ns, 0);  // before the machine's start
      const timespec until = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
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

// When each of a set of channels is free, the first to be so in front.
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
  std::vector<Clock::time_point> free_;
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
    // The default slack of timers, 50 us, is as long as a fast drive's latency. Best effort.
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
    if (model.moves_bytes) map_memory();  // last: nothing after it throws
  }
  ~RamQueue() override {
    if (memory_ != nullptr) munmap(memory_, static_cast<std::size_t>(bytes_));
  }
  RamQueue(const RamQueue&) = delete;
  RamQueue& operator=(const RamQueue&) = delete;

  // The bytes are copied now, which overlaps with the time that the model says they take.
  void begin(const Block& block) override {
    ZG_ASSERT_LE(block.offset + block.bytes, bytes_);
    if (has_delays_) {
      pending_.push_back({due(block), begun_++, {block.id, block.bytes}});
      std::push_heap(pending_.begin(), pending_.end(), Later());
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
    wake_.sleep(pending_.empty() ? deadline : std::min(deadline, pending_.front().due));
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
  struct Pending {
    Clock::time_point due;
    std::uint64_t number;  // blocks of one time come out in the order they were begun
    BlockDone done;
  };
  struct Later {
    bool operator()(const Pending& a, const Pending& b) const {
      return a.due != b.due ? a.due > b.due : a.number > b.number;
    }
  };

  void map_memory() {
    // NORESERVE: pages become real when they are written, as a sparse file's do.
    void* memory = mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw Error(Errc::kMemory, "ram drive", fmt::format("{}: {}", format_bytes(bytes_), errno_text(errno)));
    }
    memory_ = static_cast<char*>(memory);
  }

  // What the model's times are multiplied with for a block that is served from `start` on.
  double slowness(Clock::time_point start) const {
    double factor = start >= slow_from_ ? model_.slow_factor : 1;
    const auto in_queue = static_cast<int>(pending_.size()) + 1;
    if (model_.congested_depth > 0 && in_queue > model_.congested_depth)
      factor *= 1 + model_.congestion * (in_queue - model_.congested_depth);
    return factor;
  }

  // When `work` seconds at full speed are over that begin at `start`.
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
    if (!ready_.empty()) {
      done.insert(done.end(), ready_.begin(), ready_.end());
      ready_.clear();
      return true;
    }
    if (pending_.empty()) return false;
    const auto now = Clock::now();
    bool any = false;
    for (; !pending_.empty() && pending_.front().due <= now; any = true) {
      done.push_back(pending_.front().done);
      std::pop_heap(pending_.begin(), pending_.end(), Later());
      pending_.pop_back();
    }
    return any;
  }

  const std::int64_t bytes_;
  const RamModel model_;
  const RamSchedule schedule_;
  const bool has_delays_;
  char* memory_ = nullptr;  // null: the model moves no bytes
  Channels channels_[2];    // one set for both ways unless duplex
  Clock::time_point slow_from_ = kForever;
  std::uint64_t begun_ = 0;
  std::vector<Pending> pending_;  // a heap, the first due in front
  std::vector<BlockDone> ready_;
  WakeFlag wake_;
};

}  // namespace

std::unique_ptr<Queue> make_ram_queue(std::int64_t bytes, int depth, const RamModel& model) {
  return std::make_unique<RamQueue>(bytes, depth, model);
}

}  // namespace zg::io
