// Operands of kernels, the same for every device: strided matrices, and a struct for each kernel with many
// operands. ziggurat/device/ops.hpp defines their shapes; "extent" is the size of the main operand. Nothing
// is owned.
#pragma once
#include <cstdint>
#include <type_traits>

#include "ziggurat/base/dtype.hpp"
#include "ziggurat/kernels/coded.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg::kernels {

// The type in which kernels compute with operands T, and the type of their sums and statistics.
template <class T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <class T>
using Acc = typename AccOf<T>::type;

// Expands `instantiate(T)` for every storage type T.
#define ZG_FOR_STORAGE_TYPES(instantiate) \
  instantiate(float) instantiate(::zg::bf16) instantiate(::zg::fp16) instantiate(double)

struct Extent {
  std::int64_t rows = 0, cols = 0;
};

// C[m, n] (+)= op(A)[m, k] op(B)[k, n]; leading dimensions in elements.
struct GemmShape {
  std::int64_t m = 0, n = 0, k = 0;
  Trans ta = Trans::kNo, tb = Trans::kNo;
  std::int64_t lda = 0, ldb = 0, ldc = 0;
  bool accumulate = false;
};

// A row-major matrix whose rows start `ld` elements apart.
template <class T>
struct Strided {
  T* data = nullptr;
  std::int64_t ld = 0;

  Strided() = default;
  constexpr Strided(T* d, std::int64_t l) : data(d), ld(l) {}
  template <class U>
  requires std::is_same_v<const U, T>
  constexpr Strided(const Strided<U>& other)
      : data(other.data), ld(other.ld) {}  // NOLINT: implicit on purpose

  constexpr T* row(std::int64_t r) const { return data + r * ld; }
};

template <class T>
struct LayerNorm {
  Strided<const T> x;
  const T* w = nullptr;
  const T* b = nullptr;
  double eps = 0;
  Strided<T> y;
  Strided<Acc<T>> stats;  // [rows, 2]: mean, rstd
};

template <class T>
struct LayerNormBackward {
  Strided<const T> dy, x;
  const T* w = nullptr;
  Strided<const Acc<T>> stats;
  Strided<T> dx;            // +=
  Acc<T>* dw = nullptr;     // +=
  Acc<T>* db = nullptr;     // +=
  Strided<Acc<T>> scratch;  // [row groups, 2 * cols]
};

template <class T>
struct RmsNorm {
  Strided<const T> x;
  const T* w = nullptr;
  double eps = 0;
  Strided<T> y;
  Strided<Acc<T>> stats;  // [rows, 1]: rstd
  NormWeight weight = NormWeight::kPlain;
};

template <class T>
struct RmsNormBackward {
  Strided<const T> dy, x;
  const T* w = nullptr;
  Strided<const Acc<T>> stats;
  Strided<T> dx;            // +=
  Acc<T>* dw = nullptr;     // +=
  Strided<Acc<T>> scratch;  // [row groups, cols]
  NormWeight weight = NormWeight::kPlain;
};

// RMSNorm of each head by itself. The heads lie side by side in the first columns of a row.
template <class T>
struct HeadRmsNorm {
  std::int64_t heads = 0, head_size = 0;
  Strided<const T> x;
  const T* w = nullptr;  // [head_size], the same for all heads
  double eps = 0;
  Strided<T> y;
  Strided<Acc<T>> stats;  // [rows, heads]: rstd
  NormWeight weight = NormWeight::kPlain;
};

template <class T>
struct HeadRmsNormBackward {
  std::int64_t heads = 0, head_size = 0;
  Strided<const T> dy, x;
  const T* w = nullptr;
  Strided<const Acc<T>> stats;
  Strided<T> dx;            // overwritten; may be dy
  Acc<T>* dw = nullptr;     // +=
  Strided<Acc<T>> scratch;  // [row groups, head_size]
  NormWeight weight = NormWeight::kPlain;
};

// A row's position in its sequence or, with first_keys, in its document.
constexpr std::int64_t position_of(const RowPositions& rows, const std::int32_t* first_keys,
                                   std::int64_t row) {
  return rows.of(row) - (first_keys == nullptr ? 0 : first_keys[row]);
}

// wte [vocabulary, cols], wpe [positions, cols] or null. Ids outside of the vocabulary shard get rows of
// zeros, and no gradient. first_keys: for each row the position at which its document begins, from which its
// own position counts; or null.
template <class T>
struct Embedding {
  const std::int32_t* ids = nullptr;
  std::int64_t vocabulary = 0, positions = 0;
  RowPositions rows = {};
  const std::int32_t* first_keys = nullptr;
  Strided<const T> wte, wpe;
  Strided<T> out;
  VocabShard part = {};
};

template <class T>
struct EmbeddingBackward {
  const std::int32_t* ids = nullptr;
  std::int64_t vocabulary = 0, positions = 0;
  RowPositions rows = {};
  const std::int32_t* first_keys = nullptr;
  Strided<const T> dout;
  Strided<Acc<T>> dwte, dwpe;  // +=; either may be null
  VocabShard part = {};
};

