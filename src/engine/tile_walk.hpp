// Hands the model the tiles of a unit, each with the operation that it belongs to: the model's call goes
// through all operations of the step program from the first that has the unit's tiles to the last.
#pragma once
#include <array>

#include "engine/context_parts.hpp"
#include "engine/part_exchange.hpp"
#include "engine/position.hpp"
#include "engine/timer.hpp"
#include "engine/workspace.hpp"
#include "ziggurat/engine/step_executor.hpp"

namespace zg {

class StepExecutor::TileWalk final : public TileAccess {
 public:
  // The first of these operations is the engine's current one.
  explicit TileWalk(StepExecutor& engine) : engine_(engine) {
    ZG_ASSERT(!op().goes_on, "{} begins within another operation", text_of(op()));
    for (const Operand operand : kBeside) beside_.push_back(data(operand));
  }

  View next(const TileUse& use) override {
    if (began_) go_on();
    began_ = true;
    ZG_ASSERT(op().use == use, "{} is for tile {}, not for {}", text_of(op()), op().use.tile, use.tile);
    const bool reads = use.kind == TileUse::Kind::kWeight;
    const Layout::TileTensors& tile = engine_.layout_.tile(op().tile);
    return unit_view(engine_.layout_, data(reads ? Operand::kTile : Operand::kTileAccumulator),
                     reads ? tile.weight : tile.accumulator, tile);
  }

 private:
  // What a call is given once, and all its operations have.
  static constexpr std::array kBeside = {Operand::kWeight,      Operand::kTable,
                                         Operand::kInput,       Operand::kOutput,
                                         Operand::kSaved,       Operand::kActivationGradient,
                                         Operand::kAccumulator, Operand::kTableAccumulator,
                                         Operand::kAdapters,    Operand::kAdapterAccumulator};

  const StepOp& op() const { return engine_.current_op(); }
  void* data(Operand operand) const {
    return op().has(operand) ? engine_.lease(op(), operand).data() : nullptr;
  }

  // To the next of the operations, by way of those between the two.
  void go_on() {
    engine_.end_op();
    for (++engine_.at_; !op().goes_on; ++engine_.at_) {
      ZG_ASSERT_LT(engine_.at_ + 1, engine_.running_->program.op_count());
      engine_.begin_op();
      engine_.issue(op());
      engine_.end_op();
    }
    engine_.begin_op();
    if (engine_.context_ != nullptr) engine_.context_->begin_op(op());
    if (engine_.exchange_ != nullptr) engine_.exchange_->begin(op());
    for (std::size_t i = 0; i < kBeside.size(); ++i)
      ZG_ASSERT(data(kBeside[i]) == beside_[i], "{}: an operand has moved", text_of(op()));
  }

  StepExecutor& engine_;
  std::vector<void*> beside_;
  bool began_ = false;
};

}  // namespace zg
