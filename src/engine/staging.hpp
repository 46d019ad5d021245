// Host memory for the tokens, scalars and choice biases that the engine itself copies to and from the device. It
// is pinned
// if the device pins host memory, so that copies are DMA and the host does not wait for them. It is a few
// bytes for each token, and is not charged to the host tier's budget.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/device/memory.hpp"
#include "ziggurat/engine/step_executor.hpp"
#include "ziggurat/step/workspace.hpp"

namespace zg {

class Staging {
 public:
  // Allocates a buffer for Workspace::inputs(). Throws Error(kMemory) as make_host_memory() does. The device
  // must outlive it.
  Staging(Device& device, const Layout& layout)
      : device_(device),
        layout_(layout),
        bytes_(arena_charge(Workspace::input_bytes(layout, layout.options.micro_batches))),
        memory_(make_host_memory({.name = "staging of tokens", .budget = bytes_, .huge_pages = false})) {
    memory_->set_hooks(device.host_hooks());
    data_ = memory_->allocate(bytes_);
    ZG_ASSERT(data_ != nullptr, "an empty arena of {} bytes has no room for them", bytes_);
  }
  ~Staging() { memory_->release(data_, bytes_); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  void* data() const { return data_; }
  // Stages micro-batch `m`. Copies of an earlier load() must have reached the device.
  void put(std::int64_t m, const MicroBatch& batch) {
    const auto bytes = static_cast<std::size_t>(Workspace::token_bytes(layout_));
    char* const tokens = static_cast<char*>(data_) + Workspace::input_bytes(layout_, m);
    std::memcpy(tokens, batch.ids, bytes);
    std::memcpy(tokens + bytes, batch.targets, bytes);
    ZG_ASSERT_EQ(batch.first_keys != nullptr, layout_.options.micro_batch.documents);
    if (batch.first_keys != nullptr)
      std::memcpy(tokens + 2 * bytes, batch.first_keys,
                  static_cast<std::size_t>(Workspace::document_bytes(layout_)));
  }
  // Stages the choice biases of all layers' routers, [layers, experts], for all later load()s.
  void put_choice_biases(const std::vector<float>& values) {
    if (Workspace::choice_bias_bytes(layout_) == 0) return;
    char* const to = static_cast<char*>(data_) + Workspace::choice_biases_at(layout_);
    if (layout_.model->accumulator_dtype() == DType::kF64) {
      std::copy(values.begin(), values.end(), reinterpret_cast<double*>(to));
    } else {
      std::copy(values.begin(), values.end(), reinterpret_cast<float*>(to));
    }
  }
  // Copies the staged micro-batches and choice biases to the device, and zeroes the workspace's scalars. Returns
  // the bytes copied.
  std::int64_t load(Stream& stream, const Workspace& workspace, std::int64_t micro_batches) {
    std::memset(data_, 0, static_cast<std::size_t>(Workspace::scalar_bytes(layout_)));
    const std::int64_t bytes = Workspace::input_bytes(layout_, micro_batches);
    device_.copy_to_device(stream, workspace.inputs(), data_, bytes);
    return bytes;
  }

 private:
  Device& device_;
  const Layout& layout_;
  std::int64_t bytes_;
  std::unique_ptr<HostMemory> memory_;
  void* data_ = nullptr;
};

}  // namespace zg
