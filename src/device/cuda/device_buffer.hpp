// Device memory outside of the arena: workspaces of libraries.
#pragma once
#include <cstdint>
#include <utility>

#include "device/cuda/runtime.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::cuda {

class DeviceBuffer {
 public:
  // bytes are rounded up to granules. Throws Error(kMemory).
  DeviceBuffer(Runtime& runtime, int device, std::int64_t bytes) : runtime_(runtime), device_(device) {
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
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() {
    bool mapped = true;
    try {
      runtime_.use_device(device_);
      runtime_.unmap(data_, bytes_);
      mapped = false;
    } catch (const Error& error) {  // the device has failed: the addresses stay reserved
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
