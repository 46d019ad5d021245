// Llama: x1 = x + o(attention(rope(q, k), v)), out = x1 + down(silu(gate) * up), each behind an RMSNorm.
#include <algorithm>
#include <array>

#include "model/block.hpp"
#include "model/block_attention.hpp"
#include "model/units.hpp"

namespace zg::model {
namespace {

std::int64_t qkv_columns(const ModelConfig& c) {
  return (c.heads + 2 * c.kv_heads) * c.head_size;
}

// After a backward gate_up holds its gradient; after the first half of one x1 and attention.qkv hold the
// gradients of the outputs of the last product and of the first ones.
struct Saved {
  View norm1, stats1, x1, norm2, stats2, gate_up, act;
  SavedAttention attention;  // q and k after RoPE
  View norms;                // of a backward in halves: norm_sums(), of norm1 and norm2
  std::int64_t bytes = 0;

  Saved(const ModelConfig& c, const ModelPart& part, DType t, BatchShape shape, Backward how, void* base) {
    BufferPlan plan(base);
    const std::int64_t n = shape.rows(), residual = residual_rows(part, shape);
    const DType a = accumulator_of(t);
    norm1 = plan.take(t, residual, c.width);
    stats1 = plan.take(a, residual, 1);
    attention = SavedAttention(plan, c, t, shape);
    x1 = plan.take(t, residual, c.width);
    norm2 = plan.take(t, residual, c.width);
    stats2 = plan.take(a, residual, 1);
    gate_up = plan.take(t, n, 2 * c.inner);
    act = plan.take(t, n, c.inner);
    if (how == Backward::kInHalves) norms = norm_sums(plan, a, 2, c.width);
    bytes = plan.bytes();
  }
};

struct Workspace {
  View d_act;     // [N, inner]
  View dropped;   // [N, C]: gradient of attention's part of the residual stream before it was dropped, and
  View d_qkv;     // both in the memory of d_act, which is no longer needed then
  View d_norm;    // [N, C]; of a part's forward, its products; with dropout what a branch gives before it is
                  // dropped, and the gradient of that
  View d_att;     // [N, heads * head_size], in the same memory as d_norm
  View all_rows;  // [N, C], where the residual stream is split: what a product needs of all parts' rows
  AttentionWorkspace attention;
  View norm_partials;
  View held;  // of a backward in halves: dx before a norm's backward, until its place is free
  std::int64_t bytes = 0;

  Workspace(const ModelConfig& c, const ModelPart& part, DType t, BatchShape shape, const OpSizes& sizes,
            Backward how, void* base) {
    BufferPlan plan(base);
    const std::int64_t n = shape.rows(), q = c.heads * c.head_size;
    const View wide = plan.take(
        t, n, std::max({c.inner, qkv_columns(c), drops_own_rows(c, part) ? c.width : std::int64_t{0}}));
    d_act = View(wide.data, t, n, c.inner);
    if (drops_own_rows(c, part)) dropped = View(wide.data, t, n, c.width);
    d_qkv = View(wide.data, t, n, qkv_columns(c));
    const View narrow = plan.take(t, n, std::max(c.width, q));
    d_norm = View(narrow.data, t, n, c.width);
    d_att = View(narrow.data, t, n, q);
    if (part.sequence) all_rows = plan.take(t, n, c.width);
    attention = AttentionWorkspace(plan, c, t, shape, sizes);
    norm_partials = plan.take(accumulator_of(t), sizes.row_groups(), 2 * c.width);
    if (how == Backward::kInHalves) held = plan.take(t, residual_rows(part, shape), c.width);
    bytes = plan.bytes();
  }
};

// Matrices with the same input whose outputs lie side by side in one buffer (q|k|v, gate|up). Matrices that
// follow each other in the unit without padding, as they do at all usual sizes, are treated as one: fewer and
// larger products. Where the unit is in tiles, each is multiplied by itself.
class Stack {
 public:
  Stack(const Call& call, llama::Index first, llama::Index last) : call_(call) {
    std::int64_t end = -1;
    for (std::size_t i = first; i <= last; ++i) {
      const Param& p = call.unit.params[i];
      if (p.offset == end && call.tiles == nullptr) {
        pieces_[count_ - 1].rows += p.rows;
      } else {
        pieces_[count_++] = {i, p.offset, columns_, p.rows, p.cols};
      }
      end = p.offset + p.count();
      columns_ += p.rows;
    }
  }
  void forward(const View& x, const View& y) const {
    for (std::size_t i = 0; i < count_; ++i) {
      const Piece& piece = pieces_[i];
      if (call_.tiles != nullptr) {
        call_.linear(x, piece.param, View{}, piece.part(y));
      } else {
        call_.linear(x, piece.of(call_.weights), View{}, piece.part(y));
      }
    }
  }
  // dx = the sum of dy w over the matrices. Writes the gradients of the weights.
  void backward(const View& dy, const View& x, const View& dx) const {
    for (std::size_t i = 0; i < count_; ++i) {
      backward_weight(i, dy, x);
      backward_input(i, dy, dx);
    }
  }
  // Its halves.
  void backward_input(const View& dy, const View& dx) const {
    for (std::size_t i = 0; i < count_; ++i) backward_input(i, dy, dx);
  }
  void backward_weight(const View& dy, const View& x) const {
    for (std::size_t i = 0; i < count_; ++i) backward_weight(i, dy, x);
  }

