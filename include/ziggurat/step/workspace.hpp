// The engine's own device memory, one block: scratch memory, saved activations, tokens, scalars.
#pragma once
#include <algorithm>
#include <cstdint>

#include "ziggurat/base/units.hpp"
#include "ziggurat/base/view.hpp"
#include "ziggurat/step/layout.hpp"

namespace zg {

class Workspace {
 public:
  Workspace(const Layout& layout, void* base) : layout_(layout), base_(static_cast<char*>(base)) {}

  static std::int64_t bytes(const Layout& layout) {
    return round_up(inputs_offset(layout) + input_bytes(layout, layout.options.micro_batches), 4096);
  }

  // Scratch memory of the current operation.
  void* scratch() const { return base_; }
  // With one rank and one tile for each unit, it uses the memory of scratch(). Otherwise scratch() may be in
  // use: with several ranks, gradients are finished on a stream of their own while other operations run; the
  // gradients of tiles are finished between two operations of one call of the model.
  View sum_partials() const {
    void* const at = partials_bytes(layout_) > 0 ? base_ + partials_offset(layout_) : scratch();
    return {at, DType::kF64, 1, Ops::kSumPartials};
  }
  // Receives the sums of squares of elements that another tensor-parallel rank counts for the norm.
  View discarded() const {
    return {base_ + partials_offset(layout_) + Ops::kSumPartials * std::int64_t{sizeof(double)}, DType::kF64,
            1, 1};
  }
  // Holds the gradient of a whole parameter while its copies are summed over the tensor-parallel ranks.
  View copies(std::int64_t count) const {
    return {base_ + copies_offset(layout_), layout_.model->accumulator_dtype(), 1, count};
  }
  // Buffers for quantized exchanges between ranks: each call exchanges up to exchange_values() values of each
  // rank.
  View sent(std::int64_t bytes) const { return {exchange(0), DType::kU8, 1, bytes}; }
  View received(std::int64_t bytes) const { return {exchange(1), DType::kU8, 1, bytes}; }
  static std::int64_t exchange_values(const Layout& l) {
    return std::max(kQuantBlock, kExchangeValues / l.options.sharding.ranks / kQuantBlock * kQuantBlock);
  }
  void* saved() const { return base_ + scratch_bytes(layout_); }
  // The inputs of a step, contiguous, so that one copy brings them: the scalars, all zero, the choice biases
  // of routers, and then for each micro-batch the ids, the targets and, with packed documents, their first
  // rows.
  void* inputs() const { return base_ + inputs_offset(layout_); }
  static std::int64_t input_bytes(const Layout& l, std::int64_t micro_batches) {
    const std::int64_t biases = choice_bias_bytes(l) * l.model->config().layers;
    return choice_biases_at(l) + round_up(biases, kTokenAlign) + micro_batches * micro_batch_bytes(l);
  }
  // The choice bias of a layer's router; null if the model has none.
  View choice_bias(std::int64_t layer) const {
    if (choice_bias_bytes(layout_) == 0) return View();
    char* const at =
        static_cast<char*>(inputs()) + choice_biases_at(layout_) + layer * choice_bias_bytes(layout_);
    return {at, layout_.model->accumulator_dtype(), 1, layout_.model->config().experts.count};
  }
  // Where they begin among the inputs, and the bytes of a layer's.
  static std::int64_t choice_biases_at(const Layout& l) { return round_up(scalar_bytes(l), kTokenAlign); }
  static std::int64_t choice_bias_bytes(const Layout& l) {
    const Experts& experts = l.model->config().experts;
    if (!experts.choice_bias) return 0;
    return experts.count * static_cast<std::int64_t>(size_of(l.model->accumulator_dtype()));
  }
  View ids(std::int64_t micro_batch) const { return tokens(micro_batch, 0, rows()); }
  View targets(std::int64_t micro_batch) const { return tokens(micro_batch, token_bytes(layout_), rows()); }
  // Null if sequences are not packed documents.
  View documents(std::int64_t micro_batch) const {
    const BatchShape& shape = layout_.options.micro_batch;
    if (!shape.documents) return View();
    return tokens(micro_batch, 2 * token_bytes(layout_), shape.document_numbers());
  }
  // Scalar 0 is the step's summed loss, the others are the sums of squares of each unit's gradient.
  View scalar(std::int64_t i) const { return {base_ + inputs_offset(layout_) + 8 * i, DType::kF64, 1, 1}; }
  static std::int64_t scalar_bytes(const Layout& l) {
    return 8 * (1 + static_cast<std::int64_t>(l.model->units().size()));
  }
  static std::int64_t token_bytes(const Layout& l) { return 4 * l.options.micro_batch.rows(); }
  static std::int64_t document_bytes(const Layout& l) {
    const BatchShape& shape = l.options.micro_batch;
    return shape.documents ? 4 * shape.document_numbers() : 0;
  }