// The heads lie side by side in the first columns of a row.
template <class T>
struct Rotation {
  Strided<T> x;  // changed in place
  RowPositions positions = {};
  std::int64_t heads = 0, head_size = 0;
  RopeTable table = {};
  bool inverse = false;
  const std::int32_t* first_keys = nullptr;  // one for each row of x, or null
};

// The keys and values of latent attention. A row of `joint` has for each head its key's own columns and then
// its value; a row of `shared` the columns that all keys share; a row of kv the keys of all heads, then the
// values.
template <class T>
struct ExpandKv {
  LatentHeads heads = {};
  Strided<const T> joint, shared;
  Strided<T> kv;
};

template <class T>
struct ExpandKvBackward {
  LatentHeads heads = {};
  Strided<const T> dkv;
  Strided<T> d_joint, d_shared;  // overwritten; d_shared is summed over heads, in ascending order
};

// A row of qkv has the queries of all heads, then the keys, then the values; a row of o has the heads side by
// side.
template <class T>
struct CausalAttention {
  Strided<const T> qkv;
  Strided<T> o;
  Acc<T>* lse = nullptr;                     // [batch * heads, time], without gaps
  void* scratch = nullptr;                   // Ops::attention_scratch_bytes(); any contents
  const std::int32_t* first_keys = nullptr;  // [batch * time], or null
  const T* sinks = nullptr;                  // [heads], or null
};

template <class T>
struct CausalAttentionBackward {
  Strided<const T> qkv, o;
  const Acc<T>* lse = nullptr;
  Strided<const T> d_o;
  Strided<T> dqkv;                           // overwritten
  void* scratch = nullptr;                   // as in CausalAttention
  const std::int32_t* first_keys = nullptr;  // the same as in CausalAttention
};

// Attention to an AttentionBlock's keys. A row of q or o has the heads side by side; a row of kv has the keys
// of all heads, then the values. Row b * heads + h of lse belongs to head h in sequence b.
template <class T>
struct BlockAttention {
  Strided<const T> q, kv;
  Strided<Acc<T>> o, lse;
  const std::int32_t* first_keys = nullptr;  // [query_rows()], or null
  const T* sinks = nullptr;                  // [heads], or null
};

template <class T>
struct BlockAttentionBackward {
  Strided<const T> q, kv, o, d_o;
  Strided<const Acc<T>> lse;
  Strided<Acc<T>> dq, dkv;                   // +=
  void* scratch = nullptr;                   // Ops::attention_block_scratch_bytes(); any contents
  const std::int32_t* first_keys = nullptr;  // the same as in BlockAttention
};

// Operands for the gradient of the heads' sinks. o and d_o have `time` rows for each sequence, with heads of
// value_size columns.
template <class T>
struct AttentionSinksBackward {
  std::int64_t batch = 0, time = 0, heads = 0, value_size = 0;
  Strided<const T> o, d_o;
  Strided<const Acc<T>> lse;  // as in BlockAttention
  const T* sinks = nullptr;   // [heads]
  Acc<T>* d_sinks = nullptr;  // +=
};

template <class T>
struct CrossEntropy {
  Strided<const Acc<T>> logits;
  const std::int32_t* targets = nullptr;  // negative: ignored
  double* loss_sum = nullptr;             // +=
  Strided<T> dlogits;  // null: loss only; may share the logits' memory if rows start at the same addresses
  double* scratch = nullptr;  // Ops::kSumPartials doubles
  double scale = 1;           // factor of dlogits, not of the loss; positive
  double softcap = 0;         // logits become softcap * tanh(logit / softcap); 0: no cap
};

// Operands of softmax_part(), which handles one shard of the vocabulary: logits [rows, cols] of the tokens
// first, first + 1, ...
template <class T>
struct SoftmaxPart {
  Strided<const Acc<T>> logits;
  const std::int32_t* targets = nullptr;
  std::int64_t first = 0;
  Acc<T>* numbers =
      nullptr;         // [3, rows]: largest logit, sum of exp(logit - largest), the target's logit or 0
  double softcap = 0;  // as in CrossEntropy
};
// Operands of cross_entropy_part(): the SoftmaxPart::numbers of all vocabulary shards, one after the other,
// and the logits of this shard.
template <class T>
struct CrossEntropyPart {
  CrossEntropy<T> local;  // dlogits may not share the logits' memory
  std::int64_t first = 0;
  const Acc<T>* numbers = nullptr;  // [3 * parts, rows]
  std::int64_t parts = 1;
};

// Arrays of an optimizer update (kernels/host/update.hpp): n elements each, of any alignment, without
// overlap.
struct UpdateArrays {
  const void* grad = nullptr;
  DType grad_type = DType::kF32;  // f32, bf16 or f16; f64 if the state is f64
  void* weight = nullptr;
  DType weight_type = DType::kF32;       // f32, bf16 or f16 (kSplit: bf16); f64 if the state is f64
  void* master = nullptr;                // kFull: f32 (or f64); kSplit: uint16, the low halves
  void* moment[2] = {nullptr, nullptr};  // kFull: f32 (or f64); kBf16: bf16; kInt8: 1-byte codes
  float* scale[2] = {nullptr, nullptr};  // kInt8: one per block of kQuantBlock elements, full or partial
};

}  // namespace zg::kernels
