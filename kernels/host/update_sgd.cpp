// SGD (update.hpp): without momentum, with momentum, with Nesterov's momentum.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/update_sgd.cpp"
// clang-format off
#include "kernels/host/update_targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include "kernels/host/update_pass.hpp"

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

enum class Momentum { kNone, kPlain, kNesterov };

// No MulAdd: it rounds once on instruction sets that have FMA, and twice on others.
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
        one_minus_dampening_(hn::Set(d, c.one_minus_dampening)),
        step_size_(hn::Set(d, c.step_size)) {}

  HWY_INLINE void apply(V g, V& master, V& m, V& /*v*/) const {
    g = hn::Add(g, hn::Mul(l2_, master));
    if constexpr (kMomentum != Momentum::kNone) {
      m = hn::Add(hn::Mul(momentum_, m), hn::Mul(one_minus_dampening_, g));
      g = kMomentum == Momentum::kNesterov ? hn::Add(g, hn::Mul(momentum_, m)) : m;
    }
    master = hn::Sub(master, hn::Mul(step_size_, g));
  }

 private:
  V l2_, momentum_, one_minus_dampening_, step_size_;
};

template <class T>
using PlainSgd = Sgd<T, Momentum::kNone>;
template <class T>
using MomentumSgd = Sgd<T, Momentum::kPlain>;
template <class T>
using NesterovSgd = Sgd<T, Momentum::kNesterov>;

UpdatePasses sgd(bool momentum, bool nesterov) {
  if (!momentum) return update_passes<PlainSgd>();
  return nesterov ? update_passes<NesterovSgd>() : update_passes<MomentumSgd>();
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(sgd);
}  // namespace

UpdatePasses sgd_passes(bool momentum, bool nesterov) {
  return HWY_DYNAMIC_DISPATCH(sgd)(momentum, nesterov);
}

}  // namespace zg::host
#endif  // HWY_ONCE
