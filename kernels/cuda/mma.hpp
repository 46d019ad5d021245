// PTX instructions without a counterpart in C++: products of small matrices on tensor cores, and loads of
// their operands. sm_80 and later. Layouts follow the PTX ISA ("Matrix Fragments for mma.m16n8k16 with
// floating point type", "ldmatrix"); with g = lane / 4 and t = lane % 4:
//
//   a[16, 16]  a[0] (g, 2t), a[1] (g + 8, 2t), a[2] (g, 2t + 8), a[3] (g + 8, 2t + 8), each with the next
//              column
//   b[16, 8]   b0 (2t, g), b1 (2t + 8, g), each with the next row
//   d[16, 8]   d[0] (g, 2t), d[1] (g, 2t + 1), d[2] (g + 8, 2t), d[3] (g + 8, 2t + 1)
//
// A register of a or b has two elements, the first in its low half. All lanes of the warp must call together.
#pragma once
#include <type_traits>

#include "kernels/cuda/scalar.hpp"

namespace zg::cuda {

// Rounds two results to T (to nearest, ties to even) and packs them into a register; `low` is the first
// element.
template <class T>
__device__ __forceinline__ unsigned pack_halves(float low, float high) {
#if defined(__CUDACC__)
  unsigned both;
  if constexpr (std::is_same_v<T, bf16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  }
  return both;
#else
  return T(low).bits | static_cast<unsigned>(T(high).bits) << 16;
#endif
}

// 2^x with a relative error of 2^-22, and 0 where the result would be subnormal: only the instruction,
// without exp2f()'s handling of subnormal numbers.
__device__ __forceinline__ float exp2_flushed(float x) {
#if defined(__CUDACC__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return x < -126 ? 0.0f : std::exp2(x);
#endif
}

// threadIdx.x and blockIdx.x, read again from the hardware. So values derived from them are computed where
// they are needed, and take no registers before.
__device__ __forceinline__ int thread_again() {
#if defined(__CUDACC__)
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
#else
  return static_cast<int>(threadIdx.x);
#endif
}
__device__ __forceinline__ unsigned block_again() {
#if defined(__CUDACC__)
  unsigned block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
#else
  return blockIdx.x;
#endif
}

#if defined(__CUDACC__)

__device__ __forceinline__ unsigned shared_address(const void* at) {
  return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// d += a b. T: bf16 or fp16.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<T, fp16>);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Loads four 8 x 8 matrices of 16-bit elements from shared memory. Lane 8 m + r passes the address of row r
// of matrix m, a multiple of 16; register m of a lane gets elements (g, 2t) and (g, 2t + 1) of matrix m.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
// The same with transposed matrices: register m gets elements (2t, g) and (2t + 1, g).
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// Starts to copy 16 bytes to shared memory; both addresses are multiples of 16. Unless `there`, it writes
// zeros and reads nothing. This thread may read the bytes after it has committed and waited, other threads
// after a subsequent barrier.
__device__ __forceinline__ void cp_async_16(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}
// Makes the thread's copies since the last commit a group.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most the thread's latest kLeft groups are in flight.
template <int kLeft>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

#else

template <class T>
void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  // Every lane contributes its elements a0 .. a7, b0 .. b3, in the order of the ISA.
  constexpr int kGiven = 12;
  const unsigned registers[6] = {a[0], a[1], a[2], a[3], b0, b1};
  float given[kGiven];
  for (int i = 0; i < kGiven; ++i) {
    T element;
    element.bits = static_cast<std::uint16_t>(registers[i / 2] >> (i % 2 * 16));
    given[i] = to_acc(element);
  }
  const auto* all = static_cast<const unsigned char*>(emulation::gather(0xffffffffu, given, sizeof(given)));
  const auto of_lane = [all](int lane) {
    return reinterpret_cast<const float*>(all + static_cast<std::size_t>(lane) * emulation::kMaxGiven);
  };
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int lower = i / 2, col = 2 * t + i % 2;  // row g, or g + 8
    double sum = d[i];
    for (int k = 0; k < 16; ++k) {
      const int in_group = k % 8 / 2, high = k / 8;
      sum += static_cast<double>(of_lane(4 * g + in_group)[4 * high + 2 * lower + k % 2]) *
             static_cast<double>(of_lane(4 * col + in_group)[8 + 2 * high + k % 2]);
    }
    d[i] = static_cast<float>(sum);
  }
}

namespace detail {
inline void load_matrices(unsigned (&to)[4], const void* row, bool transposed) {
  emulation::require(reinterpret_cast<std::uintptr_t>(row) % 16 == 0, "a row of ldmatrix is aligned");
  const auto* all = static_cast<const unsigned char*>(emulation::gather(0xffffffffu, &row, sizeof(row)));
  const auto element = [all](int matrix, int r, int c) {
    const unsigned char* address = nullptr;
    std::memcpy(&address, all + static_cast<std::size_t>(8 * matrix + r) * emulation::kMaxGiven,
                sizeof(address));
    std::uint16_t bits = 0;
    std::memcpy(&bits, address + 2 * c, sizeof(bits));
    return static_cast<unsigned>(bits);
  };
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  for (int m = 0; m < 4; ++m) {
    to[m] = transposed ? element(m, 2 * t, g) | element(m, 2 * t + 1, g) << 16
                       : element(m, g, 2 * t) | element(m, g, 2 * t + 1) << 16;
  }
}
}  // namespace detail

inline void ldmatrix_x4(unsigned (&to)[4], const void* row) {
  detail::load_matrices(to, row, false);
}
inline void ldmatrix_x4_trans(unsigned (&to)[4], const void* row) {
  detail::load_matrices(to, row, true);
}
inline void cp_async_16(void* to, const void* from, bool there) {
  emulation::require(
      reinterpret_cast<std::uintptr_t>(to) % 16 == 0 && reinterpret_cast<std::uintptr_t>(from) % 16 == 0,
      "both ends of cp.async are aligned");
  emulation::start_copy(to, there ? from : nullptr, 16);
}
inline void cp_async_commit() {
  emulation::commit_copies();
}
template <int kLeft>
void cp_async_wait() {
  emulation::wait_copies(kLeft);
}

#endif

}  // namespace zg::cuda
