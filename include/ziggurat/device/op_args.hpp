// Operands of the ops that take many of them (ziggurat/device/ops.hpp): one struct per op. ops.hpp explains
// the types T and A and the letters in shapes. The structs own no memory.
#pragma once
#include <cstdint>

#include "ziggurat/base/view.hpp"
#include "ziggurat/kernels/coded.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg {

struct LayerNormArgs {
  View x = {};  // T [N,C]
  View w = {};  // T [1,C]
  View b = {};  // T [1,C]
  double eps = 0;
  View y = {};      // T [N,C], written
  View stats = {};  // A [N,2] = mean, rstd, written
};

struct LayerNormBackwardArgs {
  View dy = {}, x = {};   // T [N,C]
  View w = {};            // T [1,C]
  View stats = {};        // as layernorm() wrote them
  View dx = {};           // T [N,C], added to
  View dw = {}, db = {};  // A [1,C], added to
  View scratch = {};      // A [row_groups(), 2*C]
};

struct RmsNormArgs {
  View x = {};  // T [N,C]
  View w = {};  // T [1,C]
  double eps = 0;
  View y = {};      // T [N,C], written
  View stats = {};  // A [N,1] = rstd, written
  NormWeight weight = NormWeight::kPlain;
};

struct RmsNormBackwardArgs {
  View dy = {}, x = {};  // T [N,C]
  View w = {};           // T [1,C]
  View stats = {};       // as rmsnorm() wrote them
  View dx = {};          // T [N,C], added to
  View dw = {};          // A [1,C], added to
  View scratch = {};     // A [row_groups(), at least C]
  NormWeight weight = NormWeight::kPlain;
};

struct HeadRmsNormArgs {
  View x = {};  // T [N, at least heads*head_size]
  View w = {};  // T [1,head_size], the same for all heads
  double eps = 0;
  std::int64_t heads = 0, head_size = 0;
  View y = {};      // like x, written
  View stats = {};  // A [N,heads] = rstd, written
  NormWeight weight = NormWeight::kPlain;
};

struct HeadRmsNormBackwardArgs {
  View dy = {}, x = {};  // T [N, at least heads*head_size]
  View w = {};           // T [1,head_size]
  View stats = {};       // as head_rmsnorm() wrote them
  std::int64_t heads = 0, head_size = 0;
  View dx = {};       // like x, overwritten; may be dy
  View dw = {};       // A [1,head_size], added to: sums over rows and heads, in a fixed order
  View scratch = {};  // A [row_groups(), at least head_size]
  NormWeight weight = NormWeight::kPlain;
};

struct RopeArgs {
  View x = {};  // T [N, at least heads*head_size], changed in place
  RowPositions positions = {};
  std::int64_t heads = 0, head_size = 0;
  RopeTable table = {};
  bool inverse = false;  // rotates back, for the backward pass
  // i32 [1,N], or null. For each row: the row of its sequence at which its document begins. Positions then
  // count from the start of the document instead of the sequence.
  View first_keys = {};
};

struct ExpandKvArgs {
  LatentHeads heads = {};
  // T [N, joint_columns()]: for each head the columns of its key that are its own, and then its value.
  View joint = {};
  View shared = {};  // T [N, shared]: the key columns that all heads share
  View kv = {};      // T [N, kv_columns()] = k | v of all heads, written
};

struct ExpandKvBackwardArgs {
  LatentHeads heads = {};
  View dkv = {};       // T like kv
  View d_joint = {};   // T like joint, overwritten
  View d_shared = {};  // T like shared, overwritten: the sum over heads, in ascending order, rounded once
};

struct AttentionArgs {
  View qkv = {};  // T [B*T, shape.qkv_columns()] = q | k | v
  AttentionShape shape = {};
  View o = {};        // T [B*T, shape.result_columns()], written
  View lse = {};      // A [B*heads, T], without gaps, written: the log-sum-exp of each row of scores
  View scratch = {};  // u8 [1, at least attention_scratch_bytes()]; null if that is 0
  // i32 [1, B*T], or null. For each row: the first row of its sequence that it attends to (0 to T-1), where
  // its document begins. It is at most the row itself, and never decreases within a sequence. Tiles that are
  // wholly masked by the window or by documents are skipped, here and in the backward pass.
  View first_keys = {};
  View sinks = {};  // T [1,heads] with rule.sinks, else null. With sinks, lse includes the sink's logit
};

