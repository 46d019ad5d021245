#include "engine/router_ops.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace zg {

RouterOps::RouterOps(OpContext& context) : context_(context), rows_(context.device, context.layout) {
  const Layout& layout = context.layout;
  numbers_.assign(static_cast<std::size_t>(layout.layers()), -1);
  for (std::int32_t l = 0; l < layout.layers(); ++l) {
    if (!layout.routes(l) || !layout.has_unit(static_cast<std::int32_t>(layout.model->unit_of(l)))) continue;
    numbers_[static_cast<std::size_t>(l)] = static_cast<std::int64_t>(layers_.size());
    layers_.push_back(l);
  }
  const ModelConfig& c = layout.model->config();
  if (c.experts.choice_bias) choice_biases_.assign(static_cast<std::size_t>(c.layers * c.experts.count), 0);
}

void RouterOps::begin_step(double unscale, const Exchange* exchange) {
  unscale_ = unscale, exchange_ = exchange;
  counts_.clear();
}

bool RouterOps::is_experts(const StepOp& op) const {
  return context_.layout.model->units()[static_cast<std::size_t>(op.unit)].is_experts();
}

BalanceShape RouterOps::shape() const {
  const LayoutOptions& o = context_.layout.options;
  const Experts& experts = context_.layout.model->config().experts;
  const std::int64_t rows = o.micro_batch.rows();
  return {experts.count, experts.router.per_token, static_cast<std::int64_t>(layers_.size()), rows,
          rows * o.micro_batches * o.sharding.ranks};
}

ExpertOperands RouterOps::operands(const StepOp& op) {
  if (!op.has(Operand::kRouting)) return {};
  ExpertOperands experts{.routing = context_.data(op, Operand::kRouting),
                         .sums = context_.data(op, Operand::kExpertSums)};
  const Layout& layout = context_.layout;
  const std::int32_t layer = layout.layer_of(op.unit);
  const BalanceOptions& balance = layout.options.balance;
  if (!is_experts(op)) {
    experts.choice_bias = context_.workspace().choice_bias(layer);
    experts.sums_tokens = trains() && balance.on();
    experts.balances = trains() && balance.has_term();
    if (trains())
      experts.z_factor = balance.z_coefficient / (unscale_ * static_cast<double>(shape().all_rows));
    return experts;
  }
  experts.group = op.unit - static_cast<std::int32_t>(layout.model->unit_of(layer)) - 1;
  const Position::Waiting waiting(context_.position, Position::Waits::kForStream);
  experts.starts = rows_.starts(layer, op.micro_batch);
  return experts;
}

void RouterOps::prepare(const StepOp& op) {
  const BalanceOptions& balance = context_.layout.options.balance;
  if (!op.has(Operand::kRouting) || op.kind != OpKind::kBackward || op.goes_on || is_experts(op) ||
      !trains() || !balance.has_term())
    return;
  const std::int32_t layer = context_.layout.layer_of(op.unit);
  {
    const Position::Waiting waiting(context_.position, Position::Waits::kForStream);
    if (balance.kind == BalanceKind::kGlobal && counts_.empty()) sum_counts();
  }
  std::vector<double> all = factors(number_of(layer), op.micro_batch);
  for (double& factor : all) factor *= balance.coefficient / unscale_;
  rows_.put(*context_.compute, layer, op.micro_batch, all,
            context_.layout.model->balance_in(context_.layout.options.micro_batch,
                                              context_.data(op, Operand::kExpertSums)));
}

void RouterOps::finish(const StepOp& op) {
  if (!op.has(Operand::kRouting) || op.kind != OpKind::kForward || is_experts(op)) return;
  const BatchShape& shape = context_.layout.options.micro_batch;
  void* const routing = context_.data(op, Operand::kRouting);
  const Model& model = *context_.layout.model;
  const bool sums = trains() && context_.layout.options.balance.on();
  rows_.fetch(*context_.compute, context_.layout.layer_of(op.unit), op.micro_batch,
              model.starts_in(shape, routing), sums ? model.router_sums_in(shape, routing) : View());
}

