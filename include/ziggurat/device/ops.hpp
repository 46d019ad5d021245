// The ops that a device can compute. Each op is enqueued on a stream and works on views of that device's
// memory (for the host device: any memory). No op allocates device memory; scratch is an argument.
//
// Type T is f32, bf16, f16 or f64, the same for all T operands of a call; arithmetic is in fp32 (in fp64 for
// f64). Type A (accumulators, statistics) is f32, or f64 if T is f64. Shapes: N rows (tokens), C width, I
// width of the MLP, V vocabulary, P positions. Views may have ld > cols. Outputs must not overlap inputs
// unless the op allows it. Results do not depend on the number of threads.
//
// An operand of a wrong type or shape is a bug of the caller and ends the process. The stream's synchronize()
// throws failures of the device.
#pragma once
#include <cstdint>

#include "ziggurat/base/view.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/device/op_args.hpp"
#include "ziggurat/device/router_args.hpp"
#include "ziggurat/kernels/optimizer_state.hpp"
#include "ziggurat/kernels/quantize.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg {

// Options of a matrix product and its epilogue (what is done to C before it is stored). A device fuses the
// epilogue into the product if it can; else each step of the epilogue is a separate pass, and C is rounded in
// between. An epilogue excludes `accumulate` and needs a C of type T.
struct GemmOptions {
  Trans a = Trans::kNo, b = Trans::kNo;
  bool accumulate = false;  // C += instead of C =
  View bias = {};           // T [1, n], added to every row
  // Each T [m, n]. At most one of the three is given, and none may be C itself:
  View addend = {};         // added after the bias
  View gelu_input = {};     // an output: receives product plus bias; C = gelu(gelu_input)
  View gelu_backward = {};  // C is multiplied by gelu'(gelu_backward); excludes a bias
  // A [1, m]: receives the row sums of op(A); added to if `accumulate`. Where C is the gradient of a linear
  // layer's weight, this is the gradient of its bias. Needs a = kYes and a C of type A, excludes an epilogue.
  View bias_gradient = {};
  View scratch = {};  // A [row_groups(), at least m], with a bias_gradient
};

// Sizes of the scratch that ops need, and of the logits' chunks. They are known without the device, so that a
// run can be planned for a device that this machine does not have.
class OpSizes {
 public:
  virtual ~OpSizes() = default;
  // Rows are divided into this many fixed groups. Sums over rows are made per group and then added in order.
  virtual std::int64_t row_groups() const = 0;
  // Scratch bytes of attention() or of attention_backward(), whichever needs more.
  virtual std::int64_t attention_scratch_bytes(DType dtype, const AttentionShape& shape) const = 0;
  // Scratch bytes of attention_block_backward().
  virtual std::int64_t attention_block_scratch_bytes(DType /*dtype*/, const AttentionBlock& /*block*/) const {
    return 0;
  }
  // The most bytes that a chunk of logits and their gradient should take: enough rows for the head's matrix
  // product to run at full speed.
  virtual std::int64_t logits_bytes() const = 0;
  // Whether matrix products run at full speed only at large sizes in multiples of 16 bytes. The head then
  // pads the vocabulary, and makes its chunks of logits equally large.
  virtual bool pads_logits() const { return false; }
};

class Ops : public OpSizes {
 public:
  // C[m,n] (T or A) = op(A)[m,k] op(B)[k,n], fp32 accumulation (fp64 for f64).
  virtual void gemm(Stream& s, View a, View b, View c, const GemmOptions& options) = 0;

