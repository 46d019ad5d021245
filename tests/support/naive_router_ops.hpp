// The ops for mixtures of experts in the plainest fp64 loops: the part of NaiveOps (naive_ops.hpp) that has
// them.
#pragma once
#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <vector>

#include "ziggurat/device/ops.hpp"

namespace zg::test {

class NaiveRouterOps : public Ops {
 public:
  void route(Stream&, const RouteArgs& args) override {
    const auto& [logits, bias, rule, chosen, weights] = args;
    for (std::int64_t n = 0; n < logits.rows; ++n) {
      const std::vector<double> s = scores(rule, logits, n);
      std::vector<double> numbers = s;
      for (std::size_t e = 0; e < s.size(); ++e)
        numbers[e] += bias ? at(bias, 0, static_cast<std::int64_t>(e)) : 0;
      const std::vector<std::int64_t> experts = chosen_by(rule, numbers);
      double sum = 0;
      for (const std::int64_t e : experts) sum += s[static_cast<std::size_t>(e)];
      const double by = rule.renormalize ? std::max(sum + rule.epsilon, rule.least_sum) : 1;
      for (std::int64_t j = 0; j < rule.per_token; ++j) {
        const std::int64_t e = experts[static_cast<std::size_t>(j)];
        id_at(chosen, n, j) = static_cast<std::int32_t>(e);
        at(weights, n, j) = rule.scale * s[static_cast<std::size_t>(e)] / by;
      }
    }
  }

  // The gradient of each score, and then that of each logit by the whole matrix of derivatives.
  void route_backward(Stream&, const RouteBackwardArgs& args) override {
    const auto& [logits, chosen, weights, d_weights, rule, balance, z_factor, d_logits] = args;
    for (std::int64_t n = 0; n < logits.rows; ++n) {
      const std::vector<double> s = scores(rule, logits, n), p = probabilities(rule, logits, n),
                                z = softmax(logits, n);
      std::vector<double> ds(s.size(), 0.0), dp(s.size(), 0.0);
      double sum = 0;
      for (std::int64_t j = 0; j < rule.per_token; ++j) sum += s[index(chosen, n, j)];
      const double by = rule.renormalize ? std::max(sum + rule.epsilon, rule.least_sum) : 1;
      for (std::int64_t i = 0; i < rule.per_token; ++i) {
        const double d = at(d_weights, n, i) * rule.scale;
        ds[index(chosen, n, i)] += d / by;
        if (!rule.renormalize || sum + rule.epsilon < rule.least_sum) continue;
        for (std::int64_t j = 0; j < rule.per_token; ++j)
          ds[index(chosen, n, j)] -= d * s[index(chosen, n, i)] / (by * by);
      }
      for (std::size_t e = 0; e < dp.size() && balance; ++e)
        dp[e] = at(balance, n / (logits.rows / balance.rows), static_cast<std::int64_t>(e));
      const double all = std::accumulate(s.begin(), s.end(), 0.0);
      for (std::size_t e = 0; e < s.size(); ++e) {
        double d = 2 * z_factor * log_sum(logits, n) * z[e];
        for (std::size_t i = 0; i < s.size(); ++i) {
          const double same = i == e ? 1 : 0;
          if (rule.score == RouterScore::kSoftmax) {
            d += (ds[i] + dp[i]) * p[i] * (same - p[e]);
          } else {
            const double slope = s[e] * (1 - s[e]);
            d += ds[i] * same * slope + dp[i] * (same / all - s[i] / (all * all)) * slope;
          }
        }
        at(d_logits, n, static_cast<std::int64_t>(e)) = d;
      }
    }
  }

  void router_sums(Stream&, const RouterSumsArgs& args) override {
    const auto& [logits, chosen, rule, sums, scratch] = args;
    const std::int64_t experts = logits.cols;
    for (std::int64_t r = 0; r < sums.rows; ++r) {
      for (std::int64_t c = 0; c < sums.cols; ++c) at(sums, r, c) = 0;
    }
    for (std::int64_t n = 0; n < logits.rows; ++n) {
      const std::int64_t part = n / (logits.rows / sums.rows);
      const std::vector<double> p = probabilities(rule, logits, n);
      for (std::int64_t e = 0; e < experts; ++e) at(sums, part, e) += p[static_cast<std::size_t>(e)];
      for (std::int64_t j = 0; j < rule.per_token; ++j) at(sums, part, experts + id_at(chosen, n, j)) += 1;
      at(sums, part, 2 * experts) += std::pow(log_sum(logits, n), 2);
    }
  }

