// Attention on the host without a T x T buffer, after FlashAttention-2 (Dao, 2023): a tile of queries is
// multiplied with one tile of keys after another, with a running maximum and sum (online softmax: Milakov and
// Gimelshein, 2018). The backward pass recomputes the probabilities from the stored log-sum-exp.
//
// Tiles are fp32 in scratch memory. Scores are kept transposed, [keys, queries]. So the softmax over keys
// works on whole vectors of queries, and only queries and their gradients must be transposed, once for each
// tile. Scores are scaled by log2(e), too, so that exponentials are powers of two.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/attention.cpp"
// clang-format off
#include "kernels/host/targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "kernels/host/attention_softmax.hpp"
#include "kernels/host/attention_tiles.hpp"
#include "kernels/host/matrix.hpp"

#ifndef ZG_KERNELS_HOST_ATTENTION_ONCE
#define ZG_KERNELS_HOST_ATTENTION_ONCE
#include "kernels/host/attention_plain.hpp"
#include "kernels/host/attention_tasks.hpp"
#include "kernels/host/growing_buffer.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::host {
namespace {

// The functions that run tasks on one instruction set.
template <class Task>
using RunTask = void (*)(const Task&);
using AttentionTasks =
    std::tuple<RunTask<ForwardTask<float>>, RunTask<ForwardTask<bf16>>, RunTask<ForwardTask<fp16>>,
               RunTask<BackwardTask<float>>, RunTask<BackwardTask<bf16>>, RunTask<BackwardTask<fp16>>>;

}  // namespace
}  // namespace zg::host
#endif

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

// For each row r: to = keep[r] * to + take[r] * x. Null keep: overwrites `to`. Null take: 1.
HWY_NOINLINE void add_rows(Strided<const float> x, Extent extent, const float* keep, const float* take,
                           Strided<float> to) {
  for (std::int64_t r = 0; r < extent.rows; ++r) {
    const float* const from = x.row(r);
    float* const row = to.row(r);
    if (keep == nullptr) {
      for (std::int64_t c = 0; c < extent.cols; ++c) row[c] = from[c] * take[r];
    } else {
      for (std::int64_t c = 0; c < extent.cols; ++c) row[c] = row[c] * keep[r] + from[c] * take[r];
    }
  }
}

// Adds the head's sink to the sums of exponentials of a tile's queries; the sink may become their maximum.
// rescale: returns for each query the factor by which its sum of values must then be multiplied.
template <class T>
void add_sink(const ForwardTask<T>& task, const ForwardScratch& s, std::int64_t tile, std::int64_t n,
              float* rescale) {
  for (std::int64_t c = 0; c < n; ++c) rescale[c] = 1.0f;
  if (task.sink == nullptr) return;
  const float sink = load_one(task.sink) * kLog2E;
  for (std::int64_t c = 0; c < n; ++c) {
    float &max = s.max[tile][c], &sum = s.sum[tile][c];
    const float top = max > sink ? max : sink;
    rescale[c] = std::exp2(max - top);
    sum = sum * rescale[c] + std::exp2(sink - top);
    max = top;
  }
}

// Merges the results of a tile's queries with their results for other keys. Both are weighted by their share
// of the sum of exponentials. Queries that see none of these keys keep their results.
template <class T>
void store_sums(const ForwardTask<T>& task, const ForwardScratch& s, std::int64_t tile, std::int64_t query,
                std::int64_t n, const float* rescale) {
  float keep[kTile];
  float* const lse = task.lse + query;
  for (std::int64_t c = 0; c < n; ++c) {
    const float here = s.max[tile][c] * kLn2 + std::log(s.sum[tile][c]), before = task.merge ? lse[c] : here;
    const float top = before > here ? before : here;
    const float all = task.merge ? top + std::log(std::exp(before - top) + std::exp(here - top)) : here;
    keep[c] = std::exp(before - all);
    s.factor[c] = s.sum[tile][c] > 0 ? std::exp(here - all) * rescale[c] / s.sum[tile][c] : 0.0f;
    lse[c] = all;
  }
  add_rows({s.o[tile], padded_head(task.value_size)}, {n, task.value_size}, task.merge ? keep : nullptr,
           s.factor, {task.sums + query * task.ld_o, task.ld_o});
}

