#include "kernels/host/adam.hpp"

#include "tests/kernels/support.hpp"

namespace zg::test {
namespace {

template <class S, class T>
S value_of(T x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return static_cast<S>(static_cast<float>(x));
  } else {
    return static_cast<S>(x);
  }
}

template <class G, class S, class W>
struct State {
  std::vector<G> grad;
  std::vector<S> master, m, v;
  std::vector<W> weight;

  // Values from subnormal to large, with zeros.
  State(std::size_t n, std::uint64_t test_case)
      : grad(n), master(n), m(n), v(n), weight(n, static_cast<W>(value_of<Acc<W>>(poison<float>()))) {
    auto random = generator(test_case);
    std::normal_distribution<double> normal;
    std::uniform_int_distribution<int> exponent(-60, 3);
    for (std::size_t i = 0; i < n; ++i) {
      const int kind = static_cast<int>(random() % 16);
      const double size = kind < 4 ? std::ldexp(1.0, exponent(random)) : 1.0;
      grad[i] = static_cast<G>(value_of<Acc<G>>(kind == 0 ? 0.0 : normal(random) * size));
      master[i] = static_cast<S>(normal(random) * size);
      m[i] = static_cast<S>(kind == 1 ? 0.0 : 0.1 * normal(random) * size);
      v[i] = static_cast<S>(kind == 2 ? 0.0 : std::pow(normal(random) * size, 2));
    }
  }
  host::AdamArrays<G, S, W> arrays(std::size_t offset) {
    return {.grad = grad.data() + offset,
            .master = master.data() + offset,
            .m = m.data() + offset,
            .v = v.data() + offset,
            .weight = weight.data() + offset};
  }
  bool same_bits(const State& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    return same(grad, other.grad) && same(master, other.master) && same(m, other.m) && same(v, other.v) &&
           same(weight, other.weight);
  }
};

// adam.hpp's definition, one element at a time. This file is compiled without contraction, too.
template <class G, class S, class W>
void reference(std::size_t begin, std::size_t end, State<G, S, W>& s, const AdamParams& p) {
  const host::AdamConstants<S> c(p);
  for (std::size_t i = begin; i < end; ++i) {
    S g = value_of<S>(s.grad[i]) * c.grad_scale;
    if (!p.decoupled) g = g + c.l2 * s.master[i];
    s.m[i] = c.beta1 * s.m[i] + c.one_minus_beta1 * g;
    s.v[i] = c.beta2 * s.v[i] + (c.one_minus_beta2 * g) * g;
    if (p.decoupled) s.master[i] = c.decay * s.master[i];
    s.master[i] = s.master[i] - (c.step_size * s.m[i]) / (std::sqrt(s.v[i]) * c.inv_sqrt_correction2 + c.eps);
    s.weight[i] = static_cast<W>(s.master[i]);
  }
}

std::vector<AdamParams> parameters() {
  const AdamParams base{.lr = 3e-3,
                        .beta1 = 0.9,
                        .beta2 = 0.95,
                        .eps = 1e-8,
                        .weight_decay = 0.1,
                        .step = 3,
                        .grad_scale = 0.37};
  AdamParams coupled = base, uncorrected = base, late = base, plain = base;
  coupled.decoupled = false;
  uncorrected.bias_correction = false;
  late.step = 100000;
  plain.weight_decay = 0, plain.grad_scale = 1, plain.step = 1;
  return {base, coupled, uncorrected, late, plain};
}

template <class Types>
class Adam : public testing::Test {};
template <class G, class S, class W>
struct Combination {
  using Grad = G;
  using Master = S;
  using Weight = W;
};
using Combinations = testing::Types<Combination<bf16, float, bf16>, Combination<bf16, float, float>,
                                    Combination<float, float, bf16>, Combination<float, float, float>,
                                    Combination<double, double, double>>;
TYPED_TEST_SUITE(Adam, Combinations);

TYPED_TEST(Adam, SameBitsAsTheDefinitionOnEveryInstructionSet) {
  using G = typename TypeParam::Grad;
  using S = typename TypeParam::Master;
  using W = typename TypeParam::Weight;
  for_each_target([] {
    for (const AdamParams& p : parameters()) {
      for (const std::size_t n : {0u, 1u, 2u, 3u, 7u, 15u, 16u, 17u, 31u, 33u, 64u, 65u, 1000u}) {
        for (const std::size_t offset : {0u, 1u, 3u}) {
          State<G, S, W> actual(n + 8, n), expected(n + 8, n);
          host::adam<G, S, W>(static_cast<std::int64_t>(n), actual.arrays(offset), p);
          reference(offset, offset + n, expected, p);
          ASSERT_TRUE(actual.same_bits(expected)) << "n " << n << ", offset " << offset;
        }
      }
    }
  });
}

TYPED_TEST(Adam, SameBitsForAnyNumberOfThreads) {
  using G = typename TypeParam::Grad;
  using S = typename TypeParam::Master;
  using W = typename TypeParam::Weight;
  constexpr std::size_t kCount = 3 * 65536 + 17;
  State<G, S, W> expected(kCount, 1);
  reference(0, kCount, expected, parameters()[0]);
  for_each_thread_count([&](int) {
    State<G, S, W> actual(kCount, 1);
    host::adam<G, S, W>(kCount, actual.arrays(0), parameters()[0]);
    EXPECT_TRUE(actual.same_bits(expected));
  });
}

TYPED_TEST(Adam, ZerosStayZeros) {
  using G = typename TypeParam::Grad;
  using S = typename TypeParam::Master;
  using W = typename TypeParam::Weight;
  for (AdamParams p : parameters()) {
    State<G, S, W> s(37, 1);
    s.grad.assign(37, G{}), s.master.assign(37, S{}), s.m.assign(37, S{}), s.v.assign(37, S{});
    for (p.step = 1; p.step < 5; ++p.step) host::adam<G, S, W>(37, s.arrays(0), p);
    for (std::size_t i = 0; i < 37; ++i) {
      EXPECT_EQ(s.master[i], 0);
      EXPECT_EQ(s.m[i], 0);
      EXPECT_EQ(s.v[i], 0);
      EXPECT_EQ(value_of<S>(s.weight[i]), 0);
    }
  }
}

// AdamW as Loshchilov and Hutter state it (and torch.optim.AdamW computes it), in double, for ten steps.
TEST(AdamSteps, TenStepsNearDouble) {
  constexpr std::size_t kCount = 257;
  for (AdamParams p : parameters()) {
    State<float, float, float> s(kCount, 1);
    auto random = generator(9);
    std::normal_distribution<double> normal;
    std::vector<double> master(kCount), m(kCount), v(kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      s.master[i] = static_cast<float>(normal(random)), s.m[i] = 0, s.v[i] = 0;
      master[i] = static_cast<double>(s.master[i]);
    }
    for (p.step = 1; p.step <= 10; ++p.step) {
      const double t = static_cast<double>(p.step);
      const double c1 = p.bias_correction ? 1 - std::pow(p.beta1, t) : 1;
      const double c2 = p.bias_correction ? 1 - std::pow(p.beta2, t) : 1;
      for (std::size_t i = 0; i < kCount; ++i) {
        s.grad[i] = static_cast<float>(normal(random));
        double g = static_cast<double>(s.grad[i]) * p.grad_scale;
        if (!p.decoupled) g += p.weight_decay * master[i];
        if (p.decoupled) master[i] -= p.lr * p.weight_decay * master[i];
        m[i] = p.beta1 * m[i] + (1 - p.beta1) * g;
        v[i] = p.beta2 * v[i] + (1 - p.beta2) * g * g;
        master[i] -= p.lr * (m[i] / c1) / (std::sqrt(v[i] / c2) + p.eps);
      }
      host::adam<float, float, float>(kCount, s.arrays(0), p);
    }
    for (std::size_t i = 0; i < kCount; ++i) {
      // A step rounds master twice; its change is below 5 lr, off by some 20 roundings of it and of m, whose
      // terms may cancel (factor 10). Ten steps.
      const double u = 0x1p-24;
      const double allowed = 10 * (2 * u * (std::abs(master[i]) + 0.1) + p.lr * 5 * 20 * 10 * u);
      ASSERT_NEAR(static_cast<double>(s.master[i]), master[i], allowed);
    }
  }
}

TEST(AdamSteps, FirstStepMovesByTheLearningRate) {
  // m / c1 = g and sqrt(v / c2) = |g|: the change is lr, whatever the gradient.
  State<float, float, float> s(2, 1);
  s.grad = {0.3f, -20.0f}, s.master = {1, 1}, s.m = {0, 0}, s.v = {0, 0};
  host::adam<float, float, float>(2, s.arrays(0), {.lr = 0.01, .eps = 1e-12, .step = 1});
  EXPECT_NEAR(s.master[0], 0.99f, 1e-6f);
  EXPECT_NEAR(s.master[1], 1.01f, 1e-6f);
}

TEST(AdamDeathTest, EpsMustNotVanish) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  State<float, float, float> s(3, 1);
  EXPECT_DEATH((host::adam<float, float, float>(3, s.arrays(0), {.lr = 0.01, .eps = 1e-60})), "eps");
}

}  // namespace
}  // namespace zg::test
