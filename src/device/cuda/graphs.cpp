#include "device/cuda/graphs.hpp"

#include <algorithm>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"

namespace zg::cuda {

Graphs::~Graphs() {
  for (const auto& [key, entry] : entries_) {
    if (entry.graph != nullptr) runtime_.destroy_graph(entry.graph);
  }
}

void Graphs::run(CudaStream& stream, std::span<const std::uint64_t> key, const std::function<void()>& work) {
  if (off_ || stream.failed()) return work();
  key_.assign(key.begin(), key.end());
  const auto [it, fresh] = entries_.try_emplace(key_);
  Entry& entry = it->second;
  entry.used = ++clock_;
  if (fresh) {
    work();
    if (entries_.size() > kMost) make_room(stream);
    return;
  }
  std::unique_lock<std::shared_mutex> quiet;
  if (entry.graph == nullptr) {
    quiet = completions_.quiet();  // a new graph takes device memory, until it is launched
    try {
      entry.graph = capture(stream, work);
    } catch (const std::exception& e) {
      off_ = true;
      quiet = {};
      log::warning("CUDA graphs are off from here on, since an operation cannot be captured: {}", e.what());
      return work();
    }
  }
  stream.attempt([&](StreamHandle handle) {
    runtime_.launch(entry.graph, handle);
    ++launches_;
  });
}

GraphHandle Graphs::capture(CudaStream& stream, const std::function<void()>& work) {
  // CUDA forbids synchronizing with the stream, or with the device, during a capture.
  const auto drain_lock = completions_.block_drain();
  const StreamHandle handle = stream.begin_work();
  runtime_.begin_capture(handle);
  stream.set_capturing(true);
  try {
    work();
  } catch (...) {
    stream.set_capturing(false);
    try {
      runtime_.destroy_graph(runtime_.end_capture(handle));
    } catch (const Error&) {  // the capture was invalid: there is no graph
    }
    throw;
  }
  stream.set_capturing(false);
  const GraphHandle graph = runtime_.end_capture(handle);
  ++captures_;
  return graph;
}

// Drops the older half of the entries, so that a run whose keys never recur seldom needs this.
void Graphs::make_room(CudaStream& stream) {
  std::vector<std::uint64_t> used;
  for (const auto& [key, entry] : entries_) used.push_back(entry.used);
  const auto middle = used.begin() + static_cast<std::ptrdiff_t>(used.size() / 2);
  std::nth_element(used.begin(), middle, used.end());
  std::erase_if(entries_, [&](const auto& item) {
    if (item.second.used >= *middle) return false;
    // The graph may be running: destroy it after the stream's work.
    if (GraphHandle graph = item.second.graph; graph != nullptr)
      stream.callback([&runtime = runtime_, graph] { runtime.destroy_graph(graph); });
    return true;
  });
}

GraphReport Graphs::report() const {
  GraphReport r{
      .entries = static_cast<std::int64_t>(entries_.size()), .captures = captures_, .launches = launches_};
  for (const auto& [key, entry] : entries_) r.graphs += entry.graph != nullptr ? 1 : 0;
  return r;
}

}  // namespace zg::cuda
