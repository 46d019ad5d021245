// The time of a training step on a machine that need not be here: the run's own programs and decisions, run
// against a clock (timed_run.hpp), with operations as long as their arithmetic and bytes take at the
// machine's rates.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ziggurat/plan/machine_file.hpp"
#include "ziggurat/plan/plan.hpp"
#include "ziggurat/store/timed_run.hpp"

namespace zg {

// What one rank has of a machine whose ranks all do the same at the same time, so that each has an equal part
// of what they share. Bytes or FLOPs per second.
struct RankRates {
  bool on_host = false;      // the processor computes
  double products = 0;       // of its device
  double device_memory = 0;  // of its device, read and written
  double to_device = 0, to_host = 0;
  double host_memory = 0;                  // its part of the machine's, read and written
  double drive_read = 0, drive_write = 0;  // its part of all drives; 0: there are none
  double drive_mixed = 0;                  // half reads and half writes; 0: they take turns
  double peers = 0;                        // to other ranks' devices; 0: through host memory
  double call_seconds = 20e-6;             // of each call between ranks, however few its bytes
};
// `ranks`: of the machine. `drives`: of them that the run uses.
RankRates rates_of(const MachineFile& machine, int ranks, int drives, Outlook outlook);

enum class TimedPart : std::uint8_t { kCompute, kDrives, kToDevice, kToHost, kHostMemory, kRanks, kUpdates };
inline constexpr int kTimedParts = 7;
const char* name_of(TimedPart part);  // "compute", "nvme", "host->device", ...

struct StepTime {
  double seconds = 0;
  // As the clock gave it, from the end of one step to the end of the next. Work of a step that lies in the
  // time of the step before it makes this less than the bound, and `seconds` is then the bound.
  double between_ends = 0;
  // The least time that each part needs for its work of a step, and the sum of the times of everything, one
  // after the other. bound <= seconds <= sum.
  std::array<double, kTimedParts> parts{};
  double bound = 0, sum = 0;
  TimedPart bound_by = TimedPart::kCompute;  // the part with the longest time
  double operator[](TimedPart part) const { return parts[static_cast<std::size_t>(part)]; }
};

// FLOPs of the matrix products of each operation of a program, by the formula of Model::training_flops(), of
// one of the tensor- and context-parallel ranks.
std::vector<double> op_flops(const Layout& layout, const StepProgram& program);

// Times steps of one rank. The decisions are made once, by the constructor; then each machine takes a run of
// the clock.
class StepTimer {
 public:
  struct Options {
    Budgets resident;                 // RunPlan::resident
    Budgets memory;                   // of the tiers, for copies
    std::int64_t prefetch_depth = 0;  // TierConfig::prefetch_depth
    std::int64_t drive_window = 0;    // this rank's part of the bytes in flight on all drives; 0: no bound
    double flops_factor = 1;          // on op_flops()
  };
  // The references outlive the timer. The run fits these budgets.
  StepTimer(const Layout& layout, const StepPrograms& programs, const Options& options);
  // The time of a step in the steady state, without waits for other stages of a pipeline.
  StepTime time(const RankRates& rates) const;

 private:
  struct Cost {
    int stream = 0;
    double flops = 0, device_bytes = 0, host_bytes = 0, sent_bytes = 0, calls = 0;
    bool apart = false;  // the calls are the operation itself, else a part of its computation
  };
  std::vector<Cost> costs_of(const StepProgram& program) const;
  Flow flow_of(const Cost& cost, const RankRates& rates) const;

  const Layout& layout_;
  const Options options_;
  std::vector<DecidedProgram> decided_;  // of two steps
  std::vector<std::size_t> cost_of_;     // each program's costs, an index into costs_
  std::size_t first_step_ = 0;           // programs of the first of the two steps
  std::vector<std::vector<Cost>> costs_;
};

}  // namespace zg
