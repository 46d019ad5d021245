#include "model/dense_pass.hpp"

#include "model/block_attention.hpp"
#include "model/dense_call.hpp"
#include "model/latent_pass.hpp"
#include "model/router_pass.hpp"

namespace zg::model {
namespace {

// Adds the rows of `norms`, which the first half summed, to the gradients of the parameters `params`.
void add_norm_sums(const Call& call, const View& norms, std::span<const std::size_t> params) {
  std::int64_t row = 0;
  for (const std::size_t param : params) {
    const View sum = call.grad(param);
    call.ops.add(call.stream, sum, norms.row_range(row++, 1).col_range(0, sum.cols), sum);
  }
}

// The backward of a block in one call, its first half, or the backward of a frozen block.
class DenseBackward : DenseCall {
 public:
  explicit DenseBackward(const Call& from)
      : DenseCall(from, sizes_of(from.model_call)),
        whole_(from.model_call == ModelCall::kBlockBackward),
        half_(from.model_call == ModelCall::kBlockBackwardInput),
        trains_adapters_(call.adapters.grads),
        norms_(p.norms()) {}

  void run() const {
    if (half_) ops.zero(s, f.norms);
    if (whole_ && call.into == Gradients::kOverwrite)
      clear_gradients(ops, s, call.grads, call.unit, norms_.others());
    if (trains_adapters_) adapters.begin_backward();
    routes() ? through_router(call.activation_gradient) : through_mlp(call.activation_gradient);
    through_attention(call.input, call.activation_gradient);
  }

 private:
  // dx is the gradient of `out`, and so the term of x1's gradient that comes through the residual connection.
  // The norm's backward adds the other term.
  void through_mlp(const View& dx) const {
    const View dy = gradient_of(mlp, dx, w.narrow, w.wide);
    if (whole_) weight_gradient(mlp, dy);
    const bool fused = !c.form().gated && !adapters.any(AdapterInput::kDown);
    if (fused) {
      call.linear_dx_gelu(dy, p.down, f.gate_up, w.d_act);
    } else {
      call.linear_dx(dy, p.down, w.d_act);
      adapters_of_last(mlp, dy, w.d_act);
    }
    const PendingCollective input = rows_for_weight(AdapterInput::kGateUp, input2());
    if (c.form().gated) {
      ops.swiglu_backward(s, f.gate_up, w.d_act, f.gate_up, c.block.gate);
    } else if (!fused) {
      ops.gelu_backward(s, f.gate_up, w.d_act, w.d_act);
    }
    const View& d = c.form().gated ? f.gate_up : w.d_act;
    const PendingCollective sum = first_products(AdapterInput::kGateUp, gate_up(), d, input);
    if (half_ && !c.form().gated) ops.cast(s, d, f.gate_up);
    if (holds()) ops.cast(s, dx, w.held);
    add_through_norm({p.norm2, p.norm2_bias, f.x1, f.stats2}, sum, dx);
    if (holds()) ops.cast(s, w.held, f.x1), ops.cast(s, dx, w.held);
  }

  // The same for a layer with experts, which have left the gradient of their input.
  void through_router(const View& dx) const {
    const View d = router_backward(*this, dx);
    add_through_norm({p.norm2, kNone, f.x1, f.stats2}, call.begin_sum_of_parts(d), dx);
  }

  // dx is the gradient of x1 here, and likewise a term of x's gradient.
  void through_attention(const View& x, const View& dx) const {
    const View dy = gradient_of(attention, dx, w.wide, w.narrow);
    if (whole_) weight_gradient(attention, dy);
    call.linear_dx(dy, p.o, w.d_att);
    adapters_of_last(attention, dy, w.d_att);
    const PendingCollective input = rows_for_weight(AdapterInput::kQkv, input1(x));
    attention_backward(with_sinks(p.sinks == kNone ? View() : norm_sum(p.sinks)), f.attention, w.attention,
                       w.d_att, w.d_qkv);
    rope(w.d_qkv, true);
    if (!is_latent()) scale_values(w.d_qkv);
    const View& d = is_latent() ? w.d_first : w.d_qkv;  // of the outputs of the first products
    is_latent() ? through_latents() : through_head_norms();
    const PendingCollective sum = first_products(AdapterInput::kQkv, qkv(), d, input);
    if (half_) ops.cast(s, d, first_outputs(f.attention.qkv));
    add_through_norm({p.norm1, p.norm1_bias, x, f.stats1}, sum, dx);
    if (holds()) ops.cast(s, w.held, x);
  }

