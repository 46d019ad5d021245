#include "model/block_attention.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace zg::model {
namespace {

bool is_ring(BatchShape shape) {
  return shape.sequence_shard.degree > 1 && shape.sequence_shard.method == ContextMethod::kRing;
}
bool is_ulysses(BatchShape shape) {
  return shape.sequence_shard.degree > 1 && shape.sequence_shard.method == ContextMethod::kUlysses;
}

std::int64_t kv_columns(const ModelConfig& c) {
  return c.key_columns() + c.value_columns();
}

// The shape of one attention call: with Ulysses, whole sequences and a share of the heads.
AttentionShape attention_shape(const ModelConfig& c, BatchShape shape, const AttentionRule& rule) {
  const std::int64_t share = is_ulysses(shape) ? shape.sequence_shard.degree : 1;
  ZG_ASSERT(c.heads % share == 0 && c.kv_heads % share == 0, "{} and {} heads in {} shares", c.heads,
            c.kv_heads, share);
  return {.batch = shape.sequences,
          .time = shape.time * share,
          .heads = c.heads / share,
          .kv_heads = c.kv_heads / share,
          .head_size = c.head_size,
          .rule = rule,
          .documents = shape.documents,
          .value_size = c.value_size()};
}
AttentionShape attention_shape(const Call& call) {
  return attention_shape(call.config, call.shape, call.rule);
}

// The attention of this rank's rows to the keys of rank `from`. To its own keys it is causal. From a rank
// with a lower index all rows see the first of its two chunks. From a rank with a higher index this rank's
// second chunk sees all keys, and its first chunk none. A window and documents may hide more keys, which
// depends on the positions.
struct RingBlock {
  AttentionBlock block;
  std::int64_t first_query = 0;

