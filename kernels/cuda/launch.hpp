// The two ways to compile and launch kernels from the same sources: with nvcc for GPUs, or with the host's
// compiler for the emulation (emulation/emulation.hpp). Kernels include only this header, others of their
// folder and of include/ziggurat/kernels, because nvcc cannot compile all libraries of the host.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/cuda/kernels.hpp"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define ZG_UNROLL _Pragma("unroll")
#define ZG_NO_UNROLL _Pragma("unroll 1")
#else
#include "kernels/cuda/emulation/emulation.hpp"
#define ZG_UNROLL
#define ZG_NO_UNROLL
#endif

namespace zg::cuda {

struct Shape {
  dim3 grid, block;
  std::size_t shared_bytes = 0;  // dynamic shared memory; launch() opts in to large sizes
};

#if defined(__CUDACC__)

// The block's dynamic shared memory, 128-byte aligned.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char zg_dynamic_shared[];
  return reinterpret_cast<T*>(zg_dynamic_shared);
}

[[noreturn]] void refused(const char* kernel, int status);
// Shared memory that a block can have on the current GPU.
std::size_t most_shared_bytes();

// Throws Error(kDevice) if CUDA refuses the launch. An empty grid launches nothing.
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), const Launch& on, const Shape& shape, A&&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  cudaError_t status = cudaSuccess;
  // Without opting in a block has 48 KiB, including the kernel's static shared memory.
  if (shape.shared_bytes > 32 * 1024) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shape.shared_bytes));
  }
  if (status == cudaSuccess) {
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = on.stream;
    status = cudaLaunchKernelEx(&config, kernel, P(std::forward<A>(args))...);
  }
  if (status != cudaSuccess) refused(name, static_cast<int>(status));
}

#else

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(emulation::dynamic_shared());
}
inline std::size_t most_shared_bytes() {
  return emulation::most_shared();
}

// Enqueues on the emulated stream; with a null stream the kernel runs at once.
template <class... P, class... A>
void launch(const char* name, void (*kernel)(P...), const Launch& on, const Shape& shape, A&&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  emulation::enqueue(on.stream, [=, held = std::make_tuple(P(std::forward<A>(args))...)] {
    emulation::run(name, shape.grid, shape.block, shape.shared_bytes, [&] { std::apply(kernel, held); });
  });
}

#endif

}  // namespace zg::cuda
