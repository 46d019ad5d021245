// Matrix products, attention and rotary embedding on the host. Blocking calls, parallel (parallel_for) with
// partitions that depend on the sizes alone. Leading dimensions (ld*) in elements.
//
// T: float, bf16, fp16, double. Acc<T>: float; double if T is double.
#pragma once
#include <cstdint>

#include "ziggurat/base/dtype.hpp"
#include "ziggurat/kernels/arguments.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg::host {

using namespace kernels;

// C[m,n] (+)= op(A)[m,k] op(B)[k,n] (+ bias[n]); bias may be null. (In, Out): (bf16,bf16), (bf16,float),
// (fp16,fp16), (fp16,float), (float,float), (double,double). oneDNN multiplies float and bf16; for fp16,
// and for bf16 if the CPU has no instructions for it, tiles are widened to fp32, multiplied by oneDNN, and
// rounded to Out once, at the end. double is a blocked loop of our own, for tests.
template <class In, class Out>
void gemm(const GemmShape& shape, const In* a, const In* b, Out* c, const In* bias);

// The memory that widening and transposing take in each multiplying thread, for any sizes. In addition oneDNN
// keeps scratch for a product of 256 x 512 x 512.
inline constexpr std::int64_t kWidenedBytes = 2 * 1024 * 1024;

// Whether bf16 products run on bf16 instructions of the CPU; if not, they are computed in fp32, and the
// data type "auto" of a run is fp32.
bool has_native_bf16();
// The names of these instructions: "AVX512_BF16", "AMX", "Arm BF16", or "none: " and the reason.
const char* bf16_description();

// Shapes as in ziggurat/device/op_args.hpp. Scratch is not used.
template <class T>
void attention(const AttentionShape& shape, const CausalAttention<T>& args);
template <class T>
void attention_backward(const AttentionShape& shape, const CausalAttentionBackward<T>& args);

template <class T>
void attention_block(const AttentionBlock& block, const BlockAttention<T>& args);
template <class T>
void attention_block_backward(const AttentionBlock& block, const BlockAttentionBackward<T>& args);
template <class T>
void attention_sinks_backward(const AttentionSinksBackward<T>& args);

template <class T>
void rope(std::int64_t rows, const Rotation<T>& args);

template <class T>
void expand_kv(std::int64_t rows, const ExpandKv<T>& args);
template <class T>
void expand_kv_backward(std::int64_t rows, const ExpandKvBackward<T>& args);

}  // namespace zg::host
