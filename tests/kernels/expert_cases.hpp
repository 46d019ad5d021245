// Experts' rows against fp64 formulae, for the kernels of the host and of CUDA: rows that are gathered and
// added, and weighed gated activations. activation_bounds.hpp has the bounds.
#pragma once
#include "tests/kernels/activation_bounds.hpp"
#include "ziggurat/kernels/router_arguments.hpp"

namespace zg::test {

using kernels::AddRows;
using kernels::ExpertBiasBackward;
using kernels::ExpertGate;
using kernels::ExpertGateBackward;
using kernels::GatherRows;

// Slots of so many different tokens, of `tokens` with `per_token` choices each, in ascending order.
inline std::vector<std::int32_t> slots_of(std::int64_t rows, std::int64_t tokens, std::int64_t per_token,
                                          std::mt19937_64& random) {
  std::vector<std::int32_t> slots;
  for (std::int64_t n = 0; n < tokens && static_cast<std::int64_t>(slots.size()) < rows; ++n) {
    const std::int64_t left = tokens - n, wanted = rows - static_cast<std::int64_t>(slots.size());
    if (wanted < left && random() % 3 == 0) continue;
    slots.push_back(static_cast<std::int32_t>(
        n * per_token + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(per_token))));
  }
  return slots;
}

template <class K>
class ExpertRows : public testing::Test {
 protected:
  static constexpr std::int64_t kTokens = 9, kPerToken = 3, kRows = 5;
  template <class Body>
  static void for_each_shape(const Body& body) {
    K::for_each_variant([&] {
      for (const std::int64_t cols : K::columns()) {
        for (const Layout layout : K::kLayouts) {
          SCOPED_TRACE(testing::Message() << cols << " columns, " << layout);
          body(cols, layout);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    });
  }
  // The operands of a gate and of its backward.
  struct Gated {
    using T = typename K::T;
    using A = typename K::A;
    Operand<T> gate_up, y, dy, again, d_gate_up;
    Operand<A> weights, d_weights;
    std::vector<std::int32_t> slots;
    OnDevice<std::int32_t> order;
    std::int64_t cols;
    // layout(i): that of operand i.
    template <class Layouts>
    Gated(std::int64_t columns, const Layouts& layout,
          std::mt19937_64& random) requires std::is_invocable_v<Layouts, int>
        : gate_up(kRows, 2 * columns, layout(0)),
          y(kRows, columns, layout(1)),
          dy(kRows, columns, layout(2)),
          again(kRows, columns, layout(3)),
          d_gate_up(kRows, 2 * columns, layout(4)),
          weights(kTokens, kPerToken, layout(5)),
          d_weights(kTokens, kPerToken, layout(6)),
          slots(slots_of(kRows, kTokens, kPerToken, random)),
          order(slots),
          cols(columns) {
      dy.fill_normal(random), weights.fill_normal(random, 0.5);
      d_weights.fill(77);
    }
    Gated(std::int64_t columns, Layout layout, std::mt19937_64& random)
        : Gated(
              columns, [&](int i) { return apart(layout, i); }, random) {}
    void send() {
      gate_up.send(), y.send(), dy.send(), again.send(), d_gate_up.send(), weights.send(), d_weights.send();
    }
    void forward(Gate gate) {
      K::expert_gate(Extent{kRows, cols}, ExpertGate<T>{.gate_up = gate_up.read(),
                                                        .order = order.data(),
                                                        .weights = weights.read(),
                                                        .per_token = kPerToken,
                                                        .gate = gate,
                                                        .y = y.view()});
    }
    void backward(Gate gate, Operand<T>& to, Operand<T>& d) {
      K::expert_gate_backward(Extent{kRows, cols}, ExpertGateBackward<T>{.gate_up = gate_up.read(),
                                                                         .order = order.data(),
                                                                         .weights = weights.read(),
                                                                         .per_token = kPerToken,
                                                                         .gate = gate,
                                                                         .dy = dy.read(),
                                                                         .y = to.view(),
                                                                         .d_gate_up = d.view(),
                                                                         .d_weights = d_weights.view()});
    }
    double weight(std::int64_t row) const {
      const std::int32_t slot = slots[static_cast<std::size_t>(row)];
      return weights(slot / kPerToken, slot % kPerToken);
    }
  };
};
TYPED_TEST_SUITE_P(ExpertRows);

TYPED_TEST_P(ExpertRows, AreGathered) {
  using T = typename TypeParam::T;
  auto random = generator(60);
  this->for_each_shape([&](std::int64_t cols, Layout layout) {
    Operand<T> x(this->kTokens, cols, layout), y(this->kRows, cols, apart(layout, 1));
    std::vector<std::int32_t> slots = slots_of(this->kRows, this->kTokens, this->kPerToken, random);
    OnDevice<std::int32_t> order(slots);
    x.fill_normal(random).send(), y.send();
    TypeParam::gather_rows(
        Extent{this->kRows, cols},
        GatherRows<T>{.x = x.read(), .order = order.data(), .per_token = this->kPerToken, .y = y.view()});
    y.fetch("y");
    for (std::int64_t r = 0; r < this->kRows; ++r) {
      const std::int64_t token = slots[static_cast<std::size_t>(r)] / this->kPerToken;
      for (std::int64_t c = 0; c < cols; ++c) ASSERT_EQ(y(r, c), x(token, c)) << r << ", " << c;
    }
  });
}

TYPED_TEST_P(ExpertRows, AreAddedAndRoundedOnce) {
  using T = typename TypeParam::T;
  using A = typename TypeParam::A;
  auto random = generator(61);
  this->for_each_shape([&](std::int64_t cols, Layout layout) {
    Operand<T> x(this->kRows, cols, layout);
    Operand<A> sum(this->kTokens, cols, apart(layout, 1));
    std::vector<std::int32_t> slots = slots_of(this->kRows, this->kTokens, this->kPerToken, random);
    OnDevice<std::int32_t> order(slots);
    x.fill_normal(random).send(), sum.fill_normal(random).send();
    Operand<A> expected(this->kTokens, cols);
    for (std::int64_t n = 0; n < this->kTokens; ++n) {
      for (std::int64_t c = 0; c < cols; ++c) expected.at(n, c) = sum.at(n, c);
    }
    for (std::int64_t r = 0; r < this->kRows; ++r) {
      const std::int64_t token = slots[static_cast<std::size_t>(r)] / this->kPerToken;
      for (std::int64_t c = 0; c < cols; ++c) expected.at(token, c) += static_cast<A>(x.at(r, c));
    }
    TypeParam::add_rows(
        Extent{this->kRows, cols},
        AddRows<T>{.x = x.read(), .order = order.data(), .per_token = this->kPerToken, .sum = sum.view()});
    sum.fetch("sum");
    EXPECT_TRUE(sum.same_bits(expected));
  });
}

// More rows than a grid is high.
TYPED_TEST_P(ExpertRows, ManyRows) {
  using T = typename TypeParam::T;
  using A = typename TypeParam::A;
  constexpr std::int64_t kMany = 65'541;
  Operand<T> x(kMany, 2, {1, 0}), y(kMany, 2, {2, 0});
  Operand<A> sum(kMany, 2);
  std::vector<std::int32_t> slots;
  for (std::int64_t r = 0; r < kMany; ++r) {
    slots.push_back(static_cast<std::int32_t>((kMany - 1 - r) * 2 + r % 2));
    for (const std::int64_t c : {0, 1}) x.set(r, c, static_cast<double>((r * 7 + c) % 251));
  }
  OnDevice<std::int32_t> order(slots);
  x.send(), y.send(), sum.fill(1).send();
  const Extent extent{kMany, 2};
  TypeParam::gather_rows(extent,
                         GatherRows<T>{.x = x.read(), .order = order.data(), .per_token = 2, .y = y.view()});
  TypeParam::add_rows(extent,
                      AddRows<T>{.x = x.read(), .order = order.data(), .per_token = 2, .sum = sum.view()});
  y.fetch("y"), sum.fetch("sum");
  for (std::int64_t r = 0; r < kMany; ++r) {
    ASSERT_EQ(y(r, 1), x(kMany - 1 - r, 1)) << r;
    ASSERT_EQ(sum(r, 1), 1 + x(kMany - 1 - r, 1)) << r;
  }
}

TYPED_TEST_P(ExpertRows, GatesMatchTheirDefinition) {
  using A = typename TypeParam::A;
  auto random = generator(62);
  this->for_each_shape([&](std::int64_t cols, Layout layout) {
    for (const Gate gate : {Gate::kSilu, Gate::kGeluTanh}) {
      SCOPED_TRACE(gate == Gate::kSilu ? "SiLU" : "GELU");
      typename ExpertRows<TypeParam>::Gated call(cols, layout, random);
      call.gate_up.fill_normal(random, 0, gate == Gate::kSilu ? 3 : 2);
      call.send();
      call.forward(gate);
      call.backward(gate, call.again, call.d_gate_up);
      call.y.fetch("y"), call.again.fetch("y again"), call.d_gate_up.fetch("d_gate_up"),
          call.d_weights.fetch("d_weights");
      EXPECT_TRUE(call.again.same_bits(call.y));
      for (std::int64_t r = 0; r < this->kRows; ++r) {
        double dot = 0, error = 0;
        for (std::int64_t c = 0; c < cols; ++c) {
          const double g = call.gate_up(r, c), u = call.gate_up(r, cols + c), e = call.dy(r, c),
                       w = call.weight(r);
          expect_value<TypeParam>(call.y(r, c), gate, g, u * w);
          expect_slope<TypeParam>(call.d_gate_up(r, c), gate, g, e * w * u);
          expect_value<TypeParam>(call.d_gate_up(r, cols + c), gate, g, e * w);
          const Activated a(gate, g);
          const double term = e * g * a.s * u;
          dot += term;
          error += std::abs(term) * (TypeParam::sigmoid_roundings(a.argument) + static_cast<double>(cols));
        }
        const std::int32_t slot = call.slots[static_cast<std::size_t>(r)];
        ASSERT_NEAR(call.d_weights(slot / this->kPerToken, slot % this->kPerToken), dot,
                    bound<A>(dot, 1, error))
            << r;
        call.d_weights.set(slot / this->kPerToken, slot % this->kPerToken, 77);
      }
      for (std::int64_t i = 0; i < this->kTokens * this->kPerToken; ++i)
        ASSERT_EQ(call.d_weights(i / this->kPerToken, i % this->kPerToken), 77) << "slot of no row: " << i;
    }
  });
}

// With y in the place of dy, or the gradient in that of gate and up, or both.
TYPED_TEST_P(ExpertRows, ResultsMayLieWhereOperandsDo) {
  auto random = generator(63);
  this->for_each_shape([&](std::int64_t cols, Layout layout) {
    for (const Gate gate : {Gate::kSilu, Gate::kGeluTanh}) {
      typename ExpertRows<TypeParam>::Gated call(cols, layout, random);
      call.gate_up.fill_normal(random);
      call.send();
      call.backward(gate, call.again, call.d_gate_up);
      call.again.fetch("y"), call.d_gate_up.fetch("d_gate_up"), call.d_weights.fetch("d_weights");
      const Matrix<double> d_weights = call.d_weights.values();
      call.d_weights.fill(77).send();
      call.backward(gate, call.dy, call.gate_up);
      call.dy.fetch("y in place"), call.gate_up.fetch("d_gate_up in place"),
          call.d_weights.fetch("d_weights");
      EXPECT_TRUE(call.dy.same_bits(call.again));
      EXPECT_TRUE(call.gate_up.same_bits(call.d_gate_up));
      EXPECT_TRUE(call.d_weights.values().same_bits(d_weights));
    }
  });
}

// A weight of 1 leaves the bits of swiglu().
TYPED_TEST_P(ExpertRows, AWeightOfOneChangesNothing) {
  using T = typename TypeParam::T;
  auto random = generator(64);
  TypeParam::for_each_variant([&] {
    for (const Gate gate : {Gate::kSilu, Gate::kGeluTanh}) {
      typename ExpertRows<TypeParam>::Gated call(43, {}, random);
      call.gate_up.fill_normal(random, 0, 3), call.weights.fill(1);
      call.send();
      call.forward(gate);
      Operand<T> plain(this->kRows, 43);
      plain.send();
      TypeParam::swiglu(Extent{this->kRows, 43}, call.gate_up.read(), plain.view(), gate);
      call.y.fetch("y"), plain.fetch("plain");
      EXPECT_TRUE(call.y.same_bits(plain));
    }
  });
}

// One operand alone that has gaps, or is not aligned, or has a pitch that is not, changes no bit but those of
// a row's sum, which is made in another order.
TYPED_TEST_P(ExpertRows, EachOperandsLayoutIsLookedAt) {
  using T = typename TypeParam::T;
  using A = typename TypeParam::A;
  using Call = typename ExpertRows<TypeParam>::Gated;
  constexpr Layout kUsual[] = {{0, 0}, {16, 0}}, kOdd[] = {{16, 0}, {5, 0}, {0, 1}, kUnaligned};
  constexpr std::int64_t kCols = 48, kThree = 3;
  const auto run = [](Call& call) {
    call.send();
    call.forward(Gate::kSilu);
    call.backward(Gate::kSilu, call.again, call.d_gate_up);
    call.y.fetch("y"), call.again.fetch("y again"), call.d_gate_up.fetch("d_gate_up");
  };
  const auto fill = [](Call& call) {
    auto random = generator(67);
    call.gate_up.fill_normal(random);
  };
  auto first_random = generator(68);
  Call expected(kCols, Layout{}, first_random);
  fill(expected), run(expected);
  for (const Layout usual : kUsual) {
    for (const Layout odd : kOdd) {
      for (const int which : {0, 1, 2, 3, 4}) {
        SCOPED_TRACE(testing::Message() << usual << ", operand " << which << ": " << odd);
        const auto layout = [&](int i) { return i == which ? odd : usual; };
        auto random = generator(68);
        Call call(kCols, layout, random);
        fill(call), run(call);
        EXPECT_TRUE(call.y.same_bits(expected.y));
        EXPECT_TRUE(call.again.same_bits(expected.y));
        EXPECT_TRUE(call.d_gate_up.same_bits(expected.d_gate_up));
        // Rows that are gathered and added: operands 0 to 2 have these layouts, too.
        Operand<T> x(kThree, kCols, layout(0)), rows(kThree, kCols, layout(1));
        Operand<A> sum(kThree, kCols, layout(2));
        std::vector<std::int32_t> slots = {2, 0, 1};
        OnDevice<std::int32_t> order(slots);
        x.fill_normal(random).send(), rows.send(), sum.fill(0).send();
        TypeParam::gather_rows(Extent{kThree, kCols},
                               GatherRows<T>{.x = x.read(), .order = order.data(), .y = rows.view()});
        TypeParam::add_rows(Extent{kThree, kCols},
                            AddRows<T>{.x = x.read(), .order = order.data(), .sum = sum.view()});
        rows.fetch("rows"), sum.fetch("sum");
        for (std::int64_t r = 0; r < kThree; ++r) {
          const std::int64_t token = slots[static_cast<std::size_t>(r)];
          for (std::int64_t c = 0; c < kCols; ++c) {
            ASSERT_EQ(rows(r, c), x(token, c));
            ASSERT_EQ(sum(token, c), x(r, c));
          }
        }
      }
    }
  }
}

// Rows that all begin at aligned addresses, but are no whole packs: up begins at none of these.
TYPED_TEST_P(ExpertRows, AlignedRowsNeedNotBeWholePacks) {
  using Call = typename ExpertRows<TypeParam>::Gated;
  const auto aligned = [](int i) { return Layout{i == 0 || i == 4 ? 10 : 5, 0}; };
  auto random = generator(69), again = generator(69);
  Call expected(43, Layout{}, random), call(43, aligned, again);
  expected.gate_up.fill_normal(random), call.gate_up.fill_normal(again);
  for (Call* const each : {&expected, &call}) {
    each->send();
    each->backward(Gate::kSilu, each->again, each->d_gate_up);
    each->again.fetch("y"), each->d_gate_up.fetch("d_gate_up");
  }
  EXPECT_TRUE(call.again.same_bits(expected.again));
  EXPECT_TRUE(call.d_gate_up.same_bits(expected.d_gate_up));
}

// Gates in the even columns and ups in the odd ones, both clamped, some of them at the limits; a NaN stays
// one.
TYPED_TEST_P(ExpertRows, PairsMatchTheirDefinition) {
  using T = typename TypeParam::T;
  using A = typename TypeParam::A;
  auto random = generator(70);
  this->for_each_shape([&](std::int64_t cols, Layout layout) {
    typename ExpertRows<TypeParam>::Gated call(cols, layout, random);
    call.gate_up.fill_normal(random, 0, 5);
    call.gate_up.set(1, 0, 7), call.gate_up.set(1, 1, -7), call.gate_up.set(2, 0, NAN),
        call.gate_up.set(3, 1, NAN);
    call.send();
    call.forward(Gate::kClampedPairs);
    call.backward(Gate::kClampedPairs, call.again, call.d_gate_up);
    call.y.fetch("y"), call.again.fetch("y again"), call.d_gate_up.fetch("d_gate_up"),
        call.d_weights.fetch("d_weights");
    EXPECT_TRUE(call.again.same_bits(call.y));
    for (std::int64_t r = 0; r < this->kRows; ++r) {
      double dot = 0, error = 0;
      for (std::int64_t c = 0; c < cols; ++c) {
        const double gate = call.gate_up(r, 2 * c), up = call.gate_up(r, 2 * c + 1), e = call.dy(r, c),
                     w = call.weight(r);
        if (std::isnan(gate) || std::isnan(up)) {
          EXPECT_TRUE(std::isnan(call.y(r, c))) << r << ", " << c;
          dot = NAN;
          continue;
        }
        const double g = std::min(gate, 7.0), u = std::clamp(up, -7.0, 7.0) + 1,
                     s = 1 / (1 + std::exp(-1.702 * g)), slope = gate > 7 ? 0 : s * (1 + 1.702 * g * (1 - s));
        const double roundings = TypeParam::sigmoid_roundings(1.702 * g) + 4;
        // up + 1 may cancel, and so may the terms of the slope.
        const auto expect = [&](double actual, double expected, double scale) {
          ASSERT_NEAR(actual, expected, bound<T>(expected, roundings, std::abs(scale))) << gate << ", " << up;
        };
        expect(call.y(r, c), g * s * u * w, g * s * (std::abs(u) + 2) * w);
        expect(call.d_gate_up(r, 2 * c), e * w * u * slope,
               e * w * (std::abs(u) + 2) * s * (1 + 4 * std::abs(g)));
        expect(call.d_gate_up(r, 2 * c + 1), std::abs(up) > 7 ? 0 : e * w * g * s, e * w * g * s);
        dot += e * g * s * u;
        error += std::abs(e * g * s * (std::abs(u) + 2)) * (roundings + static_cast<double>(cols));
      }
      const std::int32_t slot = call.slots[static_cast<std::size_t>(r)];
      const double found = call.d_weights(slot / this->kPerToken, slot % this->kPerToken);
      if (std::isnan(dot)) {
        EXPECT_TRUE(std::isnan(found));
      } else {
        EXPECT_NEAR(found, dot, bound<A>(dot, 1, error));
      }
    }
    // In place.
    const Matrix<double> d_weights = call.d_weights.values();
    call.d_weights.fill(77).send();
    call.backward(Gate::kClampedPairs, call.dy, call.gate_up);
    call.dy.fetch("y in place"), call.gate_up.fetch("d_gate_up in place"), call.d_weights.fetch("d_weights");
    EXPECT_TRUE(call.dy.same_bits(call.again));
    EXPECT_TRUE(call.gate_up.same_bits(call.d_gate_up));
  });
}

TYPED_TEST_P(ExpertRows, BiasesAreWeighed) {
  using T = typename TypeParam::T;
  using A = typename TypeParam::A;
  auto random = generator(71);
  this->for_each_shape([&](std::int64_t cols, Layout layout) {
    Operand<T> x(this->kRows, cols, layout), weighed(this->kRows, cols, apart(layout, 2)), bias(1, cols);
    Operand<A> sum(this->kTokens, cols, apart(layout, 1)), weights(this->kTokens, this->kPerToken),
        d_weights(this->kTokens, this->kPerToken);
    std::vector<std::int32_t> slots = slots_of(this->kRows, this->kTokens, this->kPerToken, random);
    OnDevice<std::int32_t> order(slots);
    x.fill_normal(random).send(), bias.fill_normal(random).send(), sum.fill(0.5).send();
    weights.fill_normal(random).send(), d_weights.fill(3).send(), weighed.fill(NAN).send();
    const Extent extent{this->kRows, cols};
    TypeParam::add_rows(extent, AddRows<T>{.x = x.read(),
                                           .order = order.data(),
                                           .per_token = this->kPerToken,
                                           .sum = sum.view(),
                                           .bias = bias.read().data,
                                           .weights = weights.read()});
    ExpertBiasBackward<T> args{.dy = x.read(),
                               .order = order.data(),
                               .weights = weights.read(),
                               .per_token = this->kPerToken,
                               .bias = bias.read().data,
                               .d_weights = d_weights.view(),
                               .weighed = weighed.view()};
    TypeParam::expert_bias_backward(extent, args);
    args.weighed = {};
    TypeParam::expert_bias_backward(extent, args);
    args.d_weights = {};
    TypeParam::expert_bias_backward(extent, args);  // changes nothing
    sum.fetch("sum"), weighed.fetch("weighed"), d_weights.fetch("d_weights");
    for (std::int64_t r = 0; r < this->kRows; ++r) {
      const std::int32_t slot = slots[static_cast<std::size_t>(r)];
      const std::int64_t token = slot / this->kPerToken, choice = slot % this->kPerToken;
      const double w = weights(token, choice);
      double dot = 0, size = 0;
      for (std::int64_t c = 0; c < cols; ++c) {
        const double added = x(r, c) + w * bias(0, c),
                     size_of_sum = 0.5 + std::abs(x(r, c)) + std::abs(w * bias(0, c));
        ASSERT_NEAR(sum(token, c), 0.5 + added, bound<A>(0.5 + added, 1, 4 * size_of_sum)) << r << ", " << c;
        ASSERT_NEAR(weighed(r, c), x(r, c) * w, bound<T>(x(r, c) * w, 1, std::abs(x(r, c) * w)));
        dot += x(r, c) * bias(0, c), size += std::abs(x(r, c) * bias(0, c));
      }
      // The dot product is added twice.
      ASSERT_NEAR(d_weights(token, choice), 3 + 2 * dot,
                  bound<A>(3 + 2 * dot, 1, (static_cast<double>(cols) + 4) * (3 + 2 * size)));
      d_weights.set(token, choice, 3);
    }
    for (std::int64_t i = 0; i < this->kTokens * this->kPerToken; ++i)
      ASSERT_EQ(d_weights(i / this->kPerToken, i % this->kPerToken), 3) << "slot of no row: " << i;
  });
}

TYPED_TEST_P(ExpertRows, SameBitsInAnyOrder) {
  auto random = generator(65);
  typename ExpertRows<TypeParam>::Gated call(1500, {}, random);
  call.gate_up.fill_normal(random);
  std::vector<Matrix<double>> first;
  TypeParam::for_each_order([&] {
    call.d_weights.fill(77), call.again.fill(NAN), call.d_gate_up.fill(NAN);
    call.send();
    call.backward(Gate::kSilu, call.again, call.d_gate_up);
    call.again.fetch("y"), call.d_gate_up.fetch("d_gate_up"), call.d_weights.fetch("d_weights");
    if (first.empty()) first = {call.again.values(), call.d_gate_up.values(), call.d_weights.values()};
    EXPECT_TRUE(call.again.values().same_bits(first[0]));
    EXPECT_TRUE(call.d_gate_up.values().same_bits(first[1]));
    EXPECT_TRUE(call.d_weights.values().same_bits(first[2]));
  });
}

TYPED_TEST_P(ExpertRows, NothingOfNoRows) {
  auto random = generator(66);
  using T = typename TypeParam::T;
  typename ExpertRows<TypeParam>::Gated call(8, {}, random);
  call.gate_up.fill(1), call.dy.fill(2), call.y.fill(3), call.again.fill(3), call.d_gate_up.fill(3);
  call.send();
  constexpr Extent kNone{0, 8};
  TypeParam::expert_gate(kNone, ExpertGate<T>{.gate_up = call.gate_up.read(),
                                              .weights = call.weights.read(),
                                              .per_token = this->kPerToken,
                                              .y = call.y.view()});
  TypeParam::expert_gate_backward(kNone, ExpertGateBackward<T>{.gate_up = call.gate_up.read(),
                                                               .weights = call.weights.read(),
                                                               .per_token = this->kPerToken,
                                                               .dy = call.dy.read(),
                                                               .y = call.again.view(),
                                                               .d_gate_up = call.d_gate_up.view(),
                                                               .d_weights = call.d_weights.view()});
  TypeParam::gather_rows(kNone, GatherRows<T>{.x = call.gate_up.read(), .y = call.y.view()});
  TypeParam::add_rows(kNone, AddRows<T>{.x = call.y.read(), .sum = call.weights.view()});
  call.y.fetch("y"), call.again.fetch("y again"), call.d_weights.fetch("d_weights");
  for (std::int64_t c = 0; c < 8; ++c) {
    EXPECT_EQ(call.y(0, c), 3);
    EXPECT_EQ(call.again(0, c), 3);
  }
  for (std::int64_t j = 0; j < this->kPerToken; ++j) EXPECT_EQ(call.d_weights(0, j), 77);
}

REGISTER_TYPED_TEST_SUITE_P(ExpertRows, AreGathered, AreAddedAndRoundedOnce, ManyRows,
                            GatesMatchTheirDefinition, PairsMatchTheirDefinition, BiasesAreWeighed,
                            ResultsMayLieWhereOperandsDo, AWeightOfOneChangesNothing,
                            EachOperandsLayoutIsLookedAt, AlignedRowsNeedNotBeWholePacks, SameBitsInAnyOrder,
                            NothingOfNoRows);

}  // namespace zg::test
