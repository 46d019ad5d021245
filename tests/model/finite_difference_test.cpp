// Gradients of whole models against differences of their losses, in fp64.
//
// For every parameter tensor two derivatives are compared: along its element of largest gradient, and
// along a random direction, in which every element takes part.
#include <gtest/gtest.h>

#include <cmath>

#include "support/model_runner.hpp"
#include "support/reference.hpp"
#include "support/seed.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg::test {
namespace {

struct Case {
  const char* name;
  ModelConfig config;
  BatchShape shape;
};

ModelConfig untied(ModelConfig c) {
  c.layers = 1;
  c.tied = false;
  return c;
}

ModelConfig dropping(ModelConfig c) {
  c.layers = 2;
  c.dropout = {.embedding = 0.25, .residual = 0.4};
  return c;
}

// Sizes at which no two matrices of a unit lie side by side without padding, and the heads together
// are wider than the model.
ModelConfig odd_llama() {
  ModelConfig c = reference_llama();
  c.vocab_size = 61;
  c.layers = 2;
  c.width = 19;
  c.heads = 6;
  c.kv_heads = 2;
  c.head_size = 10;
  c.inner = 13;
  c.tied = true;
  return c;
}

const Case kCases[] = {
    {"gpt2", reference_gpt2(), {1, 7}},
    {"gpt2_untied", untied(reference_gpt2()), {2, 5}},
    {"llama", reference_llama(), {1, 7}},
    {"llama_tied_odd", odd_llama(), {3, 11}},
    {"gpt2_dropout", dropping(reference_gpt2()), {2, 5}},
    {"llama_dropout", dropping(odd_llama()), {3, 5}},
    {"every_option", with_every_option(odd_llama()), {2, 11}},
    {"every_option_dropout", dropping(with_every_option(odd_llama())), {2, 7}},
    {"norms_after", with_norms_after(odd_llama()), {2, 7}},
    {"norms_after_dropout", dropping(with_norms_after(odd_llama())), {2, 7}},
};

class FiniteDifferences : public testing::TestWithParam<Case> {};

Batch random_batch(const ModelConfig& c, BatchShape shape, std::uint64_t seed) {
  const NamedRandom ids(seed, "ids"), targets(seed, "targets");
  Batch b{shape, {}, {}};
  for (std::int64_t i = 0; i < shape.rows(); ++i) {
    const auto n = static_cast<std::uint64_t>(i), v = static_cast<std::uint64_t>(c.vocab_size);
    b.ids.push_back(static_cast<std::int32_t>(ids.below(n, v)));
    b.targets.push_back(i % 5 == 3 ? -100 : static_cast<std::int32_t>(targets.below(n, v)));
  }
  return b;
}

// The derivative of f at 0: central differences with steps h and h/2, extrapolated (Richardson). What
// remains is of the order h^4 f''''' and eps |f| / h.
template <class F>
double derivative(const F& f, double h) {
  const double wide = (f(h) - f(-h)) / (2 * h), narrow = (f(h / 2) - f(-h / 2)) / h;
  return (4 * narrow - wide) / 3;
}

struct Largest {
  std::int64_t row = 0, column = 0;
  double value = 0;
};

Largest largest_of(const View& g) {
  Largest most;
  for (std::int64_t r = 0; r < g.rows; ++r) {
    for (std::int64_t c = 0; c < g.cols; ++c) {
      if (std::abs(load(g, r, c)) > std::abs(most.value)) most = {r, c, load(g, r, c)};
    }
  }
  return most;
}

// Losses here are below 100 and largest gradients above 0.01: with h = 2^-10 rounding leaves 1e-16 * 100 / h
// / 0.01 = 1e-9, and h^4 = 1e-12 leaves room for fifth derivatives 1e5 times the first.
constexpr double kStep = 0x1p-10;
constexpr double kTolerance = 1e-7;

// A scaled embedding makes the steps of its elements larger by the root of the width, here 4.4.
double step_of(const ModelConfig& c) {
  return c.block.scaled_embedding ? kStep / 4 : kStep;
}

TEST_P(FiniteDifferences, EveryTensor) {
  const double step = step_of(GetParam().config);
  const std::uint64_t seed = test_seed(20240611);
  SCOPED_TRACE(testing::Message() << "ZG_TEST_SEED=" << seed);
  HostStream stream("test", HostStream::Mode::kInline);
  ModelRunner runner(GetParam().config, DType::kF64, host_ops(), stream);
  runner.fill([&](const Param& p, std::int64_t r, std::int64_t c) {
    const double u =
        static_cast<double>(NamedRandom(seed, p.name).uniform(static_cast<std::uint64_t>(r * p.cols + c)));
    return p.init == Init::kOne ? 0.8 + 0.4 * u : 0.2 * u - 0.1;
  });
  if (GetParam().config.dropout != DropoutRates{}) runner.drop_as(seed, 7, 12);
  const Batch batch = random_batch(GetParam().config, GetParam().shape, seed);
  const double loss = runner.forward_backward(batch);
  EXPECT_NEAR(loss, runner.loss(batch), 1e-12 * loss);

  for (std::size_t u = 0; u < runner.units().size(); ++u) {
    for (const Param& p : runner.units()[u].params) {
      SCOPED_TRACE(p.name);
      const View w = runner.weight(u, p), g = runner.grad(u, p);
      const Largest most = largest_of(g);
      const double old = load(w, most.row, most.column);
      const double along_one = derivative(
          [&](double h) {
            store(w, most.row, most.column, old + h);
            return runner.loss(batch);
          },
          step);
      store(w, most.row, most.column, old);
      EXPECT_NEAR(along_one, most.value, kTolerance * std::abs(most.value));

      const std::vector<double> before(w.as<double>(), w.as<double>() + w.count());
      const NamedRandom signs(seed, p.name + " direction");
      const auto n = static_cast<std::size_t>(w.count());
      std::vector<double> direction(n);
      double expected = 0, norm_sq = 0;
      for (std::size_t i = 0; i < n; ++i) {
        direction[i] = (static_cast<double>(signs.uniform(i)) - 0.5) / std::sqrt(static_cast<double>(n));
        expected += direction[i] * g.as<double>()[i];
        norm_sq += g.as<double>()[i] * g.as<double>()[i];
      }
      const double along_all = derivative(
          [&](double h) {
            for (std::size_t i = 0; i < n; ++i) w.as<double>()[i] = before[i] + h * direction[i];
            return runner.loss(batch);
          },
          8 * step);
      std::copy(before.begin(), before.end(), w.as<double>());
      // A random direction sees about this much of the gradient.
      EXPECT_NEAR(along_all, expected, kTolerance * std::sqrt(norm_sq / static_cast<double>(n)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Model, FiniteDifferences, testing::ValuesIn(kCases),
                         [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace zg::test
