// Adapters beside a tiny model, against the values of PEFT that a file of tests/reference has.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "model/adamw_runner.hpp"
#include "support/families.hpp"
#include "ziggurat/model/adapter_files.hpp"

namespace zg::test {

class AdapterValues {
 public:
  // B: whether it is as it begins, zero.
  enum class B { kFilled, kZero };

  AdapterValues(const std::string& name, const std::string& folder, const std::string& config_text = "")
      : file(name, folder),
        config(config_text.empty() ? file.config() : parse_hf_config(config_text, folder)),
        batches(family_batches()) {
    config.lora = parse_adapter_config(file.text("adapter"), "adapter", config);
  }
  virtual ~AdapterValues() = default;

  ModelRunner runner_of(const ModelConfig& c, DType dtype = DType::kF64, B b = B::kFilled) {
    ModelRunner runner(c, dtype, host_ops(), stream);
    fill(runner, b);
    return runner;
  }
  void fill(ModelRunner& to, B b = B::kFilled) const {
    to.fill([&](const Param& p, std::int64_t r, std::int64_t c) {
      const bool zero = b == B::kZero && p.adapter && p.init == Init::kZero;
      return zero ? 0 : p.adapter ? family_weight(config, p, r, c) : weight(p, r, c);
    });
  }
  // Element (row, column) of a parameter of the model itself.
  virtual double weight(const Param& p, std::int64_t row, std::int64_t column) const {
    return family_weight(config, p, row, column);
  }

  void expect_digest(const std::string& name, const std::vector<double>& actual, double tolerance) const {
    SCOPED_TRACE(name);
    const std::vector<double> expected = file.values<double>(name), mine = family_digest(actual);
    ASSERT_EQ(mine.size(), expected.size());
    EXPECT_GT(expected[0], 0);
    const double bound = tolerance * std::max(1.0, expected[0]);
    for (std::size_t i = 0; i < mine.size(); ++i) EXPECT_NEAR(mine[i], expected[i], bound) << i;
  }
  // The elements of A and B alone.
  template <class ViewOf>
  void expect_digests(const std::vector<Unit>& units, const std::string& prefix, double scale,
                      double tolerance, const ViewOf& view_of) const {
    int count = 0;
    for (std::size_t u = 0; u < units.size(); ++u) {
      for (const Param& p : units[u].params) {
        if (!p.adapter) continue;
        ++count;
        const View view = view_of(u, p);
        std::vector<double> values;
        for (std::int64_t r = 0; r < p.rows; ++r) {
          for (std::int64_t c = 0; c < p.cols; ++c) values.push_back(load(view, r, c) * scale);
        }
        expect_digest(prefix + p.name, values, tolerance);
      }
    }
    EXPECT_GT(count, 0);
  }

  void expect_logits() { expect_digest("logits", runner_of(config).logits(batches[0]), 1e-11); }
  void expect_loss_and_gradients() {
    for (const Recompute recompute : {Recompute::kNo, Recompute::kYes}) {
      for (const Gradients into : {Gradients::kAdd, Gradients::kOverwrite}) {
        ModelRunner runner = runner_of(config);
        if (into == Gradients::kOverwrite) runner.poison_grads();
        double loss = runner.forward_backward(batches[0], recompute, 1, into);
        loss += runner.forward_backward(batches[1], recompute);
        EXPECT_NEAR(loss / kFamilyValid, file.values<double>("loss")[0], 1e-12);
        expect_digests(runner.units(), "grad.", 1 / kFamilyValid, 1e-10,
                       [&](std::size_t u, const Param& p) { return runner.grad(u, p); });
      }
    }
  }
  void expect_ten_steps_of_adamw() {
    ModelRunner runner = runner_of(config);
    expect_ten_steps(runner, stream, batches, kFamilyValid, file.values<double>("adamw.loss"),
                     file.values<double>("adamw.grad_norm"));
    expect_digests(runner.units(), "final.", 1, 1e-8,
                   [&](std::size_t u, const Param& p) { return runner.weight(u, p); });
  }

  FamilyFile file;
  ModelConfig config;
  HostStream stream{"test", HostStream::Mode::kInline};
  std::vector<Batch> batches;
};

}  // namespace zg::test
