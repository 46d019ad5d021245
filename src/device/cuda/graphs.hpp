// Work that is enqueued again and again with the same operands, kept as CUDA graphs: one launch for all
// kernels of an operation. This saves host time for each operation, which matters if operations are so
// short that the device waits for the host. Graphs take device memory outside of the budget.
//
// Work is identified by its key. The first time it is enqueued directly, since libraries initialise
// themselves then; the second time it is captured; from then on its graph is launched. A key that does not
// recur costs an entry; beyond kMost entries the least recently used are dropped.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "device/cuda/stream.hpp"

namespace zg::cuda {

struct GraphReport {
  std::int64_t entries = 0, graphs = 0;     // now
  std::int64_t captures = 0, launches = 0;  // so far
};

// The graphs of one device; used by one thread at a time.
class Graphs {
 public:
  static constexpr std::size_t kMost = 4096;

  Graphs(Runtime& runtime, Completions& completions) : runtime_(runtime), completions_(completions) {}
  ~Graphs();  // no graph may be running
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  // `work` must enqueue only on this stream, and the same work for equal keys. If CUDA cannot capture it, a
  // warning is logged, and this and all later work is enqueued directly.
  void run(CudaStream& stream, std::span<const std::uint64_t> key, const std::function<void()>& work);
  GraphReport report() const;

 private:
  using Key = std::vector<std::uint64_t>;
  struct Entry {
    GraphHandle graph = nullptr;
    std::uint64_t used = 0;  // clock_ at the last use
  };
  GraphHandle capture(CudaStream& stream, const std::function<void()>& work);
  void make_room(CudaStream& stream);

  Runtime& runtime_;
  Completions& completions_;
  std::map<Key, Entry> entries_;
  Key key_;  // the current call's key; a member so that its memory is reused
  std::uint64_t clock_ = 0;
  bool off_ = false;
  std::int64_t captures_ = 0, launches_ = 0;
};

}  // namespace zg::cuda
