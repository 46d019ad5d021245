// A stream of a FakeRuntime: a thread that does one piece of work after the other.
#pragma once
#include <deque>
#include <thread>

#include "tests/cuda/fake_runtime.hpp"

namespace zg::test {

struct FakeRuntime::Point {
  bool reached = false;              // under the runtime's mutex
  std::shared_ptr<Capture> capture;  // the one that it is a part of; or null
};

struct FakeRuntime::Capture {
  Stream* origin = nullptr;
  std::vector<Stream*> joined;
  std::vector<Work> work;
  bool ended = false;
};

class FakeRuntime::Stream final : public emulation::Queue {
 public:
  Stream(FakeRuntime& runtime, std::int64_t number, int device, int most_delay_us, std::uint64_t seed);
  ~Stream() override;  // work that has not begun is dropped

  // Kernels reach it as an emulation::Queue.
  cuda::StreamHandle handle() {
    return reinterpret_cast<cuda::StreamHandle>(static_cast<emulation::Queue*>(this));
  }
  std::string name() const { return fmt::format("stream {}", number_); }
  int device() const { return device_; }
  bool idle() const;
  bool stops() const { return stops_.load(); }
  void push(Work work);
  void enqueue(std::function<void()> kernel) override { runtime_.kernel(*this, std::move(kernel)); }

  std::shared_ptr<Capture> capture;  // used by the thread that enqueues here, and by no other

 private:
  void run();
  void run_one(Work& work);

  FakeRuntime& runtime_;
  const std::int64_t number_;
  const int device_, most_delay_us_;
  std::uint64_t random_;
  mutable std::mutex mutex_;
  std::condition_variable more_;
  std::deque<Work> work_;
  bool busy_ = false;
  std::atomic<bool> stops_{false};
  std::thread thread_;
};

}  // namespace zg::test
