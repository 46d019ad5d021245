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
using TileKernels = std::tuple<Widen<bf16>, Widen<fp16>, WriteResult<bf16, bf16>, WriteResult<bf16, float>,
                               WriteResult<fp16, fp16>, WriteResult<fp16, float>>;
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
  return {widen_rows<bf16>,        widen_rows<fp16>,       write_rows<bf16, bf16>,
          write_rows<bf16, float>, write_rows<fp16, fp16>, write_rows<fp16, float>};
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
  std::get<Widen<T>>(HWY_DYNAMIC_DISPATCH(tile_kernels)())(from, ld, rows, cols, to);
}
template <class In, class Out>
void write_result(const Result<In, Out>& x) {
  std::get<WriteResult<In, Out>>(HWY_DYNAMIC_DISPATCH(tile_kernels)())(x);
}

template void widen(const bf16*, std::int64_t, std::int64_t, std::int64_t, float*);
template void widen(const fp16*, std::int64_t, std::int64_t, std::int64_t, float*);
template void write_result(const Result<bf16, bf16>&);
template void write_result(const Result<bf16, float>&);
template void write_result(const Result<fp16, fp16>&);
template void write_result(const Result<fp16, float>&);

}  // namespace zg::host
#endif  // HWY_ONCE
