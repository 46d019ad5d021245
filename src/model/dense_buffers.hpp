// The buffers of a dense block's calls: those that its forward saves for the backward, and scratch. N = rows
// of the batch, C = width.
#pragma once
#include <algorithm>
#include <cstdint>

#include "model/adapters.hpp"
#include "model/block_attention.hpp"
#include "model/call.hpp"
#include "model/routing.hpp"
#include "model/units.hpp"

namespace zg::model {

inline std::int64_t qk_columns(const ModelConfig& c) {
  return c.query_columns() + c.key_columns();
}
inline std::int64_t qkv_columns(const ModelConfig& c) {
  return qk_columns(c) + c.value_columns();
}
// Columns of the queries' part of latent attention's first products: their latent, or themselves.
inline std::int64_t query_latent_columns(const ModelConfig& c) {
  return c.block.latent->q_rank > 0 ? c.block.latent->q_rank : c.query_columns();
}
// Columns of the joint output of attention's first products.
inline std::int64_t first_columns(const ModelConfig& c) {
  if (!c.block.latent) return qkv_columns(c);
  return query_latent_columns(c) + c.block.latent->kv_rank + c.block.latent->rope;
}

// The heads that norms see: all heads that are normalised together count as one.
struct NormedHeads {
  std::int64_t heads = 0, head_size = 0;
};
inline NormedHeads normed_heads(const ModelConfig& c, std::int64_t heads) {
  if (c.block.head_norms == HeadNorms::kAll) return {1, heads * c.head_size};
  return {heads, c.head_size};
}

// Columns of the joint output of the MLP's first products.
inline std::int64_t gate_up_columns(const ModelConfig& c) {
  return c.form().gated ? 2 * c.inner : c.inner;
}

// The columns of the widest product with a bias, whose gradient needs scratch; 0 where no product has a bias.
inline std::int64_t widest_bias(const ModelConfig& c) {
  const std::int64_t mlp = c.mlp_bias()       ? std::max(gate_up_columns(c), c.width)
                           : c.experts.biases ? c.experts.count  // the router's
                                              : 0;
  return c.qkv_bias() || c.o_bias() ? std::max({first_columns(c), c.width, mlp}) : mlp;
}

// The widest weight of a norm, or the sinks.
inline std::int64_t norm_columns(const ModelConfig& c) {
  std::int64_t widest = c.block.sinks ? std::max(c.width, c.heads) : c.width;
  if (c.block.latent) widest = std::max({widest, c.block.latent->q_rank, c.block.latent->kv_rank});
  if (c.block.head_norms == HeadNorms::kNone) return widest;
  return std::max(widest, normed_heads(c, c.heads).head_size);
}

// The values that determine the sizes of the buffers.
struct DenseShape {
  const ModelConfig& config;  // with the sizes of the shard
  TensorShard shard;
  DType dtype;
  BatchShape batch;
  Backward how;
  std::int64_t layer;
  bool routes() const { return config.has_experts(layer); }
};

// The numbers of the gate of the MLP that all tokens pass, which is a router over one expert.
struct SharedGate {
  View logits, chosen, weights;  // A [N,1], i32 [N,1], A [N,1]
  View starts, order;            // i32 [1,2], i32 [1,N]: all slots, in order
  SharedGate() = default;
  SharedGate(BufferPlan& plan, DType a, std::int64_t rows) {
    logits = plan.take(a, rows, 1);
    chosen = plan.take(DType::kI32, rows, 1);
    weights = plan.take(a, rows, 1);
    starts = plan.take(DType::kI32, 1, 2);
    order = plan.take(DType::kI32, 1, rows);
  }
};

// Of latent attention: the latents before and after their norms.
struct LatentSaved {
  // The joint output of the first products: the queries' latent, or the queries; the latent of keys and
  // values; and the columns that all keys share.
  View first;
  View queries, q_stats, kv, kv_stats;  // the normalised latents; null without a latent of queries
  LatentSaved() = default;
  LatentSaved(BufferPlan& plan, const ModelConfig& c, DType t, std::int64_t rows) {
    const DType a = accumulator_of(t);
    const LatentAttention& latent = *c.block.latent;
    first = plan.take(t, rows, first_columns(c));
    if (latent.q_rank > 0) queries = plan.take(t, rows, latent.q_rank), q_stats = plan.take(a, rows, 1);
    kv = plan.take(t, rows, latent.kv_rank), kv_stats = plan.take(a, rows, 1);
  }
};

// With a gate, gate_up holds its own gradient after a backward. After the first half of a backward gate_up
// and attention.qkv, or with latent attention latent.first, hold the gradients of the outputs of each
// branch's first products; x1, or with output norms after2, holds the gradient of the output of the block's
// last product. With latent attention attention.qkv then holds the gradients of the outputs of the products
// that read the latents.
struct DenseSaved {
  View norm1, stats1, x1, norm2, stats2, gate_up, act;
  SavedAttention attention;  // q and k after RoPE
  LatentSaved latent;
  View qk, q_stats, k_stats;  // q and k before their norms
  View after1, after_stats1, after2,
      after_stats2;  // inputs of the norms after the branches, [residual rows, C]
  AdapterSaved adapters;
  SharedGate shared_gate;
  // For a backward in halves: the terms of the gradients of all norms' weights and biases, which the first
  // half computes for the second; one row for each parameter, in their order.
  View norms;
  std::int64_t bytes = 0;

