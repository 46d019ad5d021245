// Lion (update.hpp), and weights made anew from whole masters.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/update_lion.cpp"
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
template <class T>
class Lion {
 public:
  using S = T;
  static constexpr int kMoments = 1;
  using D = hn::ScalableTag<S>;
  using V = hn::Vec<D>;

  Lion(D d, const UpdateConstants<S>& c)
      : beta1_(hn::Set(d, c.beta1)),
        rest1_(hn::Set(d, c.one_minus_beta1)),
        beta2_(hn::Set(d, c.beta2)),
        rest2_(hn::Set(d, c.one_minus_beta2)),
        step_size_(hn::Set(d, c.step_size)),
        decay_(hn::Set(d, c.decay)) {}

  HWY_INLINE void apply(V g, V& master, V& m, V& /*v*/) const {
    const D d;
    const V u = hn::Add(hn::Mul(beta1_, m), hn::Mul(rest1_, g));
    m = hn::Add(hn::Mul(beta2_, m), hn::Mul(rest2_, g));
    const V moved = hn::CopySign(step_size_, u);
    const V change = hn::IfThenElse(hn::Gt(hn::Abs(u), hn::Zero(d)), moved, u);
    master = hn::Sub(hn::Mul(decay_, master), change);
  }

 private:
  V beta1_, rest1_, beta2_, rest2_, step_size_, decay_;
};

UpdateKernels<float> lion_f32() {
  return update_passes<Lion<float>>();
}
UpdateKernels<double> lion_f64() {
  return update_passes<Lion<double>>();
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
HWY_EXPORT(lion_f32);
HWY_EXPORT(lion_f64);
HWY_EXPORT(weights_f32);
}  // namespace

template <>
UpdateKernels<float> lion_kernels() {
  return HWY_DYNAMIC_DISPATCH(lion_f32)();
}
template <>
UpdateKernels<double> lion_kernels() {
  return HWY_DYNAMIC_DISPATCH(lion_f64)();
}
UpdateKernel<float> weight_kernel() {
  return HWY_DYNAMIC_DISPATCH(weights_f32)();
}

}  // namespace zg::host
#endif  // HWY_ONCE
