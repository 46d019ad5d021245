// The base of all calls on a block: the operands, the buffers and the shared steps.
#pragma once
#include "model/adapters.hpp"
#include "model/block_attention.hpp"
#include "model/dense_buffers.hpp"
#include "model/dense_pass.hpp"
#include "model/stack.hpp"
#include "model/units.hpp"

namespace zg::model {

inline constexpr std::size_t kNone = BlockParams::kNone;

// One of the two branches of a block: its last product, and the norm after it.
struct Branch {
  Dropped what;
  View input;
  std::size_t matrix = kNone, bias = kNone;
  std::size_t norm =
      kNone;              // weight of the RMSNorm after the product; kNone if the branch ends without a norm
  View kept, stats;       // the norm's input
  AdapterInput adapters;  // the product's adapters
};

struct DenseCall {
  const Call& call;
  const ModelConfig& c;
  Ops& ops;
  Stream& s;
  const BlockParams p;
  const DenseSaved f;
  const DenseWorkspace w;
  const Adapters adapters;
  const Branch attention, mlp;

  DenseCall(const Call& from, Backward how)
      : call(from),
        c(from.config),
        ops(from.ops),
        s(from.stream),
        p(c, from.unit.layer),
        f({c, from.shard, from.dtype, from.shape, how, from.unit.layer}, from.saved),
        w({c, from.shard, from.dtype, from.shape, how, from.unit.layer}, from.rule, from.ops, from.workspace),
        adapters(call, f.adapters, w.adapters),
        attention{Dropped::kAttention, f.attention.att, p.o, p.o_bias, p.after1, f.after1,
                  f.after_stats1,      AdapterInput::kO},
        mlp{Dropped::kMlp, f.act,    p.down,         p.down_bias,
            p.after2,      f.after2, f.after_stats2, AdapterInput::kDown} {}

  Stack qkv() const { return {call, p.q, p.v, p.q_bias, w.bias_partials}; }
  Stack gate_up() const { return {call, p.gate, p.up, p.gate_bias, w.bias_partials}; }
  View bias(std::size_t index) const { return index == kNone ? View{} : call.weight(index); }
  // The input of a branch's first products: the output of the norm before it, or the residual stream.
  View input1(const View& x) const { return p.norm1 == kNone ? x : f.norm1; }
  View input2() const { return p.norm2 == kNone ? f.x1 : norm2(); }
  // The output of the norm before the MLP, or before the router.
  View norm2() const { return routes() && !call.shard.sequence ? routing_of(call).x : f.norm2; }
  // Whether the layer has experts.
  bool routes() const { return p.router != kNone; }
  bool is_latent() const { return p.kv_b != kNone; }
  // Where attention's first products write, and later their gradient waits: qkv, or the latents.
  const View& first_outputs(const View& qkv) const { return is_latent() ? f.latent.first : qkv; }
  // Computes the norm with these parameters, if there is one. bias: LayerNorm only.
  void norm(std::size_t index, std::size_t bias, const View& x, const View& y, const View& stats) const {
    if (index == kNone) return;
    if (bias != kNone) {
      return ops.layernorm(s, {.x = x,
                               .w = call.weight(index),
                               .b = call.weight(bias),
                               .eps = c.norm_eps,
                               .y = y,
                               .stats = stats});
    }
    ops.rmsnorm(s, {.x = x,
                    .w = call.weight(index),
                    .eps = c.norm_eps,
                    .y = y,
                    .stats = stats,
                    .weight = c.block.norm_weight});
  }
  void rope(const View& qkv, bool inverse) const {
    if (!c.form().rotates) return;
    // q and k are the first heads of a row, so one call rotates both.
    ops.rope(s, {.x = qkv,
                 .positions = call.shape.positions(),
                 .heads = c.heads + c.kv_heads,
                 .head_size = c.head_size,
                 .table = *call.rope,
                 .inverse = inverse,
                 .first_keys = documents_of_rows(call.shape, call.documents)});
  }
  // Multiplies the values, or their gradients, by BlockDescription::residual_multiplier.
  void scale_values(const View& qkv) const {
    const View values = qkv.col_range((c.heads + c.kv_heads) * c.head_size, c.kv_heads * c.head_size);
    if (c.block.residual_multiplier != 1) ops.scale(s, values, c.block.residual_multiplier, values);
  }
  // What queries, keys and values pass between their products and the rotation.
  void finish_heads(const View& qkv) const {
    normalise_heads(qkv);
    scale_values(qkv);
  }
  // Calls visit(index of the norm's weight, first column, number of columns, heads, stats) for queries and
  // for keys.
  template <class F>
  void for_head_norms(const F& visit) const {
    const std::int64_t q = c.query_columns(), k = c.key_columns();
    visit(p.q_norm, 0, q, normed_heads(c, c.heads), f.q_stats);
    visit(p.k_norm, q, k, normed_heads(c, c.kv_heads), f.k_stats);
  }

