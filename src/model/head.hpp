// The head: final norm, output matrix and loss. The logits of all rows never exist at once: they come in
// chunks of rows or, where the output matrix is in tiles, in chunks of columns.
#pragma once
#include <cstdint>

#include "model/call.hpp"

namespace zg::model {

// Columns of the logits that products compute: V or, if OpSizes::pads_logits(), the next multiple of 64. The
// output matrix has zero rows for the padding columns; the loss ignores these, and their gradients are zero.
std::int64_t head_columns(const ModelConfig& config, const OpSizes& sizes);

// logits_bytes: the most bytes that the logits of a chunk of rows and their gradient may take. For an output
// matrix in tiles: the number of tiles on each rank, and the rows of the largest tile. 0 tiles: it is whole.
struct HeadRoom {
  std::int64_t logits_bytes = 0;
  std::int64_t tiles = 0, tile_rows = 0;
};

HeadRoom head_room(const Unit& unit, std::size_t table, std::int64_t logits_bytes);

// Rows of a chunk; a function of the sizes alone. The chunk's logits and their gradient take at most
// `logits_bytes`, or half of the bytes of the output matrix's gradient if that is more: each chunk reads and
// writes that gradient once, so larger chunks have less traffic. With tiles all rows are one chunk.
std::int64_t head_chunk_rows(const ModelConfig& config, DType dtype, std::int64_t rows, const OpSizes& sizes,
                             const HeadRoom& room);

// Bytes of the workspace of run_head(). config: the sizes of the shard.
std::int64_t head_bytes(const ModelConfig& config, const TensorShard& shard, DType dtype, std::int64_t rows,
                        const OpSizes& sizes, const HeadRoom& room, HeadGradients gradients);

// Computes a call of the head. `call` has the head's unit, and `table` is the same call on the unit that
// holds the output matrix [head_columns(), C]; a tensor-parallel rank has the rows of its own tokens. Null
// table.grads: the gradient of the output matrix is not computed. Null call.grads: the gradients of the norm
// are not computed. The loss is summed over all rows and all tokens, also where this rank holds only some
// rows of the residual stream.
void run_head(const Call& call, const Call& table);

}  // namespace zg::model
