// Latent attention: the part of a block between the first products of attention, which make the latents, and
// the queries, keys and values.
//
//   queries = norm(latent) q_b^T,  joint = norm(latent of keys and values) kv_b^T
//
// A row of `joint` has each head's own key columns and value; ops.expand_kv() makes keys and values of it and
// of the columns that all keys share. Without a latent of queries the first products make the queries.
//
// With tensor parallelism a rank has whole latents, and its heads' rows of q_b and kv_b. The gradients of
// latents are then the terms of this rank's heads, and so are the gradients of all that makes latents.
#pragma once
#include "model/call.hpp"

namespace zg::model {

struct DenseCall;

// The gradients of the outputs of the products that read the latents, T [N, ...].
struct LatentProducts {
  View queries, joint;
};
// Accumulators of the gradients of the norms' weights. The first is null without a latent of queries.
struct LatentNorms {
  View queries, kv;
};

// Makes q, k and v, before they rotate, of DenseSaved::latent.first.
void latent_forward(const DenseCall& block, const View& qkv);

// The gradients of the products' outputs, of the gradient d_qkv of q, k and v; joint: room for one of them.
LatentProducts latent_products(const DenseCall& block, const View& d_qkv, const View& joint);
// Writes the gradient of latent.first to DenseWorkspace::d_first, after latent_products(); and the gradients
// of the products' weights and adapters, if the call has room for them.
void latent_backward(const DenseCall& block, const LatentProducts& d, const LatentNorms& norms);

// The second half of a backward: the first half keeps the gradients of the products' outputs where q, k and v
// were saved, and the second half writes those of their weights and adapters.
void keep_latent_products(const DenseCall& block, const LatentProducts& d);
LatentProducts kept_latent_products(const DenseCall& block);
void latent_backward_weight(const DenseCall& block, const LatentProducts& d);

}  // namespace zg::model
