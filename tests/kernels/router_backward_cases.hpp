// Gradients of routers, for the kernels of the host and of CUDA: against differences of the loss in fp64, and
// with bounds for each type.
#pragma once
#include "tests/kernels/router_cases.hpp"

namespace zg::test {

using kernels::RouteBackward;

// What a loss is made of: factors of the weights, of p, and of squared log-sum-exps.
struct RouterLoss {
  RouterRule rule;
  bool balanced = false;
  double z_factor = 0;
};
// The loss of a token whose experts are given.
inline double loss_of(const RouterLoss& loss, const Numbers& logits, const Indices& experts,
                      const Numbers& d_weights, const Numbers& balance) {
  const double of_weights = product_of(weights_of(loss.rule, logits, experts), d_weights);
  const double of_p = loss.balanced ? product_of(probabilities_of(loss.rule, logits), balance) : 0;
  const double log_sum = log_sum_of(logits);
  return of_weights + of_p + loss.z_factor * log_sum * log_sum;
}

// A call of route_backward() for type T, behind one of route() for A. Both kinds of K are given, since the
// two ops have different types.
template <class K, class KA>
struct RoutedBack {
  using T = typename K::T;
  using A = typename K::A;
  RouterLoss loss;
  Routed<KA> forward;
  Operand<A> d_weights, balance;
  Operand<T> d_logits;

  RoutedBack(std::int64_t tokens, std::int64_t experts, std::int64_t parts, const RouterLoss& l,
             Layout layout)
      : loss(l),
        forward(tokens, experts, l.rule, layout),
        d_weights(tokens, l.rule.per_token, apart(layout, 3)),
        balance(parts, experts, apart(layout, 4)),
        d_logits(tokens, experts, apart(layout, 5)) {}
  void run() {
    d_weights.send(), balance.send(), d_logits.send();
    K::route_backward(
        Extent{d_logits.rows(), d_logits.cols()},
        RouteBackward<T>{.logits = forward.logits.read(),
                         .chosen = forward.chosen.read(),
                         .weights = forward.weights.read(),
                         .d_weights = d_weights.read(),
                         .rule = loss.rule,
                         .balance = loss.balanced ? balance.read() : Strided<const A>(),
                         .tokens_per_part = loss.balanced ? d_logits.rows() / balance.rows() : 1,
                         .z_factor = loss.z_factor,
                         .d_logits = d_logits.view()});
    d_logits.fetch("d_logits");
  }
  std::int64_t part_of(std::int64_t token) const {
    return token / std::max<std::int64_t>(1, d_logits.rows() / balance.rows());
  }
};

inline std::vector<RouterLoss> losses_of(std::int64_t per_token) {
  std::vector<RouterLoss> losses;
  for (const RouterRule& rule : rules_of(per_token)) {
    for (const bool balanced : {false, true}) {
      for (const double z_factor : {0.0, 0.125}) losses.push_back({rule, balanced, z_factor});
    }
  }
  return losses;
}

// K's kernels in double.
template <class K>
class RouterSlopes : public testing::Test {
 protected:
  static void expect_slopes(std::int64_t experts, const RouterLoss& loss, bool biased,
                            std::mt19937_64& random) {
    SCOPED_TRACE(testing::Message() << experts << " experts, " << description(loss.rule) << ", balance "
                                    << loss.balanced << ", z " << loss.z_factor);
    RoutedBack<K, K> call(6, experts, 2, loss, {5, 1});
    call.forward.fill(random, biased);
    call.d_weights.fill_normal(random), call.balance.fill_normal(random);
    call.forward.run(), call.run();
    for (std::int64_t n = 0; n < 6; ++n) {
      Numbers logits = row_of(call.forward.logits, n);
      const Numbers d_weights = row_of(call.d_weights, n), balance = row_of(call.balance, call.part_of(n));
      const Indices chosen = call.forward.experts(n);
      for (std::size_t e = 0; e < logits.size(); ++e) {
        const double expected =
            slope(logits[e], [&] { return loss_of(loss, logits, chosen, d_weights, balance); });
        // Differences err by h^2 = 1e-10 times a third derivative of some units, and by the loss' rounding,
        // 1e-15 times some units, over h.
        ASSERT_NEAR(call.d_logits(n, static_cast<std::int64_t>(e)), expected, 1e-8) << n << ", " << e;
      }
    }
  }
};
TYPED_TEST_SUITE_P(RouterSlopes);

TYPED_TEST_P(RouterSlopes, OfEachRuleAndTerm) {
  TypeParam::for_each_variant([&] {
    auto random = generator(45);
    for (const RouterLoss& loss : losses_of(3)) this->expect_slopes(12, loss, false, random);
  });
}
// Experts that scores alone would not choose; all experts; more experts than a warp has lanes.
TYPED_TEST_P(RouterSlopes, OfOtherChoices) {
  auto random = generator(46);
  for (const RouterLoss& loss : losses_of(4)) this->expect_slopes(12, loss, true, random);
  for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    const RouterRule all{.score = score, .per_token = 5, .renormalize = true, .epsilon = 0.25};
    this->expect_slopes(5, {all, true, 0.5}, false, random);
    const RouterRule many{.score = score, .per_token = 36, .renormalize = true};
    this->expect_slopes(70, {many, true, 0.5}, false, random);
  }
}
// As the gate of a shared expert.
TYPED_TEST_P(RouterSlopes, OfOneExpert) {
  auto random = generator(47);
  this->expect_slopes(1, {{.score = RouterScore::kSigmoid}, false, 0}, false, random);
}
REGISTER_TYPED_TEST_SUITE_P(RouterSlopes, OfEachRuleAndTerm, OfOtherChoices, OfOneExpert);

