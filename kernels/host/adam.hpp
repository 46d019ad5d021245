// The fused Adam pass of the host: per parameter it reads a gradient, the master weight and two moments, and
// writes the last three and the rounded weight, once each.
//
// Blocking, any thread, threaded by parallel_for. The bits of every output are the same on every instruction
// set and for any number of threads: the arithmetic is additions, products, quotients and square roots, each
// rounded once to S (never contracted), in the order written here. With c an AdamConstants<S>, and all in S:
//
//   g = grad * c.grad_scale
//   g = g + c.l2 * master                           (only if not decoupled)
//   m = c.beta1 * m + c.one_minus_beta1 * g
//   v = c.beta2 * v + (c.one_minus_beta2 * g) * g
//   master = c.decay * master                       (only if decoupled)
//   master = master - (c.step_size * m) / (sqrt(v) * c.inv_sqrt_correction2 + c.eps)
//   weight = master, rounded
#pragma once
#include <cmath>
#include <cstdint>

#include "ziggurat/base/dtype.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg::host {

// What is the same for all parameters, computed in double and rounded once.
template <class S>
struct AdamConstants {
  S grad_scale, l2, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_sqrt_correction2,
      eps;

  explicit AdamConstants(const AdamParams& p) {
    const double t = static_cast<double>(p.step);
    const double correction1 = p.bias_correction ? 1 - std::pow(p.beta1, t) : 1;
    const double correction2 = p.bias_correction ? 1 - std::pow(p.beta2, t) : 1;
    grad_scale = static_cast<S>(p.grad_scale);
    l2 = static_cast<S>(p.weight_decay);
    decay = static_cast<S>(1 - p.lr * p.weight_decay);
    beta1 = static_cast<S>(p.beta1);
    one_minus_beta1 = static_cast<S>(1 - p.beta1);
    beta2 = static_cast<S>(p.beta2);
    one_minus_beta2 = static_cast<S>(1 - p.beta2);
    step_size = static_cast<S>(p.lr / correction1);
    inv_sqrt_correction2 = static_cast<S>(1 / std::sqrt(correction2));
    eps = static_cast<S>(p.eps);
  }
};

// The arrays do not overlap; any alignment.
template <class G, class S, class W>
struct AdamArrays {
  const G* grad = nullptr;
  S* master = nullptr;
  S* m = nullptr;
  S* v = nullptr;
  W* weight = nullptr;
};

// S float: G and W float or bf16. S double: both double. p.step >= 1, and p.eps > 0 also when rounded to S.
template <class G, class S, class W>
void adam(std::int64_t n, const AdamArrays<G, S, W>& arrays, const AdamParams& p);

}  // namespace zg::host