  void sort_slots(Stream&, const SortSlotsArgs& args) override {
    const auto& [chosen, starts, order, scratch] = args;
    std::vector<std::int32_t> slots(static_cast<std::size_t>(chosen.count()));
    std::iota(slots.begin(), slots.end(), 0);
    const auto expert = [&](std::int32_t slot) {
      return id_at(chosen, slot / chosen.cols, slot % chosen.cols);
    };
    std::stable_sort(slots.begin(), slots.end(),
                     [&](std::int32_t a, std::int32_t b) { return expert(a) < expert(b); });
    for (std::int64_t e = 0; e < starts.cols; ++e) {
      id_at(starts, 0, e) = static_cast<std::int32_t>(
          std::count_if(slots.begin(), slots.end(), [&](std::int32_t slot) { return expert(slot) < e; }));
    }
    for (std::int64_t r = 0; r < order.cols; ++r) id_at(order, 0, r) = slots[static_cast<std::size_t>(r)];
  }

  void gather_rows(Stream&, const GatherRowsArgs& args) override {
    const auto& [x, order, per_token, y] = args;
    for (std::int64_t r = 0; r < y.rows; ++r) {
      for (std::int64_t c = 0; c < y.cols; ++c) at(y, r, c) = at(x, id_at(order, 0, r) / per_token, c);
    }
  }
  void add_rows(Stream&, const AddRowsArgs& args) override {
    const auto& [x, order, per_token, sum, bias, weights] = args;
    for (std::int64_t r = 0; r < x.rows; ++r) {
      const std::int32_t slot = id_at(order, 0, r);
      for (std::int64_t c = 0; c < x.cols; ++c)
        at(sum, slot / per_token, c) += at(x, r, c) + (bias ? at_slot(weights, slot) * at(bias, 0, c) : 0);
    }
  }
  void expert_bias_backward(Stream&, const ExpertBiasBackwardArgs& args) override {
    const auto& [dy, order, weights, bias, d_weights, weighed] = args;
    for (std::int64_t r = 0; r < dy.rows; ++r) {
      const std::int32_t slot = id_at(order, 0, r);
      for (std::int64_t c = 0; c < dy.cols; ++c) {
        if (d_weights) at_slot(d_weights, slot) += at(dy, r, c) * at(bias, 0, c);
        if (weighed) at(weighed, r, c) = at(dy, r, c) * at_slot(weights, slot);
      }
    }
  }

  void expert_gate(Stream&, const ExpertGateArgs& args) override {
    const auto& [gate_up, order, weights, gate, y] = args;
    for (std::int64_t r = 0; r < y.rows; ++r) {
      for (std::int64_t c = 0; c < y.cols; ++c) {
        const Gated g = gated(gate, gate_up, r, c);
        at(y, r, c) = g.activated.value * g.up.value * at_slot(weights, id_at(order, 0, r));
      }
    }
  }
  void expert_gate_backward(Stream&, const ExpertGateBackwardArgs& args) override {
    const auto& [gate_up, order, weights, gate, dy, y, d_gate_up, d_weights] = args;
    for (std::int64_t r = 0; r < y.rows; ++r) {
      const std::int32_t slot = id_at(order, 0, r);
      const double w = at_slot(weights, slot);
      double dot = 0;
      for (std::int64_t c = 0; c < y.cols; ++c) {
        const auto [a, up] = gated(gate, gate_up, r, c);
        const double e = at(dy, r, c);
        dot += e * a.value * up.value;
        at(y, r, c) = a.value * up.value * w;
        at(d_gate_up, r, gate_column(gate, c)) = e * w * up.value * a.slope;
        at(d_gate_up, r, up_column(gate, c, y.cols)) = e * w * a.value * up.slope;
      }
      at_slot(d_weights, slot) = dot;
    }
  }

 protected:
  static double& at(const View& x, std::int64_t row, std::int64_t column) {
    ZG_ASSERT(row >= 0 && row < x.rows && column >= 0 && column < x.cols);
    return x.as<double>()[row * x.ld + column];
  }
  static std::int64_t id(const View& ids, std::int64_t n) { return ids.as<std::int32_t>()[n]; }
  static std::int32_t& id_at(const View& ids, std::int64_t row, std::int64_t column) {
    ZG_ASSERT(row >= 0 && row < ids.rows && column >= 0 && column < ids.cols);
    return ids.as<std::int32_t>()[row * ids.ld + column];
  }
  static double gelu_inner(double x) { return std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x); }

  static double gelu_of(double x) { return 0.5 * x * (1 + std::tanh(gelu_inner(x))); }
  static double gelu_slope(double x) {
    const double t = std::tanh(gelu_inner(x));
    const double inner_slope = std::sqrt(2 / std::numbers::pi) * (1 + 3 * 0.044715 * x * x);
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner_slope;
  }

