// Routing against fp64 formulae, for the kernels of the host and of CUDA: choices, weights and sums over
// tokens. router_backward_cases.hpp has gradients, expert_cases.hpp has the experts' rows.
#pragma once
#include <limits>
#include <optional>
#include <set>

#include "tests/kernels/operand.hpp"
#include "tests/kernels/router_reference.hpp"
#include "ziggurat/kernels/router_arguments.hpp"

namespace zg::test {

using kernels::Route;
using kernels::RouterSums;
using kernels::SortSlots;

template <class T>
Numbers row_of(const Operand<T>& x, std::int64_t r) {
  Numbers row;
  for (std::int64_t c = 0; c < x.cols(); ++c) row.push_back(x(r, c));
  return row;
}

// Roundings of a score, relative to it: the exponent is that of z - max, or z, and errs by as many units as
// it is large; a sum of E terms; a handful of others.
inline double score_roundings(const Numbers& logits) {
  double least = INFINITY, most = -INFINITY;
  for (const double z : logits) least = std::min(least, z), most = std::max(most, z);
  return 2 * std::max({std::abs(least), std::abs(most), most - least}) + static_cast<double>(logits.size()) +
         16;
}

// The rules that are tested, for at least 12 experts in a multiple of 4.
inline std::vector<RouterRule> rules_of(std::int64_t per_token) {
  std::vector<RouterRule> rules;
  for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    const RouterRule plain{.score = score, .per_token = per_token};
    rules.push_back(plain);
    const auto add = [&](const auto& change) {
      rules.push_back(plain);
      change(rules.back());
    };
    add([](RouterRule& r) { r.scale = 2.5; });
    add([](RouterRule& r) { r.renormalize = true; });
    add([](RouterRule& r) { r.renormalize = true, r.epsilon = 0.125, r.scale = 1.5; });
    add([](RouterRule& r) { r.renormalize = true, r.least_sum = 4096, r.scale = 3; });  // more than the sum
    add([](RouterRule& r) { r.renormalize = true, r.least_sum = 0x1p-30, r.epsilon = 0x1p-4; });  // less
    add([](RouterRule& r) { r.groups = 4, r.kept_groups = 2; });
    add([](RouterRule& r) { r.groups = 4, r.kept_groups = 3, r.group_score = GroupScore::kLargest; });
  }
  return rules;
}
inline testing::Message description(const RouterRule& r) {
  return testing::Message() << (r.score == RouterScore::kSoftmax ? "softmax" : "sigmoid") << ", "
                            << r.per_token << " a token, renormalize " << r.renormalize << ", epsilon "
                            << r.epsilon << ", least sum " << r.least_sum << ", scale " << r.scale << ", "
                            << r.kept_groups << " of " << r.groups << " groups";
}

// A call of route(), and its results.
template <class K>
struct Routed {
  using A = typename K::A;
  Operand<A> logits;
  std::optional<Operand<A>> bias;
  RouterRule rule;
  Operand<std::int32_t> chosen;
  Operand<A> weights;

  Routed(std::int64_t tokens, std::int64_t experts, const RouterRule& r, Layout layout = {})
      : logits(tokens, experts, layout),
        rule(r),
        chosen(tokens, r.per_token, apart(layout, 1)),
        weights(tokens, r.per_token, apart(layout, 2)) {
    logits.fill(0);
  }
  void run() {
    logits.send(), chosen.fill(-1).send(), weights.fill(-1).send();
    if (bias) bias->send();
    K::route(Extent{logits.rows(), logits.cols()}, Route<A>{.logits = logits.read(),
                                                            .choice_bias = bias ? bias->data() : nullptr,
                                                            .rule = rule,
                                                            .chosen = chosen.view(),
                                                            .weights = weights.view()});
    chosen.fetch("chosen"), weights.fetch("weights");
  }
  Indices experts(std::int64_t token) const {
    Indices row;
    for (std::int64_t j = 0; j < chosen.cols(); ++j) row.push_back(chosen.at(token, j));
    return row;
  }
  // The numbers by which experts are chosen, rounded as the kernel has them or not at all.
  Numbers numbers(std::int64_t token) const {
    Numbers by = scores_of(rule, row_of(logits, token));
    for (std::size_t e = 0; e < by.size() && bias; ++e) by[e] += (*bias)(0, static_cast<std::int64_t>(e));
    return by;
  }
  // Normal logits, and where wanted a bias, with which no two experts or groups are so close that roundings
  // decide.
  void fill(std::mt19937_64& random, bool biased) {
    std::normal_distribution<double> normal(0, 2);
    if (biased) bias.emplace(1, logits.cols()).fill_normal(random, 0, 0.5);
    for (std::int64_t n = 0; n < logits.rows(); ++n) {
      do {
        for (std::int64_t e = 0; e < logits.cols(); ++e) logits.set(n, e, normal(random));
      } while (choice_of(rule, numbers(n)).margin < 1e-5);
    }
  }
};

