// The device that a test program tests: the host device, a CUDA device over the emulation, or a GPU, as the
// program is linked.
#pragma once
#include <cstdint>
#include <memory>

#include "ziggurat/device/device.hpp"

namespace zg::test {

// graphs: as CudaOptions::graphs; the host device ignores it.
std::unique_ptr<Device> make_test_device(std::int64_t budget, Trace* trace = nullptr, bool graphs = false);

// Whether a drive's own calls reach its memory, so that a store over any engine may have the direct link
// (Budgets::direct). For others see tests/cuda/emulated_direct_test.cpp.
bool test_device_is_host();

// The device's arena charges multiples of this many bytes.
inline std::int64_t test_granule() {
  static const std::int64_t granule = make_test_device(std::int64_t{64} << 20)->arena().granule();
  return granule;
}

// Copies between host and device that are done when these return.
inline void to_device(Device& device, void* to, const void* from, std::int64_t bytes) {
  const auto stream = device.make_stream("test copies");
  device.copy_to_device(*stream, to, from, bytes);
  stream->synchronize();
}
inline void to_host(Device& device, void* to, const void* from, std::int64_t bytes) {
  const auto stream = device.make_stream("test copies");
  device.copy_to_host(*stream, to, from, bytes);
  stream->synchronize();
}

}  // namespace zg::test
