// Kernels that show what the functions of kernels/cuda/mma.hpp do, for mma_test.cpp.
#pragma once
#include <cstdint>

#include "kernels/cuda/kernels.hpp"

namespace zg::test {

// One warp. Lane l gives a[4 l ...] and b[2 l ...], and adds to d[4 l ...].
template <class T>
void probe_mma(const cuda::Launch& on, const unsigned* a, const unsigned* b, float* d);

// One warp. Lane l gives the address of memory[offsets[l]] in a copy in shared memory, and has to[4 l ...].
void probe_ldmatrix(const cuda::Launch& on, bool transposed, const std::uint16_t* memory,
                    std::int64_t elements, const std::int32_t* offsets, unsigned* to);

// A block of kProbeThreads, each of which copies its 16 bytes of every round by way of two stages in turn;
// what comes out is its right neighbour's. Rounds with a 0 in `there` give zeros.
inline constexpr int kProbeThreads = 64;
void probe_cp_async(const cuda::Launch& on, const unsigned char* in, const std::int32_t* there,
                    std::int64_t rounds, unsigned char* out);

}  // namespace zg::test