  RingBlock(const ModelConfig& c, BatchShape shape, const AttentionRule& rule, int from) {
    const std::int64_t time = shape.time, chunk = time / 2;
    block = {.batch = shape.sequences, .queries = time, .keys = time, .query_step = time, .key_step = time};
    block.heads = c.heads, block.kv_heads = c.kv_heads, block.head_size = c.head_size;
    block.value_size = c.value_size();
    block.rule = rule;
    block.causal = from == shape.sequence_shard.index;
    block.merge = !block.causal;
    block.query_positions = shape.positions();
    SequenceShard other = shape.sequence_shard;
    other.index = from;
    block.key_positions = other.positions(time);
    // A single chunk is one range of consecutive positions.
    const auto stretch = [chunk](std::int64_t first) { return RowPositions(chunk, first, first); };
    if (from < shape.sequence_shard.index)
      block.keys = chunk, block.key_positions = stretch(block.key_positions.early);
    if (from > shape.sequence_shard.index) {
      block.queries = chunk, first_query = chunk;
      block.query_positions = stretch(block.query_positions.at(chunk));
    }
  }
  // The entries of UnitCall::documents for the block's queries.
  View documents(const View& x) const { return x ? x.col_range(first_query, block.query_rows()) : View(); }
  View queries(const View& x) const { return x.row_range(first_query, block.query_rows()); }
  View keys(const View& x) const { return x.row_range(0, block.key_rows()); }
  View lse(const View& x) const { return x.col_range(first_query, block.queries); }
};

int part_at(BatchShape shape, int step) {
  return (shape.sequence_shard.index - step + shape.sequence_shard.degree) % shape.sequence_shard.degree;
}

void ring_forward(const Call& call, const SavedAttention& saved, const AttentionWorkspace& w) {
  const std::int64_t q_cols = call.config.query_columns();
  const View q = saved.qkv.col_range(0, q_cols);
  call.ops.cast(call.stream, saved.qkv.col_range(q_cols, kv_columns(call.config)), w.kv[0]);
  const int parts = call.shape.sequence_shard.degree;
  for (int step = 0; step < parts; ++step) {
    const View &here = w.kv[step % 2], &next = w.kv[(step + 1) % 2];
    const RingBlock r(call.config, call.shape, call.rule, part_at(call.shape, step));
    if (step + 1 < parts) call.context->begin_pass(call.stream, here, next);
    call.ops.attention_block(call.stream, {.q = r.queries(q),
                                           .kv = r.keys(here),
                                           .block = r.block,
                                           .o = r.queries(w.sums),
                                           .lse = r.lse(saved.lse),
                                           .first_keys = r.documents(call.documents),
                                           .sinks = step == 0 ? call.sinks : View()});
    if (step + 1 < parts) call.context->end_pass(call.stream);
  }
  call.ops.cast(call.stream, w.sums, saved.att);
}

// Adds the sinks' gradients, over all rows of this rank and all heads.
void sinks_backward(const Call& call, const SavedAttention& saved, const View& d_att) {
  if (!call.d_sinks) return;
  call.ops.attention_sinks_backward(call.stream, {.o = saved.att,
                                                  .lse = saved.lse,
                                                  .d_o = d_att,
                                                  .shape = attention_shape(call),
                                                  .sinks = call.sinks,
                                                  .d_sinks = call.d_sinks});
}

void ring_backward(const Call& call, const SavedAttention& saved, const AttentionWorkspace& w,
                   const View& d_att, const View& d_qkv) {
  const std::int64_t q_cols = call.config.query_columns(), kv_cols = kv_columns(call.config);
  const View q = saved.qkv.col_range(0, q_cols);
  Ops& ops = call.ops;
  Stream& s = call.stream;
  sinks_backward(call, saved, d_att);
  ops.cast(s, saved.qkv.col_range(q_cols, kv_cols), w.kv[0]);
  ops.zero(s, w.d_queries);
  ops.zero(s, w.dkv[0]);
  const int parts = call.shape.sequence_shard.degree;
  for (int step = 0; step < parts; ++step) {
    const View &here = w.kv[step % 2], &next = w.kv[(step + 1) % 2];
    const View &sums = w.dkv[step % 2], &next_sums = w.dkv[(step + 1) % 2];
    const RingBlock r(call.config, call.shape, call.rule, part_at(call.shape, step));
    if (step + 1 < parts) call.context->begin_pass(s, here, next);
    ops.attention_block_backward(s, {.q = r.queries(q),
                                     .kv = r.keys(here),
                                     .o = r.queries(saved.att),
                                     .lse = r.lse(saved.lse),
                                     .d_o = r.queries(d_att),
                                     .block = r.block,
                                     .dq = r.queries(w.d_queries),
                                     .dkv = r.keys(sums),
                                     .scratch = w.scratch,
                                     .first_keys = r.documents(call.documents)});
    if (step + 1 < parts) call.context->end_pass(s);
    call.context->begin_pass(s, sums, next_sums);
    call.context->end_pass(s);
  }
  ops.cast(s, w.d_queries, d_qkv.col_range(0, q_cols));
  ops.cast(s, w.dkv[parts % 2], d_qkv.col_range(q_cols, kv_cols));
}

// A range of a row's columns that belongs to heads, in their order; each rank gets an equal share of it.
struct HeadColumns {
  std::int64_t first = 0, count = 0;
};
using Columns = std::array<HeadColumns, 3>;

Columns qkv_columns(const ModelConfig& c) {
  const std::int64_t q = c.query_columns(), k = c.key_columns();
  return {HeadColumns{0, q}, {q, k}, {q + k, c.value_columns()}};
}
Columns results_only(const ModelConfig& c) {
  return {HeadColumns{0, c.result_columns()}};
}

std::int64_t width_of(const Columns& columns, std::int64_t parts) {
  std::int64_t width = 0;
  for (const HeadColumns& c : columns) width += c.count / parts;
  return width;
}

// A view of a buffer that holds the rows of all context-parallel ranks, `width` columns each.
View in_shares(const View& buffer, BatchShape shape, std::int64_t width) {
  return {buffer.data, buffer.dtype, shape.rows() * shape.sequence_shard.degree, width};
}

// For each rank i and each range of columns, calls visit(a, p) with two views of sequence b: a is rank i's
// share of the columns in `rows`, p its place in `packed`.
template <class F>
void for_pieces(BatchShape shape, const Columns& columns, std::int64_t b, const View& rows,
                const View& packed, const F& visit) {
  const std::int64_t parts = shape.sequence_shard.degree, time = shape.time;
  for (std::int64_t i = 0; i < parts; ++i) {
    std::int64_t at = 0;
    for (const HeadColumns& c : columns) {
      const std::int64_t share = c.count / parts;
      if (share > 0) {
        visit(rows.row_range(b * time, time).col_range(c.first + i * share, share),
              packed.row_range((b * parts + i) * time, time).col_range(at, share));
      }
      at += share;
    }
  }
}

// Turns `rows` [N, ...] of this rank, with all heads, into `whole`: all rows of each sequence, with this
// rank's share of the heads.
void to_heads(const Call& call, const AttentionWorkspace& w, const Columns& columns, const View& rows,
              const View& whole) {
  const std::int64_t parts = call.shape.sequence_shard.degree, all = parts * call.shape.time;
  const View packed = in_shares(w.packed, call.shape, width_of(columns, parts));
  const View out = in_shares(whole, call.shape, packed.cols);
  for (std::int64_t b = 0; b < call.shape.sequences; ++b) {
    for_pieces(call.shape, columns, b, rows, packed,
               [&](const View& from, const View& to) { call.ops.cast(call.stream, from, to); });
    call.context->all_to_all(call.stream, packed.row_range(b * all, all), out.row_range(b * all, all));
  }
}

// The inverse of to_heads().
void to_rows(const Call& call, const AttentionWorkspace& w, const Columns& columns, const View& whole,
             const View& rows) {
  const std::int64_t parts = call.shape.sequence_shard.degree, all = parts * call.shape.time;
  const View packed = in_shares(w.packed, call.shape, width_of(columns, parts));
  const View in = in_shares(whole, call.shape, packed.cols);
  for (std::int64_t b = 0; b < call.shape.sequences; ++b) {
    call.context->all_to_all(call.stream, in.row_range(b * all, all), packed.row_range(b * all, all));
    for_pieces(call.shape, columns, b, rows, packed,
               [&](const View& to, const View& from) { call.ops.cast(call.stream, from, to); });
  }
}

// ModelCall::kBlockNext: appends the keys and values of the call's tokens to the cache, and computes their
// attention to it. The tokens are the first ones of a sequence, or one more.
void attention_to_past(const Call& call, const SavedAttention& saved, const AttentionWorkspace& w) {
  const std::int64_t q_cols = call.config.query_columns(), first = call.shape.first, time = call.shape.time;
  call.ops.cast(call.stream, saved.qkv.col_range(q_cols, kv_columns(call.config)),
                call.past.row_range(first, time));
  if (first == 0) {
    return call.ops.attention(call.stream, {.qkv = saved.qkv,
                                            .shape = attention_shape(call),
                                            .o = saved.att,
                                            .lse = saved.lse,
                                            .scratch = w.scratch,
                                            .sinks = call.sinks});
  }
  const std::int64_t window = call.rule.window, end = first + 1;
  const std::int64_t keys = window > 0 ? std::min(window, end) : end;
  AttentionBlock block{.batch = 1, .queries = 1, .keys = keys, .query_step = 1, .key_step = keys};
  block.heads = call.config.heads, block.kv_heads = call.config.kv_heads;
  block.head_size = call.config.head_size, block.value_size = call.config.value_size();
  block.rule = call.rule;
  block.rule.window = 0;  // the window has all of these keys
  call.ops.attention_block(call.stream, {.q = saved.qkv.col_range(0, q_cols),
                                         .kv = call.past.row_range(end - keys, keys),
                                         .block = block,
                                         .o = saved.att,
                                         .lse = saved.lse,
                                         .sinks = call.sinks});
}

// With YaRN's mscale_all_dim, latent attention multiplies its scores by the square of an amplitude. 0: the
// plain scale.
double latent_scale(const ModelConfig& c) {
  const RopeScaling& rope = c.block.rope.scaling;
  if (!c.block.latent || rope.mscale_all_dim == 0 || rope.factor <= 1) return 0;
  const double amplitude = 0.1 * rope.mscale_all_dim * std::log(rope.factor) + 1;
  return amplitude * amplitude / std::sqrt(static_cast<double>(c.head_size));
}

struct UlyssesViews {
  AttentionShape shape;
  View qkv, att, documents, sinks;
  UlyssesViews(const Call& call, const SavedAttention& saved)
      : shape(attention_shape(call)),
        qkv(in_shares(saved.qkv, call.shape,
                      width_of(qkv_columns(call.config), call.shape.sequence_shard.degree))),
        att(in_shares(saved.whole, call.shape,
                      width_of(results_only(call.config), call.shape.sequence_shard.degree))) {
    const std::int64_t rows = call.shape.rows();
    if (call.documents) documents = call.documents.col_range(rows, rows * call.shape.sequence_shard.degree);
    sinks = share_of(call, call.sinks);
  }
  // This rank's share of `numbers`, which has one scalar for each head.
  View share_of(const Call& call, const View& numbers) const {
    return numbers ? numbers.col_range(call.shape.sequence_shard.index * shape.heads, shape.heads) : View();
  }
};

}  // namespace

