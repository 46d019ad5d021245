#include "model/head.hpp"

#include <algorithm>

#include "model/units.hpp"

namespace zg::model {
namespace {

// Rows of logits start at multiples of this many elements: whole cache lines and vector registers.
constexpr std::int64_t kLogitsAlign = 64;
constexpr std::int64_t kChunkRows = 64;

struct Workspace {
  View normed;  // [N, C]; backward overwrites the rows of each chunk with their gradient
  View stats;
  View logits, dlogits;  // [rows of a chunk, head_columns()]
  View norm_partials, sum_partials;
  View sums;     // A [rows of a chunk, C], where tiles are summed in more bits than T has
  View unused;   // [2, C], where the head is frozen: what its norm adds to the gradients of weight and bias
  View numbers;  // [1, 3 * parts * rows of a chunk]: softmax_part() of all parts; null: the model is whole
  std::int64_t bytes = 0;

  // rows: N.
  Workspace(const ModelConfig& c, const ModelPart& part, DType t, std::int64_t rows, const OpSizes& sizes,
            const HeadRoom& room, HeadGradients gradients, void* base) {
    BufferPlan plan(base);
    const DType a = accumulator_of(t);
    const std::int64_t chunk = head_chunk_rows(c, t, rows, sizes, room);
    const std::int64_t columns = head_columns(c, sizes), ld = round_up(c.vocab_size, kLogitsAlign);
    normed = plan.take(t, rows, c.width);
    stats = plan.take(a, part.sequence ? rows / part.parts : rows, c.arch == Arch::kGpt2 ? 2 : 1);
    logits = plan.take(a, chunk, columns, ld);
    dlogits = plan.take(t, chunk, columns, ld);
    norm_partials = plan.take(a, sizes.row_groups(), 2 * c.width);
    sum_partials = plan.take(DType::kF64, 1, Ops::kSumPartials);
    if (part.parts > 1) numbers = plan.take(a, 1, 3 * part.parts * chunk);
    if (room.in_tiles && t != a) sums = plan.take(a, chunk, c.width);
    if (gradients == HeadGradients::kFrozen) unused = plan.take(a, 2, c.width);
    bytes = plan.bytes();
  }
};

HeadRoom room_of(const Call& table) {
  return {table.logits_bytes, table.tiles != nullptr};
}

Workspace workspace_of(const Call& call, const Call& table, std::int64_t rows, void* base,
                       HeadGradients gradients = HeadGradients::kAll) {
  return {call.config, call.part, call.dtype, rows, call.ops, room_of(table), gradients, base};
}

// The norm of this part's rows, and then that of all rows, which the product needs.
void norm(const Call& call, const View& x, const Workspace& w) {
  const double eps = call.config.norm_eps;
  const View weight = call.weight(head::kNormWeight), normed = call.mine(w.normed);
  if (call.config.arch == Arch::kGpt2) {
    call.ops.layernorm(call.stream, x, weight, call.weight(head::kNormBias), eps, normed, w.stats);
  } else {
    call.ops.rmsnorm(call.stream, x, weight, eps, normed, w.stats, call.config.block.norm_weight);
  }
  call.all_rows(normed, w.normed);
}

// Overwrites dx.
void norm_backward(const Call& call, const View& x, const Workspace& w, const View& dx) {
  const Begun sum = call.begin_sum_of_parts(w.normed);
  call.ops.zero(call.stream, dx);
  const View normed = sum.end();
  const bool frozen = !call.grads;
  const View weight = call.weight(head::kNormWeight),
             d_weight = frozen ? w.unused.row_range(0, 1) : call.grad(head::kNormWeight);
  if (call.config.arch == Arch::kGpt2) {
    call.ops.layernorm_backward(call.stream, normed, x, weight, w.stats, dx, d_weight,
                                frozen ? w.unused.row_range(1, 1) : call.grad(head::kNormBias),
                                w.norm_partials);
  } else {
    call.ops.rmsnorm_backward(call.stream, normed, x, weight, w.stats, dx, d_weight, w.norm_partials,
                              call.config.block.norm_weight);
  }
}

// Calls body(normed, logits, dlogits, first row, number of rows) for each chunk, with the views of its rows.
template <class Body>
void for_chunks(const Workspace& w, const Body& body) {
  for (std::int64_t first = 0; first < w.normed.rows; first += w.logits.rows) {
    const std::int64_t n = std::min(w.logits.rows, w.normed.rows - first);
    body(w.normed.row_range(first, n), w.logits.row_range(0, n), w.dlogits.row_range(0, n), first, n);
  }
}

// Adds the loss of the logits' rows and writes its gradient, unless dlogits is null. Each part has the logits
// of some tokens: it tells the others three numbers for each row, by which all merge the same softmax.
void cross_entropy(const Call& call, const Workspace& w, const View& logits, const View& targets,
                   const View& loss_sum, const View& dlogits, double scale) {
  const double softcap = call.config.block.final_softcap;
  if (!call.is_part()) {
    return call.ops.cross_entropy(call.stream, logits, targets, loss_sum, dlogits, w.sum_partials, scale,
                                  softcap);
  }
  const View numbers(w.numbers.data, w.numbers.dtype, 3 * call.part.parts, logits.rows);
  const View mine = numbers.row_range(3 * call.part.part, 3);
  call.ops.softmax_part(call.stream, logits, targets, call.tokens.first, mine, softcap);
  call.exchange->all_gather(call.stream, mine, numbers);
  call.exchange->end(call.stream);
  call.ops.cross_entropy_part(call.stream, logits, targets, call.tokens.first, numbers, loss_sum, dlogits,
                              w.sum_partials, scale, softcap);
}

}  // namespace

std::int64_t head_columns(const ModelConfig& c, const OpSizes& sizes) {
  return sizes.pads_logits() ? round_up(c.vocab_size, kLogitsAlign) : c.vocab_size;
}

std::int64_t head_chunk_rows(const ModelConfig& c, DType dtype, std::int64_t rows, const OpSizes& sizes,
                             const HeadRoom& room) {
  const std::int64_t a = static_cast<std::int64_t>(size_of(accumulator_of(dtype)));
  const std::int64_t t = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t columns = round_up(c.vocab_size, kLogitsAlign);
  const std::int64_t bytes = room.in_tiles ? std::min(room.logits_bytes, columns * c.width * t / 4)
                                           : std::max(room.logits_bytes, columns * c.width * a / 2);
  std::int64_t fit = std::max(kChunkRows, bytes / (columns * (a + t)) / kChunkRows * kChunkRows);
  if (sizes.pads_logits()) {
    // As many chunks, of equal size: a last one of few rows would not fill the device.
    const std::int64_t chunks = (rows + fit - 1) / fit;
    fit = round_up((rows + chunks - 1) / chunks, kChunkRows);
  }
  return std::min(rows, fit);
}

std::int64_t head_bytes(const ModelConfig& config, const ModelPart& part, DType dtype, std::int64_t rows,
                        const OpSizes& sizes, const HeadRoom& room, HeadGradients gradients) {
  return Workspace(config, part, dtype, rows, sizes, room, gradients, nullptr).bytes;
}

void head_backward(const Call& call, const Call& table, View x, View targets, View loss_sum, View dx,
                   void* workspace, double loss_scale) {
  const HeadGradients gradients = call.grads ? HeadGradients::kAll : HeadGradients::kFrozen;
  const Workspace w = workspace_of(call, table, call.shape.rows(), workspace, gradients);
  const std::int64_t v = call.tokens.count;
  Call product = table;
  product.sums = w.sums;
  norm(call, x, w);
  // Cross entropy leaves the padding alone: that of the gradient stays zero over all chunks.
  if (table.table_rows > v) call.ops.zero(call.stream, w.dlogits.col_range(v, table.table_rows - v));
  for_chunks(w, [&](const View& normed, const View& logits, const View& dlogits, std::int64_t first,
                    std::int64_t n) {
    product.into = first == 0 ? table.into : Gradients::kAdd;
    product.linear(normed, table.table, View{}, logits);
    cross_entropy(call, w, logits.col_range(0, v), targets.col_range(first, n), loss_sum,
                  dlogits.col_range(0, v), loss_scale);
    if (table.grads) product.linear_dw(dlogits, normed, table.table);
    product.linear_dx(dlogits, table.table, normed);
  });
  norm_backward(call, x, w, dx);
}

void head_loss(const Call& call, const Call& table, View x, View targets, View loss_sum, void* workspace) {
  const Workspace w = workspace_of(call, table, call.shape.rows(), workspace);
  const std::int64_t v = call.tokens.count;
  norm(call, x, w);
  for_chunks(w, [&](const View& normed, const View& logits, const View&, std::int64_t first, std::int64_t n) {
    table.linear(normed, table.table, View{}, logits);
    cross_entropy(call, w, logits.col_range(0, v), targets.col_range(first, n), loss_sum, View{}, 1);
  });
}

void head_logits(const Call& call, const Call& table, View x, View logits, void* workspace) {
  const Workspace w = workspace_of(call, table, x.rows, workspace);
  norm(call, x, w);
  call.linear(w.normed, table.weight(table.table), View{}, logits);
}

}  // namespace zg::model