 private:
  void backward_input(std::size_t i, const View& dy, const View& dx) const {
    const View d = pieces_[i].part(dy);
    if (call_.tiles != nullptr) {
      call_.linear_dx(d, pieces_[i].param, dx, i == 0 ? Gradients::kOverwrite : Gradients::kAdd);
    } else if (i == 0) {
      call_.linear_dx(d, pieces_[i].of(call_.weights), dx);
    } else {
      call_.linear_dx_more(d, pieces_[i].of(call_.weights), dx);
    }
  }
  void backward_weight(std::size_t i, const View& dy, const View& x) const {
    const View d = pieces_[i].part(dy);
    if (call_.tiles != nullptr) {
      call_.linear_dw(d, x, pieces_[i].param);
    } else {
      call_.linear_dw(d, x, pieces_[i].of(call_.grads));
    }
  }

  struct Piece {
    std::size_t param = 0;    // its index, of several that of the first
    std::int64_t offset = 0;  // first element in the unit
    std::int64_t column = 0;  // first column of the output
    std::int64_t rows = 0, cols = 0;
    View of(const View& flat) const {
      return {flat.col_range(offset, rows * cols).data, flat.dtype, rows, cols};
    }
    View part(const View& y) const { return y.col_range(column, rows); }
  };
  const Call& call_;
  std::array<Piece, 3> pieces_{};
  std::size_t count_ = 0;
  std::int64_t columns_ = 0;
};

// All that products overwrite, where gradients are overwritten; norms add to theirs.
constexpr std::uint32_t kOverwritten = ~(1u << llama::kNorm1 | 1u << llama::kNorm2);

// q and k are the first heads of a row, so one call rotates both.
void rope(const Call& call, const View& qkv, bool inverse) {
  const ModelConfig& c = call.config;
  call.ops.rope(call.stream, qkv, call.shape.part.positions(call.shape.time), c.heads + c.kv_heads,
                c.head_size, c.rope_theta, inverse);
}

}  // namespace

BlockBytes llama_block_bytes(const ModelConfig& config, const ModelPart& part, DType dtype, BatchShape shape,
                             const OpSizes& sizes, Backward how) {
  return {Saved(config, part, dtype, shape, how, nullptr).bytes,
          Workspace(config, part, dtype, shape, sizes, how, nullptr).bytes};
}

void llama_block_forward(const Call& call, View x, View out, void* saved, void* workspace) {
  using namespace llama;
  const ModelConfig& c = call.config;
  const Saved f(c, call.part, call.dtype, call.shape, Backward::kWhole, saved);
  const Workspace w(c, call.part, call.dtype, call.shape, call.ops, Backward::kWhole, workspace);
  Ops& ops = call.ops;
  Stream& s = call.stream;

  ops.rmsnorm(s, x, call.weight(kNorm1), c.norm_eps, f.norm1, f.stats1);
  const View qkv = attention_input(call, f.attention, w.attention);
  Stack(call, kQ, kV).forward(call.all_rows(f.norm1, w.all_rows), qkv);
  rope(call, qkv, false);
  attention_forward(call, f.attention, w.attention);
  call.linear_sum_add(Dropped::kAttention, f.attention.att, kO, View{}, x, f.x1, w.d_norm);

  ops.rmsnorm(s, f.x1, call.weight(kNorm2), c.norm_eps, f.norm2, f.stats2);
  Stack(call, kGate, kUp).forward(call.all_rows(f.norm2, w.all_rows), f.gate_up);
  ops.swiglu(s, f.gate_up, f.act);
  if (!out) return;
  call.linear_sum_add(Dropped::kMlp, f.act, kDown, View{}, f.x1, out, w.d_norm);
}

void llama_block_backward(const Call& call, BackwardCall what, View x, void* saved, View dx,
                          void* workspace) {
  using namespace llama;
  const ModelConfig& c = call.config;
  const bool whole = what == BackwardCall::kWhole;
  const Backward how = whole ? Backward::kWhole : Backward::kInHalves;
  const Saved f(c, call.part, call.dtype, call.shape, how, saved);
  const Workspace w(c, call.part, call.dtype, call.shape, call.ops, how, workspace);
  Ops& ops = call.ops;
  Stream& s = call.stream;
  const Stack gate_up(call, kGate, kUp), qkv(call, kQ, kV);

  if (!whole) {
    ops.zero(s, f.norms);
  } else if (call.into == Gradients::kOverwrite) {
    clear_gradients(ops, s, call.grads, call.unit, kOverwritten);
  }
  // dx is the gradient of `out`, and so the part of x1's gradient that the residual connection passes on. The
  // norm's backward adds the other part. What was dropped has a gradient of its own, where nothing else is
  // then.
  View dy = call.all_rows_dropped(Dropped::kMlp, dx, w.d_norm, w.all_rows);
  if (whole) call.linear_dw(dy, f.act, kDown);
  call.linear_dx(dy, kDown, w.d_act);
  ops.swiglu_backward(s, f.gate_up, w.d_act, f.gate_up);
  if (whole) {
    gate_up.backward(f.gate_up, call.all_rows(f.norm2, w.all_rows), w.d_norm);
  } else {
    gate_up.backward_input(f.gate_up, w.d_norm);
    ops.cast(s, dx, w.held);
  }
  ops.rmsnorm_backward(s, call.sum_of_parts(w.d_norm), f.x1, call.weight(kNorm2), f.stats2, dx,
                       whole ? call.grad(kNorm2) : f.norms.row_range(1, 1), w.norm_partials);
  if (!whole) ops.cast(s, w.held, f.x1), ops.cast(s, dx, w.held);

  // Now dx is the gradient of x1, and in the same way a part of x's gradient.
  dy = call.all_rows_dropped(Dropped::kAttention, dx, w.dropped, w.all_rows);
  if (whole) call.linear_dw(dy, f.attention.att, kO);
  call.linear_dx(dy, kO, w.d_att);
  attention_backward(call, f.attention, w.attention, w.d_att, w.d_qkv);
  rope(call, w.d_qkv, true);
  if (whole) {
    qkv.backward(w.d_qkv, call.all_rows(f.norm1, w.all_rows), w.d_norm);
  } else {
    qkv.backward_input(w.d_qkv, w.d_norm);
    ops.cast(s, w.d_qkv, f.attention.qkv);
  }
  ops.rmsnorm_backward(s, call.sum_of_parts(w.d_norm), x, call.weight(kNorm1), f.stats1, dx,
                       whole ? call.grad(kNorm1) : f.norms.row_range(0, 1), w.norm_partials);
  if (!whole) ops.cast(s, w.held, x);
}

void llama_block_backward_weight(const Call& call, View x, void* saved, void* workspace) {
  using namespace llama;
  const ModelConfig& c = call.config;
  const Saved f(c, call.part, call.dtype, call.shape, Backward::kInHalves, saved);
  const Workspace w(c, call.part, call.dtype, call.shape, call.ops, Backward::kInHalves, workspace);

  if (call.into == Gradients::kOverwrite)
    clear_gradients(call.ops, call.stream, call.grads, call.unit, kOverwritten);
  call.linear_dw(call.all_rows_dropped(Dropped::kMlp, f.x1, w.d_norm, w.all_rows), f.act, kDown);
  Stack(call, kGate, kUp).backward_weight(f.gate_up, call.all_rows(f.norm2, w.all_rows));
  call.linear_dw(call.all_rows_dropped(Dropped::kAttention, x, w.d_norm, w.all_rows), f.attention.att, kO);
  Stack(call, kQ, kV).backward_weight(f.attention.qkv, call.all_rows(f.norm1, w.all_rows));
  add_norm_sums(call, f.norms, {kNorm1, kNorm2});
}

}  // namespace zg::model