  // Turns w.d_qkv into the gradient of q and k before their norms, if they have norms.
  void through_head_norms() const {
    if (p.q_norm == kNone) return;
    for_head_norms(
        [&](std::size_t index, std::int64_t first, std::int64_t columns, NormedHeads n, const View& stats) {
          const View d = w.d_qkv.col_range(first, columns);
          ops.head_rmsnorm_backward(s, {.dy = d,
                                        .x = f.qk.col_range(first, columns),
                                        .w = call.weight(index),
                                        .stats = stats,
                                        .heads = n.heads,
                                        .head_size = n.head_size,
                                        .dx = d,
                                        .dw = norm_sum(index),
                                        .scratch = w.norm_partials,
                                        .weight = c.block.norm_weight});
        });
  }
  void through_latents() const {
    const LatentProducts products = latent_products(*this, w.d_qkv, w.joint);
    latent_backward(*this, products, {p.q_norm == kNone ? View() : norm_sum(p.q_norm), norm_sum(p.k_norm)});
    if (half_) keep_latent_products(*this, products);
  }

  // Whether the gradient of the residual stream must be kept for the second half, because it is also the
  // gradient of a branch's last product.
  bool holds() const { return half_ && !c.norms_after(); }

  // The gradient of the output of a branch's last product, for all rows. dx is the gradient of the residual
  // stream after the branch. Without dropout and norm the result is dx itself; otherwise it is computed in
  // `place`. `other` is scratch for the backward of dropout if there is also a norm.
  View gradient_of(const Branch& b, const View& dx, const View& place, const View& other) const {
    if (b.norm == kNone) return call.all_rows_dropped(b.what, dx, place, w.all_rows);
    if (call.drops(b.what)) call.drop(b.what, dx, other);
    ops.zero(s, place);
    ops.rmsnorm_backward(s, {.dy = call.drops(b.what) ? other : dx,
                             .x = b.kept,
                             .w = call.weight(b.norm),
                             .stats = b.stats,
                             .dx = place,
                             .dw = norm_sum(b.norm),
                             .scratch = w.norm_partials,
                             .weight = c.block.norm_weight});
    if (half_) ops.cast(s, place, b.kept);
    return call.all_rows(place, w.all_rows);
  }

  // Computes the gradients of the adapters of a branch's last product.
  void adapters_of_last(const Branch& b, const View& dy, const View& d_input) const {
    adapters.backward_input(b.adapters, dy, d_input);
    if (trains_adapters_) adapters.backward_weight(b.adapters, dy, b.input);
  }
  // The input of a branch's first products, which the gradients of their weights, or of their adapters, need:
  // gathered concurrently with the work before these products.
  PendingCollective rows_for_weight(AdapterInput which, const View& rows) const {
    const bool needed = whole_ || (trains_adapters_ && adapters.any(which));
    return needed ? call.begin_all_rows(rows, w.all_rows) : PendingCollective();
  }
  // The gradient of that input from the gradient dy of the products' outputs. Its sum over ranks runs
  // concurrently with the computation of the weights' gradients.
  PendingCollective first_products(AdapterInput which, const Stack& stack, const View& dy,
                                   const PendingCollective& input) const {
    stack.backward_input(dy, w.d_norm);
    adapters.backward_input(which, dy, w.d_norm);
    const PendingCollective sum = call.begin_sum_of_parts(w.d_norm);
    if (whole_) stack.backward_weight(dy, input.end());
    if (trains_adapters_ && adapters.any(which)) adapters.backward_weight(which, dy, input.end());
    return sum;
  }

  // A norm before a branch, with its input; weight kNone: no norm.
  struct NormBefore {
    std::size_t weight, bias;
    View x, stats;
  };
  // Adds the gradient of a branch's input to the gradient dx of the residual stream before it.
  void add_through_norm(const NormBefore& norm, const PendingCollective& sum, const View& dx) const {
    const View d = sum.end();
    if (norm.weight == kNone) return ops.add(s, d, dx, dx);
    if (norm.bias != kNone) {
      return ops.layernorm_backward(s, {.dy = d,
                                        .x = norm.x,
                                        .w = call.weight(norm.weight),
                                        .stats = norm.stats,
                                        .dx = dx,
                                        .dw = norm_sum(norm.weight),
                                        .db = norm_sum(norm.bias),
                                        .scratch = w.norm_partials});
    }
    ops.rmsnorm_backward(s, {.dy = d,
                             .x = norm.x,
                             .w = call.weight(norm.weight),
                             .stats = norm.stats,
                             .dx = dx,
                             .dw = norm_sum(norm.weight),
                             .scratch = w.norm_partials,
                             .weight = c.block.norm_weight});
  }

