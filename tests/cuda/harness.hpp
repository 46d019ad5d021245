// Where kernels of kernels/cuda are tested: on the emulation (zg_test_cuda), or on a GPU (zg_test_gpu), from
// the same sources.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/cuda/kernels.hpp"
#include "tests/kernels/support.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::test {

// Memory of the device, at least 256-byte aligned; of exactly so many bytes on the emulation.
void* device_allocate(std::int64_t bytes);
void device_release(void* data);
void device_write(void* device, const void* host, std::int64_t bytes);
void device_read(void* host, const void* device, std::int64_t bytes);  // after all that was launched
// On the device's own stream. Throws what a kernel failed by, in device_read().
cuda::Launch launch(bool deterministic = true);
// Runs `body` for several orders of threads, where those can be chosen (the emulation); else once.
void for_each_order(const std::function<void()>& body);
// Runs `body` as on a GPU whose blocks can have so many bytes of shared memory, where that can be chosen (the
// emulation, which ends the process where a kernel asks for more); else not at all.
void with_shared_memory(std::size_t bytes, const std::function<void()>& body);
// Whether this is a GPU, where tests can afford large sizes.
bool is_gpu();

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
