// Adam and AdamW (update.hpp), for all state formats.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/update_adam.cpp"
// clang-format off
#include "kernels/host/update_targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include "kernels/host/update_pass.hpp"

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

// No MulAdd: it rounds once on instruction sets that have FMA, and twice on others.
template <class T, bool kDecoupled>
class Adam {
 public:
  using S = T;
  static constexpr int kMoments = 2;
  using D = hn::ScalableTag<S>;
  using V = hn::Vec<D>;

  Adam(D d, const UpdateConstants<S>& c)
      : beta1_(hn::Set(d, c.beta1)),
        one_minus_beta1_(hn::Set(d, c.one_minus_beta1)),
        beta2_(hn::Set(d, c.beta2)),
        one_minus_beta2_(hn::Set(d, c.one_minus_beta2)),
        step_size_(hn::Set(d, c.step_size)),
        inv_sqrt_correction2_(hn::Set(d, c.inv_sqrt_correction2)),
        eps_(hn::Set(d, c.eps)),
        decay_(hn::Set(d, kDecoupled ? c.decay : c.l2)) {}

  HWY_INLINE void apply(V g, V& master, V& m, V& v) const {
    if constexpr (!kDecoupled) g = hn::Add(g, hn::Mul(decay_, master));
    m = hn::Add(hn::Mul(beta1_, m), hn::Mul(one_minus_beta1_, g));
    v = hn::Add(hn::Mul(beta2_, v), hn::Mul(hn::Mul(one_minus_beta2_, g), g));
    if constexpr (kDecoupled) master = hn::Mul(decay_, master);
    const V denominator = hn::Add(hn::Mul(hn::Sqrt(v), inv_sqrt_correction2_), eps_);
    master = hn::Sub(master, hn::Div(hn::Mul(step_size_, m), denominator));
  }

 private:
  V beta1_, one_minus_beta1_, beta2_, one_minus_beta2_, step_size_, inv_sqrt_correction2_, eps_, decay_;
};

template <class T>
using CoupledAdam = Adam<T, false>;
template <class T>
using AdamW = Adam<T, true>;

UpdatePasses adam(bool decoupled) {
  return decoupled ? update_passes<AdamW>() : update_passes<CoupledAdam>();
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(adam);
}  // namespace

UpdatePasses adam_passes(bool decoupled) {
  return HWY_DYNAMIC_DISPATCH(adam)(decoupled);
}

}  // namespace zg::host
#endif  // HWY_ONCE