std::vector<double> RouterOps::factors(std::int64_t number, std::int64_t m) const {
  const BalanceKind kind = context_.layout.options.balance.kind;
  const std::int64_t experts = shape().experts;
  std::span<const double> total;
  if (kind == BalanceKind::kGlobal)
    total = std::span(counts_).subspan(static_cast<std::size_t>(number * experts),
                                       static_cast<std::size_t>(experts));
  return balance_factors(
      kind, shape(), [this](std::int64_t l, std::int64_t at) { return sums(l, at); }, number, m, total);
}

// The numbers of tokens that have chosen each expert, over all micro-batches and ranks. All forwards of the
// step have been enqueued.
void RouterOps::sum_counts() {
  const std::int64_t experts = shape().experts;
  for (const std::int32_t layer : layers_) {
    for (std::int64_t e = 0; e < experts; ++e) {
      double n = 0;
      for (std::int32_t m = 0; m < context_.layout.options.micro_batches; ++m) {
        const std::int32_t* const starts = rows_.starts(layer, m);
        n += starts[e + 1] - starts[e];
      }
      counts_.push_back(n);
    }
  }
  ZG_ASSERT(exchange_ != nullptr, "a step exchanges numbers with other ranks");
  counts_ = (*exchange_)(counts_);
  // A token is counted by each tensor-parallel rank that has it, and by each rank of the expert group.
  const ParallelDegrees& parts = context_.layout.options.parts;
  for (double& n : counts_) n /= parts.tensor * parts.experts;
}

std::int64_t RouterOps::number_count(const Layout& layout) {
  const Experts& experts = layout.model->config().experts;
  return experts.on() ? 2 + layout.layers() * experts.count : 0;
}

// The terms without their coefficients, and the tokens of each expert by layer.
std::vector<double> RouterOps::numbers() const {
  const Layout& layout = context_.layout;
  const BalanceShape of = shape();
  std::vector<double> all(static_cast<std::size_t>(number_count(layout)));
  if (layout.options.parts.tensor_part > 0) return all;
  // The first rank of an expert group reports the tokens of the whole group.
  const bool counts = layout.options.place().expert_part() == 0;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    for (std::int32_t m = 0; m < layout.options.micro_batches; ++m) {
      const std::int32_t* const starts = rows_.starts(layers_[i], m);
      for (std::int64_t e = 0; counts && e < of.experts; ++e)
        all[static_cast<std::size_t>(2 + layers_[i] * of.experts + e)] += starts[e + 1] - starts[e];
      if (!layout.options.balance.on()) continue;
      const RouterSums own = sums(static_cast<std::int64_t>(i), m);
      if (layout.options.balance.has_term())
        all[0] += balance_value(own, factors(static_cast<std::int64_t>(i), m));
      for (std::int64_t s = 0; s < own.sequences; ++s)
        all[1] += own.squares(s) / static_cast<double>(of.all_rows);
    }
  }
  return all;
}

void RouterOps::move_choice_biases(std::span<const double> numbers) {
  const Layout& layout = context_.layout;
  const std::int64_t experts = layout.model->config().experts.count;
  const auto rate = static_cast<float>(layout.options.balance.bias_rate);
  for (std::int32_t l = 0; l < layout.layers(); ++l) {
    if (!layout.routes(l)) continue;
    const auto first = static_cast<std::size_t>(l * experts);
    const auto tokens = numbers.subspan(2 + first, static_cast<std::size_t>(experts));
    const double mean = std::accumulate(tokens.begin(), tokens.end(), 0.0) / static_cast<double>(experts);
    for (std::size_t e = 0; e < tokens.size(); ++e) {
      if (tokens[e] != mean) choice_biases_[first + e] += tokens[e] < mean ? rate : -rate;
    }
  }
}

RouterResult RouterOps::result(const Layout& layout, std::span<const double> numbers) {
  RouterResult r{.balance = numbers[0], .z = numbers[1]};
  const std::int64_t experts = layout.model->config().experts.count;
  for (std::int32_t l = 0; l < layout.layers(); ++l) {
    if (!layout.routes(l)) continue;
    const auto of_layer =
        numbers.subspan(static_cast<std::size_t>(2 + l * experts), static_cast<std::size_t>(experts));
    double sum = 0, largest = 0;
    for (const double n : of_layer) {
      sum += n, largest = std::max(largest, n);
      if (n == 0) ++r.idle;
    }
    if (sum > 0) r.largest = std::max(r.largest, largest * static_cast<double>(experts) / sum);
    r.experts += experts;
  }
  return r;
}

}  // namespace zg
