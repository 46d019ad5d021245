// What is enqueued again and again with the same operands, kept as CUDA graphs: one launch for all its kernels.
// The host then has less to do for each operation, which is what matters where operations are so short that the
// device waits for the host; the device gains little else. A graph takes some of the device's memory, outside of
// its budget.
//
// Work is known by its key. The first time it is enqueued as it is (libraries set themselves up then), the
// second time captured, from then on launched as a whole. Keys that do not come back cost their entry, of which
// there are kMost; who was not used for longest goes.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "device/cuda/pinned.hpp"
#include "device/cuda/stream.hpp"

namespace zg::cuda {

struct GraphReport {
  std::int64_t entries = 0, graphs = 0;   // now
  std::int64_t captures = 0, launches = 0;  // so far
};

// Of one device; used by one thread at a time.
class Graphs {
 public:
  static constexpr std::size_t kMost = 4096;

  Graphs(Runtime& runtime, PinnedRegions& pinned, Completions& completions)
      : runtime_(runtime), pinned_(pinned), completions_(completions) {}
  ~Graphs();  // nothing of them is under way
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  // `work` enqueues on this stream alone, and the same for the same key. Where CUDA cannot capture it, it is
  // enqueued as it is, with a warning, and so is everything from then on.
  void run(CudaStream& stream, std::span<const std::uint64_t> key, const std::function<void()>& work);
  GraphReport report() const;

 private:
  using Key = std::vector<std::uint64_t>;
  struct Entry {
    GraphHandle graph = nullptr;
    std::uint64_t used = 0;
  };
  GraphHandle capture(CudaStream& stream, const std::function<void()>& work);
  void make_room(CudaStream& stream);

  Runtime& runtime_;
  PinnedRegions& pinned_;
  Completions& completions_;
  std::map<Key, Entry> entries_;
  Key key_;  // the one asked for
  std::uint64_t clock_ = 0;
  bool off_ = false;
  std::int64_t captures_ = 0, launches_ = 0;
};

}  // namespace zg::cuda
