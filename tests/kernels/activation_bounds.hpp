// Activations in fp64, and bounds of those that kernels compute. K has the differences between the host and
// CUDA: how often a sigmoid is rounded, and where its exponent is bounded.
#pragma once
#include <algorithm>
#include <cmath>
#include <numbers>

#include "tests/kernels/operand.hpp"

namespace zg::test {

inline double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}
// The argument of GELU's sigmoid. GPT-2 writes 0.5 x (1 + tanh(u)); as x / (1 + exp(-2u)) it does not cancel,
// so that the bound can be relative.
inline double two_u(double x) {
  return 2 * std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
}

// x * sigmoid(argument(x)) and its derivative, as the sigmoid's parts. Nothing changes beyond 30.
struct Activated {
  double s, rest, argument, slope;  // rest = 1 - s; slope: of the argument, times x
  Activated(Gate gate, double x) {
    const double b = std::clamp(x, -30.0, 30.0);
    argument = gate == Gate::kSilu ? x : two_u(b);
    slope = x * (gate == Gate::kSilu ? 1 : 2 * std::sqrt(2 / std::numbers::pi) * (1 + 3 * 0.044715 * b * b));
    s = sigmoid(argument), rest = sigmoid(-argument);
  }
};

// What the bound of the exponent leaves where the limit is 0. It errs itself, but far less than by its
// rounding to T, 2^-8 at most.
template <class K>
double floor_of(double x) {
  return std::abs(x) * std::exp(-K::kLargestExponent) * (1 + 0x1p-7);
}

// The value times `factor`: relative to it.
template <class K>
void expect_value(double actual, Gate gate, double x, double factor) {
  const Activated a(gate, x);
  const double expected = x * a.s * factor;
  ASSERT_NEAR(actual, expected,
              bound<typename K::T>(expected, K::sigmoid_roundings(a.argument), std::abs(expected)) +
                  floor_of<K>(x * factor))
      << x;
}
// The derivative s + x argument' s (1 - s) times `factor`. The terms may cancel. Where 1 - s is small, it
// errs by some roundings of s, which is close to 1.
template <class K>
void expect_slope(double actual, Gate gate, double x, double factor) {
  const Activated a(gate, x);
  const double expected = factor * (a.s + a.slope * a.s * a.rest), slope = std::abs(a.slope);
  const double roundings = K::sigmoid_roundings(a.argument);
  const double error = a.s * (roundings + slope * std::min(roundings, a.rest * roundings + 8));
  ASSERT_NEAR(actual, expected,
              bound<typename K::T>(expected, 1, std::abs(factor) * error) + floor_of<K>(factor) * (1 + slope))
      << x;
}

}  // namespace zg::test
