// The routers of a run: what they have decided in a step, balance terms, and how the tokens of all ranks are
// spread over experts.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "engine/op_context.hpp"
#include "engine/routed_rows.hpp"
#include "ziggurat/step/balance.hpp"

namespace zg {

class RouterOps {
 public:
  // The context must outlive it.
  explicit RouterOps(OpContext& context);

  // What each rank gives is added up over all ranks.
  using Exchange = std::function<std::vector<double>(std::span<const double> mine)>;
  // A training step begins. unscale: the factor by which all gradients are multiplied at its end.
  void begin_step(double unscale, const Exchange* exchange);
  void begin_evaluation() { unscale_ = 0; }

  // The choice biases of all layers, [layers, experts]; empty if the model has none.
  std::vector<float>& choice_biases() { return choice_biases_; }
  // Moves them towards experts with fewer tokens than the mean of their layer, from the sums of numbers() over
  // all ranks.
  void move_choice_biases(std::span<const double> numbers);

  // The operands of an operation on a layer with experts; waits for the numbers of rows if it computes
  // experts.
  ExpertOperands operands(const StepOp& op);
  // Enqueues what precedes and what follows an operation, outside of work that may be repeated.
  void prepare(const StepOp& op);
  void finish(const StepOp& op);

  // This rank's part of the numbers that result() needs, after the step's program.
  std::vector<double> numbers() const;
  static std::int64_t number_count(const Layout& layout);
  // From the sums of these numbers over all ranks.
  static RouterResult result(const Layout& layout, std::span<const double> numbers);

  const RoutedRows& rows() const { return rows_; }

 private:
  bool trains() const { return unscale_ > 0; }
  bool is_experts(const StepOp& op) const;
  // The number of a layer among those with experts, and back.
  std::int64_t number_of(std::int32_t layer) const { return numbers_[static_cast<std::size_t>(layer)]; }
  BalanceShape shape() const;
  RouterSums sums(std::int64_t number, std::int64_t m) const {
    return rows_.sums(layers_[static_cast<std::size_t>(number)], static_cast<std::int32_t>(m));
  }
  std::vector<double> factors(std::int64_t number, std::int64_t m) const;
  void sum_counts();

  OpContext& context_;
  RoutedRows rows_;
  std::vector<std::int32_t> layers_;   // that have experts, of this rank
  std::vector<std::int64_t> numbers_;  // by layer: its place in layers_; -1: none
  std::vector<float> choice_biases_;
  double unscale_ = 0;  // 0: an evaluation
  const Exchange* exchange_ = nullptr;
  std::vector<double>
      counts_;  // BalanceKind::kGlobal: [layer with experts, expert], of all ranks; empty: not yet
};

}  // namespace zg
