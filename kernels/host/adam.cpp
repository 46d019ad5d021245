#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/adam.cpp"
// Loop bodies keep vectors in their captures, which SVE and RVV cannot; Arm runs NEON.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include "kernels/host/adam.hpp"
#include "kernels/host/lanes.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/parallel.hpp"

#ifndef ZG_ADAM_KERNELS
#define ZG_ADAM_KERNELS
namespace zg::host {
template <class G, class S, class W>
struct AdamKernels {
  using Kernel = void (*)(std::int64_t n, const AdamArrays<G, S, W>& a, const AdamConstants<S>& c);
  Kernel decoupled, coupled;
};
}  // namespace zg::host
#endif

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

enum class Decay { kDecoupled, kCoupled };

// adam.hpp says what is computed. No MulAdd: it rounds once where the instruction set has it, else twice.
template <Decay kDecay, class G, class S, class W>
void adam_pass(std::int64_t n, const AdamArrays<G, S, W>& a, const AdamConstants<S>& c) {
  const hn::ScalableTag<S> d;
  const auto grad_scale = hn::Set(d, c.grad_scale), eps = hn::Set(d, c.eps);
  const auto beta1 = hn::Set(d, c.beta1), rest1 = hn::Set(d, c.one_minus_beta1);
  const auto beta2 = hn::Set(d, c.beta2), rest2 = hn::Set(d, c.one_minus_beta2);
  const auto step_size = hn::Set(d, c.step_size), inv_sqrt = hn::Set(d, c.inv_sqrt_correction2);
  const auto l2 = hn::Set(d, c.l2), decay = hn::Set(d, c.decay);
  const AdamArrays<G, S, W> p = a;
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    auto g = hn::Mul(load(d, p.grad + i, w), grad_scale);
    auto master = load(d, static_cast<const S*>(p.master) + i, w);
    if constexpr (kDecay == Decay::kCoupled) g = hn::Add(g, hn::Mul(l2, master));
    const auto m = hn::Add(hn::Mul(beta1, load(d, static_cast<const S*>(p.m) + i, w)), hn::Mul(rest1, g));
    const auto v =
        hn::Add(hn::Mul(beta2, load(d, static_cast<const S*>(p.v) + i, w)), hn::Mul(hn::Mul(rest2, g), g));
    if constexpr (kDecay == Decay::kDecoupled) master = hn::Mul(decay, master);
    const auto denominator = hn::Add(hn::Mul(hn::Sqrt(v), inv_sqrt), eps);
    master = hn::Sub(master, hn::Div(hn::Mul(step_size, m), denominator));
    save(d, m, p.m + i, w);
    save(d, v, p.v + i, w);
    save(d, master, p.master + i, w);
    save(d, master, p.weight + i, w);
  });
}

template <class G, class S, class W>
AdamKernels<G, S, W> both() {
  return {adam_pass<Decay::kDecoupled, G, S, W>, adam_pass<Decay::kCoupled, G, S, W>};
}
AdamKernels<bf16, float, bf16> adam_bf16_bf16() {
  return both<bf16, float, bf16>();
}
AdamKernels<bf16, float, float> adam_bf16_f32() {
  return both<bf16, float, float>();
}
AdamKernels<float, float, bf16> adam_f32_bf16() {
  return both<float, float, bf16>();
}
AdamKernels<float, float, float> adam_f32_f32() {
  return both<float, float, float>();
}
AdamKernels<double, double, double> adam_f64() {
  return both<double, double, double>();
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(adam_bf16_bf16);
HWY_EXPORT(adam_bf16_f32);
HWY_EXPORT(adam_f32_bf16);
HWY_EXPORT(adam_f32_f32);
HWY_EXPORT(adam_f64);

template <class G, class S, class W>
AdamKernels<G, S, W> kernels() {
  constexpr bool kNarrowGrad = std::is_same_v<G, bf16>, kNarrowWeight = std::is_same_v<W, bf16>;
  if constexpr (std::is_same_v<S, double>) {
    return HWY_DYNAMIC_DISPATCH(adam_f64)();
  } else if constexpr (kNarrowGrad && kNarrowWeight) {
    return HWY_DYNAMIC_DISPATCH(adam_bf16_bf16)();
  } else if constexpr (kNarrowGrad) {
    return HWY_DYNAMIC_DISPATCH(adam_bf16_f32)();
  } else if constexpr (kNarrowWeight) {
    return HWY_DYNAMIC_DISPATCH(adam_f32_bf16)();
  } else {
    return HWY_DYNAMIC_DISPATCH(adam_f32_f32)();
  }
}
}  // namespace

template <class G, class S, class W>
void adam(std::int64_t n, const AdamArrays<G, S, W>& arrays, const AdamParams& p) {
  ZG_ASSERT_GE(p.step, 1);
  const AdamConstants<S> constants(p);
  // Elements that have always been zero (padding) must give 0 / eps and not 0 / 0.
  ZG_ASSERT(constants.eps > 0, "eps {}", p.eps);
  const AdamKernels<G, S, W> both = kernels<G, S, W>();
  const auto kernel = p.decoupled ? both.decoupled : both.coupled;
  constexpr std::int64_t kChunk = 64 * 1024;
  parallel_for(n, kChunk, [&](std::int64_t begin, std::int64_t end) {
    kernel(end - begin,
           {arrays.grad + begin, arrays.master + begin, arrays.m + begin, arrays.v + begin,
            arrays.weight + begin},
           constants);
  });
}

template void adam(std::int64_t, const AdamArrays<bf16, float, bf16>&, const AdamParams&);
template void adam(std::int64_t, const AdamArrays<bf16, float, float>&, const AdamParams&);
template void adam(std::int64_t, const AdamArrays<float, float, bf16>&, const AdamParams&);
template void adam(std::int64_t, const AdamArrays<float, float, float>&, const AdamParams&);
template void adam(std::int64_t, const AdamArrays<double, double, double>&, const AdamParams&);

}  // namespace zg::host
#endif  // HWY_ONCE
