// Arrays in a device's memory, with bytes behind them that no op may write.
#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "ziggurat/base/view.hpp"
#include "ziggurat/device/device.hpp"

namespace zg::test {

// Device memory with the given bytes, `offset` bytes behind an aligned address, and 8 bytes behind
// them that must stay as they are.
class DeviceBytes {
 public:
  DeviceBytes(Device& device, Stream& stream, const void* bytes, std::size_t size, std::size_t offset)
      : device_(device), stream_(stream), host_(size + offset + 8, 0xa5), offset_(offset), size_(size) {
    if (size > 0 && bytes != nullptr) std::memcpy(host_.data() + offset, bytes, size);
    data_ = device.arena().allocate(static_cast<std::int64_t>(host_.size()));
    device.copy_to_device(stream, data_, host_.data(), static_cast<std::int64_t>(host_.size()));
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() { device_.arena().release(data_, static_cast<std::int64_t>(host_.size())); }

  // A view of all elements. A vector without elements gives a null view.
  View view(DType dtype, std::int64_t rows, std::int64_t cols) const {
    return size_ == 0 ? View() : View(static_cast<std::byte*>(data_) + offset_, dtype, rows, cols);
  }
  View row(DType dtype) const { return view(dtype, 1, static_cast<std::int64_t>(size_ / size_of(dtype))); }
  const std::uint8_t* fetch() {
    device_.copy_to_host(stream_, host_.data(), data_, static_cast<std::int64_t>(host_.size()));
    stream_.synchronize();
    for (std::size_t i = 0; i < host_.size(); ++i) {
      if (i >= offset_ && i < offset_ + size_) continue;
      EXPECT_EQ(host_[i], 0xa5) << "written beside the matrix";
    }
    return host_.data() + offset_;
  }

 private:
  Device& device_;
  Stream& stream_;
  std::vector<std::uint8_t> host_;
  std::size_t offset_, size_;
  void* data_ = nullptr;
};

}  // namespace zg::test
