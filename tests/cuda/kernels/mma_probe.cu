#include "tests/cuda/kernels/mma_probe.hpp"

#include "kernels/cuda/mma.hpp"

namespace zg::test {
namespace {

template <class T>
__global__ void __launch_bounds__(32) run_mma(const unsigned* a, const unsigned* b, float* d) {
  unsigned of_a[4];
  float sums[4];
  for (unsigned i = 0; i < 4; ++i) of_a[i] = a[4 * threadIdx.x + i], sums[i] = d[4 * threadIdx.x + i];
  cuda::mma_m16n8k16<T>(sums, of_a, b[2 * threadIdx.x], b[2 * threadIdx.x + 1]);
  for (unsigned i = 0; i < 4; ++i) d[4 * threadIdx.x + i] = sums[i];
}

__global__ void __launch_bounds__(32)
    run_ldmatrix(bool transposed, const std::uint16_t* memory, std::int64_t elements,
                 const std::int32_t* offsets, unsigned* to) {
  auto* const shared = cuda::dynamic_shared<std::uint16_t>();
  for (std::int64_t i = threadIdx.x; i < elements; i += 32) shared[i] = memory[i];
  __syncthreads();
  unsigned registers[4];
  const std::uint16_t* const row = shared + offsets[threadIdx.x];
  transposed ? cuda::ldmatrix_x4_trans(registers, row) : cuda::ldmatrix_x4(registers, row);
  for (unsigned i = 0; i < 4; ++i) to[4 * threadIdx.x + i] = registers[i];
}

__global__ void __launch_bounds__(kProbeThreads)
    run_cp_async(const unsigned char* in, const std::int32_t* there, std::int64_t rounds,
                 unsigned char* out) {
  constexpr std::int64_t kRound = 16 * kProbeThreads;
  auto* const stages = cuda::dynamic_shared<unsigned char>();
  const auto start = [&](std::int64_t round) {
    const std::int64_t at = 16 * std::int64_t{threadIdx.x};
    cuda::cp_async_16(stages + round % 2 * kRound + at, in + round * kRound + at, there[round] != 0);
  };
  start(0);
  cuda::cp_async_commit();
  for (std::int64_t round = 0; round < rounds; ++round) {
    if (round + 1 < rounds) start(round + 1);
    cuda::cp_async_commit();
    cuda::cp_async_wait<1>();
    __syncthreads();
    const std::int64_t right = (threadIdx.x + 1) % kProbeThreads;
    for (std::int64_t i = 0; i < 16; ++i)
      out[round * kRound + 16 * std::int64_t{threadIdx.x} + i] = stages[round % 2 * kRound + 16 * right + i];
    __syncthreads();
  }
}

}  // namespace

template <class T>
void probe_mma(const cuda::Launch& on, const unsigned* a, const unsigned* b, float* d) {
  cuda::launch("probe_mma", run_mma<T>, on, cuda::Shape{1, 32}, a, b, d);
}
template void probe_mma<bf16>(const cuda::Launch&, const unsigned*, const unsigned*, float*);
template void probe_mma<fp16>(const cuda::Launch&, const unsigned*, const unsigned*, float*);

void probe_ldmatrix(const cuda::Launch& on, bool transposed, const std::uint16_t* memory,
                    std::int64_t elements, const std::int32_t* offsets, unsigned* to) {
  const auto bytes = static_cast<std::size_t>(elements) * sizeof(std::uint16_t);
  cuda::launch("probe_ldmatrix", run_ldmatrix, on, cuda::Shape{1, 32, bytes}, transposed, memory, elements,
               offsets, to);
}

void probe_cp_async(const cuda::Launch& on, const unsigned char* in, const std::int32_t* there,
                    std::int64_t rounds, unsigned char* out) {
  cuda::launch("probe_cp_async", run_cp_async, on, cuda::Shape{1, kProbeThreads, 2 * 16 * kProbeThreads}, in,
               there, rounds, out);
}

}  // namespace zg::test
