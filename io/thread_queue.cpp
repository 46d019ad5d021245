// Blocks through pread and pwrite on a few threads: works everywhere.
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>

#include "io/queue.hpp"
#include "ziggurat/base/error.hpp"
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

class ThreadQueue final : public Queue {
 public:
  ThreadQueue(int fd, int depth, int threads, const std::string& thread_name) : fd_(fd), ring_(depth) {
    done_.reserve(ring_.size());
    workers_.reserve(static_cast<std::size_t>(threads));
    for (int i = 0; i < threads; ++i) {
      workers_.emplace_back(fmt::format("{}.{}", thread_name, i), [this] { work(); });
    }
  }

  ~ThreadQueue() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    workers_.clear();  // joins
  }

  void begin(const Block& block) override {
    {
      std::lock_guard lock(mutex_);
      ZG_ASSERT_LT(count_, ring_.size());
      ring_[(first_ + count_++) % ring_.size()] = block;
    }
    work_.notify_one();
  }

  void reap(std::vector<BlockDone>& done, Clock::time_point deadline) override {
    std::unique_lock lock(mutex_);
    const auto something = [&] { return woken_ || !done_.empty(); };
    if (deadline == kForever) {
      reaped_.wait(lock, something);
    } else if (deadline != kNoWait) {
      reaped_.wait_until(lock, deadline, something);
    }
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
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [&] { return stop_ || count_ > 0; });
      if (count_ == 0) return;
      const Block block = ring_[first_];
      first_ = (first_ + 1) % ring_.size();
      --count_;
      lock.unlock();
      const std::int64_t result = move_block(fd_, block);
      lock.lock();
      done_.push_back({block.id, result});
      reaped_.notify_one();
    }
  }

  const int fd_;
  std::mutex mutex_;
  std::condition_variable work_, reaped_;
  std::vector<Block> ring_;  // blocks that no thread has taken yet: [first_, first_ + count_)
  std::size_t first_ = 0, count_ = 0;
  std::vector<BlockDone> done_;
  bool woken_ = false, stop_ = false;
  std::vector<NamedThread> workers_;
};

}  // namespace

std::unique_ptr<Queue> make_thread_queue(int fd, int depth, int threads, const std::string& thread_name) {
  return std::make_unique<ThreadQueue>(fd, depth, threads, thread_name);
}

}  // namespace zg::io