AttentionRule attention_rule(const ModelConfig& c, std::int64_t layer, const BatchShape& shape) {
  const std::int64_t sequence = shape.first + shape.time * shape.sequence_shard.degree;
  const double scalar = c.block.query_pre_attn_scalar, multiplier = c.block.attention_multiplier;
  AttentionRule rule{.window = c.has_window(layer) && c.block.window < sequence ? c.block.window : 0,
                     .scale = scalar > 0       ? 1 / std::sqrt(scalar)
                              : multiplier > 0 ? multiplier
                                               : latent_scale(c),
                     .softcap = c.block.attention_softcap,
                     .sinks = c.block.sinks};
  if (c.scaled_scores && !c.scores_by_layer) return rule;
  const double plain = c.scaled_scores ? 1 / std::sqrt(static_cast<double>(c.head_size)) : 1;
  rule.scale = c.scores_by_layer ? plain / static_cast<double>(layer + 1) : plain;
  return rule;
}

SavedAttention::SavedAttention(BufferPlan& plan, const ModelConfig& c, DType dtype, BatchShape shape) {
  const std::int64_t n = shape.rows();
  const AttentionShape a = attention_shape(c, shape, {});
  qkv = plan.take(dtype, n, c.query_columns() + kv_columns(c));
  att = plan.take(dtype, n, c.result_columns());
  lse = plan.take(accumulator_of(dtype), a.batch * a.heads, a.time);
  if (is_ulysses(shape)) whole = plan.take(dtype, n, c.result_columns());
}

