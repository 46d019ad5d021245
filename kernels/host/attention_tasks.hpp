// The tasks of attention on the host, and the layout of each task's scratch memory. Private to attention.cpp.
#pragma once
#include <cmath>
#include <cstdint>

#include "kernels/host/attention_scratch.hpp"
#include "ziggurat/base/dtype.hpp"
#include "ziggurat/kernels/types.hpp"
#include "ziggurat/kernels/visible_keys.hpp"

namespace zg::host {

inline constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// The factors by which a task's products become exponents of two. Queries are multiplied by `query` when they
// are packed. With a cap c products are then scores / c, and the exponents are cap * tanh(product); without a
// cap products are the exponents.
struct ScoreScale {
  float natural;    // factor of the products of queries and keys
  float query = 0;  // the queries' factor
  float cap = 0;    // c * log2(e); 0: scores are not capped

  ScoreScale(const AttentionRule& rule, std::int64_t head_size) {
    const float root = std::sqrt(static_cast<float>(head_size));
    natural = rule.scale == 0 ? 1.0f / root : static_cast<float>(rule.scale);
    if (rule.softcap != 0) {
      query = static_cast<float>(natural / rule.softcap);
      cap = static_cast<float>(rule.softcap) * kLog2E;
    } else {
      query = rule.scale == 0 ? kLog2E / root : natural * kLog2E;
    }
  }
};

// The forward pass of some queries of one head of one sequence.
template <class T>
struct ForwardTask {
  const T* q;
  std::int64_t ld_q;
  const T *k, *v;
  std::int64_t ld;  // of k and v
  T* o;             // null: the result goes to `sums`
  float* sums;
  std::int64_t ld_o;
  float* lse;
  std::int64_t head_size, value_size;
  std::int64_t first, last;  // queries [first, last) of the sequence
  std::int64_t keys;         // unused if causal: query i attends to keys up to i
  bool causal;
  bool merge;  // merge with the result for other keys in `sums` and lse
  VisibleBlockKeys visible;
  AttentionRule rule;
  const T* sink;  // the head's sink, or null
  float* scratch;
};

// The backward pass of one key/value head of one sequence, with all query heads that use it. q, o, d_o and dq
// point to the first query head; the next head begins head_size columns further on in q and dq, and
// value_size columns in o and d_o. Gradients are written to dq, dk and dv, of type T, or if these are null
// added to the sums.
template <class T>
struct BackwardTask {
  const T* q;
  std::int64_t ld_q;
  const T *k, *v;
  std::int64_t ld;  // of k and v
  const T *o, *d_o;
  std::int64_t ld_o, ld_do;
  const float* lse;     // of the first query head
  std::int64_t ld_lse;  // from one query head to the next
  T *dq, *dk, *dv;
  float *dq_sums, *dk_sums, *dv_sums;
  std::int64_t ld_dq, ld_d;  // ld_d: of dk and dv
  std::int64_t head_size, value_size, queries, keys, query_heads;
  bool causal;
  VisibleBlockKeys visible;
  AttentionRule rule;
  float* scratch;
};

inline std::int64_t padded_head(std::int64_t head_size) {
  return (head_size + kPanelUnit - 1) / kPanelUnit * kPanelUnit;
}
inline std::int64_t padded_time(std::int64_t time) {
  return (time + kTile - 1) / kTile * kTile;
}

// Scratch of a forward task: for each tile of queries its transpose, output, running maximum and sum; and
// one tile of keys and values.
struct ForwardScratch {
  ForwardScratch(BumpAllocator& cut, std::int64_t head_size, std::int64_t value_size) {
    const std::int64_t width = padded_head(head_size), value_width = padded_head(value_size);
    for (std::int64_t i = 0; i < kQueryBlock / kTile; ++i) {
      qt[i] = cut.take(kTile * width);
      o[i] = cut.take(kTile * value_width);
      max[i] = cut.take(kTile);
      sum[i] = cut.take(kTile);
    }
    k = cut.take(kTile * width);
    v = cut.take(kTile * value_width);
    q = cut.take(kTile * width);
    scores = cut.take(kTile * kTile);
    factor = cut.take(kTile);
  }
  float *qt[kQueryBlock / kTile], *o[kQueryBlock / kTile], *max[kQueryBlock / kTile],
      *sum[kQueryBlock / kTile];
  float *k, *v, *q, *scores, *factor;
  std::int32_t first[kTile];  // first keys of a tile's queries; see TileMask
};

// Scratch of a backward task: all keys, values and their gradients, and one tile of queries.
struct BackwardScratch {
  BackwardScratch(BumpAllocator& cut, std::int64_t head_size, std::int64_t value_size, std::int64_t keys) {
    const std::int64_t width = padded_head(head_size), value_width = padded_head(value_size);
    for (float** part : {&k, &dk}) *part = cut.take(padded_time(keys) * width);
    for (float** part : {&v, &dv}) *part = cut.take(padded_time(keys) * value_width);
    for (float** part : {&q, &qt, &dq}) *part = cut.take(kTile * width);
    for (float** part : {&d_o, &dot}) *part = cut.take(kTile * value_width);
    for (float** part : {&p, &ds}) *part = cut.take(kTile * kTile);
    for (float** part : {&lse, &delta}) *part = cut.take(kTile);
  }
  float *k, *v, *dk, *dv, *q, *qt, *d_o, *dot, *dq, *p, *ds, *lse, *delta;
  std::int32_t first[kTile];  // first keys of a tile's queries; see TileMask
};

}  // namespace zg::host
