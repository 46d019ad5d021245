// Options of a step as plain values, which the configuration's readers need without the engine.
#pragma once
#include <cstdint>

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

// How parameters, gradients and optimizer state are spread over the ranks that compute with the same weights:
// `ranks` of them, of which this one is number `rank`. Ranks [k * shards, (k + 1) * shards) are a shard
// group: together they hold everything once. Each other group holds it again.
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

// How the ranks of a context group compute attention, each with a part of every sequence.
//   ring     keys and values go around the group; a rank has two chunks of each sequence, one from its
//            beginning and one from its end, so that all ranks have equally many keys to attend to
//   ulysses  queries, keys and values are exchanged, so that each rank has some heads of whole sequences
enum class ContextMethod { kRing, kUlysses };

// How the model itself is spread over ranks, which compute with different weights or different tokens:
// `tensor` ranks have a part of every layer each, `stages` a stretch of the layers each, and `context` a part
// of every sequence each. Those of a context group compute with the same weights, so Sharding counts them, as
// neighbours.
struct ParallelDegrees {
  int tensor = 1, context = 1, stages = 1;
  int tensor_part = 0, stage = 0;  // this rank's
  ContextMethod context_method = ContextMethod::kRing;
};

// The order in which the stages of a pipeline take up micro-batches (step/pipeline.hpp).
//   breadth-first  all micro-batches through a chunk of layers, then the next chunk: fewest weight fetches
//   depth-first    as few micro-batches at a time as keep all stages busy: few activations
//   1F1B           one forward, one backward, with one chunk: fewest activations
//   GPipe          all forwards, then all backwards
//   zero-bubble    1F1B with the gradients of weights apart, in what would be bubbles
enum class PipelineSchedule { kBreadthFirst, kDepthFirst, kOneForwardOneBackward, kGPipe, kZeroBubble };

struct PipelineOptions {
  PipelineSchedule schedule = PipelineSchedule::kBreadthFirst;
  int chunks = 1;  // of each stage
  int group = 0;   // micro-batches that pass a chunk before the next one; 0: as the schedule says
};

// Where a rank stands. The world's ranks are counted along the tensor axis first, so that those of a tensor
// group are neighbours; then along those that Sharding counts: context, then data; then along the stages.
struct RankPlace {
  Sharding sharding;
  ParallelDegrees parts;
  int ranks() const { return parts.tensor * sharding.ranks * parts.stages; }
  int rank() const { return rank_at(parts.tensor_part, sharding.rank, parts.stage); }
  int rank_at(int tensor_part, int sharding_rank, int stage) const {
    return tensor_part + parts.tensor * (sharding_rank + sharding.ranks * stage);
  }
  // Ranks of one data group have the same sequences.
  int data_ranks() const { return sharding.ranks / parts.context; }
  int data_rank() const { return sharding.rank / parts.context; }
  int context_part() const { return sharding.rank % parts.context; }
  // The number of this rank's micro-batch `m` among those of all data groups, which take turns.
  std::int64_t micro_batch(std::int64_t m) const { return m * data_ranks() + data_rank(); }
  // What all ranks of a tensor group know, its first one tells: the loss, and counts of tokens, which all
  // stages have, of the first.
  bool tells_loss() const { return parts.tensor_part == 0; }
  bool tells_tokens() const { return tells_loss() && parts.stage == 0; }
};

}  // namespace zg