struct AttentionBackwardArgs {
  View qkv = {}, o = {}, lse = {};  // as in attention()
  View d_o = {};                    // T like o
  AttentionShape shape = {};
  View dqkv = {};        // T like qkv, overwritten
  View scratch = {};     // as in attention()
  View first_keys = {};  // the same as in attention()
};

struct AttentionSinksBackwardArgs {
  View o = {};                // T [batch*time, shape.result_columns()]
  View lse = {};              // A [batch*heads, time]
  View d_o = {};              // like o
  AttentionShape shape = {};  // only its sizes are used
  View sinks = {};            // T [1,heads]
  View d_sinks = {};          // A [1,heads], added to
};

struct AttentionBlockArgs {
  View q = {};   // T [query_rows(), heads*head_size]
  View kv = {};  // T [key_rows(), block.kv_columns()] = k | v
  AttentionBlock block = {};
  // The result over all keys seen so far. The block overwrites it, or is merged into it by the log-sum-exp:
  View o = {};           // A [query_rows(), block.result_columns()]
  View lse = {};         // A [batch*heads, queries]
  View first_keys = {};  // i32 [1, query_rows()], or null: the position where the query's document begins
  View sinks = {};       // as in attention(), if the block does not merge
};

struct AttentionBlockBackwardArgs {
  View q = {}, kv = {};   // as in attention_block()
  View o = {}, lse = {};  // the result over all keys; o is T [query_rows(), block.result_columns()]
  View d_o = {};          // T like o
  AttentionBlock block = {};
  View dq = {};          // A like q, added to
  View dkv = {};         // A like kv, added to
  View scratch = {};     // u8 [1, at least attention_block_scratch_bytes()]; null if that is 0
  View first_keys = {};  // the same as in attention_block()
};

struct EmbeddingArgs {
  View ids = {};  // i32 [1,N]
  View wte = {};  // T [V,C]
  View wpe = {};  // T [P,C] with all positions below P, or null
  RowPositions positions = {};
  View out = {};         // T [N,C], written
  VocabShard part = {};  // which rows of a larger table wte holds
  View first_keys = {};  // as in rope()
};

struct EmbeddingBackwardArgs {
  View ids = {};   // i32 [1,N]
  View dout = {};  // T [N,C]
  RowPositions positions = {};
  View dwte = {};        // A [V,C], added to
  View dwpe = {};        // A [P,C], added to, or null
  VocabShard part = {};  // which rows dwte holds; gradients of other tokens are not added
  View first_keys = {};  // as in rope()
};

struct CrossEntropyArgs {
  View logits = {};    // A [N,V]
  View targets = {};   // i32 [1,N]; a row with a negative target is ignored
  View loss_sum = {};  // f64 [1,1], added to
  // T [N,V], or null: compute the loss only. It may share the logits' memory if their rows start at the same
  // addresses.
  View dlogits = {};
  View scratch = {};   // f64 [1, Ops::kSumPartials]
  double scale = 1;    // positive; keeps small gradients from vanishing in f16, and does not change the loss
  double softcap = 0;  // each logit becomes softcap * tanh(logit / softcap); 0: logits unchanged
};

struct SoftmaxPartArgs {
  View logits = {};   // A [N,V]: this vocabulary shard's logits, for tokens first, first + 1, ...
  View targets = {};  // i32 [1,N]
  std::int64_t first = 0;
  View numbers = {};   // A [3,N], written
  double softcap = 0;  // as in cross_entropy()
};

struct CrossEntropyPartArgs {
  CrossEntropyArgs local = {};  // logits and dlogits of this vocabulary shard; they may not share memory
  std::int64_t first = 0;       // token of the shard's first logit
  View numbers = {};            // A [3 * shards, N], without gaps: what softmax_part() wrote for each shard
};

// A coded matrix and its elements. ziggurat/kernels/coded.hpp has the formats; `blocks` are format.blocks()
// of the rows and columns of `out`. All views are without gaps.
struct DecodeArgs {
  CodeFormat format = {};
  View codes = {};          // u8 [1, format.code_bytes()]
  View scales = {};         // [1, blocks], of type scale_type(format.scale)
  View zeros = {};          // u8 [1, blocks], or null; kInt4 only
  View groups = {};         // i32 [1, columns], each from 0 to format.row_blocks() - 1, or null; kInt4 only
  View nested_levels = {};  // f32 [1, 256]; CodeScale::kNested alone has nested operands
  View nested_scales = {};  // f32 [1, format.nested_blocks()]
  float nested_offset = 0;
  View out = {};  // T [rows, columns], written
};

}  // namespace zg
