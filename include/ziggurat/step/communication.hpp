// What the ranks of a run exchange: the calls that an operation makes of other ranks, how many bytes a
// program or a whole run exchanges, and what must be the same on all ranks. Pure functions of layout and
// programs; the engine makes just these calls.
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

// The groups in which a rank exchanges something (RankPlace). A rank that is alone in a group exchanges
// nothing there.
enum class CommAxis : std::uint8_t {
  kShards,        // of one shard group: weights are gathered from the shards; quantized gradients are summed
  kDataParallel,  // all that Sharding counts, in the order of their pieces: gradients are summed, a piece by
                  // each
  kReplicas,      // of one shard: its summed pieces are gathered; quantized gradients are summed before
  kScalars,       // all ranks: losses, norms, counts of tokens
  kTensor,        // those with the parts of a layer: activations and their gradients
  kContext,       // those with the parts of a sequence: keys and values and their gradients
  kStages,  // those with the stages of a pipeline, in order: activations and their gradients are passed on
  kReplicated,  // those of kTensor: sums of the gradients of what several parts hold, beside the computation
};
inline constexpr int kCommAxes = 8;
const char* name_of(CommAxis axis);  // "shards", ...
// Whether every run of several ranks has the axis; the others are those of ParallelDegrees.
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
using CommTraffics = ByAxis<CommTraffic>;  // what one rank exchanged, or several together
inline CommTraffic operator-(const CommTraffic& a, const CommTraffic& b) {
  return {a.sent - b.sent, a.received - b.received, a.calls - b.calls};
}
CommTraffics operator-(const CommTraffics& a, const CommTraffics& b);

// The ranks of the group of this rank, in the order in which the group counts them.
std::vector<int> members_of(const RankPlace& place, CommAxis axis);

// A call of all members of a group, or on the axis of the stages of two of them. `count`: elements of one
// member's row, of an all-reduce of the whole operand, or of what is passed (Communicator).
struct CommCall {
  CommAxis axis = CommAxis::kShards;
  bool sums = false;  // a reduce-scatter, an all-reduce, or an all-to-all of codes; else it only moves
  std::int64_t count = 0;
  DType dtype = DType::kF32;
  bool everywhere = false;  // an all-reduce
  bool passes = false;      // instead of these: a send to the next member, and a receive from the one before
  int to = -1, from = -1;   // the stage that this one sends to or receives from; -1: none
};
// The calls that the operation makes, in order.
std::vector<CommCall> calls_of(const Layout& layout, const StepOp& op);

// What the layout's rank exchanges in a program, and in a training step in all.
CommTraffics comm_of(const Layout& layout, const StepProgram& program);
CommTraffics comm_per_step(const Layout& layout, const StepPrograms& programs);
// The same for a whole run (StepExecutor::history).
CommTraffics comm_forecast(const Layout& layout, const StepPrograms& programs, const History& history);

// What all ranks must have in common, a line each: how everything is sharded, the shape of the batch, and the
// calls of each program that all ranks make. Not the calls for replicas, which a rank without trained
// parameters does not make. Of a pipeline, in place of calls, what its stages pass on.
std::vector<std::string> agreement_of(const Layout& layout, const StepPrograms& programs);
// Exchanges numbers with all ranks: by rank, what each has brought.
using OfAllRanks = std::function<std::vector<std::vector<double>>(std::span<const double> mine)>;
// Compares the ranks' lines. Throws disagreement() on every rank if they differ, with the first line that
// does.
void agree(std::span<const std::string> mine, const OfAllRanks& of_all_ranks);
// The error when the ranks' lines differ. lines: by rank; empty: the rank has no such line.
Error disagreement(std::span<const std::string> lines);

// "rank 2", "ranks 0, 1"; of many ranks the first ones, and how many there are.
std::string text_of(std::span<const int> ranks);

}  // namespace zg