template <class K>
class Routing : public testing::Test {
 protected:
  static void expect_distinct(const Indices& experts, std::int64_t count) {
    for (std::size_t j = 0; j < experts.size(); ++j) {
      EXPECT_TRUE(experts[j] >= 0 && experts[j] < count && (j == 0 || experts[j - 1] < experts[j]))
          << "choice " << j << " is " << experts[j];
    }
  }
};
TYPED_TEST_SUITE_P(Routing);

TYPED_TEST_P(Routing, ChoosesAndWeighsByTheRule) {
  using A = typename TypeParam::A;
  TypeParam::for_each_variant([] {
    auto random = generator(40);
    for (const std::int64_t experts : {12, 32, 160, 300}) {
      for (const RouterRule& rule : rules_of(experts == 300 ? 40 : 3)) {
        for (const bool biased : {false, true}) {
          for (const Layout layout : {Layout{0, 0}, kUnaligned}) {
            SCOPED_TRACE(testing::Message()
                         << experts << " experts, " << description(rule) << ", bias " << biased);
            Routed<TypeParam> call(experts == 12 ? 9 : 3, experts, rule, layout);
            call.fill(random, biased);
            call.run();
            for (std::int64_t n = 0; n < call.logits.rows(); ++n) {
              const Numbers logits = row_of(call.logits, n);
              const Indices expected = choice_of(rule, call.numbers(n)).experts;
              ASSERT_EQ(call.experts(n), expected) << "token " << n;
              const Numbers weights = weights_of(rule, logits, expected);
              for (std::size_t j = 0; j < weights.size(); ++j) {
                // The score, the sum of scores, and a handful of roundings.
                const double roundings =
                    2 * score_roundings(logits) + static_cast<double>(rule.per_token) + 8;
                ASSERT_NEAR(call.weights(n, static_cast<std::int64_t>(j)), weights[j],
                            bound<A>(weights[j], roundings, weights[j]))
                    << "token " << n << ", choice " << j;
              }
            }
          }
        }
      }
    }
  });
}

// Equal numbers: the lower experts, of the lower groups.
TYPED_TEST_P(Routing, TiesGoToLowerIndices) {
  for (const std::int64_t experts : {1, 8, 40, 1024}) {
    for (const std::int64_t per_token : {std::int64_t{1}, std::min<std::int64_t>(experts, 7), experts}) {
      Routed<TypeParam> call(2, experts, {.per_token = per_token});
      call.run();
      for (std::int64_t j = 0; j < per_token; ++j) ASSERT_EQ(call.chosen.at(1, j), j);
    }
  }
  for (const GroupScore score : {GroupScore::kLargest, GroupScore::kSumOfTwo}) {
    for (const bool biased : {false, true}) {
      // The last group is the best; of the others, which are equal, the first is kept.
      Routed<TypeParam> call(1, 16, {.per_token = 6, .groups = 4, .kept_groups = 2, .group_score = score});
      if (biased) call.bias.emplace(1, 16).fill(0.25);
      call.logits.set(0, 15, 1), call.logits.set(0, 13, 1);
      call.run();
      EXPECT_EQ(call.experts(0), (Indices{0, 1, 2, 3, 13, 15}));
    }
  }
  // A zero is no smaller than the other zero.
  Routed<TypeParam> call(1, 8, {.per_token = 2});
  call.logits.fill(-1), call.logits.set(0, 2, -0.0), call.logits.set(0, 5, 0.0), call.logits.set(0, 7, 0.0);
  call.run();
  EXPECT_EQ(call.experts(0), (Indices{2, 5}));
}

