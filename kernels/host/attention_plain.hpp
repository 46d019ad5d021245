// Attention in double, for tests: one score at a time. Private to attention.cpp. Pure functions; any thread.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ziggurat/kernels/types.hpp"
#include "ziggurat/kernels/visible_keys.hpp"

namespace zg::host {

// One query head of one sequence. causal: query i attends to keys up to i; else each query attends to all
// keys.
struct PlainHead {
  const double* q;
  std::int64_t ld_q;
  const double *k, *v;
  std::int64_t ld, queries, keys;
  bool causal;
  std::int64_t size, values;  // columns of a query or a key, and of a value
  VisibleBlockKeys visible;
  AttentionRule rule;
  const double* sink = nullptr;  // forward pass only; null: none

  double scale() const { return rule.scale == 0 ? 1.0 / std::sqrt(static_cast<double>(size)) : rule.scale; }
  std::int64_t begin(std::int64_t i) const { return visible.first(i); }
  std::int64_t end(std::int64_t i) const { return causal ? i + 1 : keys; }
  double score(std::int64_t i, std::int64_t j) const {
    double sum = 0;
    for (std::int64_t c = 0; c < size; ++c) sum += q[i * ld_q + c] * k[j * ld + c];
    const double score = sum * scale();
    return rule.softcap == 0 ? score : rule.softcap * std::tanh(score / rule.softcap);
  }
  // The derivative of score() with respect to the uncapped score.
  double slope(double score) const {
    const double t = rule.softcap == 0 ? 0 : score / rule.softcap;
    return 1 - t * t;
  }
};

// merge: merges the result with the one for other keys, which o and lse hold; else overwrites them.
inline void plain_forward(const PlainHead& x, double* o, std::int64_t ld_o, double* lse, bool merge) {
  std::vector<double> row(static_cast<std::size_t>(x.values));
  for (std::int64_t i = 0; i < x.queries; ++i, o += ld_o) {
    if (x.begin(i) >= x.end(i)) continue;  // the query sees none of the block's keys
    double max = x.score(i, x.begin(i)), sum = 0;
    for (std::int64_t j = x.end(i) - 1; j > x.begin(i); --j) max = std::max(max, x.score(i, j));
    std::fill(row.begin(), row.end(), 0.0);
    for (std::int64_t j = x.begin(i); j < x.end(i); ++j) {
      const double e = std::exp(x.score(i, j) - max);
      sum += e;
      for (std::int64_t c = 0; c < x.values; ++c) row[static_cast<std::size_t>(c)] += e * x.v[j * x.ld + c];
    }
    if (x.sink != nullptr) {
      const double top = std::max(max, *x.sink), rescale = std::exp(max - top);
      for (double& value : row) value *= rescale;
      sum = sum * rescale + std::exp(*x.sink - top), max = top;
    }
    const double here = max + std::log(sum);
    double keep = 0, take = 1, all = here;
    if (merge) {
      const double top = std::max(lse[i], here);
      all = top + std::log(std::exp(lse[i] - top) + std::exp(here - top));
      keep = std::exp(lse[i] - all), take = std::exp(here - all);
    }
    for (std::int64_t c = 0; c < x.values; ++c) {
      const double mine = row[static_cast<std::size_t>(c)] / sum;
      o[c] = merge ? o[c] * keep + mine * take : mine;
    }
    lse[i] = all;
  }
}

struct PlainGradients {
  const double *o, *d_o;
  std::int64_t ld_o, ld_do;
  const double* lse;
  double* dq;
  std::int64_t ld_dq;
  double *dk, *dv;
  std::int64_t ld;
};

// Adds to dq, dk and dv. Several query heads share dk and dv.
inline void plain_backward(const PlainHead& x, const PlainGradients& g) {
  for (std::int64_t i = 0; i < x.queries; ++i) {
    const double *o = g.o + i * g.ld_o, *d_o = g.d_o + i * g.ld_do;
    double* dq = g.dq + i * g.ld_dq;
    double delta = 0;
    for (std::int64_t c = 0; c < x.values; ++c) delta += d_o[c] * o[c];
    for (std::int64_t j = x.begin(i); j < x.end(i); ++j) {
      const double score = x.score(i, j), p = std::exp(score - g.lse[i]);
      double dp = 0;
      for (std::int64_t c = 0; c < x.values; ++c) dp += d_o[c] * x.v[j * x.ld + c];
      const double ds = p * (dp - delta) * x.scale() * x.slope(score);
      for (std::int64_t c = 0; c < x.size; ++c) {
        dq[c] += ds * x.k[j * x.ld + c];
        g.dk[j * g.ld + c] += ds * x.q[i * x.ld_q + c];
      }
      for (std::int64_t c = 0; c < x.values; ++c) g.dv[j * g.ld + c] += p * d_o[c];
    }
  }
}

}  // namespace zg::host
