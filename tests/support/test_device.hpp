// The device that a test program tests: the host device, a CUDA device over the emulation, or a GPU, as the
// program is linked.
#pragma once
#include <cstdint>
#include <memory>

#include "ziggurat/device/device.hpp"

namespace zg::test {

// graphs: as CudaOptions::graphs; the host device ignores it.
std::unique_ptr<Device> make_test_device(std::int64_t budget, Trace* trace = nullptr, bool graphs = false);

// Only of the host device's memory do a drive's own calls reach all, so that a store over any engine may have
// the direct link (Budgets::direct); for the others see tests/cuda/emulated_direct_test.cpp. The emulation is
// some hundred times as slow as either of the others.
enum class TestDevice { kHost, kEmulated, kGpu };
TestDevice test_device();

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
