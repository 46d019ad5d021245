// The memory that the kernels under test work on: a GPU's memory; or host memory apart from the operands, for
// the host's kernels and the emulation of CUDA.
#pragma once
#include <cstdint>
#include <vector>

#include "tests/kernels/support.hpp"

namespace zg::test {

// At least 256-byte aligned; on the host of exactly so many bytes.
void* device_allocate(std::int64_t bytes);
void device_release(void* data);
void device_write(void* device, const void* host, std::int64_t bytes);
// Waits for all launched kernels, and throws the error of a kernel that failed.
void device_read(void* host, const void* device, std::int64_t bytes);

// A vector's or a matrix's copy on the device, gaps included.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(Matrix<T>& m) : host_(m.data()), ld_(m.ld()), bytes_(m.rows() * m.ld() * width()) {
    put();
  }
  explicit OnDevice(std::vector<T>& v)
      : host_(v.data()), ld_(static_cast<std::int64_t>(v.size())), bytes_(ld_ * width()) {
    put();
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { device_release(data_); }

  T* data() { return static_cast<T*>(data_); }
  operator Strided<T>() { return {data(), ld_}; }
  operator Strided<const T>() { return {data(), ld_}; }
  // Copies it back to the host's memory that it was made of.
  void fetch() { device_read(host_, data_, bytes_); }
  // Copies the host's memory to the device again.
  void refill() { device_write(data_, host_, bytes_); }

 private:
  static constexpr std::int64_t width() { return static_cast<std::int64_t>(sizeof(T)); }
  void put() {
    data_ = device_allocate(bytes_);
    refill();
  }
  T* host_;
  std::int64_t ld_, bytes_;
  void* data_ = nullptr;
};

}  // namespace zg::test