template <class T>
void forward_task(const ForwardTask<T>& task) {
  BumpAllocator cut(task.scratch);
  ForwardScratch s(cut, task.head_size, task.value_size);
  const std::int64_t width = padded_head(task.head_size), size = task.head_size;
  const std::int64_t value_width = padded_head(task.value_size), value_size = task.value_size;
  const ScoreScale scale(task.rule, size);
  const std::int64_t tiles = (task.last - task.first + kTile - 1) / kTile;
  const auto queries = [&](std::int64_t i) { return min_of(kTile, task.last - task.first - i * kTile); };
  for (std::int64_t i = 0; i < tiles; ++i) {
    const std::int64_t n = queries(i), padded = rounded_up(n, panel());
    pack<T>({task.q + (task.first + i * kTile) * task.ld_q, task.ld_q}, {n, size}, padded, scale.query,
            {s.q, width});
    transpose(s.q, width, padded, size, 1.0f, s.qt[i]);
    for (std::int64_t c = 0; c < kTile * value_width; ++c) s.o[i][c] = 0.0f;
    for (std::int64_t c = 0; c < kTile; ++c) s.max[i][c] = -1e30f, s.sum[i][c] = 0.0f;
  }
  const std::int64_t end = task.causal ? task.last : task.keys;
  for (std::int64_t key = task.visible.first(task.first) / kTile * kTile; key < end; key += kTile) {
    const std::int64_t keys = min_of(kTile, end - key);
    pack<T>({task.k + key * task.ld, task.ld}, {keys, size}, rounded_up(keys, kRows), 1.0f, {s.k, width});
    pack<T>({task.v + key * task.ld, task.ld}, {keys, value_size}, keys, 1.0f, {s.v, value_width});
    for (std::int64_t i = 0; i < tiles; ++i) {
      const std::int64_t n = queries(i), query = task.first + i * kTile;
      if (task.causal && query < key) continue;
      if (task.visible.first(query) >= key + kTile) continue;
      const bool diagonal = task.causal && query == key;
      multiply<Start::kZero>({.a = s.k,
                              .a_row = width,
                              .a_p = 1,
                              .b = s.qt[i],
                              .ldb = kTile,
                              .c = s.scores,
                              .ldc = kTile,
                              .rows = keys,
                              .cols = n,
                              .depth = size},
                             diagonal ? Part::kColumnsFromRow : Part::kAll);
      const TileMask mask{diagonal, first_in_tile(task.visible, query, n, key, s.first)};
      running_softmax(s.scores, {keys, n}, mask, scale.cap, s.max[i], s.sum[i], s.factor);
      multiply<Start::kScaleAndAdd>({.a = s.scores,
                                     .a_row = 1,
                                     .a_p = kTile,
                                     .b = s.v,
                                     .ldb = value_width,
                                     .c = s.o[i],
                                     .ldc = value_width,
                                     .rows = n,
                                     .cols = value_size,
                                     .depth = keys,
                                     .row_scale = s.factor},
                                    diagonal ? Part::kSumToRow : Part::kAll);
    }
  }
  for (std::int64_t i = 0; i < tiles; ++i) {
    const std::int64_t n = queries(i), query = task.first + i * kTile;
    float rescale[kTile];
    add_sink(task, s, i, n, rescale);
    if (task.o == nullptr) {
      store_sums(task, s, i, query, n, rescale);
      continue;
    }
    for (std::int64_t c = 0; c < n; ++c) {
      task.lse[query + c] = s.max[i][c] * kLn2 + std::log(s.sum[i][c]);
      s.factor[c] = rescale[c] / s.sum[i][c];
    }
    unpack<T>({s.o[i], value_width}, {n, value_size}, s.factor, 1, {task.o + query * task.ld_o, task.ld_o});
  }
}

