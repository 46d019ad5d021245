#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/gemm_tiles.cpp"
// Loop bodies keep vectors in their captures, which SVE and RVV cannot; Arm runs NEON.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include "kernels/host/gemm_tiles.hpp"
#include "kernels/host/lanes.hpp"

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

void widen_bf16(const bf16* from, std::int64_t ld, std::int64_t rows, std::int64_t cols, float* to) {
  widen_rows(from, ld, rows, cols, to);
}
void widen_f16(const fp16* from, std::int64_t ld, std::int64_t rows, std::int64_t cols, float* to) {
  widen_rows(from, ld, rows, cols, to);
}
void write_bf16(const Result<bf16, bf16>& x) {
  write_rows(x);
}
void write_bf16_f32(const Result<bf16, float>& x) {
  write_rows(x);
}
void write_f16(const Result<fp16, fp16>& x) {
  write_rows(x);
}
void write_f16_f32(const Result<fp16, float>& x) {
  write_rows(x);
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(widen_bf16);
HWY_EXPORT(widen_f16);
HWY_EXPORT(write_bf16);
HWY_EXPORT(write_bf16_f32);
HWY_EXPORT(write_f16);
HWY_EXPORT(write_f16_f32);
}  // namespace

template <>
void widen(const bf16* from, std::int64_t ld, std::int64_t rows, std::int64_t cols, float* to) {
  HWY_DYNAMIC_DISPATCH(widen_bf16)(from, ld, rows, cols, to);
}
template <>
void widen(const fp16* from, std::int64_t ld, std::int64_t rows, std::int64_t cols, float* to) {
  HWY_DYNAMIC_DISPATCH(widen_f16)(from, ld, rows, cols, to);
}
template <>
void write_result(const Result<bf16, bf16>& x) {
  HWY_DYNAMIC_DISPATCH(write_bf16)(x);
}
template <>
void write_result(const Result<bf16, float>& x) {
  HWY_DYNAMIC_DISPATCH(write_bf16_f32)(x);
}
template <>
void write_result(const Result<fp16, fp16>& x) {
  HWY_DYNAMIC_DISPATCH(write_f16)(x);
}
template <>
void write_result(const Result<fp16, float>& x) {
  HWY_DYNAMIC_DISPATCH(write_f16_f32)(x);
}

}  // namespace zg::host
#endif  // HWY_ONCE
