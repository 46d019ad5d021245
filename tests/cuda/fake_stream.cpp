#include "tests/cuda/fake_stream.hpp"

#include <algorithm>

namespace zg::test {

FakeRuntime::Stream::Stream(FakeRuntime& runtime, std::int64_t number, int device, int most_delay_us,
                            std::uint64_t seed)
    : runtime_(runtime),
      number_(number),
      device_(device),
      most_delay_us_(most_delay_us),
      random_((seed + static_cast<std::uint64_t>(number) + 1) * 0x9E3779B97F4A7C15ull | 1),
      thread_([this] { run(); }) {}

FakeRuntime::Stream::~Stream() {
  {
    std::lock_guard lock(mutex_);
    stops_ = true;
  }
  more_.notify_all();
  thread_.join();
}

bool FakeRuntime::Stream::idle() const {
  std::lock_guard lock(mutex_);
  // Marks are no work: another thread that waits for the device may have put one there just now.
  return !busy_ && std::all_of(work_.begin(), work_.end(), [](const Work& work) { return work.marks; });
}

void FakeRuntime::Stream::push(Work work) {
  {
    std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
  }
  more_.notify_all();
}

void FakeRuntime::Stream::run_one(Work& work) {
  if (most_delay_us_ > 0) {
    random_ ^= random_ >> 12, random_ ^= random_ << 25, random_ ^= random_ >> 27;  // xorshift64*
    const auto us = (random_ * 0x2545F4914F6CDD1Dull >> 32) % static_cast<std::uint64_t>(most_delay_us_ + 1);
    std::this_thread::sleep_for(std::chrono::microseconds(us));
  }
  if (!runtime_.ends()) {
    try {
      work.run();
    } catch (const std::exception& error) {
      runtime_.break_device(error.what());
    }
  }
  work.run = nullptr;
  for (const Range& range : work.uses) runtime_.memory_.end_use(range.at, range.bytes);
}

void FakeRuntime::Stream::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    more_.wait(lock, [&] { return stops_ || !work_.empty(); });
    if (work_.empty()) return;
    Work work = std::move(work_.front());
    work_.pop_front();
    busy_ = !work.marks;
    const bool drop = stops_ && !work.marks;  // somebody may wait for a mark, as synchronize() does
    lock.unlock();
    if (drop) {
      for (const Range& range : work.uses) runtime_.memory_.end_use(range.at, range.bytes);
    } else {
      run_one(work);
    }
    work = {};
    lock.lock();
    busy_ = false;
  }
}

}  // namespace zg::test
