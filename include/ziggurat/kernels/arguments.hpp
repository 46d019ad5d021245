// What kernels work on, the same for every device: matrices with strides, and the operands of those kernels
// that take many. Shapes are those of ziggurat/device/ops.hpp. Nothing is owned.
#pragma once
#include <cstdint>
#include <type_traits>

#include "ziggurat/base/dtype.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg::kernels {

// The type of sums and statistics of operands T.
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

struct Extent {
  std::int64_t rows = 0, cols = 0;
};

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
  Strided<Acc<T>> stats;  // mean, rstd
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
  Strided<Acc<T>> stats;  // rstd
};

template <class T>
struct RmsNormBackward {
  Strided<const T> dy, x;
  const T* w = nullptr;
  Strided<const Acc<T>> stats;
  Strided<T> dx;            // +=
  Acc<T>* dw = nullptr;     // +=
  Strided<Acc<T>> scratch;  // [row groups, cols]
};

template <class T>
struct Embedding {
  const std::int32_t* ids = nullptr;
  std::int64_t vocabulary = 0, positions = 0, time = 0;
  Strided<const T> wte, wpe;  // wpe may be null
  Strided<T> out;
};

template <class T>
struct EmbeddingBackward {
  const std::int32_t* ids = nullptr;
  std::int64_t vocabulary = 0, positions = 0, time = 0;
  Strided<const T> dout;
  Strided<Acc<T>> dwte, dwpe;  // +=; either may be null
};

template <class T>
struct CrossEntropy {
  Strided<const Acc<T>> logits;
  const std::int32_t* targets = nullptr;  // negative: ignored
  double* loss_sum = nullptr;             // +=
  Strided<T> dlogits;                     // may be null; may start its rows where logits does
  double scale = 1;                       // of dlogits, not of the loss; positive
};

// Of the optimizer's pass (kernels/host/update.hpp): arrays of the same n elements. They do not overlap; any
// alignment.
struct UpdateArrays {
  const void* grad = nullptr;
  DType grad_type = DType::kF32;  // f32, bf16 or f16; f64 where the state is
  void* weight = nullptr;
  DType weight_type = DType::kF32;       // f32, bf16 or f16 (kSplit: bf16); f64 where the state is
  void* master = nullptr;                // kFull: f32 (or f64); kSplit: uint16, the low halves
  void* moment[2] = {nullptr, nullptr};  // kFull: f32 (or f64); kBf16: bf16; kInt8: codes, 1 byte each
  float* scale[2] = {nullptr, nullptr};  // kInt8: one for each begun block of kQuantBlock elements
};

}  // namespace zg::kernels
