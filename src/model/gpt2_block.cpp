// GPT-2: x1 = x + proj(attention(qkv(ln_1(x)))), out = x1 + proj(gelu(fc(ln_2(x1)))).
#include <algorithm>

#include "model/adapters.hpp"
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
  AdapterSaved adapters;
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
    adapters = AdapterSaved(plan, c, t, shape, how);
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
  View held;    // of a backward in halves: dx before a norm's backward, until its place is free
  View unused;  // [2, C], of a frozen block: what norms add to the gradients of weight and bias
  AdapterWorkspace adapters;
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
    if (how == Backward::kFrozen) unused = plan.take(a, 2, c.width);
    adapters = AdapterWorkspace(plan, c, t, shape);
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
constexpr std::uint64_t kOverwritten = ~(std::uint64_t{1} << gpt2::kLn1Weight | 1u << gpt2::kLn1Bias |
                                         1u << gpt2::kLn2Weight | 1u << gpt2::kLn2Bias);

// What a branch's last product, of `input`, adds to the residual stream, with what its adapters give: summed
// over the parts, and dropped, together.
void add_branch(const Call& call, const Workspace& w, const Adapters& adapters, AdapterInput which,
                const View& input, gpt2::Index weight, gpt2::Index bias, const View& addend, const View& y) {
  const Dropped what = which == AdapterInput::kO ? Dropped::kAttention : Dropped::kMlp;
  if (!y) return adapters.forward(which, input, y);
  if (!adapters.any(which) || (!call.is_part() && !call.drops(what))) {
    call.linear_sum_add(what, input, weight, call.weight(bias), addend, y, w.d_narrow);
    return adapters.forward(which, input, y);
  }
  call.linear(input, weight, call.part.part == 0 ? call.weight(bias) : View{}, w.d_narrow);
  adapters.forward(which, input, w.d_narrow);
  const View sum = call.sum_of_parts(w.d_narrow);
  if (call.drops(what)) call.drop(what, sum, sum);
  call.ops.add(call.stream, sum, addend, y);
}

}  // namespace

BlockBytes gpt2_block_bytes(const ModelConfig& config, const ModelPart& part, DType dtype, BatchShape shape,
                            const OpSizes& sizes, Backward how) {
  return {Saved(config, part, dtype, shape, how, nullptr).bytes,
          Workspace(config, part, dtype, shape, sizes, how, nullptr).bytes};
}

void gpt2_block_forward(const Call& call) {
  using namespace gpt2;
  const ModelConfig& c = call.config;
  const Saved f(c, call.part, call.dtype, call.shape, Backward::kWhole, call.saved);
  const Workspace w(c, call.part, call.dtype, call.shape, call.ops, Backward::kWhole, call.workspace);
  Ops& ops = call.ops;
  Stream& s = call.stream;

  const Adapters adapters(call, f.adapters, w.adapters);
  ops.layernorm(s, {.x = call.input,
                    .w = call.weight(kLn1Weight),
                    .b = call.weight(kLn1Bias),
                    .eps = c.norm_eps,
                    .y = f.ln1,
                    .stats = f.stats1});
  const View qkv = attention_input(call, f.attention, w.attention);
  View rows = call.all_rows(f.ln1, w.all_rows);
  call.linear(rows, kQkvWeight, call.weight(kQkvBias), qkv);
  adapters.forward(AdapterInput::kQkv, rows, qkv);
  attention_forward(call, f.attention, w.attention);
  add_branch(call, w, adapters, AdapterInput::kO, f.attention.att, kAttProjWeight, kAttProjBias, call.input,
             f.x1);

  ops.layernorm(s, {.x = f.x1,
                    .w = call.weight(kLn2Weight),
                    .b = call.weight(kLn2Bias),
                    .eps = c.norm_eps,
                    .y = f.ln2,
                    .stats = f.stats2});
  rows = call.all_rows(f.ln2, w.all_rows);
  if (adapters.any(AdapterInput::kGateUp)) {
    call.linear(rows, kFcWeight, call.weight(kFcBias), f.fc);
    adapters.forward(AdapterInput::kGateUp, rows, f.fc);
    ops.gelu(s, f.fc, f.act);
  } else {
    call.linear_gelu(rows, kFcWeight, call.weight(kFcBias), f.fc, f.act);
  }
  add_branch(call, w, adapters, AdapterInput::kDown, f.act, kMlpProjWeight, kMlpProjBias, f.x1, call.output);
}

