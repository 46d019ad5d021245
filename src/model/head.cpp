#include "model/head.hpp"

#include <algorithm>
#include <vector>

#include "model/units.hpp"

namespace zg::model {
namespace {

// Rows of logits start at multiples of this many elements: whole cache lines and vector registers.
constexpr std::int64_t kLogitsAlign = 64;
constexpr std::int64_t kChunkRows = 64;

// The values that the workspace's size depends on, apart from the device.
struct WorkspaceSizes {
  const ModelConfig& config;
  const TensorShard& shard;
  DType dtype;
  std::int64_t rows;  // N
  HeadRoom room;
  HeadGradients gradients;
};

struct Workspace {
  View normed;  // [N, C]; backward overwrites the rows of each chunk with their gradient
  View stats;
  View logits, dlogits;  // [rows of a chunk, head_columns()], or [N, rows of a tile]
  View norm_partials, sum_partials;
  View sums;       // A [N, C], if the output matrix is in tiles: the gradient of `normed`
  View discarded;  // f64 [1, 1], likewise: a loss that has been added to loss_sum already
  View unused;     // [2, C], if the head is frozen: its norm's gradients, which nobody reads
  // [1, 3 * shards * rows of a chunk]: the results of softmax_part() for all shards of the vocabulary, which
  // are the ranks' shards, or all tiles of all ranks. Null: the vocabulary is whole.
  View numbers;
  std::int64_t bytes = 0;

