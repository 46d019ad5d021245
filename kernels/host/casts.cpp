// Conversions between storage types, zeroing, and the final cast of accumulated gradients.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/casts.cpp"
// clang-format off
#include "kernels/host/targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <array>
#include <cstring>
#include <tuple>

#include "kernels/host/elementwise.hpp"
#include "kernels/host/lanes.hpp"
#include "kernels/host/spans.hpp"

#ifndef ZG_CAST_KERNELS
#define ZG_CAST_KERNELS
namespace zg::host {
template <class In, class Out>
using Convert = void (*)(std::int64_t n, const In* in, Out* out);
// Returns the sum of squares of the converted values.
template <class In, class Out>
using Finish = double (*)(std::int64_t n, const In* in, Out* out);
// The kernels of one instruction set.
using CastKernels =
    std::tuple<Convert<bf16, float>, Convert<float, bf16>, Convert<fp16, float>, Convert<float, fp16>,
               Convert<bf16, fp16>, Convert<fp16, bf16>, Finish<float, bf16>, Finish<float, fp16>,
               Finish<float, float>, Finish<double, double>>;
}  // namespace zg::host
#endif

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

template <class In, class Out>
void convert(std::int64_t n, const In* in, Out* out) {
  const hn::ScalableTag<float> d;
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR { save(d, load(d, in + i, w), out + i, w); });
}

// Squares are added into kSums interleaved sums (element i into sum i % kSums) for any vector width, so that
// every instruction set gives the same bits. Squares of floats are exact in double; squares of doubles are
// rounded before they are added (no FMA).
constexpr std::int64_t kSums = 16;
constexpr std::int64_t kBlock = 64 * kSums;
using SumLanes = hn::CappedTag<double, kSums>;

HWY_INLINE hn::Vec<SumLanes> load_double(SumLanes d, const double* from) {
  return hn::LoadU(d, from);
}
HWY_INLINE hn::Vec<SumLanes> load_double(SumLanes d, const float* from) {
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<float, SumLanes>(), from));
}

template <class A>
HWY_INLINE void add_squares(const A* values, double* sums) {
  const SumLanes d;
  const std::int64_t step = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t j = 0; j < kSums; j += step) {
    auto sum = hn::LoadU(d, sums + j);
    for (std::int64_t i = j; i < kBlock; i += kSums) {
      const auto v = load_double(d, values + i);
      sum = hn::Add(sum, hn::Mul(v, v));
    }
    hn::StoreU(sum, d, sums + j);
  }
}

template <class In, class Out>
double finish(std::int64_t n, const In* in, Out* out) {
  const hn::ScalableTag<In> d;
  double sums[kSums] = {};
  In written[kBlock];
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t count = n - begin < kBlock ? n - begin : kBlock;
    for_lanes(d, count, [&](std::int64_t i, auto w) HWY_ATTR {
      save(d, load(d, in + begin + i, w), out + begin + i, w);
      save(d, load(d, static_cast<const Out*>(out) + begin + i, w), written + i, w);
    });
    for (std::int64_t i = count; i < kBlock; ++i) written[i] = 0;
    add_squares(written, sums);
  }
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

CastKernels casts() {
  return {convert<bf16, float>, convert<float, bf16>,  convert<fp16, float>, convert<float, fp16>,
          convert<bf16, fp16>,  convert<fp16, bf16>,   finish<float, bf16>,  finish<float, fp16>,
          finish<float, float>, finish<double, double>};
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(casts);

template <class In, class Out>
void cast_span(const CastKernels& k, std::int64_t n, const In* in, Out* out) {
  if constexpr (std::is_same_v<In, Out>) {
    std::memmove(out, in, static_cast<std::size_t>(n) * sizeof(In));
  } else if constexpr (!std::is_same_v<In, double> && !std::is_same_v<Out, double>) {
    std::get<Convert<In, Out>>(k)(n, in, out);
  } else if constexpr (sizeof(In) == 2 || sizeof(Out) == 2) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<Out>(static_cast<float>(in[i]));
  } else {
    for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<Out>(in[i]);
  }
}
}  // namespace

template <class In, class Out>
void cast(Extent extent, Strided<const In> in, Strided<Out> out) {
  const CastKernels k = HWY_DYNAMIC_DISPATCH(casts)();
  for_spans(flattened(extent, in, out), [&](std::int64_t r, std::int64_t c, std::int64_t n) {
    cast_span(k, n, in.row(r) + c, out.row(r) + c);
  });
}

void zero(Extent extent, Strided<char> bytes) {
  for_spans(flattened(extent, bytes), [&](std::int64_t r, std::int64_t c, std::int64_t n) {
    std::memset(bytes.row(r) + c, 0, static_cast<std::size_t>(n));
  });
}

template <class In, class Out>
double finish_gradient(std::int64_t n, const In* in, Out* out) {
  const auto kernel = std::get<Finish<In, Out>>(HWY_DYNAMIC_DISPATCH(casts)());
  // At most kParts chunks, so that their sums fit into an array.
  constexpr std::int64_t kParts = 256;
  const std::int64_t part = std::max(kSpan, (n + kParts - 1) / kParts);
  std::array<double, kParts> sums{};
  parallel_for(n, part, [&](std::int64_t begin, std::int64_t end) {
    sums[static_cast<std::size_t>(begin / part)] = kernel(end - begin, in + begin, out + begin);
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

#define ZG_INSTANTIATE(In)                                       \
  template void cast(Extent, Strided<const In>, Strided<float>); \
  template void cast(Extent, Strided<const In>, Strided<bf16>);  \
  template void cast(Extent, Strided<const In>, Strided<fp16>);  \
  template void cast(Extent, Strided<const In>, Strided<double>);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE
template double finish_gradient(std::int64_t, const float*, bf16*);
template double finish_gradient(std::int64_t, const float*, fp16*);
template double finish_gradient(std::int64_t, const float*, float*);
template double finish_gradient(std::int64_t, const double*, double*);

}  // namespace zg::host
#endif  // HWY_ONCE