namespace {

// A backward, its first half, or that of a frozen block.
class Gpt2Backward {
 public:
  explicit Gpt2Backward(const Call& from)
      : call(from),
        ops(from.ops),
        s(from.stream),
        f(from.config, from.part, from.dtype, from.shape, sizes_of(from.model_call), from.saved),
        w(from.config, from.part, from.dtype, from.shape, from.ops, sizes_of(from.model_call),
          from.workspace),
        adapters(call, f.adapters, w.adapters),
        whole_(from.model_call == ModelCall::kBlockBackward),
        half_(from.model_call == ModelCall::kBlockBackwardInput),
        trains_adapters_(call.adapters.grads) {}

  void run() const {
    if (half_) ops.zero(s, f.norms);
    if (whole_ && call.into == Gradients::kOverwrite)
      clear_gradients(ops, s, call.grads, call.unit, kOverwritten);
    if (trains_adapters_) adapters.begin_backward();
    through_mlp(call.activation_gradient);
    through_attention(call.input, call.activation_gradient);
  }

 private:
  // dx is the gradient of `out`, and so the part of x1's gradient that the residual connection passes on. The
  // norm's backward adds the other part. What was dropped has a gradient of its own, where nothing else is
  // then.
  void through_mlp(const View& dx) const {
    using namespace gpt2;
    const View dy = call.all_rows_dropped(Dropped::kMlp, dx, w.d_narrow, w.all_rows);
    if (whole_) linear_backward(call, w, dy, f.act, kMlpProjWeight, kMlpProjBias);
    if (adapters.any(AdapterInput::kDown)) {
      call.linear_dx(dy, kMlpProjWeight, w.d_fc);
      adapters_of_last(AdapterInput::kDown, dy, f.act, w.d_fc);
      ops.gelu_backward(s, f.fc, w.d_fc, w.d_fc);
    } else {
      call.linear_dx_gelu(dy, kMlpProjWeight, f.fc, w.d_fc);
    }
    const Begun input = rows_for_weight(AdapterInput::kGateUp, f.ln2);
    const Begun sum = first_product(AdapterInput::kGateUp, w.d_fc, input, kFcWeight, kFcBias);
    if (half_) ops.cast(s, w.d_fc, f.fc), ops.cast(s, dx, w.held);
    ops.layernorm_backward(s, {.dy = sum.end(),
                               .x = f.x1,
                               .w = call.weight(kLn2Weight),
                               .stats = f.stats2,
                               .dx = dx,
                               .dw = norm_sum(kLn2Weight, kWeight2),
                               .db = norm_sum(kLn2Bias, kBias2),
                               .scratch = w.norm_partials});
    if (half_) ops.cast(s, w.held, f.x1), ops.cast(s, dx, w.held);
  }

  // Now dx is the gradient of x1, and in the same way a part of x's gradient.
  void through_attention(const View& x, const View& dx) const {
    using namespace gpt2;
    const View dy = call.all_rows_dropped(Dropped::kAttention, dx, w.dropped, w.all_rows);
    if (whole_) linear_backward(call, w, dy, f.attention.att, kAttProjWeight, kAttProjBias);
    call.linear_dx(dy, kAttProjWeight, w.d_att);
    adapters_of_last(AdapterInput::kO, dy, f.attention.att, w.d_att);
    const Begun input = rows_for_weight(AdapterInput::kQkv, f.ln1);
    attention_backward(call, f.attention, w.attention, w.d_att, w.d_qkv);
    const Begun sum = first_product(AdapterInput::kQkv, w.d_qkv, input, kQkvWeight, kQkvBias);
    if (half_) ops.cast(s, w.d_qkv, f.attention.qkv);
    ops.layernorm_backward(s, {.dy = sum.end(),
                               .x = x,
                               .w = call.weight(kLn1Weight),
                               .stats = f.stats1,
                               .dx = dx,
                               .dw = norm_sum(kLn1Weight, kWeight1),
                               .db = norm_sum(kLn1Bias, kBias1),
                               .scratch = w.norm_partials});
    if (half_) ops.cast(s, w.held, x);
  }