// delta[r] = sum over the head of dO * O.
template <class T>
HWY_NOINLINE void row_dots(Strided<const T> left, Strided<const T> right, Extent extent, float* out) {
  const Float d;
  for (std::int64_t r = 0; r < extent.rows; ++r) {
    const T *const x = left.row(r), *const y = right.row(r);
    Vector sums = hn::Zero(d);
    std::int64_t c = 0;
    for (; c + lanes() <= extent.cols; c += lanes())
      sums = hn::MulAdd(load_f32(d, x + c), load_f32(d, y + c), sums);
    float sum = hn::GetLane(hn::SumOfLanes(d, sums));
    for (; c < extent.cols; ++c) sum += load_one(x + c) * load_one(y + c);
    out[r] = sum;
  }
}

// Packs queries [query, query + n) of one head and the gradients of their results, as they are and
// transposed, and computes lse and delta.
template <class T>
void load_queries(const BackwardTask<T>& task, const BackwardScratch& s, std::int64_t head,
                  std::int64_t query, std::int64_t n) {
  const std::int64_t width = padded_head(task.head_size), size = task.head_size,
                     padded = rounded_up(n, panel());
  const std::int64_t value_width = padded_head(task.value_size), value_size = task.value_size;
  const ScoreScale scale(task.rule, size);
  const T* d_o = task.d_o + query * task.ld_do + head * value_size;
  pack<T>({task.q + query * task.ld_q + head * size, task.ld_q}, {n, size}, padded, scale.natural,
          {s.q, width});
  const auto to_query = task.rule.softcap == 0 ? kLog2E : static_cast<float>(1 / task.rule.softcap);
  transpose(s.q, width, padded, size, to_query, s.qt);
  pack<T>({d_o, task.ld_do}, {n, value_size}, padded, 1.0f, {s.d_o, value_width});
  transpose(s.d_o, value_width, padded, value_size, 1.0f, s.dot);
  row_dots<T>({d_o, task.ld_do}, {task.o + query * task.ld_o + head * value_size, task.ld_o}, {n, value_size},
              s.delta);
  for (std::int64_t c = 0; c < n; ++c) s.lse[c] = task.lse[head * task.ld_lse + query + c] * kLog2E;
  for (std::int64_t c = n; c < padded; ++c) s.lse[c] = s.delta[c] = 0.0f;
  for (std::int64_t c = 0; c < kTile * width; ++c) s.dq[c] = 0.0f;
}

// Adds the terms of one tile of queries and one tile of keys to dq, dk and dv.
HWY_NOINLINE void backward_tile(const BackwardScratch& s, std::int64_t size, std::int64_t value_size,
                                std::int64_t key, TileSize tile, const TileMask& mask, float cap) {
  const std::int64_t width = padded_head(size), at = key * width;
  const std::int64_t value_width = padded_head(value_size), value_at = key * value_width;
  const bool diagonal = mask.diagonal;
  const Part rows_are_keys = diagonal ? Part::kColumnsFromRow : Part::kAll;
  const Part sum_over_queries = diagonal ? Part::kSumFromRow : Part::kAll;
  const Part sum_over_keys = diagonal ? Part::kSumToRow : Part::kAll;
  Product product{.a = s.k + at,
                  .a_row = width,
                  .a_p = 1,
                  .b = s.qt,
                  .ldb = kTile,
                  .c = s.p,
                  .ldc = kTile,
                  .rows = tile.keys,
                  .cols = tile.queries,
                  .depth = size};
  multiply<Start::kZero>(product, rows_are_keys);  // scores
  product.a = s.v + value_at, product.a_row = value_width, product.depth = value_size;
  product.b = s.dot, product.c = s.ds;
  multiply<Start::kZero>(product, rows_are_keys);  // dP
  cap != 0 ? softmax_backward<true>(s.p, s.ds, tile, mask, cap, s.lse, s.delta)
           : softmax_backward<false>(s.p, s.ds, tile, mask, cap, s.lse, s.delta);
  product = {.a = s.p,
             .a_row = kTile,
             .a_p = 1,
             .b = s.d_o,
             .ldb = value_width,
             .c = s.dv + value_at,
             .ldc = value_width,
             .rows = tile.keys,
             .cols = value_size,
             .depth = tile.queries};
  multiply<Start::kAdd>(product, sum_over_queries);  // dV
  product.a = s.ds, product.b = s.q, product.c = s.dk + at;
  product.ldb = product.ldc = width, product.cols = size;
  multiply<Start::kAdd>(product, sum_over_queries);  // dK
  product = {.a = s.ds,
             .a_row = 1,
             .a_p = kTile,
             .b = s.k + at,
             .ldb = width,
             .c = s.dq,
             .ldc = width,
             .rows = tile.queries,
             .cols = size,
             .depth = tile.keys};
  multiply<Start::kAdd>(product, sum_over_keys);  // dQ
}

