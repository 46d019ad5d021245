// A model as operations on views. It knows its units, the shapes of micro-batches and the sizes of buffers,
// and nothing of stores, memory tiers or schedules.
//
// A model is a list of units. A unit is one flat tensor of parameters that are fetched, updated and released
// together: unit 0 is the embedding, the last unit is the head (the final norm, and the output matrix unless
// it is tied to the embedding), and the units between them are the blocks of the layers, in order. Shapes: B
// sequences of T tokens are N = B*T rows; C is the width, V the vocabulary. Weights and activations have type
// T (Model::dtype()); gradients of parameters and statistics type A (Model::accumulator_dtype()).
//
// A model owns no tensor: weights, gradients and scratch belong to the caller, and must live until the stream
// has done the work. Calls may come from any thread, one at a time per stream. None allocates device memory.
//
// A model may be one rank's tensor shard (TensorShard). Then its units hold that rank's slice of each
// parameter, and its calls exchange activations with the other tensor-parallel ranks (TensorParallelGroup),
// all of which make the same calls.
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
// (Unit::tiles), of which a call needs one at a time. How a matrix is cut into tiles depends on its sizes
// alone. With tiles, the gradient of a product's input is a sum over tiles in ascending order, so it rounds
// differently from the gradient in a whole unit.
enum class BlockTiling { kWhole, kInTiles };

// Whether the head's calls compute the gradients of its parameters.
enum class HeadGradients { kAll, kFrozen };

// The collectives of a tensor-parallel or expert group, which a sharded model's calls need. All ranks of the
// group make the same exchanges in the same order. Views have no gaps. An exchange begins when the work
// enqueued on the stream `s` so far is done, and runs concurrently with later work of `s`, which must not
// touch its views until end(). Exchanges are carried out one after the other.
class TensorParallelGroup {
 public:
  virtual ~TensorParallelGroup() = default;
  // data becomes the sum of all ranks' data, with the same bits on every rank.
  virtual void all_reduce(Stream& s, const View& data) = 0;
  // Sums `in` over all ranks, and gives this rank's slice of the sum to `out`. `in` consists of one slice of
  // the size of `out` for each rank; `out` may be this rank's slice of `in` itself.
  virtual void reduce_scatter(Stream& s, const View& in, const View& out) = 0;
  // out becomes the concatenation of all ranks' `in`, in the order of ranks; `in` may be this rank's slice of
  // `out`.
  virtual void all_gather(Stream& s, const View& in, const View& out) = 0;
  // Makes later work of `s` wait for the oldest exchange that has not been ended. Each exchange is ended
  // once.
  virtual void end(Stream& s) = 0;
};

// Throws Error(kUsage) unless the model can be split over `parts` tensor-parallel ranks: they must divide the
// heads and the inner width, and each rank needs at least one token of the vocabulary. The error's place is
// "parallel.tensor".
void validate_parts(const ModelConfig& config, int parts);
// The same for `ranks` ranks of an expert group, which must divide the experts of a layer. The error's place
// is "parallel.experts".
void validate_expert_ranks(const ModelConfig& config, int ranks);

class Model {
 public:
  // `dtype` is the type of weights and activations, T below: f32, bf16, f16 or f64. Accumulators are f32, or
  // f64 with f64. `logits_bytes`: the most bytes that the logits of one chunk and their gradient should take;
  // 0: the device's default. Throws Error(kUsage) as validate() does. `ops` must outlive the model.
  Model(const ModelConfig& config, DType dtype, Ops& ops, std::int64_t logits_bytes = 0,
        const TensorShard& shard = {}, BlockTiling blocks = BlockTiling::kWhole);
  // A model for planning without a device: it reports sizes, and calls that compute abort.
  Model(const ModelConfig& config, DType dtype, const OpSizes& sizes, std::int64_t logits_bytes = 0,
        const TensorShard& shard = {}, BlockTiling blocks = BlockTiling::kWhole);
  // The same model, connected to the other tensor-parallel ranks and to the other ranks of its expert group,
  // as the calls of a shard need. Both must outlive it; null: the rank is alone in that group.
  Model with(TensorParallelGroup* exchange, TensorParallelGroup* experts = nullptr) const;

  // A model for planning with the parameters of all experts, in whole units; the same tensor shard of them.
  Model with_all_experts() const;

