// Attention's arithmetic on tiles that are packed as fp32 in scratch memory: products, exponentials,
// packing. Included once for each instruction set (see simd.hpp), by attention.cpp alone. Pure functions;
// any thread.
#if defined(ZG_KERNELS_HOST_ATTENTION_TILES_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ZG_KERNELS_HOST_ATTENTION_TILES_HPP
#undef ZG_KERNELS_HOST_ATTENTION_TILES_HPP
#else
#define ZG_KERNELS_HOST_ATTENTION_TILES_HPP
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "kernels/host/attention_scratch.hpp"
#include "kernels/host/matrix.hpp"
#include "kernels/host/simd.hpp"
#include "ziggurat/base/dtype.hpp"

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {

// At most 16 lanes, so that kTile is a multiple of panel() on every machine.
using Float = hn::CappedTag<float, 16>;
using Int = hn::RebindToSigned<Float>;
using Vector = hn::Vec<Float>;

inline std::int64_t lanes() {
  return static_cast<std::int64_t>(hn::Lanes(Float()));
}
// The micro-kernel keeps kRows x panel() elements of C in registers: 16 vectors if the CPU has 32
// registers, else 8.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_SSSE3
inline constexpr std::int64_t kRows = 4;
#else
inline constexpr std::int64_t kRows = 8;
#endif
static_assert(kTile % kRows == 0 && kPanelUnit % kRows == 0);
inline std::int64_t panel() {
  return 2 * lanes();
}
inline std::int64_t rounded_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}
inline std::int64_t min_of(std::int64_t a, std::int64_t b) {
  return a < b ? a : b;
}

// The portion of a product that is needed on a tile crossed by the causal diagonal.
enum class Part {
  kAll,
  kColumnsFromRow,  // C[r, c] for c >= r
  kSumFromRow,      // the sum starts at p = r
  kSumToRow,        // the sum ends at p = r
};
// The initial value of the sum: 0, C, or row_scale * C.
enum class Start { kZero, kAdd, kScaleAndAdd };

// C[rows, cols] = start + A[rows, depth] B[depth, cols]. Element (r, p) of A is a[r * a_row + p * a_p]; B
// and C are row-major. All memory must have room for rows rounded up to kRows, and cols rounded up to
// panel().
struct Product {
  const float* a;
  std::int64_t a_row, a_p;
  const float* b;
  std::int64_t ldb;
  float* c;
  std::int64_t ldc;
  std::int64_t rows, cols, depth;
  const float* row_scale = nullptr;
};

template <Start kStart>
HWY_INLINE Vector start([[maybe_unused]] const float* c, [[maybe_unused]] const float* row_scale,
                        [[maybe_unused]] std::int64_t row) {
  const Float d;
  if constexpr (kStart == Start::kZero) return hn::Zero(d);
  if constexpr (kStart == Start::kAdd) return hn::LoadU(d, c);
  if constexpr (kStart == Start::kScaleAndAdd) return hn::Mul(hn::LoadU(d, c), hn::Set(d, row_scale[row]));
}

// The kRows x panel() elements of C from (row, col) on, with the sum over p in [p0, p1).
template <Start kStart>
HWY_INLINE void micro_kernel(const Product& x, std::int64_t row, std::int64_t col, std::int64_t p0,
                             std::int64_t p1) {
  const Float d;
  const std::int64_t n = lanes(), a_row = x.a_row, a_p = x.a_p, ldb = x.ldb, ldc = x.ldc;
  const float *a = x.a + row * a_row + p0 * a_p, *b = x.b + p0 * ldb + col;
  float* const c = x.c + row * ldc + col;
  const float* const row_scale = x.row_scale + (kStart == Start::kScaleAndAdd ? row : 0);
  Vector left[kRows], right[kRows];
#pragma GCC unroll 8
  for (std::int64_t r = 0; r < kRows; ++r) {
    left[r] = start<kStart>(c + r * ldc, row_scale, r);
    right[r] = start<kStart>(c + r * ldc + n, row_scale, r);
  }
  for (std::int64_t p = p0; p < p1; ++p, a += a_p, b += ldb) {
    const Vector b0 = hn::LoadU(d, b), b1 = hn::LoadU(d, b + n);
#pragma GCC unroll 8
    for (std::int64_t r = 0; r < kRows; ++r) {
      const Vector factor = hn::Set(d, a[r * a_row]);
      left[r] = hn::MulAdd(factor, b0, left[r]);
      right[r] = hn::MulAdd(factor, b1, right[r]);
    }
  }
#pragma GCC unroll 8
  for (std::int64_t r = 0; r < kRows; ++r) {
    hn::StoreU(left[r], d, c + r * ldc);
    hn::StoreU(right[r], d, c + r * ldc + n);
  }
}