// Stores packed rows times `scale`: as T to rows `ld` apart in `to` or, if `to` is null, added to `sums`.
template <class T>
void store_gradients(Strided<const float> x, Extent extent, float scale, T* to, float* sums,
                     std::int64_t ld) {
  if (to != nullptr) return unpack<T>(x, extent, &scale, 0, {to, ld});
  for (std::int64_t r = 0; r < extent.rows; ++r) {
    for (std::int64_t c = 0; c < extent.cols; ++c) sums[r * ld + c] += x.row(r)[c] * scale;
  }
}

template <class T>
void backward_task(const BackwardTask<T>& task) {
  BumpAllocator cut(task.scratch);
  BackwardScratch s(cut, task.head_size, task.value_size, task.keys);
  const std::int64_t width = padded_head(task.head_size), size = task.head_size, keys = task.keys;
  const std::int64_t value_width = padded_head(task.value_size), value_size = task.value_size;
  const ScoreScale scale(task.rule, size);
  const auto behind = [](auto* at, std::int64_t elements) { return at == nullptr ? at : at + elements; };
  pack<T>({task.k, task.ld}, {keys, size}, padded_time(keys), 1.0f, {s.k, width});
  pack<T>({task.v, task.ld}, {keys, value_size}, padded_time(keys), 1.0f, {s.v, value_width});
  for (std::int64_t i = 0; i < padded_time(keys) * width; ++i) s.dk[i] = 0.0f;
  for (std::int64_t i = 0; i < padded_time(keys) * value_width; ++i) s.dv[i] = 0.0f;
  for (std::int64_t head = 0; head < task.query_heads; ++head) {
    for (std::int64_t query = 0; query < task.queries; query += kTile) {
      const std::int64_t n = min_of(kTile, task.queries - query);
      load_queries(task, s, head, query, n);
      const std::int64_t end = task.causal ? query + 1 : keys;
      for (std::int64_t key = task.visible.first(query) / kTile * kTile; key < end; key += kTile) {
        const TileMask mask{task.causal && key == query, first_in_tile(task.visible, query, n, key, s.first)};
        backward_tile(s, size, value_size, key, {min_of(kTile, keys - key), n}, mask, scale.cap);
      }
      const std::int64_t at = query * task.ld_dq + head * size;
      store_gradients({s.dq, width}, {n, size}, scale.natural, behind(task.dq, at), behind(task.dq_sums, at),
                      task.ld_dq);
    }
  }
  store_gradients({s.dk, width}, {keys, size}, 1.0f, task.dk, task.dk_sums, task.ld_d);
  store_gradients({s.dv, value_width}, {keys, value_size}, 1.0f, task.dv, task.dv_sums, task.ld_d);
}

