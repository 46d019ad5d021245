#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/gemm_tiles.cpp"
// clang-format off
#include "kernels/host/targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include "kernels/host/gemm_tiles.hpp"
#include "kernels/host/lanes.hpp"

#ifndef ZG_GEMM_TILE_KERNELS
#define ZG_GEMM_TILE_KERNELS
#include <tuple>
namespace zg::host {
template <class T>
using Widen = void (*)(const T* from, std::int64_t ld, std::int64_t rows, std::int64_t cols, float* to);
template <class In, class Out>
using WriteResult = void (*)(const Result<In, Out>& result);
// The kernels of one instruction set.
struct TileKernels {
  std::tuple<Widen<bf16>, Widen<fp16>> widen;
  std::tuple<Widen<float>, Widen<bf16>, Widen<fp16>> widen_transposed;
  std::tuple<WriteResult<bf16, bf16>, WriteResult<bf16, float>, WriteResult<fp16, fp16>,
             WriteResult<fp16, float>>
      write_result;
};
}  // namespace zg::host
#endif

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

using Float = hn::ScalableTag<float>;

template <class T>
void widen_rows(const T* from, std::int64_t ld, std::int64_t rows, std::int64_t cols, float* to) {
  const Float d;
  for (std::int64_t r = 0; r < rows; ++r, from += ld, to += cols) {
    for_lanes(d, cols, [&](std::int64_t i, auto w) HWY_ATTR { save(d, load(d, from + i, w), to + i, w); });
  }
}

#if HWY_TARGET != HWY_SCALAR
// Transposes 4 x 4 elements in registers.
template <class T>
HWY_INLINE void widen_block(const T* from, std::int64_t ld, float* to, std::int64_t to_ld) {
  const hn::FixedTag<float, 4> d;
  const hn::Repartition<double, decltype(d)> pairs;
  const auto low = [&](auto a, auto b) HWY_ATTR {
    return hn::BitCast(d, hn::InterleaveLower(pairs, hn::BitCast(pairs, a), hn::BitCast(pairs, b)));
  };
  const auto high = [&](auto a, auto b) HWY_ATTR {
    return hn::BitCast(d, hn::InterleaveUpper(pairs, hn::BitCast(pairs, a), hn::BitCast(pairs, b)));
  };
  const auto x0 = load_f32(d, from), x1 = load_f32(d, from + ld), x2 = load_f32(d, from + 2 * ld),
             x3 = load_f32(d, from + 3 * ld);
  const auto low01 = hn::InterleaveLower(d, x0, x1), low23 = hn::InterleaveLower(d, x2, x3),
             high01 = hn::InterleaveUpper(d, x0, x1), high23 = hn::InterleaveUpper(d, x2, x3);
  hn::StoreU(low(low01, low23), d, to);
  hn::StoreU(high(low01, low23), d, to + to_ld);
  hn::StoreU(low(high01, high23), d, to + 2 * to_ld);
  hn::StoreU(high(high01, high23), d, to + 3 * to_ld);
}
#endif

template <class T>
void widen_columns(const T* from, std::int64_t ld, std::int64_t rows, std::int64_t cols, float* to) {
  const auto one_by_one = [&](std::int64_t row, std::int64_t col, std::int64_t end_row,
                              std::int64_t end_col) {
    for (std::int64_t c = col; c < end_col; ++c) {
      for (std::int64_t r = row; r < end_row; ++r) to[c * rows + r] = load_one(from + r * ld + c);
    }
  };
  std::int64_t in_blocks = 0, block_cols = 0;
#if HWY_TARGET != HWY_SCALAR
  in_blocks = rows / 4 * 4, block_cols = cols / 4 * 4;
  for (std::int64_t r = 0; r < in_blocks; r += 4) {
    for (std::int64_t c = 0; c < block_cols; c += 4)
      widen_block(from + r * ld + c, ld, to + c * rows + r, rows);
  }
#endif
  one_by_one(0, block_cols, in_blocks, cols);
  one_by_one(in_blocks, 0, rows, cols);
}

template <class In, class Out>
void write_rows(const Result<In, Out>& x) {
  const Float d;
  const float* product = x.product;
  Out* c = x.c;
  for (std::int64_t r = 0; r < x.rows; ++r, product += x.cols, c += x.ldc) {
    for_lanes(d, x.cols, [&](std::int64_t i, auto w) HWY_ATTR {
      auto value = load(d, product + i, w);
      if (x.bias != nullptr) value = hn::Add(value, load(d, x.bias + i, w));
      if (x.accumulate) value = hn::Add(value, load(d, static_cast<const Out*>(c) + i, w));
      save(d, value, c + i, w);
    });
  }
}

TileKernels tile_kernels() {
  return {{widen_rows<bf16>, widen_rows<fp16>},
          {widen_columns<float>, widen_columns<bf16>, widen_columns<fp16>},
          {write_rows<bf16, bf16>, write_rows<bf16, float>, write_rows<fp16, fp16>, write_rows<fp16, float>}};
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(tile_kernels);
}  // namespace

template <class T>
void widen(const T* from, std::int64_t ld, std::int64_t rows, std::int64_t cols, float* to) {
  std::get<Widen<T>>(HWY_DYNAMIC_DISPATCH(tile_kernels)().widen)(from, ld, rows, cols, to);
}
template <class T>
void widen_transposed(const T* from, std::int64_t ld, std::int64_t rows, std::int64_t cols, float* to) {
  std::get<Widen<T>>(HWY_DYNAMIC_DISPATCH(tile_kernels)().widen_transposed)(from, ld, rows, cols, to);
}
template <class In, class Out>
void write_result(const Result<In, Out>& x) {
  std::get<WriteResult<In, Out>>(HWY_DYNAMIC_DISPATCH(tile_kernels)().write_result)(x);
}

template void widen(const bf16*, std::int64_t, std::int64_t, std::int64_t, float*);
template void widen(const fp16*, std::int64_t, std::int64_t, std::int64_t, float*);
template void widen_transposed(const float*, std::int64_t, std::int64_t, std::int64_t, float*);
template void widen_transposed(const bf16*, std::int64_t, std::int64_t, std::int64_t, float*);
template void widen_transposed(const fp16*, std::int64_t, std::int64_t, std::int64_t, float*);
template void write_result(const Result<bf16, bf16>&);
template void write_result(const Result<bf16, float>&);
template void write_result(const Result<fp16, fp16>&);
template void write_result(const Result<fp16, float>&);

}  // namespace zg::host
#endif  // HWY_ONCE
