// GPT-2 and Llama as ops over views. Knows units (flat parameter blocks), micro-batches and buffers;
// never sees a store, a tier or a schedule.
//
// A model is a list of units, each one flat tensor of parameters that is fetched, updated and released as
// a whole: unit 0 the embedding, units 1..L the blocks, unit L+1 the head (final norm, and the output
// matrix unless it is tied to the embedding). Shapes: B sequences of T tokens, N = B*T rows, C = width.
//
// A model holds no tensor: weights, gradients and scratch are the caller's, and must live until the stream
// has done the work. Calls may come from any thread, one at a time per stream; none allocates device memory.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "ziggurat/device/ops.hpp"
#include "ziggurat/kernels/types.hpp"
#include "ziggurat/model/config.hpp"

namespace zg {

enum class Init { kZero, kOne, kNormal, kNormalResidual };  // residual: std / sqrt(2 * layers)

struct Param {
  std::string name;                 // Hugging Face's, without "transformer."; e.g. "h.0.attn.c_attn.weight"
  std::int64_t rows = 1, cols = 0;  // as stored here: matrices are [out, in], vectors are 1 x n
  bool vector = false;
  bool conv1d = false;      // the file holds it transposed, [in, out] (GPT-2's Conv1D)
  std::int64_t offset = 0;  // first element in the unit's flat tensor; multiple of kParamAlign
  Init init = Init::kNormal;
  std::int64_t count() const { return rows * cols; }
};
// Elements; the gaps are zero for ever. Blocks of quantised state never hold elements of two parameters.
inline constexpr std::int64_t kParamAlign = kQuantBlock;

struct Unit {
  std::string name;  // "embedding", "block.0", ..., "head"
  std::vector<Param> params;
  std::int64_t count = 0;  // elements of the flat tensor, padding included
  const Param& param(const std::string& name_or_suffix) const;  // aborts when there is none
};

struct BatchShape {
  std::int64_t sequences = 0, time = 0;
  std::int64_t rows() const { return sequences * time; }
};

class Model {
 public:
  // T: f32, bf16, f16 or f64 (DType of weights and activations). Accumulators are f32, f64 for f64.
  // logits_bytes: what the logits of a chunk and their gradient should take at most; 0: as the device likes it.
  Model(const ModelConfig& config, DType dtype, Ops& ops, std::int64_t logits_bytes = 0);
  // To plan with, where there is no device: sizes are known, and calls that compute abort.
  Model(const ModelConfig& config, DType dtype, const OpSizes& sizes, std::int64_t logits_bytes = 0);

  const ModelConfig& config() const { return config_; }
  DType dtype() const { return dtype_; }
  DType accumulator_dtype() const { return dtype_ == DType::kF64 ? DType::kF64 : DType::kF32; }
  const std::vector<Unit>& units() const { return units_; }
  std::int64_t parameter_count() const;  // without padding

  // Memory handed in as void* must be aligned to 256 bytes and may hold anything (NaN too).
  //
  // Bytes of: the residual stream of one micro-batch ([N,C] of T, rounded up to 4096); what a block's
  // backward needs besides its input ("saved"); scratch of each call.
  std::int64_t checkpoint_bytes(BatchShape shape) const;
  std::int64_t saved_bytes(BatchShape shape) const;
  std::int64_t block_workspace_bytes(BatchShape shape) const;  // forward and backward
  std::int64_t head_workspace_bytes(BatchShape shape) const;   // head() and head_loss()

  // All calls enqueue on `s` and return. `weights`, `grads` are the unit's flat tensors ([1, count]; grads
  // are accumulators, added to). ids, targets: i32 [1,N].
  void embedding_forward(Stream& s, BatchShape shape, View weights, View ids, View x) const;
  void embedding_backward(Stream& s, BatchShape shape, View ids, View dx, View grads) const;

  // out [N,C] = block(x [N,C]); fills `saved` (saved_bytes). out may not alias x. Run again on the same x it
  // gives the same bits, which is how activations are recomputed; a null `out` then saves the last product.
  void block_forward(Stream& s, BatchShape shape, View weights, View x, View out, void* saved,
                     void* workspace) const;
  // dx [N,C]: gradient of the output in, of the input out, in place. `saved` is used up.
  void block_backward(Stream& s, BatchShape shape, View weights, View x, void* saved, View dx, View grads,
                      void* workspace) const;

  // Loss of one micro-batch and its gradient, in chunks of rows so that the logits are never whole. `table`:
  // the output matrix's unit: the embedding's flat weights when tied, else the head's own. loss_sum f64 [1,1]
  // += sum over valid tokens. dx [N,C] overwritten with loss_scale * d loss_sum / d x. head_grads,
  // table_grads: accumulators (the same view when untied). All gradients that follow from dx have that factor
  // too; whoever uses them divides by it.
  void head(Stream& s, BatchShape shape, View head_weights, View table, View x, View targets, View loss_sum,
            View dx, View head_grads, View table_grads, void* workspace, double loss_scale = 1) const;
  // Loss alone.
  void head_loss(Stream& s, BatchShape shape, View head_weights, View table, View x, View targets,
                 View loss_sum, void* workspace) const;
  // Logits A [n, V] of the rows given in x [n,C] (n <= shape.rows()).
  void head_logits(Stream& s, View head_weights, View table, View x, View logits, void* workspace) const;

 private:
  ModelConfig config_;
  DType dtype_;
  Ops& ops() const;

  const OpSizes* sizes_;
  Ops* ops_ = nullptr;  // null: to plan with
  std::int64_t logits_bytes_;
  std::vector<Unit> units_;
};

// Floating point operations of the matrix products of one training step over `tokens` tokens in sequences of
// `time`:
//
//   tokens * (2 * p * layers * (block + attention) + 6 * table)
//
// where block and table are the elements of a block's matrices and of the output matrix, attention = time *
// heads * head_size (two products, half of each masked away), and p = 3 passes (a backward counts as two), 4
// with recomputation of the blocks. What flash attention computes again in its backward is not counted.
double training_flops(const ModelConfig& config, std::int64_t tokens, std::int64_t time, bool recompute);

}  // namespace zg
