// Matrix products and attention on the host. Blocking calls, threaded by parallel_for with a partition that
// depends on the sizes alone. Raw pointers, sizes and leading dimensions; no policy.
//
// T: float, bf16, fp16, double. Acc<T>: float, for double double.
#pragma once
#include <cstdint>

#include "ziggurat/base/dtype.hpp"
#include "ziggurat/kernels/arguments.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg::host {

using namespace kernels;

// C[m,n] (+)= op(A)[m,k] op(B)[k,n] (+ bias[n]). (In, Out) in {(bf16,bf16), (bf16,float), (fp16,fp16),
// (fp16,float), (float,float), (double,double)}. float and bf16 by oneDNN, double by our own blocked loop
// (for tests). fp16, and bf16 where the CPU has no instructions for it, by oneDNN's fp32 product of tiles
// that are widened for it; sums are rounded to Out once, at the end.
template <class In, class Out>
void gemm(const GemmShape& shape, const In* a, const In* b, Out* c, const In* bias);

// What widening takes of each thread that multiplies, whatever the sizes; besides it oneDNN keeps scratch for
// a product of 256 x 512 x 512.
inline constexpr std::int64_t kWidenedBytes = 2 * 1024 * 1024;

// Whether bf16 products run on the CPU's bf16 instructions; if not they are made in fp32 (and "auto" takes
// fp32).
bool has_native_bf16();
// "AVX512_BF16", "AMX", "none: ..."
const char* bf16_description();

// See ziggurat/device/ops.hpp for shapes. ld_* in elements.
template <class T>
void attention(const AttentionShape& shape, const T* qkv, std::int64_t ld_qkv, T* o, std::int64_t ld_o,
               Acc<T>* lse);
template <class T>
void attention_backward(const AttentionShape& shape, const T* qkv, std::int64_t ld_qkv, const T* o,
                        std::int64_t ld_o, const Acc<T>* lse, const T* d_o, std::int64_t ld_do, T* dqkv,
                        std::int64_t ld_dqkv);

// In place on the first heads * head_size columns of each row.
template <class T>
void rope(T* x, std::int64_t ld, std::int64_t rows, std::int64_t time, std::int64_t heads,
          std::int64_t head_size, double theta, bool inverse);

}  // namespace zg::host
