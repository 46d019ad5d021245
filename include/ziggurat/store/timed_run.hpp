// How long programs take on a machine that is described by rates: a run of the store's own decisions and of
// its own graph of moves against a virtual clock. No byte moves and no thread runs. What the run waits for,
// and which moves overlap, comes out of the graph's rules, as in the store.
//
// What differs from the store: each direction of a link carries one transfer at a time, the most urgent
// first; drives that take turns carry one altogether; and memory is always at hand. The thread waits until an
// operation's operands are there before it issues the operation, as the store's thread does for the host
// device (MoveRules::device_has_events).
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ziggurat/store/flows.hpp"
#include "ziggurat/store/residency.hpp"

namespace zg {

// A program with the decisions for each of its operations, as Residency has made them. They do not depend on
// time, so they are made once for any number of timed runs.
class DecidedProgram {
 public:
  // Decides all operations of `program`, and leaves `residency` behind it. Throws Error(kMemory) without
  // room.
  DecidedProgram(Residency& residency, const Program& program);
  const Program& program() const { return *program_; }
  std::span<const Action> actions(std::int32_t op) const;
  const LinkBytes& traffic() const { return traffic_; }
  std::array<std::int64_t, 2> used_before() const { return used_; }  // bytes of memory, by Tier

 private:
  const Program* program_;
  std::vector<Action> actions_;
  std::vector<std::size_t> first_;
  LinkBytes traffic_;
  std::array<std::int64_t, 2> used_{};
};

// The work of an operation, on the stream of this number.
struct TimedOp {
  int stream = 0;
  Flow flow;
};

struct TimedMachine {
  std::vector<double> capacities;  // of the resources, units per second
  struct LinkUse {
    std::vector<FlowDemand> per_byte;  // what a byte takes
    double latency = 0;                // seconds from the end of a transfer until its bytes are there
  };
  std::array<LinkUse, kLinks> links;
  Budgets memory;                                      // bytes of the tiers that copies may take
  std::int64_t piece_bytes = 0, copies_in_flight = 0;  // as MoveRules; 0: the store's
  std::int64_t prefetch_depth = 0;                     // operations that are decided ahead
  // Reads and writes of the drives take turns, as in a drive's queue: the drives have `drive_window` bytes in
  // flight, which they serve in order, and the most urgent transfers join them, as the engine chooses
  // (io::Priority). 0: no bound. Else reads and writes go on at the same time, each kind in turn.
  bool drives_take_turns = false;
  std::int64_t drive_window = 0;
  int streams = 1;
  // Streams that the thread does not wait for at the end of a program.
  std::vector<bool> goes_on = {};
};

struct TimedProgram {
  const DecidedProgram* decided = nullptr;
  std::span<const TimedOp> ops;  // one for each operation
};

struct TimedResult {
  std::vector<double> ends;                 // when each program has ended, in seconds from the start
  double drained = 0;                       // when all moves and streams have ended
  std::vector<double> used;                 // of each resource, in its unit
  std::vector<double> busy;                 // of each stream, seconds
  std::array<double, kLinks> links_busy{};  // seconds
  std::array<std::int64_t, 2> peak{};       // bytes of memory, by Tier
  LinkBytes traffic;
};

// Runs the programs one after the other. `table` is that of the decisions, and the memory of the machine
// suffices for them.
TimedResult timed_run(const TensorTable& table, const TimedMachine& machine,
                      std::span<const TimedProgram> programs);

}  // namespace zg
