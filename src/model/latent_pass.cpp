#include "model/latent_pass.hpp"

#include "model/dense_call.hpp"

namespace zg::model {
namespace {

bool has_query_latent(const DenseCall& b) {
  return b.p.q_b != kNone;
}

// The parts of the first products' joint output, or of its gradient.
View query_part(const DenseCall& b, const View& first) {
  return first.col_range(0, query_latent_columns(b.c));
}
View kv_part(const DenseCall& b, const View& first) {
  return first.col_range(query_latent_columns(b.c), b.c.block.latent->kv_rank);
}
View shared_part(const DenseCall& b, const View& first) {
  const LatentAttention& latent = *b.c.block.latent;
  return first.col_range(query_latent_columns(b.c) + latent.kv_rank, latent.rope);
}

View queries_of(const DenseCall& b, const View& qkv) {
  return qkv.col_range(0, b.c.query_columns());
}
View kv_of(const DenseCall& b, const View& qkv) {
  return qkv.col_range(b.c.query_columns(), b.c.latent_heads().kv_columns());
}

// A latent, its norm, and the product that reads it.
struct Latent {
  std::size_t norm, matrix;
  View x, normalised, stats;
  AdapterInput adapters;
};
Latent query_latent(const DenseCall& b) {
  const LatentSaved& f = b.f.latent;
  return {b.p.q_norm, b.p.q_b, query_part(b, f.first), f.queries, f.q_stats, AdapterInput::kQueryLatent};
}
Latent kv_latent(const DenseCall& b) {
  const LatentSaved& f = b.f.latent;
  return {b.p.k_norm, b.p.kv_b, kv_part(b, f.first), f.kv, f.kv_stats, AdapterInput::kKvLatent};
}

void forward(const DenseCall& b, const Latent& latent, const View& y) {
  b.ops.rmsnorm(b.s, {.x = latent.x,
                      .w = b.call.weight(latent.norm),
                      .eps = kLatentNormEps,
                      .y = latent.normalised,
                      .stats = latent.stats,
                      .weight = b.c.block.norm_weight});
  b.call.linear(latent.normalised, latent.matrix, {}, y);
  b.adapters.forward(latent.adapters, latent.normalised, y);
}

void backward_weight(const DenseCall& b, const Latent& latent, const View& dy) {
  if (b.call.grads) b.call.linear_dw(dy, latent.normalised, latent.matrix);
  if (b.call.adapters.grads) b.adapters.backward_weight(latent.adapters, dy, latent.normalised);
}

// dx: the gradient of the latent, overwritten; dw: the accumulator of its norm's weight.
void backward(const DenseCall& b, const Latent& latent, const View& dy, const View& dx, const View& dw) {
  const View d = View(b.w.d_latent.data, dy.dtype, dy.rows, dx.cols);
  if (b.call.grads) b.call.linear_dw(dy, latent.normalised, latent.matrix);
  b.call.linear_dx(dy, latent.matrix, d);
  b.adapters.backward_input(latent.adapters, dy, d);
  if (b.call.adapters.grads) b.adapters.backward_weight(latent.adapters, dy, latent.normalised);
  b.ops.zero(b.s, dx);
  b.ops.rmsnorm_backward(b.s, {.dy = d,
                               .x = latent.x,
                               .w = b.call.weight(latent.norm),
                               .stats = latent.stats,
                               .dx = dx,
                               .dw = dw,
                               .scratch = b.w.norm_partials,
                               .weight = b.c.block.norm_weight});
}

}  // namespace

void latent_forward(const DenseCall& b, const View& qkv) {
  const View queries = queries_of(b, qkv);
  if (has_query_latent(b)) {
    forward(b, query_latent(b), queries);
  } else {
    b.ops.cast(b.s, query_part(b, b.f.latent.first), queries);
  }
  forward(b, kv_latent(b), b.w.joint);
  b.ops.expand_kv(b.s, {.heads = b.c.latent_heads(),
                        .joint = b.w.joint,
                        .shared = shared_part(b, b.f.latent.first),
                        .kv = kv_of(b, qkv)});
}

LatentProducts latent_products(const DenseCall& b, const View& d_qkv, const View& joint) {
  b.ops.expand_kv_backward(b.s, {.heads = b.c.latent_heads(),
                                 .dkv = kv_of(b, d_qkv),
                                 .d_joint = joint,
                                 .d_shared = shared_part(b, b.w.d_first)});
  return {queries_of(b, d_qkv), joint};
}

void latent_backward(const DenseCall& b, const LatentProducts& d, const LatentNorms& norms) {
  const View& first = b.w.d_first;
  backward(b, kv_latent(b), d.joint, kv_part(b, first), norms.kv);
  if (has_query_latent(b)) {
    backward(b, query_latent(b), d.queries, query_part(b, first), norms.queries);
  } else {
    b.ops.cast(b.s, d.queries, query_part(b, first));
  }
}

void keep_latent_products(const DenseCall& b, const LatentProducts& d) {
  const LatentProducts kept = kept_latent_products(b);
  b.ops.cast(b.s, d.queries, kept.queries);
  b.ops.cast(b.s, d.joint, kept.joint);
}

LatentProducts kept_latent_products(const DenseCall& b) {
  const View& qkv = b.f.attention.qkv;
  return {queries_of(b, qkv), qkv.col_range(b.c.query_columns(), b.c.latent_heads().joint_columns())};
}

void latent_backward_weight(const DenseCall& b, const LatentProducts& d) {
  backward_weight(b, kv_latent(b), d.joint);
  if (has_query_latent(b)) backward_weight(b, query_latent(b), d.queries);
}

}  // namespace zg::model
