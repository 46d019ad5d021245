// Models as operations over views. A model knows its units, micro-batches and buffers; it knows
// nothing of stores, tiers or schedules.
//
// A model is a list of units. A unit is one flat tensor of parameters that are fetched, updated and released
// together: unit 0 is the embedding, units 1..L are the blocks, and unit L+1 is the head (the final norm, and
// the output matrix unless it is tied to the embedding). Shapes: B sequences of T tokens are N = B*T rows; C
// is the width, V the vocabulary. Weights and activations have type T (Model::dtype()); gradients of
// parameters and statistics type A (Model::accumulator_dtype()).
//
// A model owns no tensor: weights, gradients and scratch belong to the caller, and must live until the stream
// has done the work. Calls may come from any thread, one at a time per stream. None allocates device memory.
//
// A model may be a part of one (TensorShard): then its units hold what that part has of each parameter, and
// its calls exchange activations with the other parts (TensorParallelGroup), all of which make the same
// calls.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/device/ops.hpp"
#include "ziggurat/model/block.hpp"
#include "ziggurat/model/config.hpp"
#include "ziggurat/model/param.hpp"
#include "ziggurat/model/unit_call.hpp"

namespace zg {

namespace model {
struct HeadRoom;
struct Structure;
}  // namespace model

// Whether the weights of each block and each table (embedding, output matrix) are one flat tensor, or tiles
// (Unit::tiles), of which a call needs one at a time. How a matrix is cut depends on its sizes alone. The
// gradient of a product's input is a sum over tiles then, in ascending order, so that it rounds differently
// from a whole unit's.
enum class BlockTiling { kWhole, kInTiles };

// Whether the head's calls compute the gradients of its parameters.
enum class HeadGradients { kAll, kFrozen };

// What the calls of a part need of the other parts: all parts make the same exchanges in the same order.
// Views are without gaps. An exchange begins when the work that the stream `s` has so far is done, and goes
// on beside later work of `s`, which must leave its views alone until end(). Those that are begun are carried
// out one after the other.
class TensorParallelGroup {
 public:
  virtual ~TensorParallelGroup() = default;
  // data becomes the sum of all parts' data, the same bits on every part.
  virtual void all_reduce(Stream& s, const View& data) = 0;
  // out becomes the sum of what all parts have in this part's piece of `in`; a piece is as large as `out`,
  // which may be the piece itself.
  virtual void reduce_scatter(Stream& s, const View& in, const View& out) = 0;
  // out gets `in` of every part, in the order of the parts; `in` may be this part's piece of `out`.
  virtual void all_gather(Stream& s, const View& in, const View& out) = 0;
  // Work that `s` gets later begins when the oldest exchange that has not been ended is done. Each is ended
  // once.
  virtual void end(Stream& s) = 0;
};

// Throws Error(kUsage) unless the model can be split into so many parts: heads and inner width must divide,
// and each part needs a token of the vocabulary. The error's place is "parallel.tensor".
void validate_parts(const ModelConfig& config, int parts);

class Model {
 public:
  // `dtype` is the type of weights and activations, T below: f32, bf16, f16 or f64. Accumulators are f32, or
  // f64 with f64. `logits_bytes`: the most bytes that the logits of one chunk and their gradient should take;
  // 0: the device's default. Throws Error(kUsage) as validate() does. `ops` must outlive the model.
  Model(const ModelConfig& config, DType dtype, Ops& ops, std::int64_t logits_bytes = 0,
        const TensorShard& shard = {}, BlockTiling blocks = BlockTiling::kWhole);
  // A model for planning, where there is no device: sizes are known, and calls that compute abort.
  Model(const ModelConfig& config, DType dtype, const OpSizes& sizes, std::int64_t logits_bytes = 0,
        const TensorShard& shard = {}, BlockTiling blocks = BlockTiling::kWhole);
  // The same model with the other parts at hand, as the calls of a part need them. `exchange` must outlive
  // it.
  Model with(TensorParallelGroup& exchange) const;

