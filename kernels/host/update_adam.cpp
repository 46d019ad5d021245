// Adam and AdamW (update.hpp), over every way to keep their state.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/update_adam.cpp"
// The least that the machine must have, AVX2 and AVX-512 (NEON on Arm): what lies between would gain nothing
// that a measurement shows, and each costs a compilation of every pass. No vectors of unknown width: classes
// keep them as members.
#define HWY_DISABLED_TARGETS \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include "kernels/host/update_pass.hpp"

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

// No MulAdd: it rounds once where the instruction set has it, else twice.
template <class T, bool kDecoupled>
class Adam {
 public:
  using S = T;
  static constexpr int kMoments = 2;
  using D = hn::ScalableTag<S>;
  using V = hn::Vec<D>;

  Adam(D d, const UpdateConstants<S>& c)
      : beta1_(hn::Set(d, c.beta1)),
        rest1_(hn::Set(d, c.one_minus_beta1)),
        beta2_(hn::Set(d, c.beta2)),
        rest2_(hn::Set(d, c.one_minus_beta2)),
        step_size_(hn::Set(d, c.step_size)),
        inv_sqrt_(hn::Set(d, c.inv_sqrt_correction2)),
        eps_(hn::Set(d, c.eps)),
        decay_(hn::Set(d, kDecoupled ? c.decay : c.l2)) {}

  HWY_INLINE void apply(V g, V& master, V& m, V& v) const {
    if constexpr (!kDecoupled) g = hn::Add(g, hn::Mul(decay_, master));
    m = hn::Add(hn::Mul(beta1_, m), hn::Mul(rest1_, g));
    v = hn::Add(hn::Mul(beta2_, v), hn::Mul(hn::Mul(rest2_, g), g));
    if constexpr (kDecoupled) master = hn::Mul(decay_, master);
    const V denominator = hn::Add(hn::Mul(hn::Sqrt(v), inv_sqrt_), eps_);
    master = hn::Sub(master, hn::Div(hn::Mul(step_size_, m), denominator));
  }

 private:
  V beta1_, rest1_, beta2_, rest2_, step_size_, inv_sqrt_, eps_, decay_;
};

UpdateKernels<float> adamw_f32() {
  return update_passes<Adam<float, true>>();
}
UpdateKernels<float> adam_f32() {
  return update_passes<Adam<float, false>>();
}
UpdateKernels<double> adamw_f64() {
  return update_passes<Adam<double, true>>();
}
UpdateKernels<double> adam_f64() {
  return update_passes<Adam<double, false>>();
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(adamw_f32);
HWY_EXPORT(adam_f32);
HWY_EXPORT(adamw_f64);
HWY_EXPORT(adam_f64);
}  // namespace

template <>
UpdateKernels<float> adam_kernels(bool decoupled) {
  return decoupled ? HWY_DYNAMIC_DISPATCH(adamw_f32)() : HWY_DYNAMIC_DISPATCH(adam_f32)();
}
template <>
UpdateKernels<double> adam_kernels(bool decoupled) {
  return decoupled ? HWY_DYNAMIC_DISPATCH(adamw_f64)() : HWY_DYNAMIC_DISPATCH(adam_f64)();
}

}  // namespace zg::host
#endif  // HWY_ONCE