  // An activation of a gate, and its derivative.
  struct Activated {
    double value, slope;
  };
  static Activated activated(Gate gate, double x) {
    if (gate == Gate::kGeluTanh) return {gelu_of(x), gelu_slope(x)};
    const double sigmoid = 1 / (1 + std::exp(-x));
    return {x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))};
  }

 private:
  static std::size_t index(const View& ids, std::int64_t row, std::int64_t column) {
    return static_cast<std::size_t>(id_at(ids, row, column));
  }
  // Where gate and up of column c lie, and both as they are multiplied.
  static std::int64_t gate_column(Gate gate, std::int64_t c) {
    return gate == Gate::kClampedPairs ? 2 * c : c;
  }
  static std::int64_t up_column(Gate gate, std::int64_t c, std::int64_t cols) {
    return gate == Gate::kClampedPairs ? 2 * c + 1 : cols + c;
  }
  struct Gated {
    Activated activated, up;
  };
  static Gated gated(Gate gate, const View& gate_up, std::int64_t r, std::int64_t c) {
    const double g = at(gate_up, r, gate_column(gate, c)),
                 u = at(gate_up, r, up_column(gate, c, gate_up.cols / 2));
    if (gate != Gate::kClampedPairs) return {activated(gate, g), {u, 1}};
    const double x = std::min(g, 7.0), s = 1 / (1 + std::exp(-1.702 * x));
    return {{x * s, g > 7 ? 0 : s + 1.702 * x * s * (1 - s)},
            {std::clamp(u, -7.0, 7.0) + 1, std::abs(u) > 7 ? 0.0 : 1.0}};
  }
  static double& at_slot(const View& x, std::int32_t slot) { return at(x, slot / x.cols, slot % x.cols); }
  static double log_sum(const View& logits, std::int64_t n) {
    double most = at(logits, n, 0), sum = 0;
    for (std::int64_t e = 1; e < logits.cols; ++e) most = std::max(most, at(logits, n, e));
    for (std::int64_t e = 0; e < logits.cols; ++e) sum += std::exp(at(logits, n, e) - most);
    return most + std::log(sum);
  }
  static std::vector<double> softmax(const View& logits, std::int64_t n) {
    std::vector<double> p;
    for (std::int64_t e = 0; e < logits.cols; ++e)
      p.push_back(std::exp(at(logits, n, e) - log_sum(logits, n)));
    return p;
  }
  static std::vector<double> scores(const RouterRule& rule, const View& logits, std::int64_t n) {
    if (rule.score == RouterScore::kSoftmax) return softmax(logits, n);
    std::vector<double> s;
    for (std::int64_t e = 0; e < logits.cols; ++e) s.push_back(1 / (1 + std::exp(-at(logits, n, e))));
    return s;
  }
  static std::vector<double> probabilities(const RouterRule& rule, const View& logits, std::int64_t n) {
    std::vector<double> p = scores(rule, logits, n);
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& x : p) x /= sum;
    return p;
  }
  // The indices of the largest numbers, ascending.
  static std::vector<std::int64_t> largest(const std::vector<double>& numbers, std::int64_t count) {
    std::vector<std::int64_t> order(numbers.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
      return numbers[static_cast<std::size_t>(a)] > numbers[static_cast<std::size_t>(b)];
    });
    order.resize(static_cast<std::size_t>(count));
    std::sort(order.begin(), order.end());
    return order;
  }
  static std::vector<std::int64_t> chosen_by(const RouterRule& rule, std::vector<double> numbers) {
    if (rule.groups > 1) {
      const std::size_t size = numbers.size() / static_cast<std::size_t>(rule.groups);
      std::vector<double> of_groups;
      for (std::size_t first = 0; first < numbers.size(); first += size) {
        std::vector<double> group(numbers.begin() + static_cast<std::ptrdiff_t>(first),
                                  numbers.begin() + static_cast<std::ptrdiff_t>(first + size));
        std::sort(group.rbegin(), group.rend());
        of_groups.push_back(rule.group_score == GroupScore::kLargest ? group[0] : group[0] + group[1]);
      }
      const std::vector<std::int64_t> kept = largest(of_groups, rule.kept_groups);
      for (std::size_t e = 0; e < numbers.size(); ++e) {
        const auto group = static_cast<std::int64_t>(e / size);
        if (std::find(kept.begin(), kept.end(), group) == kept.end()) numbers[e] = -INFINITY;
      }
    }
    return largest(numbers, rule.per_token);
  }
};

}  // namespace zg::test