AttentionWorkspace::AttentionWorkspace(BufferPlan& plan, const ModelConfig& c, DType dtype, BatchShape shape,
                                       const AttentionRule& rule, const OpSizes& sizes) {
  const std::int64_t n = shape.rows(), q = c.query_columns(), kv_cols = kv_columns(c);
  const DType a = accumulator_of(dtype);
  std::int64_t bytes = 0;
  if (is_ring(shape)) {
    const RingBlock r(c, shape, rule, shape.sequence_shard.index);
    bytes = sizes.attention_block_scratch_bytes(dtype, r.block);
    const View common = plan.take(a, n, std::max(q, c.result_columns()));
    sums = View(common.data, a, n, c.result_columns()), d_queries = View(common.data, a, n, q);
    for (View& v : kv) v = plan.take(dtype, n, kv_cols);
    for (View& v : dkv) v = plan.take(a, n, kv_cols);
  } else {
    bytes = sizes.attention_scratch_bytes(dtype, attention_shape(c, shape, rule));
  }
  if (is_ulysses(shape)) {
    qkv = plan.take(dtype, n, q + kv_cols);
    packed = plan.take(dtype, n, q + kv_cols);
    d_whole = plan.take(dtype, n, c.result_columns());
  }
  if (bytes > 0) scratch = plan.take(DType::kU8, 1, bytes);
}

View attention_input(const Call& call, const SavedAttention& saved, const AttentionWorkspace& w) {
  return is_ulysses(call.shape) ? w.qkv : saved.qkv;
}

