#include "ziggurat/step/balance.hpp"

#include <numeric>

#include "ziggurat/base/error.hpp"

namespace zg {

std::vector<double> balance_factors(BalanceKind kind, const BalanceShape& shape, const SumsOf& sums,
                                    std::int64_t layer, std::int64_t m, std::span<const double> total) {
  const RouterSums own = sums(layer, m);
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  const double experts = number(shape.experts), rows = number(shape.rows), all = number(shape.all_rows),
               chosen = number(shape.per_token), layers = number(shape.layers);
  // f / (number of tokens in the step) for an expert that n tokens have chosen.
  const auto of_micro_batch = [&](std::int64_t l, std::int64_t e) {
    double n = 0;
    const RouterSums of_layer = sums(l, m);
    for (std::int64_t s = 0; s < of_layer.sequences; ++s) n += of_layer.count(s, e);
    return n;
  };
  std::vector<double> factors;
  for (std::int64_t s = 0; s < own.sequences; ++s) {
    for (std::int64_t e = 0; e < shape.experts; ++e) {
      double share = 0;
      switch (kind) {
        case BalanceKind::kNone:
          break;
        case BalanceKind::kHf: {
          double n = 0;
          for (std::int64_t l = 0; l < shape.layers; ++l) n += of_micro_batch(l, e);
          share = n / (layers * rows) / layers;  // P is a mean over layers, too
          break;
        }
        case BalanceKind::kSwitch:
          share = of_micro_batch(layer, e) / (chosen * rows);
          break;
        case BalanceKind::kSequence:
          share = own.count(s, e) / (chosen * rows / number(own.sequences));
          break;
        case BalanceKind::kGlobal:
          ZG_ASSERT_EQ(static_cast<std::int64_t>(total.size()), shape.experts);
          share = total[static_cast<std::size_t>(e)] / (chosen * all);
          break;
      }
      factors.push_back(experts * share / all);
    }
  }
  return factors;
}

double balance_value(const RouterSums& sums, std::span<const double> factors) {
  double value = 0;
  for (std::int64_t s = 0; s < sums.sequences; ++s) {
    for (std::int64_t e = 0; e < sums.experts; ++e)
      value += factors[static_cast<std::size_t>(s * sums.experts + e)] * sums.probability(s, e);
  }
  return value;
}

}  // namespace zg
