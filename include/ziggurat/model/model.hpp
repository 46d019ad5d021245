// Models as operations over views. A model knows its units, micro-batches and buffers; it knows
// nothing of stores, tiers or schedules.
//
// A model is a list of units. A unit is one flat tensor of parameters that are fetched, updated and released
// together: unit 0 is the embedding, units 1..L are the blocks, and unit L+1 is the head (the final norm, and
// the output matrix unless it is tied to the embedding). Shapes: B sequences of T tokens are N = B*T rows; C
// is the width, V the vocabulary.
//
// A model owns no tensor: weights, gradients and scratch belong to the caller, and must live until the stream
// has done the work. Calls may come from any thread, one at a time per stream. None allocates device memory.
//
// A model may be a part of one (ModelPart): then its units hold what that part has of each parameter, and its
// calls exchange activations with the other parts (PartExchange), all of which make the same calls.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ziggurat/device/ops.hpp"
#include "ziggurat/kernels/types.hpp"
#include "ziggurat/model/config.hpp"
#include "ziggurat/model/context_exchange.hpp"
#include "ziggurat/model/param.hpp"
#include "ziggurat/model/sequence_part.hpp"
#include "ziggurat/model/tile_access.hpp"

namespace zg {

namespace model {
struct Call;
struct HeadRoom;
}  // namespace model

// `time`: tokens of each sequence that are here, which are the part of it that `part` says.
// `documents`: sequences may consist of documents, each with positions and attention of its own, and calls
// are told where they begin.
// `first`: place of the first token in its sequence, where a model continues one (Model::block_next()).
struct BatchShape {
  std::int64_t sequences = 0, time = 0;
  SequencePart part = {};
  bool documents = false;
  std::int64_t first = 0;
  std::int64_t rows() const { return sequences * time; }
  // Numbers that say where documents begin: of each row here, and, where attention sees whole sequences
  // (Ulysses), of all rows of these behind them.
  std::int64_t document_numbers() const {
    const bool whole = part.parts > 1 && part.method == ContextMethod::kUlysses;
    return rows() * (1 + (whole ? part.parts : 0));
  }
  RowPositions positions() const {
    RowPositions rows = part.positions(time);
    rows.early += first;
    rows.late += first;
    return rows;
  }
};

// Where a call of a training step stands in the run, for dropout. A mask is a pure function of this, of a
// row's sequence and position in it, and of the column. So it does not depend on how a batch, its sequences
// or the model are spread over ranks and calls, and the backward pass makes the forward pass's mask again.
struct DropoutPlace {
  std::array<RandomKey, 2> keys = {};  // Model::dropout_keys() of the unit
  RandomKey adapters = {};             // Model::adapter_dropout_key() of the unit
  std::int64_t step = 0;               // below 2^32
  std::int64_t first_sequence = 0;     // number of the micro-batch's first sequence in the step's whole batch
};

enum class Pass { kForward, kBackward };

// Whether the weights of each block and each table (embedding, output matrix) are one flat tensor, or tiles
// (Unit::tiles), of which a call needs one at a time. How a matrix is cut depends on its sizes alone. The
// gradient of a product's input is a sum over tiles then, in ascending order, so that it rounds differently
// from a whole unit's.
enum class Blocks { kWhole, kInTiles };

// What a backward call does with the gradients that it is given: adds its own to them, or overwrites all of
// them, gaps between parameters included, whatever they held. Both give the same numbers where they held
// zero.
enum class Gradients { kAdd, kOverwrite };

// Whether the backward of a block is one call or two. The first half computes the gradient of the block's
// input, for which others wait; the second one the gradients of its parameters, at any time later. Both have
// the bits of the one call. kFrozen: one call, for blocks whose own parameters are not trained; the gradient
// of the input has the same bits, and those of the parameters are not computed. Of a block with adapters the
// second half computes theirs alone.
enum class Backward { kWhole, kInHalves, kFrozen };

// Whether the head's calls compute the gradients of its parameters.
enum class HeadGradients { kAll, kFrozen };

// The adapters of a block (Lora) as the flat tensor of their tile, T, and its gradients, of
// accumulator_dtype(); null: there are none.
struct AdapterViews {
  View weights = {}, grads = {};
};

// What the calls of a part need of the other parts: all parts make the same exchanges in the same order.
// Views are without gaps. An exchange begins when the work that the stream `s` has so far is done, and goes
// on beside later work of `s`, which must leave its views alone until end(). Those that are begun are carried
// out one after the other.
class PartExchange {
 public:
  virtual ~PartExchange() = default;
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

// One call of PartExchange, for forecasts. count: elements of the data, or of one part's piece of it.
struct PartCall {
  enum class Kind { kAllReduce, kReduceScatter, kAllGather };
  Kind kind = Kind::kAllReduce;
  std::int64_t count = 0;
  DType dtype = DType::kF32;
};

// The calls of a model that exchange something; kBlockAgain is a block_forward() with a null `out`.
enum class ModelCall {
  kEmbedding,
  kEmbeddingBackward,
  kBlock,
  kBlockAgain,
  kBlockBackward,
  kBlockBackwardFrozen,  // without gradients of the block's own parameters
  kBlockBackwardInput,
  kBlockBackwardWeight,
  kHeadLoss,
  kHeadLossAndGradient
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
        const ModelPart& part = {}, Blocks blocks = Blocks::kWhole);
  // A model for planning, where there is no device: sizes are known, and calls that compute abort.
  Model(const ModelConfig& config, DType dtype, const OpSizes& sizes, std::int64_t logits_bytes = 0,
        const ModelPart& part = {}, Blocks blocks = Blocks::kWhole);
  // The same model with the other parts at hand, as the calls of a part need them. `exchange` must outlive
  // it.
  Model with(PartExchange& exchange) const;