AttentionTasks attention_tasks() {
  return {forward_task<float>,  forward_task<bf16>,  forward_task<fp16>,
          backward_task<float>, backward_task<bf16>, backward_task<fp16>};
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {

HWY_EXPORT(attention_tasks);

template <class Task>
void run(const Task& task) {
  std::get<void (*)(const Task&)>(HWY_DYNAMIC_DISPATCH(attention_tasks)())(task);
}

void check(const AttentionShape& s, std::int64_t ld_qkv, std::int64_t ld_o) {
  ZG_ASSERT_GE(s.kv_heads, 1);
  ZG_ASSERT_GE(s.head_size, 1);
  ZG_ASSERT_EQ(s.heads % s.kv_heads, 0);
  ZG_ASSERT_GE(s.values(), 1);
  ZG_ASSERT_GE(ld_qkv, s.qkv_columns());
  ZG_ASSERT_GE(ld_o, s.result_columns());
}

// first_keys: of all sequences; null: none.
VisibleBlockKeys visible_keys(const AttentionShape& s, const std::int32_t* first_keys,
                              std::int64_t sequence) {
  return {s.rule.window, first_keys == nullptr ? nullptr : first_keys + sequence * s.time, s.time, s.time};
}
VisibleBlockKeys visible_keys(const AttentionBlock& x, const std::int32_t* first_keys,
                              std::int64_t sequence) {
  return {x.rule.window, first_keys == nullptr ? nullptr : first_keys + sequence * x.query_step,
          x.query_positions, x.key_positions};
}
void check_first_keys(const AttentionShape& s, const std::int32_t* first_keys) {
  if (first_keys == nullptr) return;
  for (std::int64_t r = 0; r < s.batch * s.time; ++r) {
    const std::int64_t t = r % s.time, before = t == 0 ? 0 : first_keys[r - 1];
    ZG_ASSERT(first_keys[r] >= before && first_keys[r] <= t,
              "row {} of a sequence sees rows from {} on, after {}", t, first_keys[r], before);
  }
}

float* scratch_of(std::int64_t floats) {
  static thread_local GrowingBuffer<float> scratch;
  return scratch.at_least(floats);
}

// Runs task(sequence, query head, first query) for blocks of kQueryBlock queries. The last queries of a
// causal attention have the most keys: their tasks come first.
template <class F>
void for_query_blocks(std::int64_t batch, std::int64_t heads, std::int64_t queries, const F& task) {
  const std::int64_t blocks = (queries + kQueryBlock - 1) / kQueryBlock;
  parallel_for(batch * heads * blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t block = blocks - 1 - t / (batch * heads), head = t % (batch * heads);
      task(head / heads, head % heads, block * kQueryBlock);
    }
  });
}

// Runs task(sequence, key/value head).
template <class F>
void for_kv_heads(std::int64_t batch, std::int64_t kv_heads, const F& task) {
  parallel_for(batch * kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) task(t / kv_heads, t % kv_heads);
  });
}

// Shape: AttentionShape or AttentionBlock.
template <class Shape>
std::int64_t forward_floats(const Shape& shape) {
  BumpAllocator measure(nullptr);
  ForwardScratch(measure, shape.head_size, shape.values());
  return measure.used();
}
template <class Shape>
std::int64_t backward_floats(const Shape& shape, std::int64_t keys) {
  BumpAllocator measure(nullptr);
  BackwardScratch(measure, shape.head_size, shape.values(), keys);
  return measure.used();
}

}  // namespace

template <class T>
void attention(const AttentionShape& s, const CausalAttention<T>& args) {
  check(s, args.qkv.ld, args.o.ld);
  check_first_keys(s, args.first_keys);
  const std::int64_t group = s.heads / s.kv_heads, size = s.head_size, values = s.values();
  const std::int64_t floats = forward_floats(s);
  for_query_blocks(s.batch, s.heads, s.time, [&](std::int64_t b, std::int64_t h, std::int64_t first) {
    const std::int64_t ld_qkv = args.qkv.ld, ld_o = args.o.ld;
    const T *q = args.qkv.row(b * s.time) + h * size, *k = q + (s.heads - h + h / group) * size;
    const T* v = args.qkv.row(b * s.time) + (s.heads + s.kv_heads) * size + h / group * values;
    T* out = args.o.row(b * s.time) + h * values;
    Acc<T>* const lse_head = args.lse + (b * s.heads + h) * s.time;
    const T* const sink = args.sinks == nullptr ? nullptr : args.sinks + h;
    const VisibleBlockKeys visible = visible_keys(s, args.first_keys, b);
    if constexpr (std::is_same_v<T, double>) {
      if (first > 0) return;  // the whole head is one task
      plain_forward({q, ld_qkv, k, v, ld_qkv, s.time, s.time, true, size, values, visible, s.rule, sink}, out,
                    ld_o, lse_head, false);
    } else {
      run(ForwardTask<T>{.q = q,
                         .ld_q = ld_qkv,
                         .k = k,
                         .v = v,
                         .ld = ld_qkv,
                         .o = out,
                         .sums = nullptr,
                         .ld_o = ld_o,
                         .lse = lse_head,
                         .head_size = size,
                         .value_size = values,
                         .first = first,
                         .last = std::min(s.time, first + kQueryBlock),
                         .keys = s.time,
                         .causal = true,
                         .merge = false,
                         .visible = visible,
                         .rule = s.rule,
                         .sink = sink,
                         .scratch = scratch_of(floats)});
    }
  });
}

