// Lion (update.hpp), and the rewriting of weights from their masters (MasterFormat::kFull).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/update_lion.cpp"
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
template <class T>
class Lion {
 public:
  using S = T;
  static constexpr int kMoments = 1;
  using D = hn::ScalableTag<S>;
  using V = hn::Vec<D>;

  Lion(D d, const UpdateConstants<S>& c)
      : beta1_(hn::Set(d, c.beta1)),
        one_minus_beta1_(hn::Set(d, c.one_minus_beta1)),
        beta2_(hn::Set(d, c.beta2)),
        one_minus_beta2_(hn::Set(d, c.one_minus_beta2)),
        step_size_(hn::Set(d, c.step_size)),
        decay_(hn::Set(d, c.decay)) {}

  HWY_INLINE void apply(V g, V& master, V& m, V& /*v*/) const {
    const D d;
    const V u = hn::Add(hn::Mul(beta1_, m), hn::Mul(one_minus_beta1_, g));
    m = hn::Add(hn::Mul(beta2_, m), hn::Mul(one_minus_beta2_, g));
    const V moved = hn::CopySign(step_size_, u);
    const V change = hn::IfThenElse(hn::Gt(hn::Abs(u), hn::Zero(d)), moved, u);
    master = hn::Sub(hn::Mul(decay_, master), change);
  }

 private:
  V beta1_, one_minus_beta1_, beta2_, one_minus_beta2_, step_size_, decay_;
};

UpdatePasses lion() {
  return update_passes<Lion>();
}

void weights(const UpdateJob<float>& job) {
  for (std::int64_t b = 0; b < job.blocks; ++b) {
    const std::int64_t begin = b * kQuantBlock;
    weight_block(job.arrays, begin, static_cast<const float*>(job.arrays.master) + begin);
  }
  hwy::FlushStream();
}
UpdateKernel<float> weights_f32() {
  return weights;
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(lion);
HWY_EXPORT(weights_f32);
}  // namespace

UpdatePasses lion_passes() {
  return HWY_DYNAMIC_DISPATCH(lion)();
}
UpdateKernel<float> weight_kernel() {
  return HWY_DYNAMIC_DISPATCH(weights_f32)();
}

}  // namespace zg::host
#endif  // HWY_ONCE
