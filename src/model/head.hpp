// The head: final norm, output matrix and loss, in chunks of rows, so that the logits of all rows never exist
// at once.
#pragma once
#include <cstdint>

#include "model/call.hpp"

namespace zg::model {

// Columns of the logits that products compute: V or, where OpSizes::pads_logits(), the next multiple of 64.
// The output matrix has zero rows for the others, which the loss does not see, and whose gradients are zero.
std::int64_t head_columns(const ModelConfig& config, const OpSizes& sizes);

// What the logits of a chunk of rows and their gradient may take, and whether the output matrix is in tiles.
struct HeadRoom {
  std::int64_t logits_bytes = 0;
  bool in_tiles = false;
};

// Rows of a chunk; a function of the sizes alone. The chunk's logits and their gradient take at most
// `logits_bytes`, or half of what the output matrix's gradient takes where that is more: each chunk reads and
// writes that gradient once, so larger chunks have less traffic. Beside tiles they take a quarter of what the
// matrix does at most, since a matrix that does not fit must have smaller chunks.
std::int64_t head_chunk_rows(const ModelConfig& config, DType dtype, std::int64_t rows, const OpSizes& sizes,
                             const HeadRoom& room);

// Bytes of the workspace of the following calls. config: the sizes of the part.
std::int64_t head_bytes(const ModelConfig& config, const ModelPart& part, DType dtype, std::int64_t rows,
                        const OpSizes& sizes, const HeadRoom& room, HeadGradients gradients);

// The call's unit is the head. `table` is a call on the unit that has the output matrix [head_columns(), C],
// of which a part has the rows of its tokens; its gradient is computed unless that call has none, and those
// of the norm unless the first one has none. All gradients are multiplied by loss_scale. x and dx have the
// part's rows of the residual stream, the loss is that of all rows and all tokens.
void head_backward(const Call& call, const Call& table, View x, View targets, View loss_sum, View dx,
                   void* workspace, double loss_scale);
void head_loss(const Call& call, const Call& table, View x, View targets, View loss_sum, void* workspace);
// logits: [N, V], whose rows are the caller's and have no padding.
void head_logits(const Call& call, const Call& table, View x, View logits, void* workspace);

}  // namespace zg::model
