#include "ziggurat/step/balance.hpp"

#include "ziggurat/base/error.hpp"

namespace zg {

namespace {

// Adds the numbers of tokens that have chosen each expert.
void add_counts(const RouterSums& sums, std::vector<double>& counts) {
  for (std::int64_t s = 0; s < sums.sequences; ++s) {
    for (std::int64_t e = 0; e < sums.experts; ++e) counts[static_cast<std::size_t>(e)] += sums.count(s, e);
  }
}

}  // namespace

std::vector<double> balance_factors(BalanceKind kind, const BalanceShape& shape, const SumsOf& sums,
                                    std::int64_t layer, std::int64_t m, std::span<const double> total) {
  const RouterSums own = sums(layer, m);
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  const double rows = number(shape.rows), all = number(shape.all_rows), chosen = number(shape.per_token),
               layers = number(shape.layers);
  // f = counts / of, where all sequences have the same.
  std::vector<double> counts(static_cast<std::size_t>(shape.experts));
  double of = chosen * rows;
  switch (kind) {
    case BalanceKind::kNone:
    case BalanceKind::kBias:
      break;
    case BalanceKind::kHf:
      for (std::int64_t l = 0; l < shape.layers; ++l) add_counts(sums(l, m), counts);
      of = layers * rows * layers;  // P is a mean over layers, too
      break;
    case BalanceKind::kSwitch:
      add_counts(own, counts);
      break;
    case BalanceKind::kSequence:
      of = chosen * rows / number(own.sequences);
      break;
    case BalanceKind::kGlobal:
      ZG_ASSERT_EQ(static_cast<std::int64_t>(total.size()), shape.experts);
      counts.assign(total.begin(), total.end());
      of = chosen * all;
      break;
  }
  std::vector<double> factors;
  for (std::int64_t s = 0; s < own.sequences; ++s) {
    for (std::int64_t e = 0; e < shape.experts; ++e) {
      const double n = kind == BalanceKind::kSequence ? own.count(s, e) : counts[static_cast<std::size_t>(e)];
      factors.push_back(number(shape.experts) * (n / of) / all);
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