  // y = (x - mean) * rstd * w + b.
  virtual void layernorm(Stream& s, const LayerNormArgs& args) = 0;
  virtual void layernorm_backward(Stream& s, const LayerNormBackwardArgs& args) = 0;
  // y = x * rstd * w, or, with NormWeight::kPlusOne, x * rstd * (1 + w).
  virtual void rmsnorm(Stream& s, const RmsNormArgs& args) = 0;
  virtual void rmsnorm_backward(Stream& s, const RmsNormBackwardArgs& args) = 0;
  // Applies rmsnorm() separately to each of the first `heads` heads of a row. With heads = 1 and head_size =
  // all columns, it normalizes over all heads together.
  virtual void head_rmsnorm(Stream& s, const HeadRmsNormArgs& args) = 0;
  virtual void head_rmsnorm_backward(Stream& s, const HeadRmsNormBackwardArgs& args) = 0;
  // The tanh approximation of GELU, as in GPT-2. x, y T [N,I]; y may be x.
  virtual void gelu(Stream& s, View x, View y) = 0;
  // dx = dy * gelu'(x), all T [N,I]; dx may be dy.
  virtual void gelu_backward(Stream& s, View x, View dy, View dx) = 0;
  // y = activation(gate) * up, without kClampedPairs. gate_up T [N,2I]: gate in the left half of the columns,
  // up in the right; y T [N,I].
  virtual void swiglu(Stream& s, View gate_up, View y, Gate activation = Gate::kSilu) = 0;
  // dy T [N,I]; d_gate_up T [N,2I], which may be gate_up.
  virtual void swiglu_backward(Stream& s, View gate_up, View dy, View d_gate_up,
                               Gate activation = Gate::kSilu) = 0;

  // Mixtures of experts (router_args.hpp). Chooses each token's experts and weighs them. Also with logits
  // that are no numbers, the experts of a token are different ones.
  virtual void route(Stream& s, const RouteArgs& args) = 0;
  // The gradient of the logits, from the gradient of the weights and from balance terms.
  virtual void route_backward(Stream& s, const RouteBackwardArgs& args) = 0;
  // The sums over tokens that balance terms need.
  virtual void router_sums(Stream& s, const RouterSumsArgs& args) = 0;
  // Sorts slots by expert and then by token.
  virtual void sort_slots(Stream& s, const SortSlotsArgs& args) = 0;
  // Copies the rows of tokens, and adds rows to the rows of tokens, with the bias of an expert's last
  // product.
  virtual void gather_rows(Stream& s, const GatherRowsArgs& args) = 0;
  virtual void add_rows(Stream& s, const AddRowsArgs& args) = 0;
  virtual void expert_bias_backward(Stream& s, const ExpertBiasBackwardArgs& args) = 0;
  // The activation of gate and up times the weight of each row's slot. The backward also computes the result
  // again.
  virtual void expert_gate(Stream& s, const ExpertGateArgs& args) = 0;
  virtual void expert_gate_backward(Stream& s, const ExpertGateBackwardArgs& args) = 0;

  // Rotary embedding in place on the first `heads` heads of each row of x; RopeTable says which columns are a
  // pair. The forward op is y = a R x with amplitude a and rotation R; the
  // inverse, for the backward pass, is dx = a R^T dy. Both multiply by a, so one undoes the other only if a
  // is 1.
  virtual void rope(Stream& s, const RopeArgs& args) = 0;

  // Keys and values of latent attention, from the product that makes both and the key columns that all heads
  // share.
  virtual void expand_kv(Stream& s, const ExpandKvArgs& args) = 0;
  virtual void expand_kv_backward(Stream& s, const ExpandKvBackwardArgs& args) = 0;

  // Causal attention by shape.rule. Query head h uses key/value head h / (heads / kv_heads). The T x T scores
  // of a head are never stored.
  virtual void attention(Stream& s, const AttentionArgs& args) = 0;
  // Sinks enter only through lse; attention_sinks_backward() computes their gradient.
  virtual void attention_backward(Stream& s, const AttentionBackwardArgs& args) = 0;
  // Adds the gradient of the sinks. Each row adds -exp(sink - lse) times the dot product of o and d_o over
  // the head. Rows are summed in a fixed order.
  virtual void attention_sinks_backward(Stream& s, const AttentionSinksBackwardArgs& args) = 0;

  // Attention to some of the keys (AttentionBlock). Rows that belong to no sequence are left unchanged.
  virtual void attention_block(Stream& s, const AttentionBlockArgs& args) = 0;
  // Adds to dq and dkv what the block contributes to the gradients of an attention to all keys.
  virtual void attention_block_backward(Stream& s, const AttentionBlockBackwardArgs& args) = 0;

