// A unit between the embedding and the head: its parameters, the buffer sizes of its calls, and the exchanges
// of these calls with other ranks. A dense layer is one block. A layer with a mixture of experts is a block
// with all that every token passes (attention, norms, the router), and then blocks with its experts, some in
// each. Blocks may differ, so code that works with a unit asks that unit's block (Model::block_of()).
// Thread-safe: a block never changes.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/model/config.hpp"
#include "ziggurat/model/context_exchange.hpp"
#include "ziggurat/model/param.hpp"
#include "ziggurat/model/unit_call.hpp"

namespace zg {

namespace model {
struct Call;
}

enum class Direction { kForward, kBackward };

// Whether the backward of a block is one call or two. The first half computes the gradient of the block's
// input, which other work waits for; the second half computes the gradients of its parameters, at any later
// time. Two calls give the same bits as the single call. kFrozen: one call, for blocks whose own
// parameters are not trained; it computes the gradient of the input, with the same bits, and no gradient of
// parameters. In a block that has adapters the second half computes the gradients of the adapters alone.
enum class Backward { kWhole, kInHalves, kFrozen };

// One call of TensorParallelGroup (model.hpp), for forecasts. count: elements of the data of an all-reduce,
// or of one rank's slice of the data. experts: it is of the expert group, not of the tensor-parallel one.
struct TensorParallelCall {
  enum class Kind { kAllReduce, kReduceScatter, kAllGather };
  Kind kind = Kind::kAllReduce;
  std::int64_t count = 0;
  DType dtype = DType::kF32;
  bool experts = false;
};

class Block {
 public:
  virtual ~Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  const Unit& unit() const { return unit_; }
  // The model's configuration with the sizes that this block's calls compute with.
  const ModelConfig& config() const { return config_; }

  // Bytes of the activations that a forward saves for the backward, besides the block's input. A forward
  // fills what Backward::kWhole needs; a backward in halves needs more room.
  virtual std::int64_t saved_bytes(BatchShape shape, Backward how = Backward::kWhole) const = 0;
  // Bytes of scratch memory for a forward and a backward.
  virtual std::int64_t workspace_bytes(BatchShape shape, Backward how = Backward::kWhole) const = 0;
  // The exchanges of a call with the other ranks of the tensor-parallel and expert groups, in order.
  virtual std::vector<TensorParallelCall> exchanges(ModelCall call, BatchShape shape) const = 0;
  // The exchanges of a pass with the other context-parallel ranks, in order.
  virtual std::vector<ContextCall> context_calls(BatchShape shape, Direction direction) const = 0;
  // The tiles that a call asks for, in order, without the first tile; empty where the unit is whole.
  virtual std::vector<TileUse> tile_uses(ModelCall call) const = 0;
  // Multiply-adds of a forward's matrix products, for one token in sequences of `time` tokens, summed over
  // all tensor-parallel ranks. Experts count with their average over tokens.
  virtual double forward_products(std::int64_t time) const = 0;

  // Enqueues a call whose operands have been checked.
  virtual void run(const model::Call& call) const = 0;

 protected:
  Block(const Unit& unit, const ModelConfig& config) : unit_(unit), config_(config) {}

 private:
  const Unit& unit_;           // owned by the model
  const ModelConfig& config_;  // likewise
};

}  // namespace zg
