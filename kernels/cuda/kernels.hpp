// The kernels of CUDA devices: arithmetic on raw device pointers, enqueued on a stream. Nothing is
// allocated. Operands, shapes and results are those of ziggurat/device/ops.hpp; leading dimensions (ld*) in
// elements. A launch that CUDA refuses throws Error(kDevice).
//
// T: float, bf16, fp16, double. Arithmetic is in fp32 (in fp64 for double). Sums have a fixed order: equal
// sizes give equal bits on every GPU, unless a function says otherwise.
#pragma once
#include <cstdint>

#include "ziggurat/kernels/arguments.hpp"
#include "ziggurat/kernels/router_arguments.hpp"
#include "ziggurat/kernels/types.hpp"

struct CUstream_st;

namespace zg::cuda {

using namespace kernels;

// cudaStream_t.
using StreamHandle = CUstream_st*;

// The stream on which a kernel is enqueued, and settings that a launch may depend on.
struct Launch {
  StreamHandle stream = nullptr;
  int multiprocessors = 1;
  bool deterministic = true;  // false: sums may use atomics, and then have no fixed order
};

// Sums over rows are computed in this many groups of rows, each with a row of scratch, and then added in
// order.
inline constexpr std::int64_t kRowGroups = 256;
// Doubles of scratch for sums over all elements.
inline constexpr std::int64_t kSumPartials = 1024;

// layernorm.cu, rmsnorm.cu, head_rmsnorm.cu, bias_backward.cu
template <class T>
void layernorm(const Launch& on, Extent extent, const LayerNorm<T>& args);
template <class T>
void layernorm_backward(const Launch& on, Extent extent, const LayerNormBackward<T>& args);
template <class T>
void rmsnorm(const Launch& on, Extent extent, const RmsNorm<T>& args);
template <class T>
void rmsnorm_backward(const Launch& on, Extent extent, const RmsNormBackward<T>& args);
template <class T>
void head_rmsnorm(const Launch& on, std::int64_t rows, const HeadRmsNorm<T>& args);
template <class T>
void head_rmsnorm_backward(const Launch& on, std::int64_t rows, const HeadRmsNormBackward<T>& args);
template <class T>
void bias_backward(const Launch& on, Extent extent, Strided<const T> dy, Acc<T>* db, Strided<Acc<T>> scratch);

// gelu.cu, swiglu.cu, add.cu, scale.cu, rope.cu, expand_kv.cu, dropout.cu
template <class T>
void gelu(const Launch& on, Extent extent, Strided<const T> x, Strided<T> y);
template <class T>
void gelu_backward(const Launch& on, Extent extent, Strided<const T> x, Strided<const T> dy, Strided<T> dx);
template <class T>
void swiglu(const Launch& on, Extent extent, Strided<const T> gate_up, Strided<T> y,
            Gate activation = Gate::kSilu);
template <class T>
void swiglu_backward(const Launch& on, Extent extent, Strided<const T> gate_up, Strided<const T> dy,
                     Strided<T> d_gate_up, Gate activation = Gate::kSilu);
template <class T>
void add(const Launch& on, Extent extent, Strided<const T> a, Strided<const T> b, Strided<T> out);
template <class T>
void scale(const Launch& on, Extent extent, Strided<const T> x, Acc<T> factor, Strided<T> y);
template <class T>
void rope(const Launch& on, std::int64_t rows, const Rotation<T>& args);
template <class T>
void expand_kv(const Launch& on, std::int64_t rows, const ExpandKv<T>& args);
template <class T>
void expand_kv_backward(const Launch& on, std::int64_t rows, const ExpandKvBackward<T>& args);
template <class T>
void dropout(const Launch& on, Extent extent, Strided<const T> x, const Dropout& dropout, Strided<T> y);

// casts.cu
template <class In, class Out>
void cast(const Launch& on, Extent extent, Strided<const In> in, Strided<Out> out);
// *norm_sq += the sum of squares of the rounded values. scratch: kSumPartials doubles.
template <class In, class Out>
void finish_gradient(const Launch& on, std::int64_t n, const In* in, Out* out, double* norm_sq,
                     double* scratch);

// quantize.cu. `codes` are at a multiple of 4 bytes; bits: 8 or 4.
template <class T>
void quantize(const Launch& on, std::int64_t n, const T* in, int bits, std::uint8_t* codes);
template <class T>
void dequantize(const Launch& on, std::int64_t n, const std::uint8_t* codes, int bits, bool add, T* out);

// decode.cu
template <class T>
void decode(const Launch& on, const CodedMatrix& matrix, T* out);

// embedding.cu
template <class T>
void embedding(const Launch& on, Extent extent, const Embedding<T>& args);
template <class T>
void embedding_backward(const Launch& on, Extent extent, const EmbeddingBackward<T>& args);

// cross_entropy.cu, cross_entropy_part.cu
template <class T>
void cross_entropy(const Launch& on, Extent extent, const CrossEntropy<T>& args);
template <class T>
void softmax_part(const Launch& on, Extent extent, const SoftmaxPart<T>& args);
template <class T>
void cross_entropy_part(const Launch& on, Extent extent, const CrossEntropyPart<T>& args);

// attention.cu, with the kernels in attention_*.cu. bf16 and fp16 run on tensor cores if head_size is a
// multiple of 8 up to 256, and the size of values the same or, with head_size above 128, another such one;
// probabilities and the gradients of scores are then rounded to T. The backward's
// scratch is 16-byte aligned; the forward needs none. On tensor cores, sums of queries' gradients have no
// fixed order unless `on` is deterministic.
template <class T>
void attention(const Launch& on, const AttentionShape& shape, const CausalAttention<T>& args);
template <class T>
void attention_backward(const Launch& on, const AttentionShape& shape,
                        const CausalAttentionBackward<T>& args);
// Scratch bytes of the backward.
std::int64_t attention_scratch_bytes(DType dtype, const AttentionShape& shape, bool deterministic);

// attention.cu, without tensor cores. Scratch is 16-byte aligned.
template <class T>
void attention_block(const Launch& on, const AttentionBlock& block, const BlockAttention<T>& args);
template <class T>
void attention_block_backward(const Launch& on, const AttentionBlock& block,
                              const BlockAttentionBackward<T>& args);
std::int64_t attention_block_scratch_bytes(DType dtype, const AttentionBlock& block);

// attention_sinks.cu.
template <class T>
void attention_sinks_backward(const Launch& on, const AttentionSinksBackward<T>& args);

// router.cu, router_backward.cu, router_sums.cu. A: float or double.
template <class A>
void route(const Launch& on, Extent extent, const Route<A>& args);
template <class T>
void route_backward(const Launch& on, Extent extent, const RouteBackward<T>& args);
template <class A>
void router_sums(const Launch& on, Extent extent, const RouterSums<A>& args);

// sort_slots.cu, routed_rows.cu, expert_gate.cu, expert_pairs.cu
void sort_slots(const Launch& on, Extent extent, const SortSlots& args);
template <class T>
void gather_rows(const Launch& on, Extent extent, const GatherRows<T>& args);
template <class T>
void add_rows(const Launch& on, Extent extent, const AddRows<T>& args);
template <class T>
void expert_gate(const Launch& on, Extent extent, const ExpertGate<T>& args);
template <class T>
void expert_gate_backward(const Launch& on, Extent extent, const ExpertGateBackward<T>& args);
template <class T>
void expert_bias_backward(const Launch& on, Extent extent, const ExpertBiasBackward<T>& args);

// checksum.cu: the 64-bit XXH3, equal to io::checksum(). bytes: more than 240, a multiple of 8; data:
// 8-byte aligned. scratch: checksum_scratch_bytes(), 8-byte aligned. result: written by the device.
void checksum(const Launch& on, std::int64_t bytes, const void* data, void* scratch, std::uint64_t* result);
std::int64_t checksum_scratch_bytes(std::int64_t bytes);

// update.cu: the formulae of kernels/host/update.hpp, with the same bits.
void update(const Launch& on, std::int64_t n, const UpdateArrays& arrays, const StateFormat& format,
            const UpdateParams& p);

}  // namespace zg::cuda
