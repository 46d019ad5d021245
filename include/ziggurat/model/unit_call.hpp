// One call of a model on one of its units, as a value: the kind of computation, and its operands by name.
#pragma once
#include <array>
#include <cstdint>

#include "ziggurat/base/view.hpp"
#include "ziggurat/kernels/types.hpp"
#include "ziggurat/model/context_exchange.hpp"
#include "ziggurat/model/sequence_shard.hpp"
#include "ziggurat/model/tile_access.hpp"

namespace zg {

// `time`: tokens of each sequence that this rank holds, that is of the shard `sequence_shard`. `documents`:
// sequences may consist of documents, each with positions and attention of its own; UnitCall::documents says
// where they begin. `first`: position of the first token in its sequence, where a call continues a sequence
// (ModelCall::kBlockNext).
struct BatchShape {
  std::int64_t sequences = 0, time = 0;
  SequenceShard sequence_shard = {};
  bool documents = false;
  std::int64_t first = 0;
  std::int64_t rows() const { return sequences * time; }
  // Length of UnitCall::documents: one entry for each row that this rank holds. With Ulysses, where attention
  // sees whole sequences, an entry for each row of the whole sequences follows.
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

// Which call of which training step this is, for dropout. A mask is a pure function of this place, of a row's
// sequence and position in it, and of the column. So it does not depend on how a batch, its sequences or the
// model are spread over ranks and calls, and the backward pass regenerates the forward pass's mask.
struct DropoutPlace {
  std::array<RandomKey, 2> keys = {};  // Model::dropout_keys() of the unit
  RandomKey adapters = {};             // Model::adapter_dropout_key() of the unit
  std::int64_t step = 0;               // below 2^32
  std::int64_t first_sequence = 0;     // number of the micro-batch's first sequence in the step's whole batch
};

// Whether a backward call adds its gradients to the contents of the gradient buffer, or overwrites the whole
// buffer, gaps between parameters included. Both give the same result where the buffer held zeros.
enum class Gradients { kAdd, kOverwrite };

// The weights of a unit's adapters (Lora), of type T, and their gradients, of type A: each the flat tensor
// [1, count] of the adapters' tile. A backward overwrites the gradients of all of the unit's experts, or adds
// to those of the experts that have rows.
struct AdapterViews {
  View weights = {}, grads = {};
};

// The operands of the calls on a layer with a mixture of experts, for one micro-batch.
struct ExpertOperands {
  // Model::routing_bytes(): the router's decisions, and the rows that the experts read. The block's forward
  // writes it; the experts, and all calls of the backward, read it.
  void* routing = nullptr;
  // Model::expert_sums_bytes(): in a forward the sum of the experts' outputs, in a backward the gradients
  // that the experts leave for the block.
  void* sums = nullptr;
  // Model::expert_saved_bytes(): products of the experts that their backward needs. Calls on experts alone
  // take it: a forward writes its experts' rows, the backward reads them. Null: the backward computes them
  // again.
  void* saved = nullptr;
  // Calls on experts alone need these: the number of the unit among the layer's units with experts, and
  // Model::starts_in() in the memory of the calling thread, since the numbers of rows are sizes of products.
  std::int64_t group = -1;
  const std::int32_t* starts = nullptr;
  // sums_tokens: a block's forward makes the sums that balance terms need, in Model::router_sums_in().
  // balances: a block's backward finds factors in Model::balance_in() (RouteBackwardArgs::balance).
  // z_factor: the factor of the z term in a block's backward.
  bool sums_tokens = false, balances = false;
  double z_factor = 0;
  // A [1,E]: the choice bias of the layer's router; a block's forward needs it, where the model has one.
  View choice_bias = {};
};

// The calls of a model. The comment of each lists the operands of UnitCall that it needs; it ignores the
// others. All take a shape; the unit and the shape decide whether tiles, documents, dropout, context and
// adapters are needed, too. model.hpp defines N, C, V, T and A.
//
// A backward takes the same documents and dropout as its forward. Running a block's forward again on the same
// input gives the same bits, so activations can be recomputed.
enum class ModelCall : std::uint8_t {
  // output = the embedding of the ids. Needs weights, ids, output; workspace, unless
  // embedding_workspace_bytes() is 0.
  kEmbedding,
  // The gradients of the embedding. Needs grads, ids, activation_gradient; workspace as above.
  kEmbeddingBackward,
  // output = block(input); fills `saved` for the backward. Needs weights, input, output (not the same view as
  // input), saved, workspace.
  kBlock,
  // Recomputes `saved` without an output: skips the block's last matrix product, unless a norm follows it.
  // Needs weights, input, saved, workspace.
  kBlockAgain,
  // kBlock for one sequence with a cache of keys and values: for the sequence's first tokens (shape.first 0),
  // or for one more token after shape.first earlier ones. `past` holds the rotated keys and the values of the
  // earlier tokens; the call appends the keys and values of its own tokens. The model must be whole (no
  // tensor shard), and T must be A. Needs weights, input, output, saved, workspace, past.
  kBlockNext,
  // The backward of a block in one call: activation_gradient, the gradient of the output, becomes the
  // gradient of the input. Destroys `saved`. Needs weights, grads, input, activation_gradient, saved,
  // workspace.
  kBlockBackward,
  // kBlockBackward for a block whose own parameters are frozen, as they always are when the block has
  // adapters: it computes the gradients of the adapters alone. Needs the same operands without grads; the
  // workspace has the size for Backward::kFrozen.
  kBlockBackwardFrozen,
  // The first half of a backward: computes activation_gradient. Overwrites the input and `saved` with the
  // values that the second half needs. Needs weights, input, activation_gradient, saved, and a workspace of
  // the size for Backward::kInHalves.
  kBlockBackwardInput,
  // The second half of a backward: computes the gradients of the block's parameters or, where it has
  // adapters, of the adapters alone. Needs input, saved, workspace; grads, unless there are adapters.
  kBlockBackwardWeight,
  // The calls on a layer with experts: kBlock, then kExperts on each of its units with experts in ascending
  // order; kExpertsBackward on each of them in descending order, then the block's backward, which cannot be
  // in halves. kBlock leaves the residual stream before the experts in the output. All calls on such a layer
  // need experts.routing and experts.sums.
  //
  // kExperts:
  //
  // Adds the outputs of some experts to the sum; the last unit of the layer adds the sum to the output. Needs
  // workspace and experts; weights, unless its experts have no rows; for the last unit, output.
  kExperts,
  // Computes the gradients of some experts' parameters, of their inputs and of the weights of their slots,
  // from activation_gradient, the gradient of the output. The layer's last unit begins the sums. Needs
  // weights, grads, activation_gradient, workspace, experts. The frozen kind computes no gradients of
  // parameters but those of adapters, and needs no grads.
  kExpertsBackward,
  kExpertsBackwardFrozen,
  // loss_sum += the sum of the losses of all tokens whose target is not negative; every tensor-parallel rank
  // gets the whole sum. Needs weights, table, input, targets, loss_sum, workspace.
  kHeadLoss,
  // kHeadLoss, and activation_gradient = loss_scale * the gradient of the sum by the input. loss_scale also
  // multiplies grads, table_grads (the same view where the head is not tied) and every later gradient; the
  // user of a gradient divides by it. Null grads or table_grads are not computed; without grads the workspace
  // has the size for HeadGradients::kFrozen. Needs the operands of kHeadLoss and activation_gradient.
  kHeadLossAndGradient,
  // Computes the logits of the input's rows, before capping (capped_logit()). The model must be whole (no
  // tensor shard), and so must its units (no tiles). Needs weights, table, input, logits, workspace.
  kHeadLogits
};

// The operands of a call. A view is null where there is no such operand. With sequence parallelism
// (TensorShard::sequence) input, output and activation_gradient have residual_rows() rows instead of N.
// Memory passed as void* is aligned to 256 bytes and may hold anything, NaN too.
struct UnitCall {
  BatchShape shape = {};
  std::int64_t layer = -1;  // from 0; used by calls on a block alone