  DenseSaved(const DenseShape& of, void* base) {
    const auto& [c, shard, t, shape, how, layer] = of;
    BufferPlan plan(base);
    const std::int64_t n = shape.rows(), residual = residual_rows(shard, shape);
    const DType a = accumulator_of(t);
    const auto norm = [&](bool has, View& rows, View& stats) {
      if (!has) return;
      rows = plan.take(t, residual, c.width);
      stats = plan.take(a, residual, c.form().layer_norms ? 2 : 1);
    };
    norm(c.norms_before(), norm1, stats1);
    attention = SavedAttention(plan, c, t, shape);
    if (c.block.latent) latent = LatentSaved(plan, c, t, n);
    x1 = plan.take(t, residual, c.width);
    // The experts read the output of their norm where it lies in Routing, unless a rank has only some rows.
    if (of.routes() && !shard.sequence) {
      stats2 = plan.take(a, residual, 1);
    } else {
      norm(c.norms_before(), norm2, stats2);
    }
    gate_up = plan.take(t, n, gate_up_columns(c));
    act = plan.take(t, n, c.inner);
    if (c.block.head_norms != HeadNorms::kNone) {
      qk = plan.take(t, n, qk_columns(c));
      q_stats = plan.take(a, n, normed_heads(c, c.heads).heads);
      k_stats = plan.take(a, n, normed_heads(c, c.kv_heads).heads);
    }
    norm(c.norms_after(), after1, after_stats1);
    norm(c.norms_after(), after2, after_stats2);
    adapters = AdapterSaved(plan, AdapterList(c, layer), c.lora, t, n, how);
    if (of.routes() && c.experts.shared_gate) shared_gate = SharedGate(plan, a, n);
    if (how == Backward::kInHalves) {
      const NormList list = BlockParams(c, layer).norms();
      norms = plan.take(a, static_cast<std::int64_t>(list.size()), norm_columns(c),
                        round_up(norm_columns(c), kParamAlign));
    }
    bytes = plan.bytes();
  }
};

struct DenseWorkspace {
  View d_act;  // [N, inner]: the gradient of act and, without a gate, then of gate_up
  View d_qkv;  // in the memory of d_act, which is no longer needed then
  // [residual rows, C], in the memory of d_act. For attention's branch: the gradient of its output before
  // dropout, or before the norm. For the MLP's branch: the gradient between norm and dropout.
  View wide;
  View d_norm;  // [N, C]: gradients of a branch's input. In a forward with tensor parallelism: this rank's
                // products. With dropout or a norm: a branch's output before these, and the gradient of
                // that output.
  View d_att;   // [N, result_columns()], in the same memory as d_norm
  View narrow;  // [residual rows, C], in the same memory: as `wide`, with the branches exchanged
  // Latent attention: the joint output of the product that makes keys and values, or its gradient; the
  // gradient of LatentSaved::first; and, in the memory of d_norm, room for the gradient of a normalised
  // latent.
  View joint, d_first, d_latent;
  View all_rows;  // [N, C], with sequence parallelism: the gathered rows of all ranks, for a product
  AttentionWorkspace attention;
  View norm_partials, bias_partials;  // both share one buffer
  View held;  // backward in halves: dx before a norm's backward, until its destination is free
  // [1 or 2, widest norm], for a frozen block: the gradients of norms' weights and biases, which nobody
  // reads.
  View unused;
  AdapterWorkspace adapters;
  // In a layer with experts: scratch of sorting slots, i32 [row groups, experts], and of sums over tokens,
  // A [row groups, 2 experts + 1]; the gradients of the
  // router's logits, T [N, experts], of the shared gate's weights, A [N,1], and of its logits, T [N,1].
  View sorting, summing, d_logits, d_shared_weights, d_shared_logits;
  std::int64_t bytes = 0;