// Each T, where K::Of<A> has the kernels for A, T's arithmetic.
template <class K>
class RouterGradients : public testing::Test {};
TYPED_TEST_SUITE_P(RouterGradients);

// The gradient in A, rounded once.
TYPED_TEST_P(RouterGradients, AreRoundedOnce) {
  using T = typename TypeParam::T;
  using KA = typename TypeParam::template Of<Acc<T>>;
  TypeParam::for_each_variant([] {
    auto random = generator(48);
    for (const std::int64_t experts : {12, 45}) {
      for (const RouterLoss& loss : losses_of(3)) {
        for (const Layout layout : {Layout{0, 0}, kUnaligned}) {
          RoutedBack<TypeParam, KA> call(4, experts, 2, loss, layout);
          RoutedBack<KA, KA> exact(4, experts, 2, loss, apart(layout, 6));
          call.forward.fill(random, false), call.d_weights.fill_normal(random),
              call.balance.fill_normal(random);
          for (std::int64_t n = 0; n < 4; ++n) {
            for (std::int64_t e = 0; e < experts; ++e) {
              exact.forward.logits.at(n, e) = call.forward.logits.at(n, e);
              if (n < 2) exact.balance.at(n, e) = call.balance.at(n, e);
              if (e < 3) exact.d_weights.at(n, e) = call.d_weights.at(n, e);
            }
          }
          call.forward.run(), call.run();
          exact.forward.run(), exact.run();
          for (std::int64_t n = 0; n < 4; ++n) {
            for (std::int64_t e = 0; e < experts; ++e) {
              const T expected = static_cast<T>(exact.d_logits.at(n, e));
              ASSERT_EQ(std::memcmp(&call.d_logits.at(n, e), &expected, sizeof(T)), 0) << n << ", " << e;
            }
          }
        }
      }
    }
  });
}

