// Host memory for what the engine itself copies to and from the device: pinned where the device pins host
// memory, so that copies are DMA and the host does not wait for them. Not counted to the host tier's budget:
// some bytes a token.
#pragma once
#include <cstdint>
#include <memory>

#include "ziggurat/base/error.hpp"
#include "ziggurat/device/memory.hpp"

namespace zg {

class Staging {
 public:
  // Throws Error(kMemory) as make_host_memory() does. The device must outlive it.
  Staging(Device& device, std::int64_t bytes)
      : bytes_(arena_charge(bytes)),
        memory_(make_host_memory({.name = "staging of tokens", .budget = bytes_, .huge_pages = false})) {
    memory_->set_hooks(device.host_hooks());
    data_ = memory_->allocate(bytes_);
    ZG_ASSERT(data_ != nullptr, "an empty arena of {} bytes has no room for them", bytes_);
  }
  ~Staging() { memory_->release(data_, bytes_); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  void* data() const { return data_; }

 private:
  std::int64_t bytes_;
  std::unique_ptr<HostMemory> memory_;
  void* data_ = nullptr;
};

}  // namespace zg
