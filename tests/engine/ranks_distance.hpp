// How far two runs of the same training are from each other, and how far rounding may take them apart.
#pragma once
#include <fmt/core.h>

#include <cmath>
#include <cstring>
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

// The distance of a from b. Two runs in fp64 are compared by their weights, others by their masters, which
// are read as floats.
inline Distance distance(const RanksOutcome& a, const RanksOutcome& b) {
  Distance d;
  d.first_loss = std::abs(a.losses[0] / b.losses[0] - 1);
  d.loss = relative(a.losses, b.losses);
  d.norm = relative(a.norms, b.norms);
  d.eval = relative(a.evals, b.evals);
  for (const auto& [name, values] : b.first_gradients)
    d.gradient = std::max(d.gradient, relative_to_largest(a.first_gradients.at(name), values));
  for (const auto& [name, master] : b.masters) {
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

// In fp64 all that differs is the order of sums. Moments are read as floats.
constexpr double kRoundoff = 1e-11;
inline Distance allowed_in_f64() {
  return {kRoundoff, kRoundoff, kRoundoff, kRoundoff, 1e-6, kRoundoff, ""};
}

// Expects a run in fp64 to be another one to roundoff.
inline void expect_near_in_fp64(const RanksOutcome& now, const RanksOutcome& one) {
  expect_near(now.losses, one.losses, kRoundoff, "losses");
  expect_near(now.norms, one.norms, kRoundoff, "norms");
  expect_near(now.evals, one.evals, kRoundoff, "evaluations");
  expect_near(as_doubles(now.weights), as_doubles(one.weights), kRoundoff);
}

// In fp32, where steps magnify what the order of sums has changed: the more so the further a step goes, and
// in AdamW and Lion where a gradient is nearly zero. How much they do shows in how far one rank's run in fp32
// is from the same in fp64, `own`: two runs that are as far from fp64 may be twice as far from each other.
// That is an estimate, and fails where training diverges. `linear`: the updates are multiples of the
// gradients, so weights are compared too.
inline Distance allowed_in_f32(const Distance& own, bool linear) {
  const auto at_least = [](double least, double distance) { return std::max(least, 2 * distance); };
  return {1e-6,
          at_least(1e-6, own.loss),
          at_least(1e-5, own.norm),
          at_least(1e-6, own.eval),
          1e-5,
          linear ? at_least(1e-5, own.weight) : INFINITY,
          ""};
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
