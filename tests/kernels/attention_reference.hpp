// Attention in fp64, written plainly: the full softmax of the stored inputs over the keys that the rule and
// the documents leave, with the sums of magnitudes that bound the errors of a computation in less.
#pragma once
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "tests/kernels/support.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg::test {

// The arithmetic's relative error of an operation. Tensor cores cut what they add, to fp32's 24 bits.
template <class T>
constexpr double arithmetic_error() {
  return sizeof(T) == 2 ? 0x1p-23 : unit_roundoff<Acc<T>>();
}

struct AttentionReference {
  // firsts: of each row of all sequences the first row that it sees; empty: all see row 0.
  // sinks: of all heads; empty: there are none.
  // tiny: what a probability or a score's gradient may lose beside its relative rounding to T, in units of
  // that.
  template <class T>
  AttentionReference(const AttentionShape& s, const Matrix<T>& qkv, const Matrix<T>& d_o,
                     std::vector<std::int32_t> firsts = {}, std::vector<double> of_heads = {})
      : shape(s),
        first_keys(std::move(firsts)),
        sinks(std::move(of_heads)),
        d_sinks(sinks.size()),
        d_sinks_size(sinks.size()),
        o(qkv.rows(), s.result_columns()),
        o_size(o),
        dqkv(qkv.rows(), qkv.cols()),
        dqkv_size(dqkv),
        lse(static_cast<std::size_t>(s.batch * s.heads * s.time)),
        tiny(least_error<T>() / unit_roundoff<T>()) {
    for (std::int64_t b = 0; b < s.batch; ++b) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        for (std::int64_t i = 0; i < s.time; ++i) row(qkv, d_o, b, h, i);
      }
    }
    terms = static_cast<double>(s.time * (s.heads / s.kv_heads) + s.head_size + s.values());
  }

  // |o - reference| <= this * o_size + half an ulp: probabilities are rounded to T (tensor cores), and sums
  // have `terms` terms at most, with probabilities' own errors of `worst` roundings.
  template <class T>
  double o_bound() const {
    return arithmetic_error<T>() * (worst + terms) + unit_roundoff<T>();
  }
  // The same for the gradients. A score's gradient, p * (dp - delta), is rounded to T; its delta is made of
  // an o with o_bound()'s error and its own rounding: 4 roundings in all.
  template <class T>
  double dqkv_bound() const {
    return arithmetic_error<T>() * (worst + terms) + 4 * unit_roundoff<T>();
  }

  AttentionShape shape;
  std::vector<std::int32_t> first_keys;
  std::vector<double> sinks, d_sinks, d_sinks_size;
  Matrix<double> o, o_size, dqkv, dqkv_size;
  std::vector<double> lse;
  double worst = 0;  // relative error of a probability, in the arithmetic's roundings
  double terms = 0, tiny = 0;

 private:
  // Whether a query sees a key, in the sequence whose first row is `sequence`.
  bool sees(std::int64_t sequence, std::int64_t query, std::int64_t key) const {
    if (shape.rule.window > 0 && !(query - shape.rule.window < key)) return false;
    return first_keys.empty() || key >= first_keys[static_cast<std::size_t>(sequence + query)];
  }
  template <class T>
  void row(const Matrix<T>& qkv, const Matrix<T>& d_o, std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::int64_t size = shape.head_size, kv = h / (shape.heads / shape.kv_heads),
                       first = b * shape.time, values = shape.values();
    const std::int64_t q_at = h * size, k_at = (shape.heads + kv) * size, o_at = h * values;
    const std::int64_t v_at = (shape.heads + shape.kv_heads) * size + kv * values;
    const double cap = shape.rule.softcap,
                 scale = shape.rule.scale != 0 ? shape.rule.scale : 1 / std::sqrt(static_cast<double>(size));
    std::vector<double> p(static_cast<std::size_t>(i + 1)), slope(p), dp(p), dp_size(p);
    double max = -std::numeric_limits<double>::infinity(), sum = 0, error = 0;
    for (std::int64_t j = 0; j <= i; ++j) {
      p[static_cast<std::size_t>(j)] = -std::numeric_limits<double>::infinity();
      if (!sees(first, i, j)) continue;
      double s = 0, magnitude = 0;
      for (std::int64_t c = 0; c < size; ++c) {
        const double product = qkv.get(first + i, q_at + c) * qkv.get(first + j, k_at + c);
        s += product, magnitude += std::abs(product);
      }
      s *= scale;
      // A score is rounded once for each term and when it is scaled; an exponential once for its argument.
      error = std::max(error, (static_cast<double>(size) + 4) * magnitude * scale + 4 * std::abs(s));
      if (cap != 0) {
        // A hyperbolic tangent has 5 roundings, and two products of its own.
        const double t = std::tanh(s / cap);
        slope[static_cast<std::size_t>(j)] = 1 - t * t;
        s = cap * t, error += 7 * std::abs(s);
      } else {
        slope[static_cast<std::size_t>(j)] = 1;
      }
      max = std::max(max, s);
      p[static_cast<std::size_t>(j)] = s;
    }
    const auto head = static_cast<std::size_t>(h);
    if (!sinks.empty()) max = std::max(max, sinks[head]), sum = std::exp(sinks[head] - max);
    for (double& s : p) sum += s = std::exp(s - max);
    for (double& s : p) s /= sum;
    const double log_sum = max + std::log(sum);
    lse[static_cast<std::size_t>((b * shape.heads + h) * shape.time + i)] = log_sum;
    // The errors of two scores (the maximum's, or the stored lse's), of lse, of some exponentials and of
    // their sum.
    worst = std::max(worst, 2 * error + 4 * std::abs(log_sum) + 8 + static_cast<double>(i + 1));
    // The slope of a cap, 1 - t^2 with t's error of at most error / cap, and three roundings.
    if (cap != 0)
      worst = std::max(worst,
                       2 * error * (1 + 1 / cap) + 4 * std::abs(log_sum) + 12 + static_cast<double>(i + 1));
    double delta = 0, delta_size = 0;
    for (std::int64_t j = 0; j <= i; ++j) {
      const auto at = static_cast<std::size_t>(j);
      if (!sees(first, i, j)) continue;
      for (std::int64_t c = 0; c < values; ++c) {
        const double v = qkv.get(first + j, v_at + c), g = d_o.get(first + i, o_at + c);
        o.at(first + i, o_at + c) += p[at] * v;
        o_size.at(first + i, o_at + c) += (p[at] + tiny) * std::abs(v);
        dp[at] += g * v, dp_size[at] += std::abs(g * v);
      }
      delta += p[at] * dp[at], delta_size += (p[at] + tiny) * dp_size[at];
    }
    if (!sinks.empty()) {
      const double of_sink = std::exp(sinks[head] - log_sum);
      d_sinks[head] -= of_sink * delta, d_sinks_size[head] += of_sink * delta_size;
    }
    for (std::int64_t j = 0; j <= i; ++j) {
      const auto at = static_cast<std::size_t>(j);
      if (!sees(first, i, j)) continue;
      const double ds = p[at] * (dp[at] - delta) * scale * slope[at],
                   ds_size = ((p[at] + tiny) * (dp_size[at] + delta_size) + tiny) * scale;
      for (std::int64_t c = 0; c < size; ++c) {
        const double q = qkv.get(first + i, q_at + c), k = qkv.get(first + j, k_at + c);
        dqkv.at(first + i, q_at + c) += ds * k, dqkv_size.at(first + i, q_at + c) += ds_size * std::abs(k);
        dqkv.at(first + j, k_at + c) += ds * q, dqkv_size.at(first + j, k_at + c) += ds_size * std::abs(q);
      }
      for (std::int64_t c = 0; c < values; ++c) {
        const double g = d_o.get(first + i, o_at + c);
        dqkv.at(first + j, v_at + c) += p[at] * g;
        dqkv_size.at(first + j, v_at + c) += (p[at] + tiny) * std::abs(g);
      }
    }
  }
};

// What is stored in T against the reference: |got - want| <= relative * size + one rounding to T. `lead`:
// columns of `got` before the first one that is compared.
template <class T>
void expect_near(const Matrix<T>& got, const Matrix<double>& want, const Matrix<double>& size,
                 double relative, const char* what, std::int64_t lead = 0) {
  int bad = 0;
  for (std::int64_t r = 0; r < want.rows(); ++r) {
    for (std::int64_t c = 0; c < want.cols(); ++c) {
      const double wanted = want.get(r, c),
                   tolerance = relative * size.get(r, c) + bound<T>(wanted, 1, wanted);
      const double error = std::abs(got.get(r, c + lead) - wanted);
      if (!(error <= tolerance) && ++bad <= 3) {
        ADD_FAILURE() << what << " [" << r << ", " << c << "]: " << got.get(r, c + lead) << ", expected "
                      << wanted << ", tolerance " << tolerance;
      }
    }
  }
  ASSERT_EQ(bad, 0) << what;
}

}  // namespace zg::test