// Scores that round to the same number.
TYPED_TEST_P(Routing, LogitsDecideWithoutABias) {
  Routed<TypeParam> call(1, 64, {.score = RouterScore::kSigmoid, .per_token = 2});
  call.logits.fill(50), call.logits.set(0, 37, 51), call.logits.set(0, 62, 52);
  call.run();
  EXPECT_EQ(call.experts(0), (Indices{37, 62}));
  EXPECT_EQ(call.weights(0, 0), call.weights(0, 1));
}

// Groups count the two largest, or the largest; the others' experts are not chosen, however large.
TYPED_TEST_P(Routing, GroupsDecideFirst) {
  for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    for (const GroupScore of : {GroupScore::kLargest, GroupScore::kSumOfTwo}) {
      Routed<TypeParam> call(
          1, 9, {.score = score, .per_token = 3, .groups = 3, .kept_groups = 1, .group_score = of});
      const double logits[] = {-9, 2.2, -9, 2, 2, 1.5, -9, 2.1, -8};
      for (std::int64_t e = 0; e < 9; ++e) call.logits.set(0, e, logits[e]);
      call.run();
      EXPECT_EQ(call.experts(0), of == GroupScore::kLargest ? (Indices{0, 1, 2}) : (Indices{3, 4, 5}));
    }
  }
}

// The bias chooses, and leaves the weight alone.
TYPED_TEST_P(Routing, TheBiasIsNoPartOfTheWeight) {
  for (const bool renormalize : {false, true}) {
    Routed<TypeParam> call(1, 4,
                           {.score = RouterScore::kSigmoid, .per_token = 2, .renormalize = renormalize});
    call.bias.emplace(1, 4).fill(0);
    call.bias->set(0, 3, 0.875);
    call.run();
    EXPECT_EQ(call.experts(0), (Indices{0, 3}));
    for (const std::int64_t j : {0, 1}) EXPECT_EQ(call.weights(0, j), 0.5);  // sigmoid(0), or its half of 1
  }
}

TYPED_TEST_P(Routing, NoNumbersStillGiveDifferentExperts) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = INFINITY;
  TypeParam::for_each_variant([] {
    auto random = generator(41);
    for (const std::int64_t experts : {12, 200}) {
      for (const RouterRule& rule : rules_of(5)) {
        for (const bool biased : {false, true}) {
          SCOPED_TRACE(testing::Message()
                       << experts << " experts, " << description(rule) << ", bias " << biased);
          Routed<TypeParam> call(7, experts, rule);
          if (biased) call.bias.emplace(1, experts).fill(0.5);
          for (std::int64_t n = 0; n < 7; ++n) {
            for (std::int64_t e = 0; e < experts; ++e) {
              const double special[] = {kNan, kInfinity, -kInfinity};
              const double number = static_cast<double>(random() % 100) / 8;
              call.logits.set(n, e, n < 3 ? special[n] : random() % 3 != 0 ? special[random() % 3] : number);
            }
          }
          call.logits.set(6, 0, kNan);  // the only one there
          for (std::int64_t e = 1; e < experts; ++e) call.logits.set(6, e, -static_cast<double>(e % 50));
          call.run();
          for (std::int64_t n = 0; n < 7; ++n) {
            Routing<TypeParam>::expect_distinct(call.experts(n), experts);
            if (biased || rule.groups > 1) continue;
            const Numbers logits = row_of(call.logits, n);
            EXPECT_EQ(call.experts(n), choice_of(rule, logits).experts) << "token " << n;
          }
          // A NaN is not taken for a number: all of a softmax are NaN.
          if (rule.score != RouterScore::kSoftmax) continue;
          EXPECT_TRUE(std::isnan(call.weights(6, 0)));
        }
      }
    }
  });
}

TYPED_TEST_P(Routing, NothingOfNoTokens) {
  Routed<TypeParam> call(0, 8, {.per_token = 2});
  call.run();
}

