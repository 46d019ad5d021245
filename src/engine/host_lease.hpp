// A lease through which the processor reads or writes a segment: at the host, or at the device with a copy of
// the bytes at the host.
#pragma once
#include <utility>

#include "ziggurat/base/buffer.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {

class HostLease {
 public:
  // A lease at the host, or on a device that is the host.
  explicit HostLease(Lease lease) : lease_(std::move(lease)) {}
  // A lease on a GPU. The destructor copies back what was written. Copies run on `stream`, which must be
  // idle.
  HostLease(Lease lease, Access access, Device& device, Stream& stream)
      : lease_(std::move(lease)), copy_(lease_.bytes()), device_(&device), stream_(&stream) {
    writes_ = access != Access::kRead;
    if (access == Access::kOverwrite) return;
    device.copy_to_host(stream, copy_.data(), lease_.data(), lease_.bytes());
    stream.synchronize();
  }
  HostLease(HostLease&& other) noexcept
      : lease_(std::move(other.lease_)),
        copy_(std::move(other.copy_)),
        device_(std::exchange(other.device_, nullptr)),
        stream_(other.stream_),
        writes_(other.writes_) {}
  HostLease& operator=(HostLease&&) = delete;
  // If the device fails here, the next synchronize() throws the failure.
  ~HostLease() {
    if (device_ == nullptr || !writes_) return;
    device_->copy_to_device(*stream_, lease_.data(), copy_.data(), lease_.bytes());
    try {
      stream_->synchronize();
    } catch (...) {
    }
  }

  void* data() const { return device_ != nullptr ? copy_.data() : lease_.data(); }
  std::int64_t bytes() const { return lease_.bytes(); }

 private:
  Lease lease_;
  Buffer copy_;
  Device* device_ = nullptr;  // null: there is no copy
  Stream* stream_ = nullptr;
  bool writes_ = false;
};

}  // namespace zg
