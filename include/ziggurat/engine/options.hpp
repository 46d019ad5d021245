// Options of a step as plain values, which the configuration's readers need without the engine.
#pragma once

namespace zg {

// The lowest tier that tensors may be demoted to. kAuto: any tier that has room.
enum class OffloadTarget { kAuto, kDevice, kHost, kNvme };

// The order in which the micro-batches of a step pass through the layers.
//   layer-major        all micro-batches through one layer, then through the next one: weights cross each
//   link
//                      twice a step
//   micro-batch-major  one micro-batch through all layers, then the next one: less activation memory, more
//                      weight traffic
enum class Accumulation { kLayerMajor, kMicroBatchMajor };

// How parameters, gradients and optimizer state are spread over data-parallel ranks. Ranks [k * shards,
// (k + 1) * shards) are a shard group: together they hold everything once. Each other group holds it again.
// DeepSpeed's stages: 0 is one shard; 1 and 2 keep the weights, 3 does not; hybrid sharding (hpZ, MiCS,
// HYBRID_SHARD) has fewer shards than ranks.
struct Sharding {
  int ranks = 1, rank = 0;
  int shards = 1;  // divides `ranks`; 1: every rank holds everything
  // Gathered weights live from the forward to the end of the backward of a step; else they are gathered for
  // each of the two.
  bool keep_weights = false;
  int shard() const { return rank % shards; }
  int replica() const { return rank / shards; }  // of the shard, among `replicas()`
  int replicas() const { return ranks / shards; }
  // A unit is cut into as many equal pieces as there are ranks. A shard is `replicas()` neighbouring pieces,
  // one of which this rank sums the gradient of. So sums and norms are made alike for any number of shards.
  int piece() const { return shard() * replicas() + replica(); }
  int rank_of_piece(int piece) const { return piece % replicas() * shards + piece / replicas(); }
};

}  // namespace zg
