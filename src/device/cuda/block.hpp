// A piece of device memory of one size and one owner, outside of the arena: libraries' workspaces.
#pragma once
#include <cstdint>
#include <utility>

#include "device/cuda/runtime.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::cuda {

class Block {
 public:
  // Throws Error(kMemory).
  Block(Runtime& runtime, int device, std::int64_t bytes) : runtime_(runtime), device_(device) {
    runtime_.use_device(device_);
    bytes_ = round_up(bytes, runtime_.device_info(device_).granule);
    data_ = runtime_.reserve_addresses(bytes_);
    try {
      physical_ = runtime_.create_physical(bytes_);
      runtime_.map(data_, bytes_, physical_);
    } catch (...) {
      if (physical_ != 0) runtime_.release_physical(physical_);
      runtime_.free_addresses(data_, bytes_);
      throw;
    }
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    bool mapped = true;
    try {
      runtime_.use_device(device_);
      runtime_.unmap(data_, bytes_);
      mapped = false;
    } catch (const Error& error) {  // a device that has failed
      log::warning("device {}: {}", device_, error.what());
    }
    runtime_.release_physical(physical_);
    if (!mapped) runtime_.free_addresses(data_, bytes_);
  }
  void* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  Runtime& runtime_;
  const int device_;
  std::int64_t bytes_ = 0;
  void* data_ = nullptr;
  PhysicalHandle physical_ = 0;
};

}  // namespace zg::cuda
