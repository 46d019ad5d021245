// The constants of an update (update.hpp), computed in double and rounded once to S.
#pragma once
#include <cmath>

#include "ziggurat/kernels/types.hpp"

namespace zg::host {

template <class S>
struct UpdateConstants {
  S grad_scale, l2, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_sqrt_correction2,
      eps, momentum, one_minus_dampening;

  UpdateConstants(OptimizerKind kind, const UpdateParams& p) {
    const double t = static_cast<double>(p.step);
    const bool corrected = kind == OptimizerKind::kAdam && p.bias_correction;
    const double correction1 = corrected ? 1 - std::pow(p.beta1, t) : 1;
    const double correction2 = corrected ? 1 - std::pow(p.beta2, t) : 1;
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
    momentum = static_cast<S>(p.momentum);
    // As in torch, the first momentum is the gradient itself.
    one_minus_dampening = p.step == 1 ? S{1} : static_cast<S>(1 - p.dampening);
  }
};

}  // namespace zg::host
