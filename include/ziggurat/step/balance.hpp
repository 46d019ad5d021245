// Balance terms: additions to the loss by which routers learn to use all experts. Pure functions.
//
// p is the probability that a router gives a token for an expert (RouteBackwardArgs), n the number of tokens
// that have chosen an expert, E the number of experts, K the number of a token's experts. All kinds are means
// over tokens, so that the number of micro-batches and ranks does not matter to their size; the terms of all
// layers are added up.
//
//   hf        E * sum_e f_e P_e with f = n / (L T) and P the mean of p, over the T tokens of a micro-batch
//             and all L layers with experts together, as transformers has it
//
//   switch    the same with f = n / (K T), layer by layer (Switch Transformers, Megatron)
//   sequence  the same as switch, over the tokens of each sequence (DeepSeek-V3)
//   global    the same as switch, over all tokens of the step, of all ranks
//
// The z term is the mean over tokens of the squared log-sum-exp of their logits.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ziggurat/step/options.hpp"

namespace zg {

// Sums over the tokens of one micro-batch in one layer, as Ops::router_sums() makes them: a row for each
// sequence.
struct RouterSums {
  std::int64_t experts = 0, sequences = 0;
  std::vector<double> values;  // [sequences, 2 * experts + 1]

  std::span<const double> row(std::int64_t s) const {
    return std::span(values).subspan(static_cast<std::size_t>(s * (2 * experts + 1)),
                                     static_cast<std::size_t>(2 * experts + 1));
  }
  double probability(std::int64_t s, std::int64_t e) const { return row(s)[static_cast<std::size_t>(e)]; }
  double count(std::int64_t s, std::int64_t e) const { return row(s)[static_cast<std::size_t>(experts + e)]; }
  double squares(std::int64_t s) const { return row(s)[static_cast<std::size_t>(2 * experts)]; }
};

// The step that terms are computed for.
struct BalanceShape {
  std::int64_t experts = 0, per_token = 0;
  std::int64_t layers = 0;    // with experts
  std::int64_t rows = 0;      // tokens of a micro-batch
  std::int64_t all_rows = 0;  // tokens of the step, of all ranks
};

// The sums that a term of a micro-batch depends on: sums(l, m) of layer l, counted among the layers with
// experts.
using SumsOf = std::function<RouterSums(std::int64_t layer, std::int64_t micro_batch)>;

// The factors of p in the term of the step, without its coefficient: [sequences, experts], for one layer and
// micro-batch. total: the numbers of tokens that have chosen each expert of the layer in the whole step, used
// by kGlobal alone.
std::vector<double> balance_factors(BalanceKind kind, const BalanceShape& shape, const SumsOf& sums,
                                    std::int64_t layer, std::int64_t micro_batch,
                                    std::span<const double> total);

// The contribution of a layer and micro-batch to the term of the step, from its factors.
double balance_value(const RouterSums& sums, std::span<const double> factors);

}  // namespace zg
