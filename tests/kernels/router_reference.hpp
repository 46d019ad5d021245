// The router's choice, weights, probabilities and loss of one token, in plain fp64 loops.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ziggurat/kernels/router.hpp"

namespace zg::test {

using Numbers = std::vector<double>;
using Indices = std::vector<std::int32_t>;

inline double log_sum_of(const Numbers& logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const double z : logits) sum += std::exp(z - most);
  return most + std::log(sum);
}
inline Numbers softmax_of(const Numbers& logits) {
  Numbers p;
  for (const double z : logits) p.push_back(std::exp(z - log_sum_of(logits)));
  return p;
}
inline Numbers scores_of(const RouterRule& rule, const Numbers& logits) {
  if (rule.score == RouterScore::kSoftmax) return softmax_of(logits);
  Numbers s;
  for (const double z : logits) s.push_back(1 / (1 + std::exp(-z)));
  return s;
}
inline Numbers probabilities_of(const RouterRule& rule, const Numbers& logits) {
  Numbers p = scores_of(rule, logits);
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& x : p) x /= sum;
  return p;
}

// The indices of the `count` largest numbers, ascending. margin: at most the distance to the next one.
inline Indices largest_of(const Numbers& numbers, std::int64_t count, double& margin) {
  Indices order(numbers.size());
  std::iota(order.begin(), order.end(), 0);
  const auto number = [&](std::int32_t i) { return numbers[static_cast<std::size_t>(i)]; };
  std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    const bool a_is_nan = std::isnan(number(a)), b_is_nan = std::isnan(number(b));
    if (a_is_nan != b_is_nan) return b_is_nan;
    return a_is_nan || number(a) == number(b) ? a < b : number(a) > number(b);
  });
  const auto n = static_cast<std::size_t>(count);
  if (n < order.size()) margin = std::min(margin, number(order[n - 1]) - number(order[n]));
  order.resize(n);
  std::sort(order.begin(), order.end());
  return order;
}

// A token's experts, chosen by these numbers. margin: by how much they are chosen.
struct Choice {
  Indices experts;
  double margin = INFINITY;
};
inline Choice choice_of(const RouterRule& rule, const Numbers& numbers) {
  Choice choice;
  Numbers open = numbers;
  const std::size_t size = numbers.size() / static_cast<std::size_t>(rule.groups);
  if (rule.groups > 1) {
    Numbers groups;
    for (std::size_t first = 0; first < numbers.size(); first += size) {
      const Numbers group(numbers.begin() + static_cast<std::ptrdiff_t>(first),
                          numbers.begin() + static_cast<std::ptrdiff_t>(first + size));
      double unused = 0, sum = 0;
      for (const std::int32_t i : largest_of(group, rule.group_score == GroupScore::kLargest ? 1 : 2, unused))
        sum += group[static_cast<std::size_t>(i)];
      groups.push_back(sum);
    }
    open.clear();
    Indices experts;
    for (const std::int32_t g : largest_of(groups, rule.kept_groups, choice.margin)) {
      for (std::size_t e = static_cast<std::size_t>(g) * size; e < static_cast<std::size_t>(g + 1) * size;
           ++e) {
        open.push_back(numbers[e]);
        experts.push_back(static_cast<std::int32_t>(e));
      }
    }
    for (const std::int32_t i : largest_of(open, rule.per_token, choice.margin))
      choice.experts.push_back(experts[static_cast<std::size_t>(i)]);
    return choice;
  }
  choice.experts = largest_of(open, rule.per_token, choice.margin);
  return choice;
}

inline Numbers weights_of(const RouterRule& rule, const Numbers& logits, const Indices& experts) {
  const Numbers scores = scores_of(rule, logits);
  Numbers weights;
  double sum = rule.epsilon;
  for (const std::int32_t e : experts) sum += scores[static_cast<std::size_t>(e)];
  for (const std::int32_t e : experts) {
    const double score = scores[static_cast<std::size_t>(e)];
    weights.push_back(rule.scale * score / (rule.renormalize ? std::max(sum, rule.least_sum) : 1));
  }
  return weights;
}

inline double product_of(const Numbers& a, const Numbers& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

}  // namespace zg::test
