// One transformer block of either architecture. N = rows of the batch, C = width.
//
// A part of a block has some of the heads and some of the inner width; a call's config has their numbers.
// Where the residual stream is split by rows, x, out, dx and what norms save have N / parts rows.
//
// All calls enqueue work on the call's stream. Forward fills `saved` for backward, which reads and may
// overwrite it; with a null `out` forward does only that. Results do not depend on what the memory held
// before, so a forward that is run again gives the same bits.
#pragma once
#include <cstdint>

#include "model/call.hpp"

namespace zg::model {

struct BlockBytes {
  std::int64_t saved = 0, workspace = 0;
};

// config: the sizes of the part.
BlockBytes gpt2_block_bytes(const ModelConfig& config, const ModelPart& part, DType dtype, BatchShape shape,
                            const OpSizes& sizes);
void gpt2_block_forward(const Call& call, View x, View out, void* saved, void* workspace);
void gpt2_block_backward(const Call& call, View x, void* saved, View dx, void* workspace);

BlockBytes llama_block_bytes(const ModelConfig& config, const ModelPart& part, DType dtype, BatchShape shape,
                             const OpSizes& sizes);
void llama_block_forward(const Call& call, View x, View out, void* saved, void* workspace);
void llama_block_backward(const Call& call, View x, void* saved, View dx, void* workspace);

inline std::int64_t residual_rows(const ModelPart& part, BatchShape shape) {
  return part.sequence ? shape.rows() / part.parts : shape.rows();
}

}  // namespace zg::model
