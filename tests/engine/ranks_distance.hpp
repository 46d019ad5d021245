// How far two runs of the same training are from each other, and how far rounding may take them apart.
#pragma once
#include <fmt/core.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "engine/ranks_run.hpp"

namespace zg::test {

// Losses and norms relative to themselves, elements relative to the largest one of their tensor; the largest
// of all steps and tensors.
struct Distance {
  double first_loss = 0, loss = 0, norm = 0, eval = 0, gradient = 0, weight = 0;
  std::string weight_name;  // of the tensor whose weights are the furthest

  void raise(const Distance& o) {
    first_loss = std::max(first_loss, o.first_loss), loss = std::max(loss, o.loss);
    norm = std::max(norm, o.norm), eval = std::max(eval, o.eval);
    gradient = std::max(gradient, o.gradient);
    if (o.weight > weight) weight = o.weight, weight_name = o.weight_name;
  }
};

inline double relative(const std::vector<double>& a, const std::vector<double>& b) {
  double most = a.size() == b.size() ? 0 : INFINITY;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (std::isfinite(a[i]) || std::isfinite(b[i])) most = std::max(most, std::abs(a[i] / b[i] - 1));
  }
  return most;
}
template <class T>
double relative_to_largest(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return INFINITY;
  double scale = 0, far = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    scale = std::max(scale, std::abs(static_cast<double>(b[i])));
    far = std::max(far, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  }
  return scale > 0 ? far / scale : far;
}
// Each figure, relative to itself.
inline void expect_near(const std::vector<double>& a, const std::vector<double>& b, double most,
                        const char* what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  EXPECT_LE(relative(a, b), most) << what;
}
// Each tensor's elements, relative to its largest one.
template <class T>
void expect_near(const std::map<std::string, std::vector<T>>& a,
                 const std::map<std::string, std::vector<T>>& b, double most) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, values] : b) EXPECT_LE(relative_to_largest(a.at(name), values), most) << name;
}
inline std::vector<double> as_doubles(const std::vector<char>& bytes) {
  std::vector<double> values(bytes.size() / sizeof(double));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(double));
  return values;
}

inline std::map<std::string, std::vector<double>> as_doubles(
    const std::map<std::string, std::vector<char>>& tensors) {
  std::map<std::string, std::vector<double>> all;
  for (const auto& [name, bytes] : tensors) all[name] = as_doubles(bytes);
  return all;
}

// The step that a parameter makes, and the most that storing it before and behind has rounded off that: with
// SGD of rate 1 it is the gradient.
struct FirstStep {
  std::vector<double> values;
  double rounding = 0;
};
inline FirstStep first_step(const RanksOutcome& run, const std::string& name, std::size_t elements) {
  const std::vector<char>&before = run.first_weights.at(name), &after = run.second_weights.at(name);
  FirstStep step;
  const auto fill = [&](auto type, double epsilon) {
    double largest = 0;
    for (std::size_t i = 0; i < elements; ++i) {
      decltype(type) from = 0, to = 0;
      std::memcpy(&from, before.data() + i * sizeof from, sizeof from);
      std::memcpy(&to, after.data() + i * sizeof to, sizeof to);
      step.values.push_back(static_cast<double>(from) - static_cast<double>(to));
      largest = std::max(largest, std::abs(static_cast<double>(to)));
    }
    step.rounding = largest * epsilon / 2;  // half a unit in the last place of what is stored
  };
  if (before.size() == elements * sizeof(double)) {
    fill(double{}, std::numeric_limits<double>::epsilon());
  } else if (before.size() == elements * sizeof(float)) {
    fill(float{}, std::numeric_limits<float>::epsilon());
  }
  return step;
}
// How far the first gradients of SGD with rate 1 are from each other, but for what storing them rounds.
inline double first_steps_apart(const RanksOutcome& a, const RanksOutcome& b, const std::string& name,
                                std::size_t elements) {
  const FirstStep x = first_step(a, name, elements), y = first_step(b, name, elements);
  if (x.values.size() != y.values.size()) return INFINITY;
  double scale = 0, far = 0;
  for (std::size_t i = 0; i < x.values.size(); ++i) {
    scale = std::max(scale, std::abs(y.values[i]));
    far = std::max(far, std::abs(x.values[i] - y.values[i]));
  }
  return scale > 0 ? std::max(0.0, far - x.rounding - y.rounding) / scale : far;
}

