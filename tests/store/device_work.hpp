// What tests read and write under a lease, on any device: where its memory is not the host's, through copies.
#pragma once
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ziggurat/base/buffer.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/store/store.hpp"

namespace zg::test {

// The bytes under a lease at this tier.
struct Leased {
  Tier tier = Tier::kHost;
  Access access = Access::kRead;
  void* data = nullptr;
  std::int64_t bytes = 0;

  Leased(Tier t, Access a, const Lease& lease)
      : tier(t), access(a), data(lease.data()), bytes(lease.bytes()) {}
  Leased(const AccessStep& step, const Lease& lease) : Leased(step.tier, step.access, lease) {}
  bool within_reach(const Device& device) const { return tier == Tier::kHost || device.is_host(); }
};

// Host memory for copies that the host does not wait for. Its destructor waits for all that the device does.
class Staging {
 public:
  Staging(Device& device, std::int64_t bytes) : buffer_(bytes), hooks_(device.host_hooks()) {
    if (hooks_.mapped) hooks_.mapped(buffer_.data(), buffer_.size());
  }
  Staging(const Staging&) = delete;
  ~Staging() {
    if (hooks_.unmapped) hooks_.unmapped(buffer_.data(), buffer_.size());
  }
  void* data() const { return buffer_.data(); }
  std::int64_t bytes() const { return buffer_.size(); }

 private:
  Buffer buffer_;
  Arena::Hooks hooks_;
};

// Calls work(memory), where memory is the host's, and holds the bytes of the lease before and after. Returns
// when that is done.
template <class Work>
void work_on(Device& device, const Leased& at, Work&& work) {
  if (at.within_reach(device)) return work(at.data);
  const auto stream = device.make_stream("test copies");
  const Buffer staging(at.bytes);
  if (at.access != Access::kOverwrite) {
    device.copy_to_host(*stream, staging.data(), at.data, at.bytes);
    stream->synchronize();
  }
  work(staging.data());
  if (at.access == Access::kRead) return;
  device.copy_to_device(*stream, at.data, staging.data(), at.bytes);
  stream->synchronize();
}

// A stream of the device on which tests run code of their own. On a device that is not the host a thread runs
// that code, and the stream waits for it. Used by one thread at a time; gone before the device is.
class WorkStream {
 public:
  explicit WorkStream(Device& device, const std::string& name = "work")
      : device_(device), stream_(device.make_stream(name)) {
    if (!device.is_host()) thread_ = std::make_unique<HostStream>(name, HostStream::Mode::kThread);
  }
  WorkStream(const WorkStream&) = delete;
  // Waits for all work. A failure was reported by synchronize(), or nobody asked for it.
  ~WorkStream() {
    try {
      stream_->synchronize();
    } catch (...) {
    }
  }

  Stream* get() { return stream_.get(); }
  void wait(const Event& event) { stream_->wait(event); }
  Event record() { return stream_->record(); }

  // `work` may touch no device memory.
  void enqueue(Task work) {
    if (thread_ == nullptr) return static_cast<HostStream&>(*stream_).enqueue("work", std::move(work));
    thread_->wait(stream_->record());
    thread_->enqueue("work", std::move(work));
    stream_->wait(thread_->record());
  }
  // Enqueues work(memory), where memory holds the bytes of the lease as with work_on().
  template <class Work>
  void enqueue(const Leased& at, Work work) {
    if (at.within_reach(device_))
      return enqueue([data = at.data, work = std::move(work)]() mutable { work(data); });
    const bool again = !staged_.empty() && staged_.front().done.done();
    Staged staged;
    if (again) {
      staged = std::move(staged_.front());
      staged_.pop_front();
    }
    if (!again || staged.memory->bytes() < at.bytes) {
      if (again) too_small_.push_back(std::move(staged.memory));
      staged.memory = std::make_unique<Staging>(device_, at.bytes);
    }
    void* const memory = staged.memory->data();
    if (at.access != Access::kOverwrite) device_.copy_to_host(*stream_, memory, at.data, at.bytes);
    enqueue([memory, work = std::move(work)]() mutable { work(memory); });
    if (at.access != Access::kRead) device_.copy_to_device(*stream_, at.data, memory, at.bytes);
    staged.done = stream_->record();
    staged_.push_back(std::move(staged));
  }
  // The lease ends after all that was enqueued so far.
  void release(Lease& lease) { lease.release_after(*stream_, stream_->record()); }
  void synchronize() { stream_->synchronize(); }

 private:
  struct Staged {
    Event done;
    std::unique_ptr<Staging> memory;
  };
  Device& device_;
  std::deque<Staged> staged_;
  std::vector<std::unique_ptr<Staging>> too_small_;  // it stays, since streams may wait for the host
  std::unique_ptr<HostStream> thread_;               // null: the stream itself runs the tests' code
  std::unique_ptr<Stream> stream_;  // ends first: it waits for the thread, and uses staged memory
};

}  // namespace zg::test
