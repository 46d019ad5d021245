// Communication between the ranks of a run: the communication calls that an operation makes, how many bytes a
// program or a whole run exchanges, and what must be equal on all ranks. Pure functions of layout and
// programs; the engine makes exactly these calls.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "ziggurat/comm/comm.hpp"
#include "ziggurat/step/program_sequence.hpp"

namespace zg {

// The groups in which a rank communicates (RankPlace). A rank that is alone in a group exchanges nothing
// there.
enum class CommAxis : std::uint8_t {
  kShards,        // a shard group: weights are gathered from shards; quantized gradients are summed
  kDataParallel,  // all ranks of Sharding, in the order of their pieces: gradients are summed, one piece by
                  // each rank
  kReplicas,      // ranks with the same shard: summed pieces are gathered; quantized gradients are summed
  kScalars,       // all ranks: losses, norms, counts of tokens
  kTensor,        // tensor-parallel ranks: activations and their gradients
  kContext,       // context-parallel ranks: keys and values and their gradients
  kStages,        // the stages of a pipeline, in order: activations and their gradients are passed on
  kReplicated,    // the ranks of kTensor: gradients of replicated elements, summed during compute
  kExperts,       // the ranks of an expert group: inputs and outputs of experts, and their gradients
};
inline constexpr int kCommAxes = 9;
const char* name_of(CommAxis axis);  // "shards", ...
// Whether every run of several ranks has the axis. The other axes depend on ParallelDegrees.
constexpr bool is_of_sharding(CommAxis axis) {
  return axis <= CommAxis::kScalars;
}

template <class T>
struct ByAxis {
  std::array<T, kCommAxes> all{};
  T& operator[](CommAxis axis) { return all[static_cast<std::size_t>(axis)]; }
  const T& operator[](CommAxis axis) const { return all[static_cast<std::size_t>(axis)]; }
  bool operator==(const ByAxis&) const = default;
  ByAxis& operator+=(const ByAxis& o) {
    for (std::size_t i = 0; i < all.size(); ++i) all[i] += o.all[i];
    return *this;
  }
};
using CommTraffics = ByAxis<CommTraffic>;  // of one rank, or of several together
inline CommTraffic operator-(const CommTraffic& a, const CommTraffic& b) {
  return {a.sent - b.sent, a.received - b.received, a.calls - b.calls};
}
CommTraffics operator-(const CommTraffics& a, const CommTraffics& b);

// The weights whose shards and gradients a call on kShards, kDataParallel or kReplicas exchanges. Experts may
// be sharded over fewer ranks than other weights, since only ranks with the same experts share them.
enum class SharedWeights : std::uint8_t { kAll, kExperts };
// The ranks of this rank's group on the axis, in the group's order.
std::vector<int> members_of(const RankPlace& place, CommAxis axis,
                            SharedWeights weights = SharedWeights::kAll);

// A collective call of all members of a group, or on kStages, a send or receive between two of them. `count`:
// elements of one member's row, of the whole operand of an all-reduce, or of the tensor that is passed
// (Communicator).
struct CommCall {
  CommAxis axis = CommAxis::kShards;
  bool sums = false;  // a reduce-scatter, an all-reduce, or an all-to-all of codes; false: data is only moved
  std::int64_t count = 0;
  DType dtype = DType::kF32;
  bool everywhere = false;  // an all-reduce
  bool passes = false;      // a send to the next member and a receive from the one before, not a collective
  int to = -1, from = -1;   // the stages that this stage sends to and receives from; -1: none
  SharedWeights weights = SharedWeights::kAll;
};
// The calls that the operation makes, in order.
std::vector<CommCall> calls_of(const Layout& layout, const StepOp& op);

// The traffic of the layout's rank in a program, and in a whole training step.
CommTraffics comm_of(const Layout& layout, const StepProgram& program);
CommTraffics comm_per_step(const Layout& layout, const StepPrograms& programs);
// The traffic of a whole run (StepExecutor::history).
CommTraffics comm_forecast(const Layout& layout, const StepPrograms& programs, const History& history);

// What must be equal on all ranks, as lines of text: how everything is sharded, the shape of the batch, and
// the communication calls that all ranks make in each program. The calls on kReplicas are left out: a rank
// without trained parameters does not make them. With a pipeline, the tensors that its stages pass on take
// the place of the calls.
std::vector<std::string> agreement_of(const Layout& layout, const StepPrograms& programs);
// Exchanges numbers with all ranks. Returns the numbers of each rank, indexed by rank.
using OfAllRanks = std::function<std::vector<std::vector<double>>(std::span<const double> mine)>;
// Compares the ranks' lines. If they differ, throws disagreement() with the first differing line, on every
// rank.
void agree(std::span<const std::string> mine, const OfAllRanks& of_all_ranks);
// The error when the ranks' lines differ. `lines` is indexed by rank; an empty one: the rank has no such
// line.
Error disagreement(std::span<const std::string> lines);

// "rank 2", "ranks 0, 1"; for many ranks, the first ones and the number of all.
std::string text_of(std::span<const int> ranks);

}  // namespace zg