template <class T>
void attention_backward(const AttentionShape& s, const CausalAttentionBackward<T>& args) {
  const std::int64_t ld_qkv = args.qkv.ld, ld_o = args.o.ld, ld_do = args.d_o.ld, ld_dqkv = args.dqkv.ld;
  check(s, ld_qkv, ld_o);
  check(s, ld_dqkv, ld_do);
  check_first_keys(s, args.first_keys);
  const std::int64_t group = s.heads / s.kv_heads, size = s.head_size, values = s.values();
  const std::int64_t floats = backward_floats(s, s.time);
  for_kv_heads(s.batch, s.kv_heads, [&](std::int64_t b, std::int64_t kv) {
    const std::int64_t h = kv * group, row = b * s.time;
    const std::int64_t at_q = h * size, at_k = (s.heads + kv) * size, at_o = h * values;
    const std::int64_t at_v = (s.heads + s.kv_heads) * size + kv * values;
    const T* in = args.qkv.row(row);
    T* out = args.dqkv.row(row);
    const T *o_head = args.o.row(row) + at_o, *do_head = args.d_o.row(row) + at_o;
    const Acc<T>* lse_head = args.lse + (b * s.heads + h) * s.time;
    const VisibleBlockKeys visible = visible_keys(s, args.first_keys, b);
    if constexpr (std::is_same_v<T, double>) {
      for (std::int64_t r = 0; r < s.time; ++r) {
        std::fill_n(out + r * ld_dqkv + at_q, group * size, 0.0);
        std::fill_n(out + r * ld_dqkv + at_k, size, 0.0);
        std::fill_n(out + r * ld_dqkv + at_v, values, 0.0);
      }
      for (std::int64_t g = 0; g < group; ++g) {
        plain_backward({in + at_q + g * size, ld_qkv, in + at_k, in + at_v, ld_qkv, s.time, s.time, true,
                        size, values, visible, s.rule},
                       {o_head + g * values, do_head + g * values, ld_o, ld_do, lse_head + g * s.time,
                        out + at_q + g * size, ld_dqkv, out + at_k, out + at_v, ld_dqkv});
      }
    } else {
      run(BackwardTask<T>{.q = in + at_q,
                          .ld_q = ld_qkv,
                          .k = in + at_k,
                          .v = in + at_v,
                          .ld = ld_qkv,
                          .o = o_head,
                          .d_o = do_head,
                          .ld_o = ld_o,
                          .ld_do = ld_do,
                          .lse = lse_head,
                          .ld_lse = s.time,
                          .dq = out + at_q,
                          .dk = out + at_k,
                          .dv = out + at_v,
                          .dq_sums = nullptr,
                          .dk_sums = nullptr,
                          .dv_sums = nullptr,
                          .ld_dq = ld_dqkv,
                          .ld_d = ld_dqkv,
                          .head_size = size,
                          .value_size = values,
                          .queries = s.time,
                          .keys = s.time,
                          .query_heads = group,
                          .causal = true,
                          .visible = visible,
                          .rule = s.rule,
                          .scratch = scratch_of(floats)});
    }
  });
}

