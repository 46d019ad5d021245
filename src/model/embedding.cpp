#include "model/embedding.hpp"

#include "model/units.hpp"

namespace zg::model {

// Each tensor-parallel rank computes the rows of its tokens; rank 0 adds the positions; the sum over ranks is
// the embedding. Of several tiles the first writes all rows, and each other tile the rows of its tokens.
void embedding_forward(const Call& call) {
  Stream& s = call.stream;
  const bool positions = !call.config.form().rotates && call.shard.index == 0;
  const View rows = call.shard.sequence
                        ? View(call.workspace, call.dtype, call.shape.rows(), call.config.width)
                        : call.output;
  call.for_rows(embedding::kTokens, TileUse::Kind::kWeight, [&](const View& table, std::int64_t first) {
    call.ops.embedding(s, {.ids = call.ids,
                           .wte = table,
                           .wpe = positions ? call.weight(embedding::kPositions) : View{},
                           .positions = call.shape.positions(),
                           .out = rows,
                           .part = call.table_part(first),
                           .first_keys = documents_of_rows(call.shape, call.documents)});
  });
  if (call.shard.sequence) {
    call.exchange->reduce_scatter(s, rows, call.output);
    call.exchange->end(s);
  } else {
    call.sum_of_parts(call.output);
  }
  const double factor = embedding_factor(call.config, call.dtype);
  if (factor != 1) call.ops.scale(s, call.output, factor, call.output);
  if (call.drops(Dropped::kEmbedding)) call.drop(Dropped::kEmbedding, call.output, call.output);
}

void embedding_backward(const Call& call) {
  Stream& s = call.stream;
  const double factor = embedding_factor(call.config, call.dtype);
  if (call.into == Gradients::kOverwrite) call.ops.zero(s, call.grads);
  const View room(call.workspace, call.dtype, call.shape.rows(), call.config.width);
  View all = call.all_rows_dropped(Dropped::kEmbedding, call.activation_gradient, room, room);
  if (factor != 1) call.ops.scale(s, all, factor, room), all = room;
  call.for_rows(embedding::kTokens, TileUse::Kind::kGradient, [&](const View& table, std::int64_t first) {
    const bool positions = !call.config.form().rotates && first == 0;
    if (call.tiles != nullptr && call.into == Gradients::kOverwrite) call.ops.zero(s, table);
    call.ops.embedding_backward(s, {.ids = call.ids,
                                    .dout = all,
                                    .positions = call.shape.positions(),
                                    .dwte = table,
                                    .dwpe = positions ? call.grad(embedding::kPositions) : View{},
                                    .part = call.table_part(first),
                                    .first_keys = documents_of_rows(call.shape, call.documents)});
  });
}

}  // namespace zg::model
