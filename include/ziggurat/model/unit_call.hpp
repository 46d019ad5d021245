// One call of a model on one of its units, as a value: what it computes, and its operands by name.
#pragma once
#include <array>
#include <cstdint>

#include "ziggurat/base/view.hpp"
#include "ziggurat/kernels/types.hpp"
#include "ziggurat/model/context_exchange.hpp"
#include "ziggurat/model/sequence_shard.hpp"
#include "ziggurat/model/tile_access.hpp"

namespace zg {

// `time`: tokens of each sequence that are here, which are the part of it that `part` says.
// `documents`: sequences may consist of documents, each with positions and attention of its own, and calls
// are told where they begin.
// `first`: place of the first token in its sequence, where a call continues one (ModelCall::kBlockNext).
struct BatchShape {
  std::int64_t sequences = 0, time = 0;
  SequenceShard sequence_shard = {};
  bool documents = false;
  std::int64_t first = 0;
  std::int64_t rows() const { return sequences * time; }
  // Length of UnitCall::documents: one number for each row here and, where attention sees whole sequences
  // (Ulysses), then one for each row of these.
  std::int64_t document_numbers() const {
    const bool whole = sequence_shard.degree > 1 && sequence_shard.method == ContextMethod::kUlysses;
    return rows() * (1 + (whole ? sequence_shard.degree : 0));
  }
  RowPositions positions() const {
    RowPositions rows = sequence_shard.positions(time);
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

// What a backward call does with the gradients that it is given: adds its own to them, or overwrites all of
// them, gaps between parameters included, whatever they held. Both give the same numbers where they held
// zero.
enum class Gradients { kAdd, kOverwrite };

// The adapters of a block (Lora) as the flat tensor [1, count] of their tile, T, and its gradients, A.
struct AdapterViews {
  View weights = {}, grads = {};
};

// The calls of a model. Each needs the operands of UnitCall that it names here, and leaves those alone that
// it does not. All take a shape; tiles, documents, dropout, context and adapters are as the unit and the
// shape say. model.hpp defines N, C, V, T and A.
//
// A backward takes the documents and the dropout of its forward. A block's forward that runs again on the
// same input gives the same bits, so activations can be recomputed.
enum class ModelCall : std::uint8_t {
  // output = the embedding of the ids. Needs weights, ids, output; workspace, unless
  // embedding_workspace_bytes() is 0.
  kEmbedding,
  // The gradients of the embedding. Needs grads, ids, activation_gradient; workspace as above.
  kEmbeddingBackward,
  // output = block(input), and `saved` for the backward. Needs weights, input, output (another one), saved,
  // workspace.
  kBlock,
  // Fills `saved` again, without an output: skips the last product, unless a norm follows it. Needs weights,
  // input, saved, workspace.
  kBlockAgain,
  // kBlock for one sequence whose keys and values are kept, so that it can be continued: for its first tokens
  // (shape.first 0), or for one more after shape.first others. `past` holds the rotated keys and the values
  // of the earlier tokens; the call appends the keys and values of its own tokens. The model must be whole,
  // and T must be A. Needs weights, input, output, saved, workspace, past.
  kBlockNext,
  // The backward of a block in one call: activation_gradient, the gradient of the output, becomes the
  // gradient of the input. Destroys `saved`. Needs weights, grads, input, activation_gradient, saved,
  // workspace.
  kBlockBackward,
  // The same for a block whose own parameters are frozen, as they always are beside adapters: it computes the
  // gradients of the adapters alone. Needs the same without grads; workspace as Backward::kFrozen says.
  kBlockBackwardFrozen,
  // The first half of a backward: activation_gradient. Overwrites the input and `saved` with what the second
  // half needs of them. Needs weights, input, activation_gradient, saved, workspace as Backward::kInHalves
  // says.
  kBlockBackwardInput,
  // The second half: the gradients of the block or, where it has adapters, of these. Needs input, saved,
  // workspace; grads, unless there are adapters.
  kBlockBackwardWeight,
  // loss_sum += the sum of the losses of all tokens that count, on every part. Needs weights, table, input,
  // targets, loss_sum, workspace.
  kHeadLoss,
  // The same, and activation_gradient = loss_scale * the gradient of the sum by the input. loss_scale also
  // multiplies grads, table_grads (the same view where the head is not tied) and every later gradient;
  // whoever uses one divides by it. The call skips null grads or table_grads; without grads the workspace is
  // as large as HeadGradients::kFrozen says. Needs activation_gradient besides.
  kHeadLossAndGradient,
  // logits of the rows of the input, before they are capped (capped_logit()). The model and its units must be
  // whole. Needs weights, table, input, logits, workspace.
  kHeadLogits
};

// The operands of a call. A view is null where there is no such operand. In a sequence-parallel part of a
// model input, output and activation_gradient have residual_rows() instead of N rows. Memory passed as void*
// is aligned to 256 bytes and may hold anything, NaN too.
struct UnitCall {
  BatchShape shape = {};
  std::int64_t layer = -1;  // of a call on a block, from 0

  View weights = {};  // T [1, count]: the unit's flat tensor, or its first tile
  View grads = {};    // A [1, count]: the gradients of the same
  Gradients into = Gradients::kAdd;
  AdapterViews adapters = {};   // of the block, if it has some
  TileAccess* tiles = nullptr;  // of the unit, or of the one with the output matrix; null where that is whole

  View ids = {};     // i32 [1,N]: the tokens of the embedding
  View input = {};   // T [N,C], the residual stream before the unit
  View output = {};  // T [N,C], the residual stream after the unit
  // T [N,C]: the gradient of the loss by the output, and after the call by the input.
  View activation_gradient = {};
  void* saved = nullptr;      // saved_bytes(): what a block's backward needs besides the input
  void* workspace = nullptr;  // scratch, of the size that the model says for the call
  View past = {};             // T [room, past_columns()]: keys and values of a sequence that is continued

  // The head: the flat tensor of the unit that holds the output matrix (the embedding's when tied, else the
  // head's own), or its first tile, and its gradients.
  View table = {}, table_grads = {};
  View targets = {};   // i32 [1,N]; one below 0 does not count
  View loss_sum = {};  // f64 [1,1]
  double loss_scale = 1;
  View logits = {};  // A [N,V]

  // i32 [1,document_numbers()]: by row the first row of its whole sequence, from 0, that is of its document;
  // null: each sequence is one document.
  View documents = {};
  const DropoutPlace* dropout = nullptr;  // null: nothing is dropped
  ContextExchange* context = nullptr;     // with the other parts of the sequences; null: these are whole
};

}  // namespace zg
