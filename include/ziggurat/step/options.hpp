// Options of a step as plain values. The readers of the configuration use them without the engine.
#pragma once
#include <algorithm>
#include <cstdint>

namespace zg {

// The lowest tier to which tensors may be demoted. kAuto: any tier that has room.
enum class OffloadTarget { kAuto, kDevice, kHost, kNvme };

// The form in which the weights of trained layers are kept between their uses, and in which they move.
//   computed  as they are computed with: rounded from their masters
//   FP8       matrices of layers as 8-bit numbers with a scale for each 128, made from their masters after
//             each update, and decoded before each use; everything else as with `computed`
enum class StoredWeights { kComputed, kFp8 };

// The order in which the micro-batches of a step pass through the layers.
//   layer-major        all micro-batches through one layer, then all through the next layer: weights cross
//                      each link twice a step
//   micro-batch-major  one micro-batch through all layers, then the next micro-batch: less activation memory,
//                      more weight traffic
enum class Accumulation { kLayerMajor, kMicroBatchMajor };

// How parameters, gradients and optimizer state are spread over the ranks that compute with the same weights.
// There are `ranks` such ranks, and this rank is number `rank`. Ranks [k * shards, (k + 1) * shards) are a
// shard group: together they hold everything once. Every other shard group holds a copy. In terms of
// DeepSpeed's ZeRO stages: stage 0 has one shard; stages 1 and 2 keep the weights, stage 3 does not; hybrid
// sharding (hpZ, MiCS, HYBRID_SHARD) has fewer shards than ranks.
struct Sharding {
  int ranks = 1, rank = 0;
  int shards = 1;  // divides `ranks`; 1: every rank holds everything
  // True: gathered weights live from the forward to the end of the backward of a step. False: they are
  // gathered for the forward and again for the backward.
  bool keep_weights = false;
  int shard() const { return rank % shards; }
  int replica() const { return rank / shards; }  // this rank's number among the replicas of its shard
  int replicas() const { return ranks / shards; }
  // A unit is cut into `ranks` equal pieces. A shard consists of `replicas()` neighbouring pieces, and this
  // rank sums the gradient of one of them. So sums and norms are rounded the same way for any number of
  // shards.
  int piece() const { return shard() * replicas() + replica(); }
  int rank_of_piece(int piece) const { return piece % replicas() * shards + piece / replicas(); }
};

// How the ranks of a context group compute attention. Each rank has a shard of every sequence.
//   ring     keys and values go around the group; a rank has two ranges of each sequence, one from its
//            beginning and one from its end, so that all ranks have equally many keys to attend to
//   ulysses  queries, keys and values are exchanged, so that each rank has some heads of whole sequences
enum class ContextMethod { kRing, kUlysses };

// How the model itself is spread over ranks that compute with different weights or different tokens. Each of
// `tensor` ranks has a tensor shard of every layer, each of `stages` stages has ranges of layers, and each of
// `context` ranks has a shard of every sequence. The ranks of a context group compute with the same weights,
// so they are among Sharding's ranks, as neighbours. So are the `experts` ranks of an expert group, which
// have the experts of a layer between them (ExpertShard), and all else alike.
struct ParallelDegrees {
  int tensor = 1, context = 1, stages = 1;
  int tensor_part = 0, stage = 0;  // indices of this rank
  ContextMethod context_method = ContextMethod::kRing;
  int experts = 1;
};

// The order in which the stages of a pipeline start micro-batches (step/pipeline.hpp).
//   breadth-first  all micro-batches through a chunk of layers, then the next chunk: fewest weight fetches
//   depth-first    as few micro-batches at a time as keep all stages busy: few activations
//   1F1B           one forward, one backward, with one chunk: fewest activations
//   GPipe          all forwards, then all backwards
//   zero-bubble    1F1B with the gradients of weights computed separately, in otherwise idle time
enum class PipelineSchedule { kBreadthFirst, kDepthFirst, kOneForwardOneBackward, kGPipe, kZeroBubble };

struct PipelineOptions {
  PipelineSchedule schedule = PipelineSchedule::kBreadthFirst;
  int chunks = 1;  // chunks of layers in each stage
  int group = 0;   // micro-batches that pass a chunk before the next chunk; 0: the schedule's default
};

// How routers learn to use all experts: by terms that are added to the loss of training (step/balance.hpp),
// or with kBias by choice biases that follow the numbers of experts' tokens.
enum class BalanceKind : std::uint8_t { kNone, kHf, kSwitch, kSequence, kGlobal, kBias };

struct BalanceOptions {
  BalanceKind kind = BalanceKind::kNone;
  double coefficient = 0, z_coefficient = 0;
  double bias_rate = 0;  // kBias: by so much a bias moves in a step
  // Whether the loss has a balance term, or any term of routers.
  bool has_term() const { return kind != BalanceKind::kNone && kind != BalanceKind::kBias; }
  bool on() const { return has_term() || z_coefficient > 0; }
  bool operator==(const BalanceOptions&) const = default;
};

// A rank's place on each axis of parallelism. The world's ranks are numbered along the tensor axis first, so
// that the ranks of a tensor group are neighbours; then along Sharding's ranks: first the context axis, then
// the data axis; then along the stages.
struct RankPlace {
  Sharding sharding;
  ParallelDegrees parts;
  int ranks() const { return parts.tensor * sharding.ranks * parts.stages; }
  int rank() const { return rank_at(parts.tensor_part, sharding.rank, parts.stage); }
  int rank_at(int tensor_part, int sharding_rank, int stage) const {
    return tensor_part + parts.tensor * (sharding_rank + sharding.ranks * stage);
  }
  // Ranks with the same data_rank() have the same sequences.
  int data_ranks() const { return sharding.ranks / parts.context; }
  int data_rank() const { return sharding.rank / parts.context; }
  int context_part() const { return sharding.rank % parts.context; }
  // expert_part(): the index of this rank in its expert group. expert_sharding(): how experts are sharded
  // over the ranks that have the same ones; one of `experts` and Sharding::shards must divide the other.
  int expert_part() const { return sharding.rank % parts.experts; }
  Sharding expert_sharding() const {
    const int each = parts.experts;
    return {sharding.ranks / each, sharding.rank / each, std::max(1, sharding.shards / each),
            sharding.keep_weights};
  }
  // The number of this rank's micro-batch `m` among the micro-batches of all data ranks, which take turns.
  std::int64_t micro_batch(std::int64_t m) const { return m * data_ranks() + data_rank(); }
  // Whether this rank reports the loss and the token count to the sums over all ranks. All ranks of a tensor
  // group have the same values, so only the first rank reports them. All stages have the same token counts,
  // so only the first stage reports them.
  bool tells_loss() const { return parts.tensor_part == 0; }
  bool tells_tokens() const { return tells_loss() && parts.stage == 0; }
};

}  // namespace zg
