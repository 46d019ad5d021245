// Moves blocks on a pool of threads with blocking calls: pread and pwrite, which work everywhere, or those of
// a DirectStorage.
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <functional>
#include <mutex>

#include "io/queue.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/failure.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/thread.hpp"

namespace zg::io {
namespace {

std::int64_t move_block(int fd, const Block& block) {
  const auto bytes = static_cast<std::size_t>(block.bytes);
  ssize_t n = 0;
  do {
    n = block.op == Op::kRead ? pread(fd, block.data, bytes, block.offset)
                              : pwrite(fd, block.data, bytes, block.offset);
  } while (n < 0 && errno == EINTR);
  return n < 0 ? -errno : n;
}

// The blocking calls: each thread calls `enter` once at its start; `move` returns bytes or a negative errno.
struct BlockCalls {
  std::function<void()> enter;
  std::function<std::int64_t(const Block&)> move;
};

class ThreadQueue final : public Queue {
 public:
  ThreadQueue(BlockCalls calls, int depth, int threads, const std::string& thread_name)
      : calls_(std::move(calls)), ring_(static_cast<std::size_t>(depth)) {
    done_.reserve(ring_.size());
    begun_.reserve(ring_.size());
    workers_.reserve(static_cast<std::size_t>(threads));
    try {
      for (int i = 0; i < threads; ++i)
        workers_.emplace_back(fmt::format("{}.{}", thread_name, i), [this] { work(); });
    } catch (const std::exception& e) {
      stop();
      const Error error = error_from(e);
      throw Error(error.code(), error.where(),
                  fmt::format("{} of {}, and no more: {}", workers_.size(), threads, error.message()),
                  error.hint());
    }
  }

  ~ThreadQueue() override { stop(); }

  // The next reap() hands all blocks to the threads together, with one lock and few wake-ups.
  void begin(const Block& block) override { begun_.push_back(block); }

  void reap(std::vector<BlockDone>& done, Clock::time_point deadline) override {
    std::unique_lock lock(mutex_);
    hand_over();
    const auto something = [&] { return woken_ || !done_.empty(); };
    reaper_waits_ = true;
    if (deadline == kForever) {
      reaped_.wait(lock, something);
    } else if (deadline != kNoWait) {
      reaped_.wait_until(lock, deadline, something);
    }
    reaper_waits_ = false;
    woken_ = false;
    done.insert(done.end(), done_.begin(), done_.end());
    done_.clear();
  }

  void wake() override {
    {
      std::lock_guard lock(mutex_);
      woken_ = true;
    }
    reaped_.notify_one();
  }

  std::string features() const override { return fmt::format("{} threads a queue", workers_.size()); }

 private:
  // False: this thread cannot move blocks, so it fails those that it takes.
  bool enter() {
    try {
      calls_.enter();
      return true;
    } catch (const std::exception& e) {
      log::error("I/O thread: {}", e.what());
      return false;
    }
  }

  void stop() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    for (NamedThread& worker : workers_) worker.join();
  }

  void hand_over() {
    for (const Block& block : begun_) {
      ZG_ASSERT_LT(count_, ring_.size());
      ring_[(first_ + count_++) % ring_.size()] = block;
    }
    for (std::size_t i = 0; i < begun_.size() && i < static_cast<std::size_t>(idle_); ++i) work_.notify_one();
    begun_.clear();
  }

  void work() {
    const bool entered = enter();
    std::unique_lock lock(mutex_);
    while (true) {
      ++idle_;
      work_.wait(lock, [&] { return stop_ || count_ > 0; });
      --idle_;
      if (count_ == 0) return;
      const Block block = ring_[first_];
      first_ = (first_ + 1) % ring_.size();
      --count_;
      lock.unlock();
      const std::int64_t result = entered ? calls_.move(block) : -EIO;
      lock.lock();
      done_.push_back({block.id, result});
      if (reaper_waits_) reaped_.notify_one();
    }
  }

  const BlockCalls calls_;
  std::mutex mutex_;
  std::condition_variable work_, reaped_;
  std::vector<Block> ring_;  // blocks that no thread has taken yet: [first_, first_ + count_)
  std::size_t first_ = 0, count_ = 0;
  std::vector<BlockDone> done_;
  std::vector<Block> begun_;  // not yet handed over; belongs to the reaping thread
  int idle_ = 0;              // threads without work
  bool reaper_waits_ = false;
  bool woken_ = false, stop_ = false;
  std::vector<NamedThread> workers_;
};

}  // namespace

std::unique_ptr<Queue> make_thread_queue(int fd, int depth, int threads, const std::string& thread_name) {
  return std::make_unique<ThreadQueue>(
      BlockCalls{[] {}, [fd](const Block& block) { return move_block(fd, block); }}, depth, threads,
      thread_name);
}

std::unique_ptr<Queue> make_direct_queue(DirectStorage& storage, DirectStorage::File& file, int depth,
                                         const std::string& thread_name) {
  const auto move = [&file](const Block& b) {
    return b.op == Op::kRead ? file.read(b.data, b.bytes, b.offset) : file.write(b.data, b.bytes, b.offset);
  };
  storage.enter_thread();  // since completions, which run on this thread, make checksums
  return std::make_unique<ThreadQueue>(BlockCalls{[&storage] { storage.enter_thread(); }, move}, depth, depth,
                                       thread_name);
}

}  // namespace zg::io
