// GPT-2: x1 = x + proj(attention(qkv(ln_1(x)))), out = x1 + proj(gelu(fc(ln_2(x1)))).
#include <algorithm>

#include "model/block.hpp"
#include "model/block_attention.hpp"
#include "model/units.hpp"

namespace zg::model {
namespace {

enum Norms : std::int64_t { kWeight1, kBias1, kWeight2, kBias2, kNorms };

// After the first half of a backward x1, fc and attention.qkv hold the gradients of the outputs of the last
// product, of the one before it, and of the first one.
struct Saved {
  View ln1, stats1, x1, ln2, stats2, fc, act;
  SavedAttention attention;
  View norms;  // of a backward in halves: norm_sums(), as `Norms` counts them
  std::int64_t bytes = 0;

  Saved(const ModelConfig& c, const ModelPart& part, DType t, BatchShape shape, Backward how, void* base) {
    BufferPlan plan(base);
    const std::int64_t n = shape.rows(), residual = residual_rows(part, shape);
    const DType a = accumulator_of(t);
    ln1 = plan.take(t, residual, c.width);
    stats1 = plan.take(a, residual, 2);
    attention = SavedAttention(plan, c, t, shape);
    x1 = plan.take(t, residual, c.width);
    ln2 = plan.take(t, residual, c.width);
    stats2 = plan.take(a, residual, 2);
    fc = plan.take(t, n, c.inner);
    act = plan.take(t, n, c.inner);
    if (how == Backward::kInHalves) norms = norm_sums(plan, a, kNorms, c.width);
    bytes = plan.bytes();
  }
};

struct Workspace {
  View d_fc;      // [N, inner]
  View dropped;   // [N, C]: gradient of attention's part of the residual stream before it was dropped, and
  View d_qkv;     // [N, 3 heads * head_size], both in the memory of d_fc, which is no longer needed then
  View d_narrow;  // [N, C]: gradient of a norm's output; of a part's forward, its products; with dropout what
                  // a branch gives before it is dropped, and the gradient of that
  View d_att;     // [N, heads * head_size]: gradient of attention's output, in the same memory
  View all_rows;  // [N, C], where the residual stream is split: what a product needs of all parts' rows
  AttentionWorkspace attention;
  View partials;  // partial sums over groups of rows
  View norm_partials;
  View held;  // of a backward in halves: dx before a norm's backward, until its place is free
  std::int64_t bytes = 0;