  View weights = {};  // T [1, count]: the unit's flat tensor, or its first tile
  View grads = {};    // A [1, count]: the gradients of `weights`
  Gradients into = Gradients::kAdd;
  AdapterViews adapters = {};   // the unit's adapters, if it has some
  ExpertOperands experts = {};  // of a layer with a mixture of experts
  TileAccess* tiles = nullptr;  // tiles of the unit (the head: of output_unit()); null if whole

  View ids = {};     // i32 [1,N]: the tokens of the embedding
  View input = {};   // T [N,C], the residual stream before the unit
  View output = {};  // T [N,C], the residual stream after the unit
  // T [N,C]: the gradient of the loss by the output, and after the call by the input.
  View activation_gradient = {};
  void* saved = nullptr;      // saved_bytes(): values that a block's backward needs besides the input
  void* workspace = nullptr;  // scratch of the size that the model reports for the call
  View past = {};             // T [room, past_columns()]: cached keys and values of kBlockNext

  // The head's output matrix: the flat tensor of the unit that holds it (the embedding when tied, else the
  // head), or that unit's first tile; and the gradients of the same.
  View table = {}, table_grads = {};
  View targets = {};   // i32 [1,N]; tokens with a negative target do not count
  View loss_sum = {};  // f64 [1,1]
  double loss_scale = 1;
  View logits = {};  // A [N,V]

  // i32 [1,document_numbers()]: for each row, the position in its whole sequence, from 0, at which its
  // document begins. Null: each sequence is one document.
  View documents = {};
  const DropoutPlace* dropout = nullptr;  // null: nothing is dropped
  ContextExchange* context = nullptr;     // exchange with the other context-parallel ranks; null: none
};

}  // namespace zg
