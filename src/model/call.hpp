// Types that the modules of src/model share: the operands of one call, and the layout of buffers in the
// caller's memory.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "model/tensor_shard.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/model/model.hpp"

namespace zg::model {

inline DType accumulator_of(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

// Hands out consecutive views of one block of memory, each aligned to kAlign bytes. With a null base it only
// counts bytes: the same code computes a layout and its size, so the two cannot disagree.
class BufferPlan {
 public:
  static constexpr std::int64_t kAlign = 256;

  explicit BufferPlan(void* base) : base_(static_cast<char*>(base)) {
    ZG_ASSERT(reinterpret_cast<std::uintptr_t>(base) % kAlign == 0, "a buffer is not aligned to {} bytes",
              kAlign);
  }
  View take(DType dtype, std::int64_t rows, std::int64_t cols) { return take(dtype, rows, cols, cols); }
  View take(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t ld) {
    const View view(base_ ? base_ + bytes_ : nullptr, dtype, rows, cols, ld);
    bytes_ = round_up(bytes_ + rows * ld * static_cast<std::int64_t>(size_of(dtype)), kAlign);
    return view;
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  std::int64_t bytes_ = 0;
};

// The entries of UnitCall::documents for the rows that this rank holds.
inline View documents_of_rows(const BatchShape& shape, const View& documents) {
  return documents ? documents.col_range(0, shape.rows()) : View();
}

// The factor of the embedding's output, rounded to the weights' type.
inline double embedding_factor(const ModelConfig& c, DType t) {
  if (!c.block.scaled_embedding) return c.block.embedding_multiplier;
  const double root = std::sqrt(static_cast<double>(c.width));
  const auto single = static_cast<float>(root);
  if (t == DType::kBF16) return static_cast<double>(static_cast<float>(bf16(single)));
  if (t == DType::kF16) return static_cast<double>(static_cast<float>(fp16(single)));
  return t == DType::kF64 ? root : static_cast<double>(single);
}

// The view [rows, cols] of one parameter in a unit's flat tensor of weights or gradients.
inline View param_view(const View& flat, const Param& param) {
  const View at = flat.col_range(param.offset, param.count());
  return {at.data, at.dtype, param.rows, param.cols};
}

// The result of an exchange with the other tensor-parallel ranks that has been begun; end() makes it
// available. Work that a call enqueues before end() runs concurrently with the exchange. Exchanges are ended
// in the order in which they were begun.
class PendingCollective {
 public:
  PendingCollective() = default;
  // Null `exchange`: the rows are available already.
  PendingCollective(const View& rows, TensorParallelGroup* exchange, Stream& stream)
      : rows_(rows), exchange_(exchange), stream_(&stream) {}
  View end() const {
    if (exchange_ != nullptr) exchange_->end(*stream_);
    return rows_;
  }

 private:
  View rows_ = {};
  TensorParallelGroup* exchange_ = nullptr;
  Stream* stream_ = nullptr;
};

// The places of dropout: the sum of embeddings, and the outputs of a block's attention and MLP before they
// are added to the residual stream.
enum class Dropped { kEmbedding, kAttention, kMlp };

// Whether a block needs memory of its own for the result of dropout's backward. With sequence parallelism it
// needs none: the result goes into the buffer in which the rows of all ranks are gathered.
inline bool drops_own_rows(const ModelConfig& config, const TensorShard& shard) {
  return config.dropout.residual > 0 && !shard.sequence;
}

// A call under way: the caller's operands, without those that the call ignores, and the values of the model
// that the call needs.
struct Call : UnitCall {
  ModelCall model_call;
  Ops& ops;
  Stream& stream;
  const ModelConfig& config;
  DType dtype;
  const Unit& unit;
  std::int64_t logits_bytes = 0;  // for the head's calls: see head_chunk_rows()
  TensorShard shard = {};         // `config` has the sizes of this shard
  Tokens tokens = {};             // tokens of the vocabulary that this rank holds
  std::int64_t whole_vocabulary = 0;
  TensorParallelGroup* exchange = nullptr;         // null: the model is whole
  TensorParallelGroup* expert_exchange = nullptr;  // null: this rank has all experts
  // In a call on the output matrix: the index of the matrix in the unit, and the number of its rows,
  // including the zero rows after them that products read.
  std::size_t matrix = 0;
  std::int64_t matrix_rows = 0;
  View sums = {};  // A [N, widest input]: sums over a block's tiles, where A is wider than T
  // In a call on a block: how its layer computes attention and rotates heads.
  AttentionRule rule = {};
  const RopeTable* rope = nullptr;
  // Attention sinks of the heads [1, heads] and their gradient. Null sinks: none. Null gradient: it is not
  // computed.
  View sinks = {}, d_sinks = {};

  bool is_part() const { return shard.degree > 1; }
  // The shard of the token table whose rows begin `first` rows after this rank's first row: the rank's whole
  // shard, or one of its tiles.
  VocabShard table_part(std::int64_t first) const {
    const bool split = is_part() || tiles != nullptr;
    return {tokens.first + first, split ? whole_vocabulary : 0, first > 0};
  }
  // The rows of x that this rank continues with: all or, with sequence parallelism, its own rows.
  View mine(const View& x) const {
    if (!shard.sequence) return x;
    const std::int64_t rows = x.rows / shard.degree;
    return x.row_range(shard.index * rows, rows);
  }
  // All rows of x: x itself or, with sequence parallelism, where x has this rank's rows alone, `room` [N, C]
  // with the gathered rows of all ranks.
  [[nodiscard]] PendingCollective begin_all_rows(const View& x, const View& room) const {
    if (!shard.sequence) return {x, nullptr, stream};
    exchange->all_gather(stream, x, room);
    return {room, exchange, stream};
  }
  View all_rows(const View& x, const View& room) const { return begin_all_rows(x, room).end(); }
  // The backward of dropout, and then all_rows() of its result. dy, the gradient of dropout's output, stays
  // unchanged. The result lies in `own`, which is as large as dy, or with sequence parallelism in `room`, as
  // in begin_all_rows().
  [[nodiscard]] PendingCollective begin_all_rows_dropped(Dropped what, const View& dy, const View& own,
                                                         const View& room) const {
    if (!drops(what)) return begin_all_rows(dy, room);
    const View kept = shard.sequence ? mine(room) : own;
    drop(what, dy, kept);
    return begin_all_rows(kept, room);
  }
  View all_rows_dropped(Dropped what, const View& dy, const View& own, const View& room) const {
    return begin_all_rows_dropped(what, dy, own, room).end();
  }
  bool drops(Dropped what) const { return dropout != nullptr && rate_of(what) > 0; }
  // y = dropout(x) for the rows of mine(); y may be x.
  void drop(Dropped what, const View& x, const View& y) const {
    const RowPositions positions = shape.positions();
    ops.dropout(stream, x,
                {.rate = rate_of(what),
                 .key = dropout->keys[what == Dropped::kMlp ? 1 : 0],
                 .step = dropout->step,
                 .positions = positions,
                 .first_row = shard.sequence ? shard.index * x.rows : 0,
                 .first_sequence = dropout->first_sequence},
                y);
  }
  // The sum of `partial` [N, C] over all ranks; the result is the rows of mine(), in the memory of `partial`.
  [[nodiscard]] PendingCollective begin_sum_of_parts(const View& partial) const {
    const View sum = mine(partial);
    if (shard.sequence) {
      exchange->reduce_scatter(stream, partial, sum);
    } else if (is_part()) {
      exchange->all_reduce(stream, sum);
    }
    return {sum, is_part() ? exchange : nullptr, stream};
  }
  View sum_of_parts(const View& partial) const { return begin_sum_of_parts(partial).end(); }
  // Sums numbers, without gaps, over all ranks in place.
  void sum_numbers(const View& numbers) const {
    if (!is_part()) return;
    exchange->all_reduce(stream, numbers);
    exchange->end(stream);
  }

  // Exchanges with the other ranks of the expert group, each of which has as many rows. own_rows(): this
  // rank's rows of `all`, which has the rows of all ranks of the group, in their order. gather_rows() fills
  // `all`; sum_rows() makes own_rows() the sums of these rows over the ranks. With one rank `all` is its own.
  bool shares_experts() const { return shard.experts.degree > 1; }
  View own_rows(const View& all) const {
    const std::int64_t rows = all.rows / shard.experts.degree;
    return all.row_range(shard.experts.index * rows, rows);
  }
  [[nodiscard]] PendingCollective begin_gather_rows(const View& own, const View& all) const {
    if (shares_experts()) expert_exchange->all_gather(stream, own, all);
    return {all, shares_experts() ? expert_exchange : nullptr, stream};
  }
  void gather_rows(const View& own, const View& all) const { (void)begin_gather_rows(own, all).end(); }
  [[nodiscard]] PendingCollective begin_sum_rows(const View& all) const {
    if (shares_experts()) expert_exchange->reduce_scatter(stream, all, own_rows(all));
    return {own_rows(all), shares_experts() ? expert_exchange : nullptr, stream};
  }
  void sum_rows(const View& all) const { (void)begin_sum_rows(all).end(); }

  View weight(std::size_t index) const { return param_view(weights, unit.params[index]); }
  View grad(std::size_t index) const { return param_view(grads, unit.params[index]); }

  // Calls f(rows, first row) once for all rows of a matrix or its gradient, or once for each tile of it. A
  // matrix is whole if it lies in the first tile, or if the unit is not cut into tiles.
  template <class F>
  void for_rows(std::size_t index, TileUse::Kind kind, const F& f) const {
    const Param& p = unit.params[index];
    if (tiles == nullptr || (unit.tiles.front().param < 0 && p.offset < unit.tiles.front().count)) {
      const View& flat = kind == TileUse::Kind::kGradient ? grads : weights;
      const std::int64_t rows = matrix_rows > 0 ? matrix_rows : p.rows;
      return f(rows_at(flat.col_range(p.offset, rows * p.cols), rows, p.cols), 0);
    }
    for_tiles(index, [&](std::size_t tile, std::int64_t first, std::int64_t rows) {
      const View at = rows_of(tile, kind, rows);
      if (rows > 0) f(at, first);
    });
  }
  // Calls f(index of the tile, first row, number of rows) for each tile of a matrix. Where ranks have
  // different numbers of tokens, a tile of the output matrix may have no rows.
  template <class F>
  void for_tiles(std::size_t index, const F& f) const {
    const Param& p = unit.params[index];
    const std::int64_t all = matrix_rows > 0 ? matrix_rows : p.rows;
    for (std::size_t i = 0; i < unit.tiles.size(); ++i) {
      const Tile& tile = unit.tiles[i];
      if (tile.param != static_cast<std::int32_t>(index)) continue;
      const std::int64_t first = (tile.first - p.offset) / p.cols;
      f(i, first, std::clamp<std::int64_t>(all - first, 0, tile.count / p.cols));
    }
  }
  // The first `rows` rows of a tile, valid for work that is enqueued before the next tile is asked for. In a
  // gradient that is overwritten, the elements after these rows are zeroed.
  View rows_of(std::size_t tile, TileUse::Kind kind, std::int64_t rows) const {
    const bool gradient = kind == TileUse::Kind::kGradient;
    const View at = tile > 0   ? tiles->next({static_cast<std::int32_t>(tile), kind})
                    : gradient ? grads
                               : weights;
    const std::int64_t cols = unit.params[static_cast<std::size_t>(unit.tiles[tile].param)].cols;
    const std::int64_t behind = unit.tiles[tile].count - rows * cols;
    if (gradient && into == Gradients::kOverwrite && behind > 0)
      ops.zero(stream, at.col_range(rows * cols, behind));
    return rows_at(at, rows, cols);
  }

  // Weight matrices are w [out, in].
  // y = x w^T (+ bias)
  void linear(const View& x, const View& w, const View& bias, const View& y) const {
    GemmOptions options;
    options.b = Trans::kYes;
    options.bias = bias;
    ops.gemm(stream, x, w, y, options);
  }
  // y += x w^T
  void linear_more(const View& x, const View& w, const View& y) const {
    GemmOptions options;
    options.b = Trans::kYes;
    options.accumulate = true;
    ops.gemm(stream, x, w, y, options);
  }
  // dx = dy w
  void linear_dx(const View& dy, const View& w, const View& dx) const {
    ops.gemm(stream, dy, w, dx, GemmOptions{});
  }
  // dx += dy w
  void linear_dx_more(const View& dy, const View& w, const View& dx) const {
    GemmOptions options;
    options.accumulate = true;
    ops.gemm(stream, dy, w, dx, options);
  }
  // dw = dy^T x or, by `how`, dw += dy^T x
  void linear_dw(const View& dy, const View& x, const View& dw, Gradients how) const {
    GemmOptions options;
    options.a = Trans::kYes;
    options.accumulate = how == Gradients::kAdd;
    ops.gemm(stream, dy, x, dw, options);
  }
  void linear_dw(const View& dy, const View& x, const View& dw) const { linear_dw(dy, x, dw, into); }

  // linear_dw(), and db = the column sums of dy, or +=. scratch: [row groups, at least the columns of dy].
  void linear_dw_db(const View& dy, const View& x, const View& dw, const View& db,
                    const View& scratch) const {
    GemmOptions options;
    options.a = Trans::kYes;
    options.accumulate = into == Gradients::kAdd;
    options.bias_gradient = db;
    options.scratch = scratch.col_range(0, dy.cols);
    ops.gemm(stream, dy, x, dw, options);
  }

  // The same products with a matrix of the unit, by its index: whole, or tile by tile.
  //
  // y = x w^T (+ bias)
  void linear(const View& x, std::size_t w, const View& bias, const View& y) const {
    GemmOptions options;
    options.bias = bias;
    product(x, w, y, options);
  }
  // y = x w^T (+ bias) + addend
  void linear_add(const View& x, std::size_t w, const View& bias, const View& addend, const View& y) const {
    GemmOptions options;
    options.bias = bias;
    options.addend = addend;
    product(x, w, y, options);
  }
  // y = dropout(x w^T (+ bias)) + addend, where each tensor-parallel rank has some of the columns of x and of
  // w. The ranks' products are summed; only rank 0 adds the bias. room: [N, C].
  void linear_sum_add(Dropped what, const View& x, std::size_t w, const View& bias, const View& addend,
                      const View& y, const View& room) const {
    if (!is_part() && !drops(what)) return linear_add(x, w, bias, addend, y);
    linear(x, w, shard.index == 0 ? bias : View{}, room);
    const View sum = sum_of_parts(room);
    if (drops(what)) drop(what, sum, sum);
    ops.add(stream, sum, addend, y);
  }
  // y = gelu(inner), inner = x w^T + bias
  void linear_gelu(const View& x, std::size_t w, const View& bias, const View& inner, const View& y) const {
    GemmOptions options;
    options.bias = bias;
    options.gelu_input = inner;
    product(x, w, y, options);
  }
  // dx = dy w or, by `how`, dx += dy w. With a matrix in tiles, the products are summed over tiles in
  // ascending order, in the accumulator type, and rounded once.
  void linear_dx(const View& dy, std::size_t w, const View& dx, Gradients how = Gradients::kOverwrite) const {
    const bool rounds = tiles != nullptr && dx.dtype != accumulator_of(dtype);
    const View sum = rounds ? View(sums.data, sums.dtype, dx.rows, dx.cols) : dx;
    GemmOptions options;
    options.accumulate = how == Gradients::kAdd;
    if (rounds && options.accumulate) ops.cast(stream, dx, sum);
    for_rows(w, TileUse::Kind::kWeight, [&](const View& rows, std::int64_t first) {
      ops.gemm(stream, dy.col_range(first, rows.rows), rows, sum, options);
      options.accumulate = true;
    });
    if (rounds) ops.cast(stream, sum, dx);
  }
  // dx = (dy w) * gelu'(inner)
  void linear_dx_gelu(const View& dy, std::size_t w, const View& inner, const View& dx) const {
    if (tiles != nullptr) {
      linear_dx(dy, w, dx);
      return ops.gelu_backward(stream, inner, dx, dx);
    }
    GemmOptions options;
    options.gelu_backward = inner;
    ops.gemm(stream, dy, weight(w), dx, options);
  }
  // dw = dy^T x, or +=
  void linear_dw(const View& dy, const View& x, std::size_t w) const {
    for_rows(w, TileUse::Kind::kGradient,
             [&](const View& dw, std::int64_t first) { linear_dw(dy.col_range(first, dw.rows), x, dw); });
  }
  // linear_dw(), and db = the column sums of dy, or +=. scratch: [row groups, at least the columns of dy].
  void linear_dw_db(const View& dy, const View& x, std::size_t w, const View& db, const View& scratch) const {
    for_rows(w, TileUse::Kind::kGradient, [&](const View& dw, std::int64_t first) {
      linear_dw_db(dy.col_range(first, dw.rows), x, dw, db.col_range(first, dw.rows),
                   scratch.col_range(first, dw.rows));
    });
  }

 private:
  static View rows_at(const View& at, std::int64_t rows, std::int64_t cols) {
    return {at.data, at.dtype, rows, cols};
  }
  double rate_of(Dropped what) const {
    return what == Dropped::kEmbedding ? config.dropout.embedding : config.dropout.residual;
  }
  // y = x w^T, followed by the epilogue.
  void product(const View& x, std::size_t w, const View& y, const GemmOptions& epilogue) const {
    for_rows(w, TileUse::Kind::kWeight, [&](const View& rows, std::int64_t first) {
      GemmOptions options = epilogue;
      options.b = Trans::kYes;
      for (View* columns : {&options.bias, &options.addend, &options.gelu_input}) {
        if (*columns) *columns = columns->col_range(first, rows.rows);
      }
      ops.gemm(stream, x, rows, y.col_range(first, rows.rows), options);
    });
  }
};

}  // namespace zg::model