  Workspace(const ModelConfig& c, const ModelPart& part, DType t, BatchShape shape, const OpSizes& sizes,
            Backward how, void* base) {
    BufferPlan plan(base);
    const std::int64_t n = shape.rows(), q = c.heads * c.head_size,
                       wide = std::max({c.inner, 3 * q, drops_own_rows(c, part) ? c.width : std::int64_t{0}});
    const DType a = accumulator_of(t);
    const View shared = plan.take(t, n, wide);
    d_fc = View(shared.data, t, n, c.inner);
    if (drops_own_rows(c, part)) dropped = View(shared.data, t, n, c.width);
    d_qkv = View(shared.data, t, n, 3 * q);
    d_narrow = plan.take(t, n, c.width);
    d_att = View(d_narrow.data, t, n, q);
    if (part.sequence) all_rows = plan.take(t, n, c.width);
    attention = AttentionWorkspace(plan, c, t, shape, sizes);
    partials = plan.take(a, sizes.row_groups(), std::max(wide, 2 * c.width));
    norm_partials = View(partials.data, a, sizes.row_groups(), 2 * c.width);
    if (how == Backward::kInHalves) held = plan.take(t, residual_rows(part, shape), c.width);
    bytes = plan.bytes();
  }
  View bias_partials(std::int64_t columns) const {
    return {partials.data, partials.dtype, partials.rows, columns};
  }
};

// Writes the gradients of a linear layer's weight and bias, by the gradient dy of its output and its input x.
void linear_backward(const Call& call, const Workspace& w, View dy, View x, gpt2::Index weight,
                     gpt2::Index bias) {
  call.linear_dw_db(dy, x, weight, call.grad(bias), w.bias_partials(dy.cols));
}

// All that linear_backward() overwrites, where gradients are overwritten; norms add to theirs.
constexpr std::uint32_t kOverwritten =
    ~(1u << gpt2::kLn1Weight | 1u << gpt2::kLn1Bias | 1u << gpt2::kLn2Weight | 1u << gpt2::kLn2Bias);

}  // namespace

BlockBytes gpt2_block_bytes(const ModelConfig& config, const ModelPart& part, DType dtype, BatchShape shape,
                            const OpSizes& sizes, Backward how) {
  return {Saved(config, part, dtype, shape, how, nullptr).bytes,
          Workspace(config, part, dtype, shape, sizes, how, nullptr).bytes};
}

void gpt2_block_forward(const Call& call, View x, View out, void* saved, void* workspace) {
  using namespace gpt2;
  const ModelConfig& c = call.config;
  const Saved f(c, call.part, call.dtype, call.shape, Backward::kWhole, saved);
  const Workspace w(c, call.part, call.dtype, call.shape, call.ops, Backward::kWhole, workspace);
  Ops& ops = call.ops;
  Stream& s = call.stream;

  ops.layernorm(s, x, call.weight(kLn1Weight), call.weight(kLn1Bias), c.norm_eps, f.ln1, f.stats1);
  call.linear(call.all_rows(f.ln1, w.all_rows), kQkvWeight, call.weight(kQkvBias),
              attention_input(call, f.attention, w.attention));
  attention_forward(call, f.attention, w.attention);
  call.linear_sum_add(Dropped::kAttention, f.attention.att, kAttProjWeight, call.weight(kAttProjBias), x,
                      f.x1, w.d_narrow);

  ops.layernorm(s, f.x1, call.weight(kLn2Weight), call.weight(kLn2Bias), c.norm_eps, f.ln2, f.stats2);
  call.linear_gelu(call.all_rows(f.ln2, w.all_rows), kFcWeight, call.weight(kFcBias), f.fc, f.act);
  if (!out) return;
  call.linear_sum_add(Dropped::kMlp, f.act, kMlpProjWeight, call.weight(kMlpProjBias), f.x1, out, w.d_narrow);
}

void gpt2_block_backward(const Call& call, BackwardCall what, View x, void* saved, View dx, void* workspace) {
  using namespace gpt2;
  const ModelConfig& c = call.config;
  const bool whole = what == BackwardCall::kWhole;
  const Backward how = whole ? Backward::kWhole : Backward::kInHalves;
  const Saved f(c, call.part, call.dtype, call.shape, how, saved);
  const Workspace w(c, call.part, call.dtype, call.shape, call.ops, how, workspace);
  Ops& ops = call.ops;
  Stream& s = call.stream;
  const auto norm_sum = [&](Index param, Norms norm) {
    return whole ? call.grad(param) : f.norms.row_range(norm, 1);
  };
  // The input of a product is gathered for the gradient of its weight beside what comes before that: the
  // gradient of the input, whose sum over the parts then goes on beside that of the weight.
  const auto rows_for_weight = [&](const View& rows) {
    return whole ? call.begin_all_rows(rows, w.all_rows) : Begun();
  };

  if (!whole) {
    ops.zero(s, f.norms);
  } else if (call.into == Gradients::kOverwrite) {
    clear_gradients(ops, s, call.grads, call.unit, kOverwritten);
  }
  // dx is the gradient of `out`, and so the part of x1's gradient that the residual connection passes on. The
  // norm's backward adds the other part. What was dropped has a gradient of its own, where nothing else is
  // then.
  View dy = call.all_rows_dropped(Dropped::kMlp, dx, w.d_narrow, w.all_rows);
  if (whole) linear_backward(call, w, dy, f.act, kMlpProjWeight, kMlpProjBias);
  call.linear_dx_gelu(dy, kMlpProjWeight, f.fc, w.d_fc);
  Begun input = rows_for_weight(f.ln2);
  call.linear_dx(w.d_fc, kFcWeight, w.d_narrow);
  Begun sum = call.begin_sum_of_parts(w.d_narrow);
  if (whole) linear_backward(call, w, w.d_fc, input.end(), kFcWeight, kFcBias);
  if (!whole) ops.cast(s, w.d_fc, f.fc), ops.cast(s, dx, w.held);
  ops.layernorm_backward(s, sum.end(), f.x1, call.weight(kLn2Weight), f.stats2, dx,
                         norm_sum(kLn2Weight, kWeight2), norm_sum(kLn2Bias, kBias2), w.norm_partials);
  if (!whole) ops.cast(s, w.held, f.x1), ops.cast(s, dx, w.held);

  // Now dx is the gradient of x1, and in the same way a part of x's gradient.
  dy = call.all_rows_dropped(Dropped::kAttention, dx, w.dropped, w.all_rows);
  if (whole) linear_backward(call, w, dy, f.attention.att, kAttProjWeight, kAttProjBias);
  call.linear_dx(dy, kAttProjWeight, w.d_att);
  input = rows_for_weight(f.ln1);
  attention_backward(call, f.attention, w.attention, w.d_att, w.d_qkv);
  call.linear_dx(w.d_qkv, kQkvWeight, w.d_narrow);
  sum = call.begin_sum_of_parts(w.d_narrow);
  if (whole) linear_backward(call, w, w.d_qkv, input.end(), kQkvWeight, kQkvBias);
  if (!whole) ops.cast(s, w.d_qkv, f.attention.qkv);
  ops.layernorm_backward(s, sum.end(), x, call.weight(kLn1Weight), f.stats1, dx,
                         norm_sum(kLn1Weight, kWeight1), norm_sum(kLn1Bias, kBias1), w.norm_partials);
  if (!whole) ops.cast(s, w.held, x);
}

void gpt2_block_backward_weight(const Call& call, View x, void* saved, void* workspace) {
  using namespace gpt2;
  const ModelConfig& c = call.config;
  const Saved f(c, call.part, call.dtype, call.shape, Backward::kInHalves, saved);
  const Workspace w(c, call.part, call.dtype, call.shape, call.ops, Backward::kInHalves, workspace);

  if (call.into == Gradients::kOverwrite)
    clear_gradients(call.ops, call.stream, call.grads, call.unit, kOverwritten);
  // What a product needs of all parts' rows is gathered beside the product before it, in turn in two rooms.
  Begun dy = call.begin_all_rows_dropped(Dropped::kMlp, f.x1, w.d_narrow, w.all_rows);
  Begun input = call.begin_all_rows(f.ln2, w.d_narrow);
  linear_backward(call, w, dy.end(), f.act, kMlpProjWeight, kMlpProjBias);
  dy = call.begin_all_rows_dropped(Dropped::kAttention, x, w.d_narrow, w.all_rows);
  linear_backward(call, w, f.fc, input.end(), kFcWeight, kFcBias);
  input = call.begin_all_rows(f.ln1, w.d_narrow);
  linear_backward(call, w, dy.end(), f.attention.att, kAttProjWeight, kAttProjBias);
  linear_backward(call, w, f.attention.qkv, input.end(), kQkvWeight, kQkvBias);
  static constexpr std::size_t kInOrder[] = {kLn1Weight, kLn1Bias, kLn2Weight, kLn2Bias};  // of `Norms`
  add_norm_sums(call, f.norms, kInOrder);
}

}  // namespace zg::model