  // The accumulator for the gradient of a norm's weight or bias.
  View norm_sum(std::size_t index) const {
    if (whole_) return call.grad(index);
    if (!half_) {
      const bool is_bias = index == p.norm1_bias || index == p.norm2_bias;
      return w.unused.row_range(is_bias ? 1 : 0, 1).col_range(0, call.unit.params[index].cols);
    }
    return f.norms.row_range(norms_.row_of(index), 1).col_range(0, call.unit.params[index].cols);
  }

  const bool whole_, half_, trains_adapters_;
  const NormList norms_;
};

}  // namespace

void dense_forward(const Call& call) {
  const DenseCall b(call, Backward::kWhole);
  b.norm(b.p.norm1, b.p.norm1_bias, call.input, b.f.norm1, b.f.stats1);
  const View qkv = attention_input(call, b.f.attention, b.w.attention);
  const View& first = b.first_outputs(qkv);
  const View rows1 = call.all_rows(b.input1(call.input), b.w.all_rows);
  b.qkv().forward(rows1, first);
  b.adapters.forward(AdapterInput::kQkv, rows1, first);
  b.is_latent() ? latent_forward(b, qkv) : b.finish_heads(qkv);
  b.rope(qkv, false);
  attention_forward(b.with_sinks(), b.f.attention, b.w.attention);
  b.add(b.attention, call.input, b.f.x1);

  b.norm(b.p.norm2, b.p.norm2_bias, b.f.x1, b.norm2(), b.f.stats2);
  if (b.routes()) return router_forward(b);
  b.activate(call.all_rows(b.input2(), b.w.all_rows));
  b.add(b.mlp, b.f.x1, call.output);
}

void dense_backward(const Call& call) {
  DenseBackward(call).run();
}

void dense_backward_weight(const Call& call) {
  const DenseCall b(call, Backward::kInHalves);
  const NormList norms = b.p.norms();
  const bool own = static_cast<bool>(call.grads);  // else adapters alone
  if (own && call.into == Gradients::kOverwrite)
    clear_gradients(call.ops, call.stream, call.grads, call.unit, norms.others());
  if (!own) b.adapters.begin_backward();
  // The gradient that the first half left for the second: of the residual stream after a branch or, if the
  // branch ends in a norm, of the norm's input.
  const auto gradient_of = [&](const Branch& branch, const View& residual) {
    if (!own && !b.adapters.any(branch.adapters)) return PendingCollective();
    if (branch.norm != kNone) return call.begin_all_rows(branch.kept, b.w.all_rows);
    return call.begin_all_rows_dropped(branch.what, residual, b.w.d_norm, b.w.all_rows);
  };
  const auto input_of = [&](AdapterInput which, const View& rows) {
    return own || b.adapters.any(which) ? call.begin_all_rows(rows, b.w.d_norm) : PendingCollective();
  };
  const auto of_last = [&](const Branch& branch, const View& dy) {
    if (own) b.weight_gradient(branch, dy);
    b.adapters.backward_weight(branch.adapters, dy, branch.input);
  };
  const auto of_first = [&](AdapterInput which, const Stack& stack, const View& dy, const View& input) {
    if (own) stack.backward_weight(dy, input);
    b.adapters.backward_weight(which, dy, input);
  };
  // The rows of all ranks that a product needs are gathered while the product before it runs, alternately
  // into two buffers.
  PendingCollective dy = gradient_of(b.mlp, b.f.x1);
  PendingCollective input = input_of(AdapterInput::kGateUp, b.input2());
  of_last(b.mlp, dy.end());
  dy = gradient_of(b.attention, call.input);
  of_first(AdapterInput::kGateUp, b.gate_up(), b.f.gate_up, input.end());
  input = input_of(AdapterInput::kQkv, b.input1(call.input));
  of_last(b.attention, dy.end());
  if (b.is_latent()) latent_backward_weight(b, kept_latent_products(b));
  of_first(AdapterInput::kQkv, b.qkv(), b.first_outputs(b.f.attention.qkv), input.end());
  if (own) add_norm_sums(call, b.f.norms, norms.all());
}

}  // namespace zg::model
