// Where kernels of kernels/cuda are tested: on the emulation (zg_test_cuda), or on a GPU (zg_test_gpu), from
// the same sources.
#pragma once
#include <cstddef>
#include <functional>

#include "kernels/cuda/kernels.hpp"
#include "tests/kernels/on_device.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::test {

// On the device's own stream. Throws what a kernel failed by, in device_read().
cuda::Launch launch(bool deterministic = true);
// Runs `body` for several orders of threads, where those can be chosen (the emulation); else once.
void for_each_order(const std::function<void()>& body);
// Runs `body` as on a GPU whose blocks can have so many bytes of shared memory, where that can be chosen (the
// emulation, which ends the process where a kernel asks for more); else not at all.
void with_shared_memory(std::size_t bytes, const std::function<void()>& body);
// Whether this is a GPU, where tests can afford large sizes.
bool is_gpu();

}  // namespace zg::test
