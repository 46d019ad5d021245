// Tracks first uses of NVIDIA's libraries. cuBLASLt and cuDNN load kernels, and take memory, when a problem
// or a stream is new to them. To do so, CUDA may wait for all work of the device, and other threads' CUDA
// calls wait for that. So no stream may wait for the host meanwhile (Completions::quiet()).
//
// A first use blocks the thread that issues it until every event has come that a stream waits for by a word.
// That wait ends: such an event belongs to a transfer or an update in progress, and never needs an operation
// that the blocked thread has yet to issue.
#pragma once
#include <array>
#include <cstdint>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <utility>

#include "device/cuda/stream.hpp"

namespace zg::cuda {

// Any thread.
class FirstUses {
 public:
  using Key = std::array<std::int64_t, 16>;

  explicit FirstUses(Completions& completions) : completions_(completions) {}

  // Returns a lock to hold while work with this key is enqueued on the stream. Locks and allocates nothing if
  // the stream has had such work before. During a capture Graphs holds the lock.
  [[nodiscard]] std::unique_lock<std::shared_mutex> begin(const CudaStream& stream, const Key& key) {
    {
      std::lock_guard lock(mutex_);
      if (!known_.insert({stream.handle(), key}).second) return {};
    }
    if (stream.capturing() || stream.failed()) return {};
    return completions_.quiet();
  }

 private:
  Completions& completions_;
  std::mutex mutex_;
  std::set<std::pair<StreamHandle, Key>> known_;
};

}  // namespace zg::cuda