template <class T>
void attention_block(const AttentionBlock& x, const BlockAttention<T>& a) {
  if (x.keys == 0) return;
  const std::int64_t group = x.heads / x.kv_heads, size = x.head_size, values = x.values();
  const std::int64_t floats = forward_floats(x);
  for_query_blocks(x.batch, x.heads, x.queries, [&](std::int64_t b, std::int64_t h, std::int64_t first) {
    const T *q = a.q.row(b * x.query_step) + h * size, *k = a.kv.row(b * x.key_step) + h / group * size;
    const T* v = a.kv.row(b * x.key_step) + x.kv_heads * size + h / group * values;
    Acc<T>* const out = a.o.row(b * x.query_step) + h * values;
    Acc<T>* const lse = a.lse.row(b * x.heads + h);
    const T* const sink = a.sinks == nullptr ? nullptr : a.sinks + h;
    const VisibleBlockKeys visible = visible_keys(x, a.first_keys, b);
    if constexpr (std::is_same_v<T, double>) {
      if (first > 0) return;  // the whole head is one task
      plain_forward(
          {q, a.q.ld, k, v, a.kv.ld, x.queries, x.keys, x.causal, size, values, visible, x.rule, sink}, out,
          a.o.ld, lse, x.merge);
    } else {
      run(ForwardTask<T>{.q = q,
                         .ld_q = a.q.ld,
                         .k = k,
                         .v = v,
                         .ld = a.kv.ld,
                         .o = nullptr,
                         .sums = out,
                         .ld_o = a.o.ld,
                         .lse = lse,
                         .head_size = size,
                         .value_size = values,
                         .first = first,
                         .last = std::min(x.queries, first + kQueryBlock),
                         .keys = x.keys,
                         .causal = x.causal,
                         .merge = x.merge,
                         .visible = visible,
                         .rule = x.rule,
                         .sink = sink,
                         .scratch = scratch_of(floats)});
    }
  });
}

template <class T>
void attention_block_backward(const AttentionBlock& x, const BlockAttentionBackward<T>& a) {
  const std::int64_t group = x.heads / x.kv_heads, size = x.head_size, values = x.values();
  const std::int64_t floats = backward_floats(x, x.keys);
  for_kv_heads(x.batch, x.kv_heads, [&](std::int64_t b, std::int64_t kv) {
    const std::int64_t h = kv * group, query = b * x.query_step, key = b * x.key_step;
    const std::int64_t at_q = h * size, at_k = kv * size, at_o = h * values;
    const std::int64_t at_v = x.kv_heads * size + kv * values;
    const T *q = a.q.row(query) + at_q, *k = a.kv.row(key) + at_k, *v = a.kv.row(key) + at_v;
    const T *o = a.o.row(query) + at_o, *d_o = a.d_o.row(query) + at_o;
    const Acc<T>* lse = a.lse.row(b * x.heads + h);
    Acc<T>*dq = a.dq.row(query) + at_q, *dk = a.dkv.row(key) + at_k, *dv = a.dkv.row(key) + at_v;
    const VisibleBlockKeys visible = visible_keys(x, a.first_keys, b);
    if constexpr (std::is_same_v<T, double>) {
      for (std::int64_t g = 0; g < group; ++g) {
        plain_backward(
            {q + g * size, a.q.ld, k, v, a.kv.ld, x.queries, x.keys, x.causal, size, values, visible, x.rule},
            {o + g * values, d_o + g * values, a.o.ld, a.d_o.ld, lse + g * a.lse.ld, dq + g * size, a.dq.ld,
             dk, dv, a.dkv.ld});
      }
    } else {
      run(BackwardTask<T>{.q = q,
                          .ld_q = a.q.ld,
                          .k = k,
                          .v = v,
                          .ld = a.kv.ld,
                          .o = o,
                          .d_o = d_o,
                          .ld_o = a.o.ld,
                          .ld_do = a.d_o.ld,
                          .lse = lse,
                          .ld_lse = a.lse.ld,
                          .dq = nullptr,
                          .dk = nullptr,
                          .dv = nullptr,
                          .dq_sums = dq,
                          .dk_sums = dk,
                          .dv_sums = dv,
                          .ld_dq = a.dq.ld,
                          .ld_d = a.dkv.ld,
                          .head_size = size,
                          .value_size = values,
                          .queries = x.queries,
                          .keys = x.keys,
                          .query_heads = group,
                          .causal = x.causal,
                          .visible = visible,
                          .rule = x.rule,
                          .scratch = scratch_of(floats)});
    }
  });
}

#define ZG_INSTANTIATE(T)                                                                     \
  template void attention(const AttentionShape&, const CausalAttention<T>&);                  \
  template void attention_backward(const AttentionShape&, const CausalAttentionBackward<T>&); \
  template void attention_block(const AttentionBlock&, const BlockAttention<T>&);             \
  template void attention_block_backward(const AttentionBlock&, const BlockAttentionBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
#endif  // HWY_ONCE