// The distance of a from b. Two runs in fp64 are compared by their weights, others by their masters, which
// are read as floats. Gradients are those of the first step: its moments, or what SGD, which has none, has
// added.
inline Distance distance(const RanksOutcome& a, const RanksOutcome& b) {
  Distance d;
  d.first_loss = std::abs(a.losses[0] / b.losses[0] - 1);
  d.loss = relative(a.losses, b.losses);
  d.norm = relative(a.norms, b.norms);
  d.eval = relative(a.evals, b.evals);
  for (const auto& [name, values] : b.first_gradients)
    d.gradient = std::max(d.gradient, relative_to_largest(a.first_gradients.at(name), values));
  const bool steps = b.first_gradients.empty() && !b.second_weights.empty();
  for (const auto& [name, master] : b.masters) {
    if (steps) d.gradient = std::max(d.gradient, first_steps_apart(a, b, name, master.size()));
    const std::vector<char>&x = a.weights.at(name), &y = b.weights.at(name);
    const bool in_f64 = y.size() == master.size() * sizeof(double) && x.size() == y.size();
    Distance of_tensor;
    of_tensor.weight = in_f64 ? relative_to_largest(as_doubles(x), as_doubles(y))
                              : relative_to_largest(a.masters.at(name), master);
    of_tensor.weight_name = name;
    d.raise(of_tensor);
  }
  return d;
}

// In fp64 all that differs is the order of sums. Moments are read as floats; gradients of SGD are not.
constexpr double kRoundoff = 1e-11;
inline Distance allowed_in_f64(bool sgd = false) {
  return {kRoundoff, kRoundoff, kRoundoff, kRoundoff, sgd ? kRoundoff : 1e-6, kRoundoff, ""};
}

// Expects a run in fp64 to be another one to roundoff.
inline void expect_near_in_fp64(const RanksOutcome& now, const RanksOutcome& one) {
  expect_near(now.losses, one.losses, kRoundoff, "losses");
  expect_near(now.norms, one.norms, kRoundoff, "norms");
  expect_near(now.evals, one.evals, kRoundoff, "evaluations");
  expect_near(as_doubles(now.weights), as_doubles(one.weights), kRoundoff);
}

// In fp32, of training that does not magnify what the order of sums has changed: SGD that is steady, and
// AdamW behind clipping, of which no weights are compared, since it takes those apart whose gradient is
// nearly zero.
inline Distance allowed_in_f32(bool linear) {
  return {1e-6, 1e-6, 1e-5, 1e-6, 1e-5, linear ? 1e-5 : INFINITY, ""};
}
// The same of training that does, Lion's and AdamW's without clipping. How much they do shows in how far one
// rank's run in fp32 is from the same in fp64, `own`: two runs that are as far from fp64 may be twice as far
// from each other. That is an estimate, and fails where training diverges.
inline Distance allowed_in_f32_beside(const Distance& own, bool linear) {
  Distance d = allowed_in_f32(linear);
  d.loss = std::max(d.loss, 2 * own.loss), d.norm = std::max(d.norm, 2 * own.norm);
  d.eval = std::max(d.eval, 2 * own.eval), d.weight = std::max(d.weight, 2 * own.weight);
  return d;
}

inline void expect_within(const Distance& d, const Distance& most) {
  EXPECT_LE(d.first_loss, most.first_loss) << "of the first loss";
  EXPECT_LE(d.loss, most.loss) << "of the losses";
  EXPECT_LE(d.norm, most.norm) << "of the gradient norms";
  EXPECT_LE(d.eval, most.eval) << "of the evaluations";
  EXPECT_LE(d.gradient, most.gradient) << "of the first gradients";
  EXPECT_LE(d.weight, most.weight) << "of the weights of " << d.weight_name;
}

inline constexpr const char* kDistanceColumns =
    "first loss | losses | norms | evaluations | first gradients | weights |";
inline std::string distance_row(const Distance& d) {
  return fmt::format("{:.1e} | {:.1e} | {:.1e} | {:.1e} | {:.1e} | {:.1e} |", d.first_loss, d.loss, d.norm,
                     d.eval, d.gradient, d.weight);
}

}  // namespace zg::test