 private:
  static constexpr std::int64_t kTokenAlign = 256;  // kernels read several tokens at once
  // The number of values of all ranks in one exchange: large enough to use a link at full speed.
  static constexpr std::int64_t kExchangeValues = std::int64_t{4} << 20;

  static std::int64_t micro_batch_bytes(const Layout& l) { return 2 * token_bytes(l) + document_bytes(l); }
  static std::int64_t exchange_bytes(const Layout& l) {
    if (l.options.weight_bits == 0 && l.options.gradient_bits == 0) return 0;
    std::int64_t most = 0;  // the most values that one rank exchanges for a tile
    for (const Layout::TileTensors& tile : l.tiles)
      most = std::max(most, tile.piece * l.options.sharding.replicas());
    const std::int64_t values = std::min(most, exchange_values(l)) * l.options.sharding.ranks;
    return round_up(kernels::quantized_bytes(values, 8), 4096);
  }
  char* exchange(int which) const {
    return base_ + exchange_offset(layout_) + which * exchange_bytes(layout_);
  }

  static std::int64_t scratch_bytes(const Layout& l) {
    const BatchShape shape = l.options.micro_batch;
    std::int64_t bytes = std::max(
        {l.model->block_workspace_bytes(shape, l.options.backward()), l.model->head_workspace_bytes(shape),
         l.model->embedding_workspace_bytes(shape), Ops::kSumPartials * std::int64_t{sizeof(double)}});
    bool any_frozen = false;
    for (std::int32_t u = std::max(1, l.first_trained()); u < l.head_unit(); ++u)
      any_frozen |= l.is_frozen(u);
    if (any_frozen) bytes = std::max(bytes, l.model->block_workspace_bytes(shape, Backward::kFrozen));
    if (l.is_frozen(l.head_unit()))
      bytes = std::max(bytes, l.model->head_workspace_bytes(shape, HeadGradients::kFrozen));
    return round_up(bytes, 4096);
  }
  // The saved activations of a recomputed block, for a whole backward. Without recomputation, only forwards
  // whose activations are not kept use this memory.
  static std::int64_t saved_bytes(const Layout& l) {
    return round_up(l.model->saved_bytes(l.options.micro_batch), 4096);
  }
  static std::int64_t partials_bytes(const Layout& l) {
    const std::int64_t doubles = Ops::kSumPartials + (l.options.parts.tensor > 1 ? 1 : 0);
    const bool apart = l.options.place().ranks() > 1 || l.tiles.size() > l.model->units().size();
    return apart ? round_up(doubles * std::int64_t{sizeof(double)}, 4096) : 0;
  }
  static std::int64_t copies_bytes(const Layout& l) {
    return round_up(l.largest_copy() * static_cast<std::int64_t>(size_of(l.model->accumulator_dtype())),
                    4096);
  }
  static std::int64_t partials_offset(const Layout& l) { return scratch_bytes(l) + saved_bytes(l); }
  static std::int64_t exchange_offset(const Layout& l) { return partials_offset(l) + partials_bytes(l); }
  static std::int64_t copies_offset(const Layout& l) { return exchange_offset(l) + 2 * exchange_bytes(l); }
  static std::int64_t inputs_offset(const Layout& l) { return copies_offset(l) + copies_bytes(l); }
  std::int64_t rows() const { return layout_.options.micro_batch.rows(); }
  View tokens(std::int64_t micro_batch, std::int64_t at, std::int64_t count) const {
    return {static_cast<char*>(inputs()) + input_bytes(layout_, micro_batch) + at, DType::kI32, 1, count};
  }

  const Layout& layout_;
  char* base_;
};

// Views of a flat tensor whose bytes are at `data`: of all its elements, and of a unit's (or tile's) elements
// without padding.
inline View whole_view(const Layout& layout, void* data, TensorId tensor) {
  const TensorSpec& spec = layout.table.tensor(tensor).spec;
  return {data, spec.dtype, 1, spec.count};
}
inline View unit_view(const Layout& layout, void* data, TensorId tensor, const Layout::TileTensors& unit) {
  return whole_view(layout, data, tensor).col_range(0, unit.count);
}

}  // namespace zg