// In A, against the same kernel in double.
TYPED_TEST_P(RouterGradients, ErrByRoundings) {
  using T = typename TypeParam::T;
  using A = Acc<T>;
  using KD = typename TypeParam::template Of<double>;
  using KA = typename TypeParam::template Of<A>;
  TypeParam::for_each_variant([] {
    auto random = generator(49);
    for (const RouterLoss& loss : losses_of(3)) {
      SCOPED_TRACE(testing::Message()
                   << description(loss.rule) << ", balance " << loss.balanced << ", z " << loss.z_factor);
      RoutedBack<TypeParam, KA> call(4, 32, 2, loss, {});
      RoutedBack<KD, KD> exact(4, 32, 2, loss, {});
      call.forward.fill(random, false), call.d_weights.fill_normal(random), call.balance.fill_normal(random);
      for (std::int64_t n = 0; n < 4; ++n) {
        for (std::int64_t e = 0; e < 32; ++e) {
          exact.forward.logits.at(n, e) = call.forward.logits(n, e);
          if (n < 2) exact.balance.at(n, e) = call.balance(n, e);
          if (e < 3) exact.d_weights.at(n, e) = call.d_weights(n, e);
        }
      }
      call.forward.run(), call.run();
      exact.forward.run(), exact.run();
      for (std::int64_t n = 0; n < 4; ++n) {
        const Numbers logits = row_of(call.forward.logits, n), p = probabilities_of(loss.rule, logits),
                      z = softmax_of(logits);
        const Numbers balance = row_of(exact.balance, call.part_of(n));
        double of_weights = 0, of_balance = 0;
        for (std::int64_t j = 0; j < 3; ++j)
          of_weights += std::abs(exact.forward.weights(n, j) * exact.d_weights(n, j));
        for (std::size_t e = 0; e < p.size() && loss.balanced; ++e) of_balance += p[e] * std::abs(balance[e]);
        const double of_z = 2 * loss.z_factor * std::abs(log_sum_of(logits));
        // A score errs by these, a weight by them and a sum's, and each product by a few more.
        const double roundings = 3 * score_roundings(logits) + 32 + 16;
        for (std::size_t e = 0; e < p.size(); ++e) {
          const auto c = static_cast<std::int64_t>(e);
          double size =
              p[e] * (of_weights + of_balance + (loss.balanced ? std::abs(balance[e]) : 0)) + z[e] * of_z;
          // The log-sum-exp errs by as many roundings of 1.
          size += 2 * loss.z_factor * z[e];
          const Indices chosen = call.forward.experts(n);
          const auto found = std::find(chosen.begin(), chosen.end(), static_cast<std::int32_t>(e));
          if (found != chosen.end()) {
            const std::int64_t j = found - chosen.begin();
            const double weight = exact.forward.weights(n, j);
            size += weight * (std::abs(exact.d_weights(n, j)) + of_weights / loss.rule.scale);
          }
          ASSERT_NEAR(call.d_logits(n, c), exact.d_logits(n, c),
                      bound<T>(exact.d_logits(n, c), roundings, size))
              << n << ", " << e;
        }
      }
    }
  });
}

TYPED_TEST_P(RouterGradients, OfNoNumbersOrNoTokens) {
  using KA = typename TypeParam::template Of<typename TypeParam::A>;
  TypeParam::for_each_variant([] {
    for (const RouterLoss& loss : losses_of(3)) {
      RoutedBack<TypeParam, KA> none(0, 12, 1, loss, {}), call(2, 12, 1, loss, {});
      none.forward.run(), none.run();
      call.forward.logits.fill(1).set(0, 4, NAN);
      call.d_weights.fill(1), call.balance.fill(1);
      call.forward.run(), call.run();
      for (std::int64_t e = 0; e < 12; ++e) EXPECT_TRUE(std::isfinite(call.d_logits(1, e)));
      if (loss.rule.score != RouterScore::kSoftmax || !loss.balanced) continue;
      EXPECT_TRUE(std::isnan(call.d_logits(0, 4)));
    }
  });
}
REGISTER_TYPED_TEST_SUITE_P(RouterGradients, AreRoundedOnce, ErrByRoundings, OfNoNumbersOrNoTokens);

}  // namespace zg::test