  const ModelConfig& config() const { return config_; }  // of the whole model
  const ModelPart& part() const { return part_; }
  DType dtype() const { return dtype_; }
  DType accumulator_dtype() const { return dtype_ == DType::kF64 ? DType::kF64 : DType::kF32; }
  // The overload for a temporary model is deleted, since a loop over its units would run after it was
  // destroyed.
  const std::vector<Unit>& units() const& { return units_; }
  const std::vector<Unit>& units() const&& = delete;
  std::int64_t parameter_count() const;  // of the whole model, without padding
  // Rows of the residual stream, N below, that this part has: all, or its piece of them
  // (ModelPart::sequence).
  std::int64_t residual_rows(BatchShape shape) const {
    return part_.sequence ? shape.rows() / part_.parts : shape.rows();
  }
  // What a call exchanges with the other parts, in order.
  std::vector<PartCall> exchanges_of(ModelCall call, BatchShape shape) const;

  // The tiles that a call asks for, but the first one, in order; nothing where its unit is whole. Those of
  // the head's calls are of the unit with the output matrix.
  std::vector<TileUse> tile_uses(ModelCall call) const;

  // The keys of what calls of a unit drop: the first for the embedding's sum, or for what a block's attention
  // adds to the residual stream, the second for what its MLP adds.
  std::array<RandomKey, 2> dropout_keys(std::uint64_t seed, std::size_t unit) const;
  // The key of what the unit's adapters drop of their modules' inputs.
  RandomKey adapter_dropout_key(std::uint64_t seed, std::size_t unit) const;

  // Sizes in bytes of the memory that calls take. Memory passed as void* must be aligned to 256 bytes and may
  // hold anything, NaN too.
  std::int64_t checkpoint_bytes(BatchShape shape) const;  // a block's input, T [N,C], rounded up to 4096
  // `saved`: what backward needs besides that input. Forward fills what a whole backward needs of it, and
  // needs no more room.
  std::int64_t saved_bytes(BatchShape shape, Backward how = Backward::kWhole) const;
  // Scratch of a block's forward and backward.
  std::int64_t block_workspace_bytes(BatchShape shape, Backward how = Backward::kWhole) const;
  // Scratch of the head's calls.
  std::int64_t head_workspace_bytes(BatchShape shape, HeadGradients gradients = HeadGradients::kAll) const;
  // What a block exchanges with the other parts of its sequences in a pass, in order.
  std::vector<ContextCall> context_calls(BatchShape shape, Pass pass) const;
  std::int64_t embedding_workspace_bytes(BatchShape shape) const;  // of the embedding's; 0: it needs none