  void normalise_heads(const View& qkv) const {
    if (p.q_norm == kNone) return;
    ops.cast(s, qkv.col_range(0, f.qk.cols), f.qk);
    for_head_norms(
        [&](std::size_t index, std::int64_t first, std::int64_t columns, NormedHeads n, const View& stats) {
          ops.head_rmsnorm(s, {.x = f.qk.col_range(first, columns),
                               .w = call.weight(index),
                               .eps = c.norm_eps,
                               .heads = n.heads,
                               .head_size = n.head_size,
                               .y = qkv.col_range(first, columns),
                               .stats = stats,
                               .weight = c.block.norm_weight});
        });
  }

  // Computes the MLP's activation from its input, for all rows.
  void activate(const View& rows) const {
    if (!c.form().gated && !adapters.any(AdapterInput::kGateUp))
      return call.linear_gelu(rows, p.gate, bias(p.gate_bias), f.gate_up, f.act);
    gate_up().forward(rows, f.gate_up);
    adapters.forward(AdapterInput::kGateUp, rows, f.gate_up);
    c.form().gated ? ops.swiglu(s, f.gate_up, f.act, c.block.gate) : ops.gelu(s, f.gate_up, f.act);
  }

  // The gradient of the weight of a branch's last product, from the gradient dy of its output.
  void weight_gradient(const Branch& b, const View& dy) const {
    if (b.bias == kNone) return call.linear_dw(dy, b.input, b.matrix);
    call.linear_dw_db(dy, b.input, b.matrix, call.grad(b.bias), w.bias_partials);
  }
  // The call for the block's attention, with its sinks; d_sinks: accumulator of their gradient.
  Call with_sinks(const View& d_sinks = {}) const {
    Call own = call;
    if (p.sinks != kNone) own.sinks = call.weight(p.sinks), own.d_sinks = d_sinks;
    return own;
  }

  // y = addend + the branch's output. With a null y it computes only the values that the backward needs.
  void add(const Branch& b, const View& addend, const View& y) const {
    if (b.norm == kNone) return add_product(b, addend, y);
    const View& product = call.is_part() ? w.d_norm : b.kept;
    call.linear(b.input, b.matrix, call.shard.index == 0 ? bias(b.bias) : View{}, product);
    adapters.forward(b.adapters, b.input, product);
    if (call.is_part()) ops.cast(s, call.sum_of_parts(product), b.kept);
    norm(b.norm, kNone, b.kept, w.narrow, b.stats);
    if (!y) return;
    if (call.drops(b.what)) call.drop(b.what, w.narrow, w.narrow);
    ops.add(s, w.narrow, addend, y);
  }

 private:
  // The same for a branch without a norm. The adapters' output is summed over ranks, and dropped, together
  // with the output of the product that they belong to.
  void add_product(const Branch& b, const View& addend, const View& y) const {
    if (!y) return adapters.forward(b.adapters, b.input, y);
    if (!adapters.any(b.adapters) || (!call.is_part() && !call.drops(b.what))) {
      call.linear_sum_add(b.what, b.input, b.matrix, bias(b.bias), addend, y, w.d_norm);
      return adapters.forward(b.adapters, b.input, y);
    }
    call.linear(b.input, b.matrix, call.shard.index == 0 ? bias(b.bias) : View{}, w.d_norm);
    adapters.forward(b.adapters, b.input, w.d_norm);
    const View sum = call.sum_of_parts(w.d_norm);
    if (call.drops(b.what)) call.drop(b.what, sum, sum);
    ops.add(s, sum, addend, y);
  }
};

}  // namespace zg::model