// Sums of p, numbers of slots and squared log-sum-exps of each part of the tokens.
TYPED_TEST_P(Routing, SumsOverTokens) {
  using A = typename TypeParam::A;
  struct Case {
    std::int64_t tokens, parts, experts;
  };
  const std::int64_t many = TypeParam::kRowGroups + 3;
  TypeParam::for_each_variant([&] {
    auto random = generator(42);
    for (const Case c : {Case{24, 1, 12}, Case{24, 3, 12}, Case{24, 24, 12}, Case{2 * many, many, 1},
                         Case{2 * many + 1, 1, 33}, Case{0, 1, 12}, Case{4, 2, 1024},
                         Case{5 * TypeParam::kRowGroups + 2, 1, 4}}) {
      for (const RouterScore score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
        SCOPED_TRACE(testing::Message() << c.tokens << " tokens in " << c.parts << " parts");
        Routed<TypeParam> call(c.tokens, c.experts,
                               {.score = score, .per_token = std::min<std::int64_t>(c.experts, 3)}, {5, 1});
        call.logits.fill_normal(random, 0, 2);
        call.run();
        Operand<A> sums(c.parts, 2 * c.experts + 1, {3, 0}),
            scratch(TypeParam::kRowGroups, 2 * c.experts + 1, {2, 0});
        sums.send(), scratch.send();
        TypeParam::router_sums(Extent{c.tokens, c.experts}, RouterSums<A>{.logits = call.logits.read(),
                                                                          .chosen = call.chosen.read(),
                                                                          .rule = call.rule,
                                                                          .parts = c.parts,
                                                                          .sums = sums.view(),
                                                                          .scratch = scratch.view()});
        sums.fetch("sums"), scratch.fetch("scratch");
        const std::int64_t of_part = c.tokens / c.parts;
        for (std::int64_t part = 0; part < c.parts; ++part) {
          Numbers p(static_cast<std::size_t>(c.experts), 0.0), slots = p;
          double squares = 0, square_error = 0, roundings = static_cast<double>(of_part);
          for (std::int64_t n = part * of_part; n < (part + 1) * of_part; ++n) {
            const Numbers logits = row_of(call.logits, n), own = probabilities_of(call.rule, logits);
            for (std::size_t e = 0; e < own.size(); ++e) p[e] += own[e];
            for (const std::int32_t e : call.experts(n)) slots[static_cast<std::size_t>(e)] += 1;
            const double log_sum = log_sum_of(logits), of_token = score_roundings(logits);
            squares += log_sum * log_sum;
            // The sum errs by a score's roundings, of itself, and so does its logarithm in all.
            const double error = of_token * unit_roundoff<A>();
            square_error += (2 * std::abs(log_sum) + error) * error;
            roundings = std::max(roundings, static_cast<double>(of_part) + 3 * of_token);
          }
          for (std::int64_t e = 0; e < c.experts; ++e) {
            const double expected = p[static_cast<std::size_t>(e)];
            ASSERT_NEAR(sums(part, e), expected, bound<A>(expected, roundings, expected))
                << part << ", " << e;
            ASSERT_EQ(sums(part, c.experts + e), slots[static_cast<std::size_t>(e)]) << part << ", " << e;
          }
          ASSERT_NEAR(sums(part, 2 * c.experts), squares,
                      square_error + bound<A>(squares, static_cast<double>(of_part) + 4, squares));
        }
      }
    }
  });
}

// No bit depends on threads, or on the order of blocks.
TYPED_TEST_P(Routing, SameBitsInAnyOrder) {
  using A = typename TypeParam::A;
  const std::int64_t tokens = 2 * TypeParam::kRowGroups + 5, experts = 40, cols = 2 * experts + 1;
  auto random = generator(44);
  Routed<TypeParam> call(tokens, experts, {.per_token = 4, .renormalize = true});
  call.logits.fill_normal(random);
  Operand<A> sums(1, cols), scratch(TypeParam::kRowGroups, cols);
  std::vector<Matrix<double>> first;
  TypeParam::for_each_order([&] {
    call.run();
    sums.fill(NAN).send(), scratch.fill(NAN).send();
    TypeParam::router_sums(Extent{tokens, experts}, RouterSums<A>{.logits = call.logits.read(),
                                                                  .chosen = call.chosen.read(),
                                                                  .rule = call.rule,
                                                                  .sums = sums.view(),
                                                                  .scratch = scratch.view()});
    sums.fetch("sums");
    if (first.empty()) first = {call.weights.values(), call.chosen.values(), sums.values()};
    EXPECT_TRUE(call.weights.values().same_bits(first[0]));
    EXPECT_TRUE(call.chosen.values().same_bits(first[1]));
    EXPECT_TRUE(sums.values().same_bits(first[2]));
  });
}