  Workspace(const WorkspaceSizes& of, const OpSizes& sizes, void* base) {
    BufferPlan plan(base);
    const auto& [c, shard, t, rows, room, gradients] = of;
    const DType a = accumulator_of(t);
    const std::int64_t chunk = head_chunk_rows(c, t, rows, sizes, room);
    const std::int64_t columns = room.tiles > 0 ? room.tile_rows : head_columns(c, sizes);
    const std::int64_t ld = round_up(columns, kLogitsAlign);
    normed = plan.take(t, rows, c.width);
    stats = plan.take(a, shard.sequence ? rows / shard.degree : rows, c.form().layer_norms ? 2 : 1);
    logits = plan.take(a, chunk, columns, ld);
    dlogits = plan.take(t, chunk, columns, ld);
    norm_partials = plan.take(a, sizes.row_groups(), 2 * c.width);
    sum_partials = plan.take(DType::kF64, 1, Ops::kSumPartials);
    const std::int64_t pieces = std::max<std::int64_t>(1, room.tiles) * shard.degree;  // vocabulary shards
    if (pieces > 1) numbers = plan.take(a, 1, 3 * pieces * chunk);
    if (room.tiles > 0) {
      sums = plan.take(a, rows, c.width);
      discarded = plan.take(DType::kF64, 1, 1);
    }
    if (gradients == HeadGradients::kFrozen) unused = plan.take(a, 2, c.width);
    bytes = plan.bytes();
  }
};

HeadRoom room_of(const Call& table) {
  HeadRoom room{table.logits_bytes};
  if (table.tiles != nullptr) room = head_room(table.unit, table.matrix, table.logits_bytes);
  return room;
}

Workspace workspace_of(const Call& call, const Call& table, HeadGradients gradients = HeadGradients::kAll) {
  const WorkspaceSizes sizes{call.config,       call.shard,     call.dtype,
                             call.shape.rows(), room_of(table), gradients};
  return {sizes, call.ops, call.workspace};
}

// Logits are divided by way of the rows that they are products of.
void divide(const Call& call, const View& rows) {
  const double divisor = call.config.block.logits_divisor;
  if (divisor != 1) call.ops.scale(call.stream, rows, 1 / divisor, rows);
}

// Normalises this rank's rows, and then gathers the rows of all ranks, which the product needs.
void norm(const Call& call, const View& x, const Workspace& w) {
  const double eps = call.config.norm_eps;
  const View weight = call.weight(head::kNormWeight), normed = call.mine(w.normed);
  if (call.config.form().layer_norms) {
    call.ops.layernorm(
        call.stream,
        {.x = x, .w = weight, .b = call.weight(head::kNormBias), .eps = eps, .y = normed, .stats = w.stats});
  } else {
    call.ops.rmsnorm(call.stream, {.x = x,
                                   .w = weight,
                                   .eps = eps,
                                   .y = normed,
                                   .stats = w.stats,
                                   .weight = call.config.block.norm_weight});
  }
  divide(call, normed);
  call.all_rows(normed, w.normed);
}

// Overwrites the call's activation_gradient with the gradient of the head's input.
void norm_backward(const Call& call, const Workspace& w) {
  const PendingCollective sum = call.begin_sum_of_parts(w.normed);
  const View &x = call.input, &dx = call.activation_gradient;
  call.ops.zero(call.stream, dx);
  const View normed = sum.end();
  divide(call, normed);
  const bool frozen = !call.grads;
  const View weight = call.weight(head::kNormWeight),
             d_weight = frozen ? w.unused.row_range(0, 1) : call.grad(head::kNormWeight);
  if (call.config.form().layer_norms) {
    call.ops.layernorm_backward(call.stream,
                                {.dy = normed,
                                 .x = x,
                                 .w = weight,
                                 .stats = w.stats,
                                 .dx = dx,
                                 .dw = d_weight,
                                 .db = frozen ? w.unused.row_range(1, 1) : call.grad(head::kNormBias),
                                 .scratch = w.norm_partials});
  } else {
    call.ops.rmsnorm_backward(call.stream, {.dy = normed,
                                            .x = x,
                                            .w = weight,
                                            .stats = w.stats,
                                            .dx = dx,
                                            .dw = d_weight,
                                            .scratch = w.norm_partials,
                                            .weight = call.config.block.norm_weight});
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

// Adds the loss of the logits' rows and writes its gradient, unless dlogits is null. Each rank has the logits
// of some tokens: it sends the others three scalars for each row, from which all compute the same softmax.
void cross_entropy(const Call& call, const Workspace& w, const View& logits, const View& targets,
                   const View& dlogits) {
  const double softcap = call.config.block.final_softcap;
  if (!call.is_part()) {
    return call.ops.cross_entropy(call.stream, {.logits = logits,
                                                .targets = targets,
                                                .loss_sum = call.loss_sum,
                                                .dlogits = dlogits,
                                                .scratch = w.sum_partials,
                                                .scale = call.loss_scale,
                                                .softcap = softcap});
  }
  const View numbers(w.numbers.data, w.numbers.dtype, 3 * call.shard.degree, logits.rows);
  const View mine = numbers.row_range(3 * call.shard.index, 3);
  call.ops.softmax_part(call.stream, {.logits = logits,
                                      .targets = targets,
                                      .first = call.tokens.first,
                                      .numbers = mine,
                                      .softcap = softcap});
  call.exchange->all_gather(call.stream, mine, numbers);
  call.exchange->end(call.stream);
  call.ops.cross_entropy_part(call.stream, {.local = {.logits = logits,
                                                      .targets = targets,
                                                      .loss_sum = call.loss_sum,
                                                      .dlogits = dlogits,
                                                      .scratch = w.sum_partials,
                                                      .scale = call.loss_scale,
                                                      .softcap = softcap},
                                            .first = call.tokens.first,
                                            .numbers = numbers});
}

// A tile of the output matrix: its tokens, counted from the rank's first one, and the columns that its
// products compute, including zero rows after the tokens. 0 tokens: the tile is not multiplied.
struct TokenTile {
  std::size_t tile = 0;
  std::int64_t first = 0, tokens = 0, columns = 0;
};

// The head with an output matrix in tiles. Each tile is a shard of the vocabulary, just like another rank's
// shard. A first pass over all tiles yields three scalars for each row and tile, from which the softmax
// follows. A second pass computes the logits of each tile again, and from them the tile's gradient and its
// term of the rows' gradients. So each tile is fetched twice, and its gradient once, however many rows there
// are.
class TiledHead {
 public:
  // To be constructed after the norm has been computed.
  TiledHead(const Call& call, const Call& table, const Workspace& w)
      : call_(call), table_(table), w_(w), parts_(call.shard.degree) {
    table.for_tiles(table.matrix, [&](std::size_t tile, std::int64_t first, std::int64_t rows) {
      const std::int64_t tokens = std::clamp<std::int64_t>(call.tokens.count - first, 0, rows);
      tiles_.push_back({tile, first, tokens, tokens > 0 ? rows : 0});
    });
    tell_numbers();
  }
  void loss() const { cross_entropy(w_.logits.col_range(0, 1), tiles_.front(), call_.loss_sum, View{}); }
  // Overwrites w.normed with its gradient.
  void gradients() const {
    for (const TokenTile& tile : tiles_) {
      const View weights = weights_of(tile), d = w_.dlogits.col_range(0, tile.columns);
      const bool first = tile.first == 0;
      if (tile.tokens > 0) {
        const View logits = logits_of(tile, weights);
        if (tile.columns > tile.tokens)
          call_.ops.zero(call_.stream, d.col_range(tile.tokens, tile.columns - tile.tokens));
        cross_entropy(logits, tile, first ? call_.loss_sum : w_.discarded, d.col_range(0, tile.tokens));
        GemmOptions options;
        options.accumulate = !first;
        call_.ops.gemm(call_.stream, d, weights, w_.sums, options);
      }
      if (!table_.grads) continue;
      const View gradient = table_.rows_of(tile.tile, TileUse::Kind::kGradient, tile.columns);
      if (tile.tokens > 0) table_.linear_dw(d, w_.normed, gradient);
    }
    call_.ops.cast(call_.stream, w_.sums, w_.normed);
  }

 private:
  View weights_of(const TokenTile& tile) const {
    return table_.rows_of(tile.tile, TileUse::Kind::kWeight, tile.columns);
  }
  // The logits of the tile's tokens.
  View logits_of(const TokenTile& tile, const View& weights) const {
    const View logits = w_.logits.col_range(0, tile.columns);
    call_.linear(w_.normed, weights, View{}, logits);
    return logits.col_range(0, tile.tokens);
  }
  std::int64_t count() const { return static_cast<std::int64_t>(tiles_.size()); }
  View numbers() const { return {w_.numbers.data, w_.numbers.dtype, 3 * count() * parts_, w_.normed.rows}; }
  View numbers_of(std::size_t i) const {
    return numbers().row_range(3 * (call_.shard.index * count() + static_cast<std::int64_t>(i)), 3);
  }
  void tell_numbers() const {
    const auto tell = [&](const View& logits, const TokenTile& tile, const View& of) {
      call_.ops.softmax_part(call_.stream, {.logits = logits,
                                            .targets = call_.targets,
                                            .first = call_.tokens.first + tile.first,
                                            .numbers = of,
                                            .softcap = call_.config.block.final_softcap});
    };
    for (std::size_t i = 0; i < tiles_.size(); ++i) {
      const View weights = weights_of(tiles_[i]);
      if (tiles_[i].tokens == 0) continue;
      const View logits = logits_of(tiles_[i], weights);
      tell(logits, tiles_[i], numbers_of(i));
      // Tiles without tokens copy the first tile's scalars, and then zero all but the largest logit, so that
      // they add nothing.
      for (std::size_t j = 0; i == 0 && j < tiles_.size(); ++j) {
        if (tiles_[j].tokens > 0) continue;
        tell(logits, tiles_[i], numbers_of(j));
        call_.ops.zero(call_.stream, numbers_of(j).row_range(1, 2));
      }
    }
    if (!call_.is_part()) return;
    const View all = numbers();
    call_.exchange->all_gather(call_.stream, all.row_range(3 * call_.shard.index * count(), 3 * count()),
                               all);
    call_.exchange->end(call_.stream);
  }
  void cross_entropy(const View& logits, const TokenTile& tile, const View& loss, const View& d) const {
    call_.ops.cross_entropy_part(call_.stream, {.local = {.logits = logits,
                                                          .targets = call_.targets,
                                                          .loss_sum = loss,
                                                          .dlogits = d,
                                                          .scratch = w_.sum_partials,
                                                          .scale = call_.loss_scale,
                                                          .softcap = call_.config.block.final_softcap},
                                                .first = call_.tokens.first + tile.first,
                                                .numbers = numbers()});
  }

  const Call &call_, &table_;
  const Workspace& w_;
  const std::int64_t parts_;
  std::vector<TokenTile> tiles_;
};

}  // namespace

HeadRoom head_room(const Unit& unit, std::size_t table, std::int64_t logits_bytes) {
  HeadRoom room{logits_bytes};
  if (!unit.in_tiles()) return room;
  for (const Tile& tile : unit.tiles) {
    if (tile.param != static_cast<std::int32_t>(table)) continue;
    ++room.tiles;
    room.tile_rows = std::max(room.tile_rows, tile.count / unit.params[table].cols);
  }
  return room;
}

std::int64_t head_columns(const ModelConfig& c, const OpSizes& sizes) {
  return sizes.pads_logits() ? round_up(c.vocab_size, kLogitsAlign) : c.vocab_size;
}

std::int64_t head_chunk_rows(const ModelConfig& c, DType dtype, std::int64_t rows, const OpSizes& sizes,
                             const HeadRoom& room) {
  if (room.tiles > 0) return rows;
  const std::int64_t a = static_cast<std::int64_t>(size_of(accumulator_of(dtype)));
  const std::int64_t t = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t columns = round_up(c.vocab_size, kLogitsAlign);
  const std::int64_t bytes = std::max(room.logits_bytes, columns * c.width * a / 2);
  std::int64_t fit = std::max(kChunkRows, bytes / (columns * (a + t)) / kChunkRows * kChunkRows);
  if (sizes.pads_logits()) {
    // The same number of chunks, but of equal size: a last chunk of few rows would not fill the device.
    const std::int64_t chunks = (rows + fit - 1) / fit;
    fit = round_up((rows + chunks - 1) / chunks, kChunkRows);
  }
  return std::min(rows, fit);
}

std::int64_t head_bytes(const ModelConfig& config, const TensorShard& shard, DType dtype, std::int64_t rows,
                        const OpSizes& sizes, const HeadRoom& room, HeadGradients gradients) {
  return Workspace({config, shard, dtype, rows, room, gradients}, sizes, nullptr).bytes;
}

namespace {

void loss_and_gradient(const Call& call, const Call& table) {
  if (call.into == Gradients::kOverwrite) {
    if (&call.unit != &table.unit && call.grads)
      clear_gradients(call.ops, call.stream, call.grads, call.unit, 0);
    if (table.grads) clear_gradients(call.ops, call.stream, table.grads, table.unit, 1u << table.matrix);
  }
  const HeadGradients gradients = call.grads ? HeadGradients::kAll : HeadGradients::kFrozen;
  const Workspace w = workspace_of(call, table, gradients);
  const std::int64_t v = call.tokens.count;
  norm(call, call.input, w);
  if (table.tiles != nullptr) {
    TiledHead(call, table, w).gradients();
    return norm_backward(call, w);
  }
  // Cross entropy does not write the padding columns, so the gradient's padding stays zero over all chunks.
  if (table.matrix_rows > v) call.ops.zero(call.stream, w.dlogits.col_range(v, table.matrix_rows - v));
  Call product = table;
  for_chunks(w, [&](const View& normed, const View& logits, const View& dlogits, std::int64_t first,
                    std::int64_t n) {
    product.into = first == 0 ? table.into : Gradients::kAdd;
    product.linear(normed, table.matrix, View{}, logits);
    cross_entropy(call, w, logits.col_range(0, v), call.targets.col_range(first, n), dlogits.col_range(0, v));
    if (table.grads) product.linear_dw(dlogits, normed, table.matrix);
    product.linear_dx(dlogits, table.matrix, normed);
  });
  norm_backward(call, w);
}

void loss(const Call& call, const Call& table) {
  const Workspace w = workspace_of(call, table);
  const std::int64_t v = call.tokens.count;
  norm(call, call.input, w);
  if (table.tiles != nullptr) return TiledHead(call, table, w).loss();
  for_chunks(w, [&](const View& normed, const View& logits, const View&, std::int64_t first, std::int64_t n) {
    table.linear(normed, table.matrix, View{}, logits);
    cross_entropy(call, w, logits.col_range(0, v), call.targets.col_range(first, n), View{});
  });
}

void logits(const Call& call, const Call& table) {
  const Workspace w = workspace_of(call, table);
  norm(call, call.input, w);
  call.linear(w.normed, table.weight(table.matrix), View{}, call.logits);
}

}  // namespace

void run_head(const Call& call, const Call& table) {
  switch (call.model_call) {
    case ModelCall::kHeadLoss:
      return loss(call, table);
    case ModelCall::kHeadLossAndGradient:
      return loss_and_gradient(call, table);
    case ModelCall::kHeadLogits:
      return logits(call, table);
    default:
      ZG_ASSERT(false, "call {} is not the head's", static_cast<int>(call.model_call));
  }
}

}  // namespace zg::model
