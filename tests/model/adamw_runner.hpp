// AdamW as the reference values were trained with.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "support/model_runner.hpp"
#include "ziggurat/device/ops.hpp"

namespace zg::test {

// AdamW over the flat tensors of a model, one parameter at a time, with the ops of the device.
class AdamW {
 public:
  AdamW(ModelRunner& runner, double valid) : runner_(runner), valid_(valid) {
    for (std::size_t u = 0; u < runner.units().size(); ++u) {
      const std::size_t n = static_cast<std::size_t>(runner.units()[u].count);
      const View w = runner.weights(u);
      for (auto* all : {&master_, &m_, &v_})
        all->emplace_back(static_cast<std::int64_t>(n * size_of(w.dtype)));
      std::memcpy(master_[u].data(), w.data, n * size_of(w.dtype));
      m_[u].clear();
      v_[u].clear();
    }
  }

  // The norm of the whole gradient / valid, with gradients left in place.
  double gradient_norm(Stream& s) {
    double sum = 0;
    for (std::size_t u = 0; u < runner_.units().size(); ++u) {
      double part = 0, partials[Ops::kSumPartials];
      const View scratch(partials, DType::kF64, 1, Ops::kSumPartials);
      host_ops().finish_gradient(s, runner_.grads(u), runner_.grads(u), View(&part, DType::kF64, 1, 1),
                                 scratch);
      s.synchronize();
      sum += part;
    }
    return std::sqrt(sum) / valid_;
  }
  void step(Stream& s, std::int64_t number, double grad_scale) {
    for (std::size_t u = 0; u < runner_.units().size(); ++u) {
      for (const Param& p : runner_.units()[u].params) {
        if (runner_.model().config().lora.on() && !p.adapter) continue;
        UpdateParams a;
        a.lr = 1e-3;
        a.beta2 = 0.95;
        a.weight_decay = p.vector ? 0 : 0.1;
        a.step = number;
        a.grad_scale = grad_scale;
        const DType t = runner_.weights(u).dtype;
        const auto part = [&](View flat) { return flat.col_range(p.offset, p.count()); };
        const auto state = [&](const Bytes& b) {
          return part(View(b.data(), t, 1, runner_.units()[u].count));
        };
        host_ops().update(s, part(runner_.grads(u)), part(runner_.weights(u)),
                          {.master = state(master_[u]), .moment = {state(m_[u]), state(v_[u])}, .scale = {}},
                          {.full = t}, a);
      }
    }
    s.synchronize();
  }

 private:
  ModelRunner& runner_;
  const double valid_;  // targets that count
  std::vector<Bytes> master_, m_, v_;
};

// Trains ten steps over `batches`, of which `valid` targets count, with gradients clipped to a norm of 0.5.
// Expects these losses and gradient norms, within 1e-8.
inline void expect_ten_steps(ModelRunner& runner, Stream& stream, const std::vector<Batch>& batches,
                             double valid, const std::vector<double>& losses,
                             const std::vector<double>& norms) {
  AdamW optimizer(runner, valid);
  for (std::size_t step = 0; step < 10; ++step) {
    SCOPED_TRACE(step);
    runner.clear_grads();
    double loss = 0;
    for (const Batch& b : batches) loss += runner.forward_backward(b);
    const double norm = optimizer.gradient_norm(stream), clip = std::min(1.0, 0.5 / (norm + 1e-6));
    EXPECT_NEAR(loss / valid, losses[step], 1e-8);
    EXPECT_NEAR(norm, norms[step], 1e-8);
    optimizer.step(stream, static_cast<std::int64_t>(step) + 1, clip / valid);
  }
}

}  // namespace zg::test