  // All calls enqueue work on `s` and return. `weights` (T) and `grads` (of accumulator_dtype(), added to or
  // overwritten) are a unit's flat tensors [1, count], or its first tile's. `ids` and `targets` are i32
  // [1,N]; a target below 0 is not counted.
  //
  // `documents`: i32 [1,document_numbers()], of each row the first row of its whole sequence (from 0) that is
  // of its document; null: each sequence is one document, as where the shape says that there are no others. A
  // backward takes the same.
  //
  // `dropout`: of a training step, which drops by config().dropout; null: nothing is dropped. A backward
  // takes the same as its forward.
  //
  // `tiles`: of the unit, null where that is whole.
  //
  // x [N,C] of T = embedding of the ids. The backward's gradient is that of x, dx [N,C]. Here and below, a
  // part of a sequence-parallel model has residual_rows() in place of N rows of x, out and dx.
  void embedding_forward(Stream& s, BatchShape shape, View weights, View ids, View x,
                         void* workspace = nullptr, const DropoutPlace* dropout = nullptr,
                         const View& documents = {}, TileAccess* tiles = nullptr) const;
  void embedding_backward(Stream& s, BatchShape shape, View ids, View dx, View grads,
                          Gradients into = Gradients::kAdd, void* workspace = nullptr,
                          const DropoutPlace* dropout = nullptr, const View& documents = {},
                          TileAccess* tiles = nullptr) const;

  // out [N,C] = block(x [N,C]), both of T; fills `saved` (saved_bytes()). `out` must not alias `x`. Run again
  // on the same x it gives the same bits, so activations can be recomputed; a null `out` then skips the last
  // product, unless a norm follows it. `context`: with the other parts of the sequences; null where these are
  // whole. `layer`: from 0; -1 will do where all layers compute alike (ModelConfig::layers_differ()).
  void block_forward(Stream& s, BatchShape shape, View weights, View x, View out, void* saved,
                     void* workspace, ContextExchange* context = nullptr, TileAccess* tiles = nullptr,
                     const DropoutPlace* dropout = nullptr, std::int64_t layer = -1,
                     const View& documents = {}, const View& adapters = {}) const;
  // The same for tokens of one sequence whose keys and values are kept, so that it can be continued: its
  // first tokens (shape.first 0), or one more behind shape.first others. `past`: T [room, past_columns()],
  // where the keys, as they turn, and values of the tokens before are; those of these tokens are put behind
  // them. Of a whole model alone, whose T is accumulator_dtype().
  std::int64_t past_columns() const;
  void block_next(Stream& s, BatchShape shape, View weights, View x, View out, View past, void* saved,
                  void* workspace, std::int64_t layer) const;
  // dx [N,C] of T holds the gradient of the block's output, and is overwritten with that of its input. The
  // content of `saved` is destroyed. Null `grads`: the block's own parameters are frozen, and `workspace` is
  // as large as Backward::kFrozen says; those of a block with adapters always are.
  void block_backward(Stream& s, BatchShape shape, View weights, View x, void* saved, View dx, View grads,
                      void* workspace, Gradients into = Gradients::kAdd, ContextExchange* context = nullptr,
                      TileAccess* tiles = nullptr, const DropoutPlace* dropout = nullptr,
                      std::int64_t layer = -1, const View& documents = {},
                      const AdapterViews& adapters = {}) const;
  // The same in two calls; `saved` and `workspace` are as large as Backward::kInHalves says. The first one
  // overwrites x and `saved` with what the second one needs of them. adapters: their weights in the first
  // call, their gradients in the second, whose `grads` are null then.
  void block_backward_input(Stream& s, BatchShape shape, View weights, View x, void* saved, View dx,
                            void* workspace, ContextExchange* context = nullptr, TileAccess* tiles = nullptr,
                            const DropoutPlace* dropout = nullptr, std::int64_t layer = -1,
                            const View& documents = {}, const View& adapters = {}) const;
  void block_backward_weight(Stream& s, BatchShape shape, View x, void* saved, View grads, void* workspace,
                             Gradients into = Gradients::kAdd, TileAccess* tiles = nullptr,
                             const DropoutPlace* dropout = nullptr, const View& adapters = {}) const;