  const ModelConfig& config() const;  // of the whole model
  const TensorShard& shard() const;
  DType dtype() const;
  DType accumulator_dtype() const { return dtype() == DType::kF64 ? DType::kF64 : DType::kF32; }
  // The overloads for a temporary model are deleted, since a loop over its units would run after it was
  // destroyed.
  const std::vector<Unit>& units() const&;
  const std::vector<Unit>& units() const&& = delete;
  // The block of a layer, from 0; it lives as long as a copy of the model does.
  const Block& block(std::int64_t layer) const&;
  const Block& block(std::int64_t layer) const&& = delete;
  const Block& largest_block() const&;  // with the most elements; the first one of several
  // The unit that holds the output matrix: the embedding when tied, else the head.
  const Unit& output_unit() const&;
  std::int64_t parameter_count() const;  // of the whole model, without padding
  // Rows of the residual stream, N below, that this part has: all, or its piece of them
  // (TensorShard::sequence).
  std::int64_t residual_rows(BatchShape shape) const {
    return shard().sequence ? shape.rows() / shard().degree : shape.rows();
  }
  // The exchanges of a call on a unit with the other parts, in order.
  std::vector<TensorParallelCall> exchanges_of(std::size_t unit, ModelCall call, BatchShape shape) const;

  // The tiles that a call on a unit asks for, but the first one, in order; none where it is whole. The
  // head's calls use tiles of output_unit().
  std::vector<TileUse> tile_uses(std::size_t unit, ModelCall call) const;

  // The keys of what calls of a unit drop: the first for the embedding's sum, or for what a block's attention
  // adds to the residual stream, the second for what its MLP adds.
  std::array<RandomKey, 2> dropout_keys(std::uint64_t seed, std::size_t unit) const;
  // The key of what the unit's adapters drop of their modules' inputs.
  RandomKey adapter_dropout_key(std::uint64_t seed, std::size_t unit) const;

  // Sizes in bytes of the memory that calls take. Memory passed as void* must be aligned to 256 bytes and may
  // hold anything, NaN too.
  std::int64_t checkpoint_bytes(BatchShape shape) const;  // a block's input, T [N,C], rounded up to 4096
  // Block::saved_bytes() and Block::workspace_bytes() of the block that needs most.
  std::int64_t saved_bytes(BatchShape shape, Backward how = Backward::kWhole) const;
  std::int64_t block_workspace_bytes(BatchShape shape, Backward how = Backward::kWhole) const;
  // Scratch of the head's calls.
  std::int64_t head_workspace_bytes(BatchShape shape, HeadGradients gradients = HeadGradients::kAll) const;
  std::int64_t embedding_workspace_bytes(BatchShape shape) const;  // of the embedding's; 0: it needs none

  // Columns of UnitCall::past: the keys and values of a token.
  std::int64_t past_columns() const;

  // Floating-point operations of the matrix products of one training step, over `tokens` tokens in sequences
  // of `time` tokens:
  //
  //   2 * tokens * (p * (the blocks' forward_products()) + 3 * table)
  //
  // Here `table` is the elements of the output matrix, and p is 3 passes, since a backward counts as two, or
  // 4 with recomputation of the blocks. What flash attention recomputes in its backward is not counted.
  double training_flops(std::int64_t tokens, std::int64_t time, bool recompute) const;

  // Enqueues the call on `s` and returns. Operands that are missing, or of another size or type than
  // ModelCall and UnitCall say, are a bug of the caller and end the process.
  void run(Stream& s, ModelCall kind, const UnitCall& call) const;

 private:
  model::Call call_of(Stream& s, ModelCall kind, const UnitCall& given) const;
  // The head's call, as one on the unit with the output matrix.
  model::Call table_call(const model::Call& head) const;
  model::HeadRoom head_room() const;
  std::int64_t head_chunk_rows(BatchShape shape) const;

  std::shared_ptr<const model::Structure> structure_;  // copies share it
  TensorParallelGroup* exchange_ = nullptr;            // null: the model is whole, or computes nothing
  Ops* ops_ = nullptr;                                 // null: a model for planning
  std::int64_t logits_bytes_;
};

// A logit of ModelCall::kHeadLogits as the model means it.
double capped_logit(const ModelConfig& config, double logit);

}  // namespace zg