  void adapters_of_last(AdapterInput which, const View& dy, const View& x, const View& d_x) const {
    adapters.backward_input(which, dy, d_x);
    if (trains_adapters_) adapters.backward_weight(which, dy, x);
  }
  // The input of a branch's first product is gathered for the gradient of its weight, or of its adapter,
  // beside what comes before that: the gradient of the input, whose sum over the parts then goes on beside
  // that of the weight.
  Begun rows_for_weight(AdapterInput which, const View& rows) const {
    const bool needed = whole_ || (trains_adapters_ && adapters.any(which));
    return needed ? call.begin_all_rows(rows, w.all_rows) : Begun();
  }
  Begun first_product(AdapterInput which, const View& dy, const Begun& input, gpt2::Index weight,
                      gpt2::Index bias) const {
    call.linear_dx(dy, weight, w.d_narrow);
    adapters.backward_input(which, dy, w.d_narrow);
    const Begun sum = call.begin_sum_of_parts(w.d_narrow);
    if (whole_) linear_backward(call, w, dy, input.end(), weight, bias);
    if (trains_adapters_ && adapters.any(which)) adapters.backward_weight(which, dy, input.end());
    return sum;
  }
  View norm_sum(gpt2::Index param, Norms norm) const {
    return whole_ ? call.grad(param) : half_ ? f.norms.row_range(norm, 1) : w.unused.row_range(norm % 2, 1);
  }

  const Call& call;
  Ops& ops;
  Stream& s;
  const Saved f;
  const Workspace w;
  const Adapters adapters;
  const bool whole_, half_, trains_adapters_;
};

}  // namespace

void gpt2_block_backward(const Call& call) {
  Gpt2Backward(call).run();
}

void gpt2_block_backward_weight(const Call& call) {
  using namespace gpt2;
  const ModelConfig& c = call.config;
  const Saved f(c, call.part, call.dtype, call.shape, Backward::kInHalves, call.saved);
  const Workspace w(c, call.part, call.dtype, call.shape, call.ops, Backward::kInHalves, call.workspace);
  const Adapters adapters(call, f.adapters, w.adapters);
  const bool own = static_cast<bool>(call.grads);  // else those of adapters alone

  if (own && call.into == Gradients::kOverwrite)
    clear_gradients(call.ops, call.stream, call.grads, call.unit, kOverwritten);
  if (!own) adapters.begin_backward();
  const auto gradient_of = [&](Dropped what, AdapterInput which, const View& residual) {
    if (!own && !adapters.any(which)) return Begun();
    return call.begin_all_rows_dropped(what, residual, w.d_narrow, w.all_rows);
  };
  const auto input_of = [&](AdapterInput which, const View& rows) {
    return own || adapters.any(which) ? call.begin_all_rows(rows, w.d_narrow) : Begun();
  };
  const auto weights = [&](AdapterInput which, const View& dy, const View& input, Index weight, Index bias) {
    if (own) linear_backward(call, w, dy, input, weight, bias);
    adapters.backward_weight(which, dy, input);
  };
  // What a product needs of all parts' rows is gathered beside the product before it, in turn in two rooms.
  Begun dy = gradient_of(Dropped::kMlp, AdapterInput::kDown, f.x1);
  Begun input = input_of(AdapterInput::kGateUp, f.ln2);
  weights(AdapterInput::kDown, dy.end(), f.act, kMlpProjWeight, kMlpProjBias);
  dy = gradient_of(Dropped::kAttention, AdapterInput::kO, call.input);
  weights(AdapterInput::kGateUp, f.fc, input.end(), kFcWeight, kFcBias);
  input = input_of(AdapterInput::kQkv, f.ln1);
  weights(AdapterInput::kO, dy.end(), f.attention.att, kAttProjWeight, kAttProjBias);
  weights(AdapterInput::kQkv, f.attention.qkv, input.end(), kQkvWeight, kQkvBias);
  static constexpr std::size_t kInOrder[] = {kLn1Weight, kLn1Bias, kLn2Weight, kLn2Bias};  // of `Norms`
  if (own) add_norm_sums(call, f.norms, kInOrder);
}

}  // namespace zg::model
