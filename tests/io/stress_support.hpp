// What the stress tests share: how many operations, contents that need not be kept, memory with guards,
// counted completions, and a watchdog.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "support.hpp"

namespace zg::io::test {

// ZG_STRESS_OPERATIONS: of the volume's users together; the engines' take parts of it.
inline std::int64_t stress_operations() {
  const char* text = std::getenv("ZG_STRESS_OPERATIONS");
  return text != nullptr ? std::max(std::strtoll(text, nullptr, 0), 1000LL) : 300'000;
}

// Random numbers in sequence: SplitMix64, since Philox would be most of what the test does.
class Dice {
 public:
  Dice(std::uint64_t seed, std::uint64_t stream) : state_(mix(seed) ^ mix(~stream)) {}
  std::int64_t roll(std::int64_t bound) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(bound));
  }
  // 1 to 2^bits, as often between one power of two and the next as between any other two.
  std::int64_t log_uniform(int bits) {
    const std::int64_t low = std::int64_t{1} << roll(bits);
    return low + 1 + roll(low) - (low == 1 ? roll(2) : 0);
  }
  static std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }

 private:
  std::uint64_t next() { return mix(state_ += 0x9E3779B97F4A7C15ull); }
  std::uint64_t state_;
};

// The bytes that `key` names: each word depends on it and on where it stands.
class Contents {
 public:
  explicit Contents(std::uint64_t key) : key_(Dice::mix(key)) {}
  // From a multiple of 8 on.
  void fill(char* data, std::int64_t bytes, std::int64_t from = 0) const {
    std::int64_t i = from;
    for (; i + 8 <= bytes; i += 8) {
      const std::uint64_t word = at(i);
      std::memcpy(data + i, &word, 8);
    }
    const std::uint64_t last = at(i);
    std::memcpy(data + i, &last, static_cast<std::size_t>(bytes - i));
  }
  bool are(const char* data, std::int64_t bytes, std::int64_t from = 0) const {
    std::uint64_t wrong = 0;
    std::int64_t i = from;
    for (; i + 8 <= bytes; i += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, data + i, 8);
      wrong |= word ^ at(i);
    }
    const std::uint64_t last = at(i);
    return wrong == 0 && std::memcmp(data + i, &last, static_cast<std::size_t>(bytes - i)) == 0;
  }

 private:
  std::uint64_t at(std::int64_t i) const {
    return (key_ + static_cast<std::uint64_t>(i)) * 0x9E3779B97F4A7C15ull;
  }
  std::uint64_t key_;
};

// Memory for one transfer, at any address within its room; what stands before and behind it must not change.
class GuardedMemory {
 public:
  static constexpr std::int64_t room(std::int64_t most) { return most + 3 * kPage; }
  explicit GuardedMemory(char* pages) : pages_(pages) {}
  // `shift` bytes from a page's begin.
  void place(std::int64_t shift, std::int64_t bytes) {
    data_ = pages_ + kPage + shift;
    bytes_ = bytes;
    std::memset(data_ - kGuard, kMark, kGuard);
    std::memset(data_ + bytes, kMark, kGuard);
  }
  void wipe() { std::memset(data_, 0x5A, static_cast<std::size_t>(bytes_)); }
  char* data() const { return data_; }
  bool guards_hold() const {
    for (std::int64_t i = 0; i < kGuard; ++i) {
      if (data_[-1 - i] != kMark || data_[bytes_ + i] != kMark) return false;
    }
    return true;
  }

 private:
  static constexpr std::int64_t kGuard = 16;
  static constexpr char kMark = 0x3C;
  char* const pages_;
  char* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// That a completion comes exactly once: a tag is armed when its transfer begins, and taken when it completes.
// A tag is never used twice, so a second completion is seen even when what it belongs to has gone on.
class Once {
 public:
  void arm(std::uint64_t tag) { tag_.store(tag, std::memory_order_relaxed); }
  bool is_armed(std::uint64_t tag) const { return tag_.load(std::memory_order_relaxed) == tag; }
  bool take(std::uint64_t tag) { return tag_.compare_exchange_strong(tag, 0, std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> tag_{0};
};

// Ends the test, with the engine's state, when nothing was done for a minute.
class Watchdog {
 public:
  explicit Watchdog(std::function<std::string()> state)
      : state_(std::move(state)), thread_([this] { watch(); }) {}
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  void progress() { done_.fetch_add(1, std::memory_order_relaxed); }

 private:
  static constexpr auto kPatience = std::chrono::seconds(60);
  void watch() {
    std::int64_t last = -1;
    auto since = std::chrono::steady_clock::now();
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(500), [&] { return stop_; })) {
      const std::int64_t done = done_.load(std::memory_order_relaxed);
      const auto now = std::chrono::steady_clock::now();
      if (done != last) since = now;
      last = done;
      if (now - since < kPatience) continue;
      fprintf(stderr, "no progress after %lld operations; a request was lost, or hangs:\n%s\n",
              static_cast<long long>(done), state_().c_str());
      std::abort();
    }
  }

  std::function<std::string()> state_;
  std::atomic<std::int64_t> done_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;
};

// Runs `work` for each user on a thread of its own.
template <class Users, class Work>
void on_threads(Users& users, Work work) {
  std::vector<std::thread> threads;
  for (auto& user : users) threads.emplace_back([&] { work(*user); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace zg::io::test
