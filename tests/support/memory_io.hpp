// An io::Engine over memory, for tests of what is above it: transfers complete out of order, after a random
// delay, on one thread. It can be told to fail a transfer or to flip a bit, and aborts when two transfers
// that are under way at once touch the same bytes and one of them writes there.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/thread.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg::test {

class MemoryIo final : public io::Engine {
 public:
  struct Faults {
    int fail_read = -1, fail_write = -1;  // the number of the transfer, counted from 0
    int flip_read = -1;                   // the number of the read whose first byte changes on the way
  };
  struct Options {
    std::uint64_t seed = 1;
    std::chrono::microseconds max_delay{100};
    Faults faults;
  };

  MemoryIo(int drives, std::int64_t bytes, const Options& options)
      : options_(options), random_(options.seed), files_(static_cast<std::size_t>(drives)) {
    for (auto& file : files_) file.resize(static_cast<std::size_t>(bytes));
    thread_ = NamedThread("memory-io", [this] { serve(); });
  }
  ~MemoryIo() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      held_ = {};
    }
    changed_.notify_all();
    thread_.join();
  }

  io::Ticket submit(const io::Transfer& t) override {
    ZG_ASSERT(t.completion != nullptr);
    ZG_ASSERT(t.offset % alignment() == 0 && t.bytes % alignment() == 0 && t.bytes >= 0);
    ZG_ASSERT_EQ(reinterpret_cast<std::uintptr_t>(t.data) % alignment(), 0u);
    std::lock_guard lock(mutex_);
    ZG_ASSERT_LE(t.offset + t.bytes, static_cast<std::int64_t>(file(t).size()));
    for (const Pending& p : pending_)
      ZG_ASSERT(!clash(p.transfer, t), "drive {}, offset {}", t.drive, t.offset);
    const auto delay =
        std::chrono::microseconds(random_() % static_cast<std::uint64_t>(options_.max_delay.count() + 1));
    const int number = t.op == io::Op::kRead ? reads_++ : writes_++;
    if (t.op == io::Op::kWrite) write_priority_ = t.priority;
    pending_.push_back({t, Clock::now() + delay, number});
    changed_.notify_all();
    return {static_cast<std::uint32_t>(number), 1};
  }
  void promote(io::Ticket, io::Priority) override {
    std::lock_guard lock(mutex_);
    ++promoted_;
  }
  bool poll(io::Ticket, io::Result&) override { return false; }
  io::Result wait(io::Ticket) override { return {}; }
  void register_memory(void*, std::int64_t) override { ++registered_; }
  void unregister_memory(void*) override {}
  int drive_count() const override { return static_cast<int>(files_.size()); }
  std::int64_t drive_bytes(int drive) const override {
    return static_cast<std::int64_t>(files_[static_cast<std::size_t>(drive)].size());
  }
  io::LinkCounters counters(int) const override { return {}; }
  io::DriveReport report(int drive) const override {
    io::DriveReport report;
    report.name = fmt::format("memory{}", drive);
    return report;
  }
  io::Backend backend() const override { return io::Backend::kRam; }
  std::string describe() const override { return "memory"; }
  std::string state() const override {
    std::lock_guard lock(mutex_);
    return fmt::format("memory io: {} transfers under way", pending_.size());
  }
  // Transfers of this kind stay under way until they are let go.
  void hold(io::Op op) { hold(op, true); }
  void let_go(io::Op op) { hold(op, false); }
  int promoted() const {
    std::lock_guard lock(mutex_);
    return promoted_;
  }
  int reads() const {
    std::lock_guard lock(mutex_);
    return reads_;
  }
  int registered() const { return registered_; }  // how often memory was registered
  int writes() const {
    std::lock_guard lock(mutex_);
    return writes_;
  }
  io::Priority write_priority() const {  // of the last write
    std::lock_guard lock(mutex_);
    return write_priority_;
  }

 private:
  struct Pending {
    io::Transfer transfer;
    Clock::time_point due;
    int number;
  };

  static bool overlap(std::uintptr_t a, std::uintptr_t b, std::int64_t a_bytes, std::int64_t b_bytes) {
    return a < b + static_cast<std::uintptr_t>(b_bytes) && b < a + static_cast<std::uintptr_t>(a_bytes);
  }
  static bool clash(const io::Transfer& a, const io::Transfer& b) {
    const bool a_reads = a.op == io::Op::kRead, b_reads = b.op == io::Op::kRead;
    const bool file = a.drive == b.drive && overlap(static_cast<std::uintptr_t>(a.offset),
                                                    static_cast<std::uintptr_t>(b.offset), a.bytes, b.bytes);
    const bool memory = overlap(reinterpret_cast<std::uintptr_t>(a.data),
                                reinterpret_cast<std::uintptr_t>(b.data), a.bytes, b.bytes);
    return (file && !(a_reads && b_reads)) || (memory && (a_reads || b_reads));
  }

  void hold(io::Op op, bool held) {
    std::lock_guard lock(mutex_);
    held_[static_cast<std::size_t>(op)] = held;
    changed_.notify_all();
  }
  bool is_held(const Pending& p) const { return held_[static_cast<std::size_t>(p.transfer.op)]; }

  std::vector<char>& file(const io::Transfer& t) { return files_[static_cast<std::size_t>(t.drive)]; }

  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      if (pending_.empty()) {
        if (stop_) return;
        changed_.wait(lock);
        continue;
      }
      const auto first =
          std::min_element(pending_.begin(), pending_.end(), [&](const Pending& a, const Pending& b) {
            return is_held(a) != is_held(b) ? is_held(b) : a.due < b.due;
          });
      if (is_held(*first)) {
        changed_.wait(lock);
        continue;
      }
      if (first->due > Clock::now()) {
        const auto due = first->due;
        changed_.wait_until(lock, due);
        continue;
      }
      const Pending p = *first;
      lock.unlock();
      const io::Result result = move(p);
      lock.lock();
      // The transfer counts as under way until now, so that clashes show.
      std::erase_if(pending_,
                    [&](const Pending& q) { return q.number == p.number && q.transfer.op == p.transfer.op; });
      lock.unlock();
      p.transfer.completion->on_complete({static_cast<std::uint32_t>(p.number), 1}, p.transfer.tag, result);
      lock.lock();
    }
  }

  io::Result move(const Pending& p) {
    const io::Transfer& t = p.transfer;
    const bool read = t.op == io::Op::kRead;
    if (t.bytes == 0) return {};
    if (p.number == (read ? options_.faults.fail_read : options_.faults.fail_write)) return {EIO, 0};
    char* at = file(t).data() + t.offset;
    std::memcpy(read ? t.data : at, read ? at : t.data, static_cast<std::size_t>(t.bytes));
    if (read && p.number == options_.faults.flip_read) *static_cast<char*>(t.data) ^= 1;
    return {0, t.bytes};
  }

  const Options options_;
  std::mt19937_64 random_;
  std::vector<std::vector<char>> files_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Pending> pending_;
  int promoted_ = 0;
  int reads_ = 0, writes_ = 0;
  io::Priority write_priority_ = io::Priority::kDemand;
  std::array<bool, 2> held_{};  // by io::Op
  std::atomic<int> registered_{0};
  bool stop_ = false;
  NamedThread thread_;
};

}  // namespace zg::test
