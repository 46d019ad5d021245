// A call of the model on a unit in tiles. It consists of several operations of a step program, so it runs on
// a stack of its own, and is suspended whenever it asks for the tile of the next operation.
#pragma once
#include <functional>
#include <optional>
#include <utility>

#include "ziggurat/base/fiber.hpp"
#include "ziggurat/model/model.hpp"

namespace zg {

class TileCall final : private TileAccess {
 public:
  // `run` makes the calls of the model with the operands that it receives.
  TileCall(UnitCall operands, std::optional<DropoutPlace> dropout, std::function<void(const UnitCall&)> run)
      : operands_(std::move(operands)),
        dropout_(std::move(dropout)),
        fiber_(kStackBytes, [this, run = std::move(run)] { run(operands_); }) {
    operands_.tiles = this;
    operands_.dropout = dropout_ ? &*dropout_ : nullptr;
  }

  // Begins the call, or resumes it, with this tile; returns when the call asks for the next tile, or ends.
  void go_on(const TileUse& use, const View& tile) {
    use_ = use, tile_ = tile, is_new_ = true;
    fiber_.resume();
    ZG_ASSERT(!is_new_, "the call has ended, and the program has tile {} for it", use.tile);
  }
  bool ended() const { return fiber_.ended(); }

 private:
  // Room for the stack frames of the model's functions, and of kernels that run on the calling thread.
  static constexpr std::size_t kStackBytes = std::size_t{1} << 20;

  View next(const TileUse& use) override {
    if (!is_new_) fiber_.suspend();
    ZG_ASSERT(use_ == use, "the program has tile {}, the call asks for tile {}", use_.tile, use.tile);
    is_new_ = false;
    return tile_;
  }

  UnitCall operands_;
  const std::optional<DropoutPlace> dropout_;
  TileUse use_;
  View tile_;
  bool is_new_ = false;  // the call has not taken the tile yet
  Fiber fiber_;          // last, so that it is destroyed before the members that it uses
};

}  // namespace zg