  const ModelConfig& config() const;  // of the whole model
  const TensorShard& shard() const;
  DType dtype() const;
  DType accumulator_dtype() const { return dtype() == DType::kF64 ? DType::kF64 : DType::kF32; }
  // The overloads for a temporary model are deleted, since a loop over its units would outlive it.
  const std::vector<Unit>& units() const&;
  const std::vector<Unit>& units() const&& = delete;
  // The index of a layer's block in units(), without its experts, which follow it; layers count from 0. The
  // number of layers gives the head's.
  std::size_t unit_of(std::int64_t layer) const;
  // The block of a layer, without its experts, and the block of a unit between the embedding and the head.
  // They live as long as any copy of the model.
  const Block& block(std::int64_t layer) const&;
  const Block& block(std::int64_t layer) const&& = delete;
  const Block& block_of(std::size_t unit) const&;
  const Block& block_of(std::size_t unit) const&& = delete;
  const Block& largest_block() const&;  // the block with the most elements; the first of several
  // The unit that holds the output matrix: the embedding when tied, else the head.
  const Unit& output_unit() const&;
  std::int64_t parameter_count() const;  // of the whole model, without padding
  // The number of ranks that each have such a unit with parameters of their own: for a unit with experts the
  // ranks of the expert group, else 1.
  std::int64_t ranks_with_such(const Unit& unit) const {
    return unit.is_experts() ? shard().experts.degree : 1;
  }
  // Rows of the residual stream that this rank holds: all N, or N / degree with TensorShard::sequence.
  std::int64_t residual_rows(BatchShape shape) const {
    return shard().sequence ? shape.rows() / shard().degree : shape.rows();
  }
  // The exchanges with the other ranks of the tensor-parallel and expert groups in a call on a unit, in
  // order.
  std::vector<TensorParallelCall> exchanges_of(std::size_t unit, ModelCall call, BatchShape shape) const;

  // The tiles that a call on a unit asks for, in order, without the first tile; empty where the unit is
  // whole. The head's calls use the tiles of output_unit().
  std::vector<TileUse> tile_uses(std::size_t unit, ModelCall call) const;

  // The random keys of a unit's dropout. The first is for the sum of embeddings, or for the output of a
  // block's attention before it is added to the residual stream; the second for the output of the block's
  // MLP.
  std::array<RandomKey, 2> dropout_keys(std::uint64_t seed, std::size_t unit) const;
  // The random key for the dropout of the inputs of the unit's adapters.
  RandomKey adapter_dropout_key(std::uint64_t seed, std::size_t unit) const;

  // Sizes in bytes of the memory that calls use. Memory passed as void* must be aligned to 256 bytes; its
  // contents may be anything, NaN too.
  std::int64_t checkpoint_bytes(BatchShape shape) const;  // a block's input, T [N,C], rounded up to 4096
  // The maximum over all blocks of Block::saved_bytes(), and of Block::workspace_bytes().
  std::int64_t saved_bytes(BatchShape shape, Backward how = Backward::kWhole) const;
  std::int64_t block_workspace_bytes(BatchShape shape, Backward how = Backward::kWhole) const;
  // Bytes of ExpertOperands::routing and ::sums; 0 if no layer has experts. starts_in() is the view of
  // `routing` in which a forward writes the numbers of ExpertOperands::starts: i32 [1, experts + 1].
  std::int64_t routing_bytes(BatchShape shape) const;
  std::int64_t expert_sums_bytes(BatchShape shape) const;
  View starts_in(BatchShape shape, void* routing) const;
  // The view of ExpertOperands::routing with RouterSumsArgs::sums, which have a row for each sequence; and
  // the view of ::sums with the factors of balance terms, A [sequences, experts].
  View router_sums_in(BatchShape shape, void* routing) const;
  View balance_in(BatchShape shape, void* sums) const;
  // Scratch of the head's calls.
  std::int64_t head_workspace_bytes(BatchShape shape, HeadGradients gradients = HeadGradients::kAll) const;
  std::int64_t embedding_workspace_bytes(BatchShape shape) const;  // scratch of the embedding's calls

  // Columns of UnitCall::past: the keys and values of a token.
  std::int64_t past_columns() const;

  // Floating-point operations of the matrix products of one training step, over `tokens` tokens in sequences
  // of `time` tokens:
  //
  //   2 * tokens * (p * (the blocks' forward_products()) + 3 * table)
  //
  // Here `table` is the number of elements of the output matrix. p is the number of passes: 3, since a
  // backward counts as two, or 4 if blocks are recomputed. The recomputation inside flash attention's
  // backward is not counted.
  double training_flops(std::int64_t tokens, std::int64_t time, bool recompute) const;

  // Enqueues the call on `s` and returns. Operands that are missing, or whose size or type differs from what
  // ModelCall and UnitCall require, are a bug of the caller and end the process.
  void run(Stream& s, ModelCall kind, const UnitCall& call) const;

 private:
  model::Call call_of(Stream& s, ModelCall kind, const UnitCall& given) const;
  // The same call of the head, with the operands of the unit that holds the output matrix.
  model::Call table_call(const model::Call& head) const;
  model::HeadRoom head_room() const;
  std::int64_t head_chunk_rows(BatchShape shape) const;

  std::shared_ptr<const model::Structure> structure_;  // copies share it
  TensorParallelGroup* exchange_ = nullptr;            // null if the model is whole or for planning
  TensorParallelGroup* expert_exchange_ = nullptr;     // likewise
  Ops* ops_ = nullptr;                                 // null if the model is for planning
  std::int64_t logits_bytes_;
};

// Applies the model's cap (final_softcap), if it has one, to a logit of ModelCall::kHeadLogits.
double capped_logit(const ModelConfig& config, double logit);

}  // namespace zg
