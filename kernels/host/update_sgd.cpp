// SGD (update.hpp): plain, with momentum, with that of Nesterov.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/update_sgd.cpp"
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

enum class Momentum { kNone, kPlain, kNesterov };

// No MulAdd: it rounds once where the instruction set has it, else twice.
template <class T, Momentum kMomentum>
class Sgd {
 public:
  using S = T;
  static constexpr int kMoments = kMomentum == Momentum::kNone ? 0 : 1;
  using D = hn::ScalableTag<S>;
  using V = hn::Vec<D>;

  Sgd(D d, const UpdateConstants<S>& c)
      : l2_(hn::Set(d, c.l2)),
        momentum_(hn::Set(d, c.momentum)),
        rest_(hn::Set(d, c.rest)),
        step_size_(hn::Set(d, c.step_size)) {}

  HWY_INLINE void apply(V g, V& master, V& m, V& /*v*/) const {
    g = hn::Add(g, hn::Mul(l2_, master));
    if constexpr (kMomentum != Momentum::kNone) {
      m = hn::Add(hn::Mul(momentum_, m), hn::Mul(rest_, g));
      g = kMomentum == Momentum::kNesterov ? hn::Add(g, hn::Mul(momentum_, m)) : m;
    }
    master = hn::Sub(master, hn::Mul(step_size_, g));
  }

 private:
  V l2_, momentum_, rest_, step_size_;
};

UpdateKernels<float> plain_f32() {
  return update_passes<Sgd<float, Momentum::kNone>>();
}
UpdateKernels<float> momentum_f32() {
  return update_passes<Sgd<float, Momentum::kPlain>>();
}
UpdateKernels<float> nesterov_f32() {
  return update_passes<Sgd<float, Momentum::kNesterov>>();
}
UpdateKernels<double> plain_f64() {
  return update_passes<Sgd<double, Momentum::kNone>>();
}
UpdateKernels<double> momentum_f64() {
  return update_passes<Sgd<double, Momentum::kPlain>>();
}
UpdateKernels<double> nesterov_f64() {
  return update_passes<Sgd<double, Momentum::kNesterov>>();
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(plain_f32);
HWY_EXPORT(momentum_f32);
HWY_EXPORT(nesterov_f32);
HWY_EXPORT(plain_f64);
HWY_EXPORT(momentum_f64);
HWY_EXPORT(nesterov_f64);
}  // namespace

template <>
UpdateKernels<float> sgd_kernels(bool momentum, bool nesterov) {
  if (!momentum) return HWY_DYNAMIC_DISPATCH(plain_f32)();
  return nesterov ? HWY_DYNAMIC_DISPATCH(nesterov_f32)() : HWY_DYNAMIC_DISPATCH(momentum_f32)();
}
template <>
UpdateKernels<double> sgd_kernels(bool momentum, bool nesterov) {
  if (!momentum) return HWY_DYNAMIC_DISPATCH(plain_f64)();
  return nesterov ? HWY_DYNAMIC_DISPATCH(nesterov_f64)() : HWY_DYNAMIC_DISPATCH(momentum_f64)();
}

}  // namespace zg::host
#endif  // HWY_ONCE