  // out = a + b, all T [N,C]; out may be a or b.
  virtual void add(Stream& s, View a, View b, View out) = 0;
  // y = factor * x, rounded once; the factor is of type A. x, y T [N,C]; y may be x.
  virtual void scale(Stream& s, View x, double factor, View y) = 0;
  // y = x / (1 - rate) if `dropout` keeps the element; else 0, even if x is NaN. The backward pass is the
  // same op on the gradient. x, y T [N,C], rows of sequences; y may be x.
  virtual void dropout(Stream& s, View x, const Dropout& dropout, View y) = 0;
  // db (A [1,C]) += column sums of dy (T [N,C]). scratch: A [row_groups(), at least C].
  virtual void bias_backward(Stream& s, View dy, View db, View scratch) = 0;

  // out[n] = wte[ids[n]], plus wpe[position of row n] unless wpe is null. An id outside of [0, V) ends the
  // process; on a GPU the device fails. With `part`, wte holds V rows of a larger table, and ids index the
  // larger table. Rows of tokens outside the shard count as zeros; with VocabShard::only, `out` is left
  // unchanged for them.
  virtual void embedding(Stream& s, const EmbeddingArgs& args) = 0;
  // Adds each row of dout to dwte at the row's id, and to dwpe at its position. Rows are added in a fixed
  // order, unless the device was made non-deterministic for speed.
  virtual void embedding_backward(Stream& s, const EmbeddingBackwardArgs& args) = 0;

  // loss_sum += sum over rows of -log softmax(logits)[target]. dlogits = scale * (softmax - onehot), 0 in
  // ignored rows. With a softcap, dlogits is the gradient with respect to the uncapped logits.
  virtual void cross_entropy(Stream& s, const CrossEntropyArgs& args) = 0;
  static constexpr std::int64_t kSumPartials = 1024;

  // First step of a cross entropy whose logits are sharded by vocabulary. For each row it writes three
  // scalars, from which the shards can be merged exactly: the shard's largest logit, the sum of
  // exp(logit - largest), and the target's logit, or 0 if another shard holds the target.
  virtual void softmax_part(Stream& s, const SoftmaxPartArgs& args) = 0;
  // Second step: cross_entropy() over all shards. dlogits is the gradient of this shard's logits. Every shard
  // adds the loss over the whole vocabulary.
  virtual void cross_entropy_part(Stream& s, const CrossEntropyPartArgs& args) = 0;

  virtual void zero(Stream& s, View x) = 0;
  // out = in, rounded to nearest even; any two storage types, of the same shape. With a leading dimension of 0
  // all rows of `in` are one and the same.
  virtual void cast(Stream& s, View in, View out) = 0;
  // Convert values to integers of 8 or 4 bits with a scale per block, and back
  // (ziggurat/kernels/quantize.hpp). values: T [1, n], without gaps; codes: u8 [1, quantized_bytes(n, bits)],
  // aligned to 4 bytes. `add`: values += instead of values =.
  virtual void quantize(Stream& s, View values, int bits, View codes) = 0;
  virtual void dequantize(Stream& s, View codes, int bits, bool add, View values) = 0;
  // Decodes a coded matrix: out = level * scale, computed in fp32 and rounded once to T.
  virtual void decode(Stream& s, const DecodeArgs& args) = 0;
  // Writes an accumulated gradient in its final type: out = accumulator, rounded. The types of (accumulator,
  // out) are (f32, bf16), (f32, f16), (f32, f32) or (f64, f64); both are without gaps. norm_sq (f64 [1,1]) +=
  // the sum of squares of the rounded values, in fp64 and in a fixed order; it is not finite if a value is
  // NaN or infinite. scratch: f64 [1, kSumPartials].
  virtual void finish_gradient(Stream& s, View accumulator, View out, View norm_sq, View scratch) = 0;

  // One fused optimizer step over n = weight.count() elements; all operands are [1, n]. Reads grad (f32,
  // bf16, f16 or f64), updates the state, and writes the weight, which is the rounded master weight.
  // kernels/host/update.hpp has the formulae.
  virtual void update(Stream& s, View grad, View weight, const OptimizerState& state,
                      const StateFormat& format, const UpdateParams& params) = 0;
  // Encodes trained weights, f32 `in` [1, n] in kFp8Weights: codes u8 [1, n], scales f32 [1, blocks], all
  // without gaps. All devices produce the same bits.
  virtual void encode_fp8(Stream& s, View in, View codes, View scales) = 0;
};

// The ops of the host device. They take HostStreams.
Ops& host_ops();

}  // namespace zg