REGISTER_TYPED_TEST_SUITE_P(Routing, ChoosesAndWeighsByTheRule, TiesGoToLowerIndices,
                            LogitsDecideWithoutABias, GroupsDecideFirst, TheBiasIsNoPartOfTheWeight,
                            NoNumbersStillGiveDifferentExperts, NothingOfNoTokens, SumsOverTokens,
                            SameBitsInAnyOrder);

template <class K>
class SlotSorting : public testing::Test {};
TYPED_TEST_SUITE_P(SlotSorting);

TYPED_TEST_P(SlotSorting, ByExpertAndToken) {
  const std::int64_t many = 2 * TypeParam::kRowGroups + 7;
  struct Case {
    std::int64_t tokens, experts, per_token;
  };
  std::vector<Case> cases = {{0, 3, 2},       {1, 1, 1},   {5, 1, 1},  {many, 4, 4},
                             {many, 1024, 3}, {3, 90, 90}, {9, 70, 40}};
  auto random = generator(43);
  for (int i = 0; i < 8; ++i) {
    const std::int64_t experts = 1 + static_cast<std::int64_t>(random() % 64);
    cases.push_back({static_cast<std::int64_t>(random() % 200), experts,
                     1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(experts))});
  }
  for (const Case& c : cases) {
    for (const bool same : {false, true}) {  // all tokens have the last experts
      SCOPED_TRACE(testing::Message() << c.tokens << " tokens, " << c.per_token << " of " << c.experts);
      Operand<std::int32_t> chosen(c.tokens, c.per_token, {same ? 3 : 0, 1}), starts(1, c.experts + 1),
          order(1, c.tokens * c.per_token), scratch(TypeParam::kRowGroups, c.experts, {2, 0});
      for (std::int64_t n = 0; n < c.tokens; ++n) {
        std::set<std::int32_t> experts;
        while (static_cast<std::int64_t>(experts.size()) < c.per_token) {
          experts.insert(static_cast<std::int32_t>(
              same ? c.experts - 1 - static_cast<std::int64_t>(experts.size())
                   : static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(c.experts))));
        }
        std::int64_t j = 0;
        for (const std::int32_t e : experts) chosen.at(n, j++) = e;
      }
      const auto sort = [&] {
        chosen.send(), starts.fill(-1).send(), order.fill(-1).send(), scratch.fill(-7).send();
        TypeParam::sort_slots(Extent{c.tokens, c.experts}, SortSlots{.chosen = chosen.read(),
                                                                     .per_token = c.per_token,
                                                                     .starts = starts.data(),
                                                                     .order = order.data(),
                                                                     .scratch = scratch.view()});
        starts.fetch("starts"), order.fetch("order"), scratch.fetch("scratch");
        ASSERT_EQ(starts.at(0, 0), 0);
        ASSERT_EQ(starts.at(0, c.experts), c.tokens * c.per_token);
        std::vector<int> seen(static_cast<std::size_t>(c.tokens * c.per_token), 0);
        for (std::int64_t e = 0; e < c.experts; ++e) {
          ASSERT_LE(starts.at(0, e), starts.at(0, e + 1));
          for (std::int32_t r = starts.at(0, e); r < starts.at(0, e + 1); ++r) {
            const std::int32_t slot = order.at(0, r);
            ASSERT_TRUE(slot >= 0 && slot < c.tokens * c.per_token) << slot;
            ASSERT_EQ(chosen.at(slot / c.per_token, slot % c.per_token), e) << "row " << r;
            ASSERT_EQ(seen[static_cast<std::size_t>(slot)]++, 0) << "slot " << slot;
            if (r == starts.at(0, e)) continue;
            ASSERT_LT(order.at(0, r - 1), slot) << "row " << r;
          }
        }
      };
      c.tokens == many && !same ? TypeParam::for_each_order(sort) : sort();
    }
  }
}
REGISTER_TYPED_TEST_SUITE_P(SlotSorting, ByExpertAndToken);

}  // namespace zg::test