void attention_forward(const Call& call, const SavedAttention& saved, const AttentionWorkspace& w) {
  if (call.past) return attention_to_past(call, saved, w);
  if (is_ring(call.shape)) return ring_forward(call, saved, w);
  if (!is_ulysses(call.shape)) {
    return call.ops.attention(call.stream, {.qkv = saved.qkv,
                                            .shape = attention_shape(call),
                                            .o = saved.att,
                                            .lse = saved.lse,
                                            .scratch = w.scratch,
                                            .first_keys = call.documents,
                                            .sinks = call.sinks});
  }
  to_heads(call, w, qkv_columns(call.config), w.qkv, saved.qkv);
  const UlyssesViews v(call, saved);
  call.ops.attention(call.stream, {.qkv = v.qkv,
                                   .shape = v.shape,
                                   .o = v.att,
                                   .lse = saved.lse,
                                   .scratch = w.scratch,
                                   .first_keys = v.documents,
                                   .sinks = v.sinks});
  to_rows(call, w, results_only(call.config), saved.whole, saved.att);
}

void attention_backward(const Call& call, const SavedAttention& saved, const AttentionWorkspace& w,
                        const View& d_att, const View& d_qkv) {
  if (is_ring(call.shape)) return ring_backward(call, saved, w, d_att, d_qkv);
  if (!is_ulysses(call.shape)) {
    sinks_backward(call, saved, d_att);
    return call.ops.attention_backward(call.stream, {.qkv = saved.qkv,
                                                     .o = saved.att,
                                                     .lse = saved.lse,
                                                     .d_o = d_att,
                                                     .shape = attention_shape(call),
                                                     .dqkv = d_qkv,
                                                     .scratch = w.scratch,
                                                     .first_keys = call.documents});
  }
  to_heads(call, w, results_only(call.config), d_att, w.d_whole);
  const UlyssesViews v(call, saved);
  call.ops.attention_backward(call.stream, {.qkv = v.qkv,
                                            .o = v.att,
                                            .lse = saved.lse,
                                            .d_o = in_shares(w.d_whole, call.shape, v.att.cols),
                                            .shape = v.shape,
                                            .dqkv = in_shares(w.qkv, call.shape, v.qkv.cols),
                                            .scratch = w.scratch,
                                            .first_keys = v.documents});
  if (call.d_sinks) {
    call.ops.attention_sinks_backward(call.stream, {.o = v.att,
                                                    .lse = saved.lse,
                                                    .d_o = in_shares(w.d_whole, call.shape, v.att.cols),
                                                    .shape = v.shape,
                                                    .sinks = v.sinks,
                                                    .d_sinks = v.share_of(call, call.d_sinks)});
  }
  to_rows(call, w, qkv_columns(call.config), w.qkv, d_qkv);
}

std::vector<ContextCall> context_calls(const ModelConfig& c, DType dtype, BatchShape shape,
                                       Direction direction) {
  using Kind = ContextCall::Kind;
  const int parts = shape.sequence_shard.degree;
  std::vector<ContextCall> calls;
  const std::int64_t rows = shape.rows(), qkv = c.query_columns() + kv_columns(c), kv = kv_columns(c);
  if (is_ring(shape)) {
    for (int step = 0; step < parts; ++step) {
      if (step + 1 < parts) calls.push_back({Kind::kPass, rows * kv, dtype});
      if (direction == Direction::kBackward) calls.push_back({Kind::kPass, rows * kv, accumulator_of(dtype)});
    }
  } else if (is_ulysses(shape)) {
    const std::int64_t results = c.result_columns();
    const std::int64_t before = direction == Direction::kForward ? qkv : results,
                       after = direction == Direction::kForward ? results : qkv;
    for (const std::int64_t columns : {before, after}) {
      const ContextCall of_sequence{Kind::kAllToAll, shape.time * columns / parts, dtype};
      calls.insert(calls.end(), static_cast<std::size_t>(shape.sequences), of_sequence);
    }
  }
  return calls;
}

}  // namespace zg::model
