// What the stress tests share: how many operations, contents that need not be kept, memory with guards,
// and counted completions.
#pragma once
#include <atomic>
#include <cstdlib>
#include <string>
#include <thread>

#include "support.hpp"
#include "support/deadline.hpp"

namespace zg::io::test {

using zg::test::StallWatch;

// After so long without any operation the test aborts: a request was lost, or hangs.
inline constexpr int kPatienceSeconds = 60;

// ZG_STRESS_OPERATIONS: operations of all users of the volume together; tests of the engine do a part of it.
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
  // A number from 1 to 2^bits whose logarithm is uniform: as often between one power of two and the next as
  // between any other two.
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
  // `from`: a multiple of 8.
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
  // `shift`: bytes between the start of a page and the memory.
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

// Checks that a completion comes exactly once: a tag is armed when its transfer begins, and taken when it
// completes. A tag is never used twice, so a second completion is noticed even after its transfer's owner has
// gone on.
class Once {
 public:
  void arm(std::uint64_t tag) { tag_.store(tag, std::memory_order_relaxed); }
  bool is_armed(std::uint64_t tag) const { return tag_.load(std::memory_order_relaxed) == tag; }
  bool take(std::uint64_t tag) { return tag_.compare_exchange_strong(tag, 0, std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> tag_{0};
};

// Runs `work` for each user on a thread of its own.
template <class Users, class Work>
void on_threads(Users& users, Work work) {
  std::vector<std::thread> threads;
  for (auto& user : users) threads.emplace_back([&] { work(*user); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace zg::io::test
