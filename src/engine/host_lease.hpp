// A lease through which the CPU reads or writes a segment. The lease is at the host, or at the device with a
// copy of the bytes in host memory.
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
  // The range of bytes of the segment that the user reads and may change.
  struct Part {
    std::int64_t begin = 0, bytes = 0;
  };
  // A lease at a GPU. The bytes of `part` are copied to the host, unless `access` overwrites them; the
  // destructor copies them back, unless `access` only reads. Copies run on `stream`, which must be idle.
  HostLease(Lease lease, Access access, Device& device, Stream& stream, const Part& part)
      : lease_(std::move(lease)),
        copy_(lease_.bytes()),
        device_(&device),
        stream_(&stream),
        part_(part),
        writes_(access != Access::kRead) {
    if (access == Access::kOverwrite || part.bytes == 0) return;
    device.copy_to_host(stream, at(copy_.data()), at(lease_.data()), part.bytes);
    stream.synchronize();
  }
  HostLease(HostLease&& other) noexcept
      : lease_(std::move(other.lease_)),
        copy_(std::move(other.copy_)),
        device_(std::exchange(other.device_, nullptr)),
        stream_(other.stream_),
        part_(other.part_),
        writes_(other.writes_) {}
  HostLease& operator=(HostLease&&) = delete;
  // If the device fails here, the stream's next synchronize() throws the failure.
  ~HostLease() {
    if (device_ == nullptr || !writes_ || part_.bytes == 0) return;
    device_->copy_to_device(*stream_, at(lease_.data()), at(copy_.data()), part_.bytes);
    try {
      stream_->synchronize();
    } catch (...) {
    }
  }

  void* data() const { return device_ != nullptr ? copy_.data() : lease_.data(); }
  std::int64_t bytes() const { return lease_.bytes(); }

 private:
  void* at(void* data) const { return static_cast<char*>(data) + part_.begin; }

  Lease lease_;
  Buffer copy_;
  Device* device_ = nullptr;  // null: no copy
  Stream* stream_ = nullptr;
  Part part_;
  bool writes_ = false;
};

}  // namespace zg
