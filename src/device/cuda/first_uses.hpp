// The first use of what NVIDIA's libraries do for the first time: cuBLASLt and cuDNN load kernels, and take
// memory, when a problem or a stream is new to them. CUDA may wait for all work of the device to do so; other
// threads' calls wait for that. So no stream may wait for the host meanwhile (Completions::quiet()).
//
// A first use holds up the thread that issues it until every event that streams wait for by a word has come.
// That ends: such an event belongs to a transfer or an update that is under way, and never needs an operation
// that the thread has yet to issue.
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

  // To be held while work with this key is enqueued on the stream. Holds and allocates nothing if the stream
  // has had such work. During a capture Graphs holds the lock.
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
