// The op set: what a device can compute. Each op is enqueued on a stream and works on views of memory
// of that device (for the host device: any memory). No op allocates device memory; scratch is an argument.
//
// Storage types of "T" operands are f32, bf16, f16 or f64, all T operands of a call alike; arithmetic is fp32
// (fp64 for f64). "A" operands (accumulators, statistics) are f32, or f64 when T is f64.
// Results do not depend on the number of threads.
// N = rows (tokens), C = width, V = vocabulary. Views may have ld > cols.
#pragma once
#include <cstdint>

#include "ziggurat/base/view.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/kernels/optimizer_state.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg {

// What else happens to a product before it is stored. Devices that can do so work it in; on others each is a
// pass of its own, with C rounded in between. Without accumulate, and where C is of type T.
struct GemmOptions {
  Trans a = Trans::kNo, b = Trans::kNo;
  bool accumulate = false;  // C += instead of C =
  View bias = {};           // T [1, n], added to every row
  View addend = {};         // T [m, n], added after the bias; not C, and not with one of the following
  View gelu_input = {};     // T [m, n], written: C is gelu() of it (the tanh approximation)
  View gelu_backward = {};  // T [m, n]: C is multiplied by gelu'() of it; no bias
};

// What operations take besides their operands. Known without the device itself, so that a run can be planned for
// one that is not there.
class OpSizes {
 public:
  virtual ~OpSizes() = default;
  // Sums over rows are made in this many fixed groups of rows, added in order; other devices, other groups.
  virtual std::int64_t row_groups() const = 0;
  virtual std::int64_t attention_scratch_bytes(DType dtype, const AttentionShape& shape) const = 0;
  // What the logits of one call, and their gradient, should take at most: enough rows for a product at full
  // speed.
  virtual std::int64_t logits_bytes() const = 0;
};

class Ops : public OpSizes {
 public:

  // C[m,n] (T or A) = op(A)[m,k] op(B)[k,n], fp32 accumulation (fp64 for f64).
  virtual void gemm(Stream& s, View a, View b, View c, const GemmOptions& options) = 0;

  // y = (x - mean) * rstd * w + b. x, y T [N,C]; w, b T [1,C]; stats A [N,2] = mean, rstd. y may not
  // alias x.
  virtual void layernorm(Stream& s, View x, View w, View b, double eps, View y, View stats) = 0;
  // dx += (T), dw += (A [1,C]), db += (A [1,C]). scratch: A [row_groups(), 2*C].
  virtual void layernorm_backward(Stream& s, View dy, View x, View w, View stats, View dx, View dw, View db,
                                  View scratch) = 0;
  // y = x * rstd * w, stats A [N,1] = rstd.
  virtual void rmsnorm(Stream& s, View x, View w, double eps, View y, View stats) = 0;
  virtual void rmsnorm_backward(Stream& s, View dy, View x, View w, View stats, View dx, View dw,
                                View scratch) = 0;
  // tanh approximation of GELU, as GPT-2. x, y T [N,I].
  virtual void gelu(Stream& s, View x, View y) = 0;
  // dx = dy * gelu'(x); dx may alias dy.
  virtual void gelu_backward(Stream& s, View x, View dy, View dx) = 0;
  // gate_up T [N,2I] (gate left, up right) -> y T [N,I] = silu(gate) * up.
  virtual void swiglu(Stream& s, View gate_up, View y) = 0;
  // d_gate_up T [N,2I]; may alias gate_up.
  virtual void swiglu_backward(Stream& s, View gate_up, View dy, View d_gate_up) = 0;

  // Rotary embedding in place on the first `heads` heads of size `head_size` of every row: row r has
  // position r % time. Half-split convention (Hugging Face): pairs (i, i + head_size/2). inverse: the
  // transpose, for the backward.
  virtual void rope(Stream& s, View x, std::int64_t time, std::int64_t heads, std::int64_t head_size,
                    double theta, bool inverse) = 0;

  // Causal attention, scale 1/sqrt(head_size). qkv T [B*T, (heads + 2*kv_heads)*head_size] = q | k | v;
  // o T [B*T, heads*head_size]; lse A [B*heads, T] = log of the softmax denominator (with the max).
  // Query head h uses key/value head h / (heads / kv_heads). Never stores T x T per head.
  // scratch: u8 [1, attention_scratch_bytes()], null where that is 0.
  virtual void attention(Stream& s, View qkv, const AttentionShape& shape, View o, View lse,
                         View scratch) = 0;
  // dqkv T like qkv, overwritten.
  virtual void attention_backward(Stream& s, View qkv, View o, View lse, View d_o,
                                  const AttentionShape& shape, View dqkv, View scratch) = 0;

  // out = a + b, T [N,C]; out may alias a or b.
  virtual void add(Stream& s, View a, View b, View out) = 0;
  // y = x where Dropout keeps it, divided by what it keeps of all; else 0. The same for a gradient. y may be x.
  virtual void dropout(Stream& s, View x, const Dropout& dropout, View y) = 0;
  // db (A [1,M]) += column sums of dy (T [N,M]). scratch: A [row_groups(), M].
  virtual void bias_backward(Stream& s, View dy, View db, View scratch) = 0;

  // out T [N,C] = wte[ids[n]] (+ wpe[n % time] if given). ids i32 [1,N].
  virtual void embedding(Stream& s, View ids, View wte, View wpe, std::int64_t time, View out) = 0;
  // dwte (A [V,C]) += rows of dout by id, dwpe (A [P,C]) += by position; fixed order, no atomics.
  virtual void embedding_backward(Stream& s, View ids, View dout, std::int64_t time, View dwte,
                                  View dwpe) = 0;

  // logits A [N,V], targets i32 [1,N] (negative: ignored). loss_sum f64 [1,1] += sum of -log softmax.
  // dlogits T [N,V] = scale * (softmax - onehot), 0 for ignored rows; null view: loss only. The scale lifts
  // gradients that would vanish in f16; the loss has none of it. scratch: f64 [1, kSumPartials].
  virtual void cross_entropy(Stream& s, View logits, View targets, View loss_sum, View dlogits, View scratch,
                             double scale = 1) = 0;
  static constexpr std::int64_t kSumPartials = 1024;

  virtual void zero(Stream& s, View x) = 0;
  // out (T or A) = in, rounded.
  virtual void cast(Stream& s, View in, View out) = 0;
  // Gradient leaves its accumulator: out (bf16, f16, f32 or f64) = in (A), rounded; norm_sq f64 [1,1] += sum
  // of squares of what was written, in fp64 and fixed order; a NaN or infinity makes it not finite. scratch: f64 [1, kSumPartials].
  virtual void finish_gradient(Stream& s, View accumulator, View out, View norm_sq, View scratch) = 0;

  // One fused pass of the optimizer over n = weight.count() elements (all 1 x n): grad in (f32, bf16, f16 or
  // f64), state updated, weight = rounded master. kernels/host/update.hpp has the formulae.
  virtual void update(Stream& s, View grad, View weight, const OptimizerState& state,
                      const StateFormat& format, const UpdateParams& params) = 0;
};

// Enqueues on HostStreams.
Ops& host_ops();

}  // namespace zg