template <Start kStart>
HWY_NOINLINE void multiply(const Product& x, Part part) {
  const std::int64_t step = panel();
  for (std::int64_t r = 0; r < x.rows; r += kRows) {
    const std::int64_t first_col = part == Part::kColumnsFromRow ? r / step * step : 0;
    const std::int64_t p0 = part == Part::kSumFromRow ? r : 0;
    const std::int64_t p1 = part == Part::kSumToRow ? min_of(x.depth, r + kRows) : x.depth;
    for (std::int64_t c = first_col; c < x.cols; c += step) micro_kernel<kStart>(x, r, c, p0, p1);
  }
}

// 2^x for x up to about 1. Below -125 the result is 2^-125; NaN stays NaN. The polynomial interpolates 2^f
// at the Chebyshev nodes of [-1/2, 1/2]: its relative error is 2e-8, a third of a unit roundoff.
HWY_INLINE Vector exp2_of(Vector x) {
  const Float d;
  const Int di;
  // The lowest bits of x + shifter are 127 plus the integer nearest to x. Shifted left, they are the exponent
  // bits of the result.
  const Vector shifter = hn::Set(d, 0x1.8p23f + 127.0f);
  x = hn::Max(hn::Set(d, -125.0f), x);  // in this order x86 keeps a NaN
  const Vector shifted = hn::Add(x, shifter);
  const Vector f = hn::Sub(x, hn::Sub(shifted, shifter));
  Vector y = hn::Set(d, 1.546144485e-04f);
  y = hn::MulAdd(y, f, hn::Set(d, 1.340042800e-03f));
  y = hn::MulAdd(y, f, hn::Set(d, 9.618056938e-03f));
  y = hn::MulAdd(y, f, hn::Set(d, 5.550327152e-02f));
  y = hn::MulAdd(y, f, hn::Set(d, 2.402265072e-01f));
  y = hn::MulAdd(y, f, hn::Set(d, 6.931471825e-01f));
  y = hn::MulAdd(y, f, hn::Set(d, 1.000000000e+00f));
  return hn::Mul(y, hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
}

// Copies x [rows, cols], times `scale`, to fp32 rows of to.ld elements, padded with zeros, and adds rows of
// zeros up to `padded_rows`.
template <class T>
HWY_NOINLINE void pack(Strided<const T> x, Extent extent, std::int64_t padded_rows, float scale,
                       Strided<float> to) {
  const Float d;
  const std::int64_t n = lanes();
  const Vector factor = hn::Set(d, scale);
  for (std::int64_t r = 0; r < extent.rows; ++r) {
    const T* const from = x.row(r);
    float* const row = to.row(r);
    std::int64_t c = 0;
    for (; c + n <= extent.cols; c += n) hn::StoreU(hn::Mul(load_f32(d, from + c), factor), d, row + c);
    for (; c < extent.cols; ++c) row[c] = load_one(from + c) * scale;
    for (; c < to.ld; ++c) row[c] = 0.0f;
  }
  float* const padding = to.row(extent.rows);
  for (std::int64_t i = 0; i < (padded_rows - extent.rows) * to.ld; ++i) padding[i] = 0.0f;
}

// Transposes the first `cols` columns of packed rows, times `scale`, into rows of kTile elements.
HWY_NOINLINE void transpose(const float* x, std::int64_t width, std::int64_t rows, std::int64_t cols,
                            float scale, float* to) {
  for (std::int64_t c = 0; c < cols; ++c) {
    for (std::int64_t r = 0; r < rows; ++r) to[c * kTile + r] = x[r * width + c] * scale;
  }
}

// Copies packed rows to rows of T, row r times scale[r * scale_step].
template <class T>
HWY_NOINLINE void unpack(Strided<const float> x, Extent extent, const float* scale, std::int64_t scale_step,
                         Strided<T> to) {
  const Float d;
  const std::int64_t n = lanes();
  for (std::int64_t r = 0; r < extent.rows; ++r) {
    const float factor = scale[r * scale_step];
    const float* const from = x.row(r);
    T* const row = to.row(r);
    std::int64_t c = 0;
    for (; c + n <= extent.cols; c += n)
      store(d, hn::Mul(hn::LoadU(d, from + c), hn::Set(d, factor)), row + c);
    for (; c < extent.cols; ++c) store_one(from[c] * factor, row + c);
  }
}

}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the guard