  DenseWorkspace(const DenseShape& of, const AttentionRule& rule, const OpSizes& sizes, void* base) {
    const auto& [c, shard, t, shape, how, layer] = of;
    BufferPlan plan(base);
    const std::int64_t n = shape.rows(), results = c.result_columns(), residual = residual_rows(shard, shape);
    const DType a = accumulator_of(t);
    const bool branches = drops_own_rows(c, shard) || c.norms_after();
    const View first =
        plan.take(t, n, std::max({c.inner, qkv_columns(c), branches ? c.width : std::int64_t{0}}));
    d_act = View(first.data, t, n, c.inner);
    if (branches) wide = View(first.data, t, residual, c.width);
    d_qkv = View(first.data, t, n, qkv_columns(c));
    const std::int64_t widest_latent =
        c.block.latent ? std::max(c.block.latent->q_rank, c.block.latent->kv_rank) : 0;
    const View second = plan.take(t, n, std::max({c.width, results, widest_latent}));
    d_norm = View(second.data, t, n, c.width);
    d_att = View(second.data, t, n, results);
    narrow = View(second.data, t, residual, c.width);
    if (c.block.latent) {
      joint = plan.take(t, n, c.latent_heads().joint_columns());
      d_first = plan.take(t, n, first_columns(c));
      d_latent = View(second.data, t, n, widest_latent);
    }
    if (shard.sequence) all_rows = plan.take(t, n, c.width);
    attention = AttentionWorkspace(plan, c, t, shape, rule, sizes);
    const std::int64_t biases = widest_bias(c);
    const View partials = plan.take(a, sizes.row_groups(), std::max(2 * norm_columns(c), biases));
    norm_partials = View(partials.data, a, partials.rows, 2 * norm_columns(c));
    if (biases > 0) bias_partials = View(partials.data, a, partials.rows, biases);
    if (how == Backward::kInHalves) held = plan.take(t, residual, c.width);
    // The experts' sums of gradients, to which the adapters of such a layer add theirs, are of type A.
    adapters = AdapterWorkspace(plan, AdapterList(c, layer), c.lora, t, of.routes() ? a : t, n);
    if (of.routes()) {
      sorting = plan.take(DType::kI32, sizes.row_groups(), c.experts.count);
      summing = plan.take(a, sizes.row_groups(), 2 * c.experts.count + 1);
      d_logits = plan.take(t, n, c.experts.count);
      if (c.experts.shared_gate) d_shared_weights = plan.take(a, n, 1), d_shared_logits = plan.take(t, n, 1);
    }
    if (how == Backward::kFrozen) unused = plan.take(a, c.form().layer_norms ? 2 : 1, norm_columns(c));
    bytes = plan.bytes();
  }
};

}  // namespace zg::model
