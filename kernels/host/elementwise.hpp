// The kernels of the host other than matrix products, attention and optimizers: norms, activations,
// embeddings, the loss, casts, and the routing of tokens to the experts of a mixture. Shapes are those of
// ziggurat/device/ops.hpp.
//
// Blocking calls, from any thread. They are parallel (parallel_for), with partitions that depend on the
// sizes alone and sums in a fixed order: results have the same bits for any number of threads. Exponentials
// and sums of floats may differ in their last bits between instruction sets; casts, dropout,
// quantize, dequantize, decode and finish_gradient do not.
//
// T: float, bf16, fp16, double. Acc<T>: the type of sums and statistics. Nothing is allocated or owned.
#pragma once
#include <cstdint>
#include <type_traits>

#include "kernels/host/matrix.hpp"
#include "ziggurat/base/dtype.hpp"
#include "ziggurat/kernels/router_arguments.hpp"

namespace zg::host {

// Sums over rows are computed in this many groups of rows (fewer for fewer rows), and the groups' sums are
// then added in order.
inline constexpr std::int64_t kRowGroups = 32;

template <class T>
void layernorm(Extent extent, const LayerNorm<T>& args);

template <class T>
void layernorm_backward(Extent extent, const LayerNormBackward<T>& args);

template <class T>
void rmsnorm(Extent extent, const RmsNorm<T>& args);

template <class T>
void rmsnorm_backward(Extent extent, const RmsNormBackward<T>& args);

template <class T>
void head_rmsnorm(std::int64_t rows, const HeadRmsNorm<T>& args);

template <class T>
void head_rmsnorm_backward(std::int64_t rows, const HeadRmsNormBackward<T>& args);

// db += column sums of dy. scratch [kRowGroups, cols].
template <class T>
void bias_backward(Extent extent, Strided<const T> dy, Acc<T>* db, Strided<Acc<T>> scratch);

// x, y [rows, cols]; y may be x.
template <class T>
void gelu(Extent extent, Strided<const T> x, Strided<T> y);
// dx may be dy.
template <class T>
void gelu_backward(Extent extent, Strided<const T> x, Strided<const T> dy, Strided<T> dx);
// gate_up [rows, 2 * cols], y [rows, cols].
template <class T>
void swiglu(Extent extent, Strided<const T> gate_up, Strided<T> y, Gate activation = Gate::kSilu);
// d_gate_up may be gate_up.
template <class T>
void swiglu_backward(Extent extent, Strided<const T> gate_up, Strided<const T> dy, Strided<T> d_gate_up,
                     Gate activation = Gate::kSilu);
// out may be a or b.
template <class T>
void add(Extent extent, Strided<const T> a, Strided<const T> b, Strided<T> out);
// y = factor * x, rounded once; y may be x.
template <class T>
void scale(Extent extent, Strided<const T> x, Acc<T> factor, Strided<T> y);

// y may be x. A dropped element is 0, even if it was a NaN.
template <class T>
void dropout(Extent extent, Strided<const T> x, const Dropout& dropout, Strided<T> y);

// extent: tokens x width.
template <class T>
void embedding(Extent extent, const Embedding<T>& args);

template <class T>
void embedding_backward(Extent extent, const EmbeddingBackward<T>& args);

// extent: tokens x vocabulary.
template <class T>
void cross_entropy(Extent extent, const CrossEntropy<T>& args);
template <class T>
void softmax_part(Extent extent, const SoftmaxPart<T>& args);
template <class T>
void cross_entropy_part(Extent extent, const CrossEntropyPart<T>& args);

// Mixtures of experts. A: float or double. Arithmetic with a NaN gives a NaN, and the choice of experts is
// valid with any logits.
template <class A>
void route(Extent extent, const Route<A>& args);
template <class T>
void route_backward(Extent extent, const RouteBackward<T>& args);
template <class A>
void router_sums(Extent extent, const RouterSums<A>& args);
void sort_slots(Extent extent, const SortSlots& args);
template <class T>
void gather_rows(Extent extent, const GatherRows<T>& args);
template <class T>
void add_rows(Extent extent, const AddRows<T>& args);
template <class T>
void expert_gate(Extent extent, const ExpertGate<T>& args);
template <class T>
void expert_gate_backward(Extent extent, const ExpertGateBackward<T>& args);
template <class T>
void expert_bias_backward(Extent extent, const ExpertBiasBackward<T>& args);

// Converts from any storage type to any. double is rounded to float on its way to bf16 or fp16.
template <class In, class Out>
void cast(Extent extent, Strided<const In> in, Strided<Out> out);

// Sets bytes to 0; extent and leading dimension in bytes.
void zero(Extent extent, Strided<char> bytes);

// out: quantized_bytes(n, bits) bytes; bits: 8 or 4.
template <class T>
void quantize(std::int64_t n, const T* in, int bits, std::uint8_t* out);
// out = the decoded values or, with `add`, out += the decoded values.
template <class T>
void dequantize(std::int64_t n, const std::uint8_t* in, int bits, bool add, T* out);

// out [rows, cols] = the elements of the matrix, without gaps between rows.
template <class T>
void decode(const CodedMatrix& matrix, T* out);

// Writes codes and scales of a matrix `in` [rows, cols] of finite numbers, without gaps. kNf4 and kFp8 have
// scales in fp32; kInt4 has them in bf16, and no zero points. kMxfp4 cannot be encoded.
void encode(const CodeFormat& format, Extent extent, const float* in, std::uint8_t* codes, void* scales);

// out = in, rounded. Returns the sum of squares of the rounded values, in double and in an order that depends
// on n alone; it is not finite if one of the values is not. (In, Out): (float, bf16), (float, fp16), (float,
// float), (double, double).
template <class In, class Out>
double finish_gradient(std::int64_t n, const In* in, Out* out);

}  // namespace zg::host