  // The loss of one micro-batch and its gradient. The logits of all rows never exist at once: they come in
  // chunks of rows or, of an output matrix in tiles, tile by tile. `table` is the flat tensor of the unit
  // that holds the output matrix, and `tiles` are that unit's: the embedding's when tied, else the head's
  // own. loss_sum f64 [1,1] += the sum over the tokens that count, on every part. dx [N,C] of T is
  // overwritten with loss_scale * d loss_sum / d x. head_grads and table_grads (the same view when untied),
  // and all gradients that follow from dx, are multiplied by loss_scale; whoever uses them divides by it.
  // Null head_grads or table_grads are not computed; without head_grads `workspace` is as large as
  // HeadGradients::kFrozen says.
  void head_loss_and_gradient(Stream& s, BatchShape shape, View head_weights, View table, View x,
                              View targets, View loss_sum, View dx, View head_grads, View table_grads,
                              void* workspace, double loss_scale = 1, Gradients into = Gradients::kAdd,
                              TileAccess* tiles = nullptr) const;
  // The loss alone: loss_sum f64 [1,1] += the sum over the tokens that count.
  void head_loss(Stream& s, BatchShape shape, View head_weights, View table, View x, View targets,
                 View loss_sum, void* workspace, TileAccess* tiles = nullptr) const;
  // logits [n,V], of accumulator_dtype(), of the rows x [n,C] of T, before they are capped: capped_logit()
  // does that. Of a whole model alone, whose units are whole.
  void head_logits(Stream& s, View head_weights, View table, View x, View logits, void* workspace) const;

 private:
  ModelConfig config_;
  ModelConfig here_;  // with the sizes that this part has
  ModelPart part_;
  DType dtype_;
  Ops& ops() const;
  model::Call call_of(Stream& s, BatchShape shape, const Unit& unit, View weights, View grads, Gradients into,
                      ContextExchange* context = nullptr) const;
  // How a block's layer attends.
  void set_layer(model::Call& call, std::int64_t layer, const View& documents) const;
  // A call on the output matrix.
  model::Call table_call(Stream& s, BatchShape shape, View table, View grads, Gradients into,
                         TileAccess* tiles) const;
  model::HeadRoom head_room() const;
  std::int64_t head_chunk_rows(BatchShape shape) const;
  // The room of a block in tiles for sums of products, behind its workspace [N, widest]; null: it needs none.
  View tile_sums(BatchShape shape, Backward how, void* workspace) const;

  const OpSizes* sizes_;
  PartExchange* exchange_ = nullptr;  // null: the model is whole, or computes nothing
  Ops* ops_ = nullptr;                // null: a model for planning
  std::int64_t logits_bytes_;
  std::vector<Unit> units_;
  RopeTable rope_, window_rope_;  // of layers without and with a window; GPT-2 has none
};

// A logit of head_logits() as the model means it.
double capped_logit(const ModelConfig& config, double logit);

// Floating-point operations of the matrix products of one training step, over `tokens` tokens in sequences of
// `time` tokens:
//
//   tokens * (2 * p * layers * (block + attention) + 6 * table)
//
// Here `block` and `table` are the elements of a block's matrices and of the output matrix; `attention` is
// time * heads * head_size (two products, half of each masked away), or in a layer with a window w shorter
// than that w * (2 - w / time) * heads * head_size; p is 3 passes, since a backward counts as two, or 4 with
// recomputation of the blocks. What flash attention recomputes in its backward is not counted.
double training_flops(const ModelConfig& config, std::int64_t tokens, std::int64_t time, bool recompute);

}  // namespace zg
