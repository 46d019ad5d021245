// Plans a run before its first step: whether it fits, how many bytes it will move, and how fast it can be.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/step/communication.hpp"
#include "ziggurat/store/residency.hpp"

namespace zg {

struct Plan {
  bool fits = false;
  std::optional<NoRoom> obstacle;  // what does not fit; set unless `fits`
  LinkBytes per_step;              // the store's traffic of a step in the steady state
  CommTraffics comm_per_step;      // traffic with other ranks
  Budgets peak;                    // bytes used of each budget, without the workspace
};

// Dry-runs everything that a training run may do (first steps, evaluations, further steps) under these
// budgets, which do not include the workspace.
Plan make_plan(const Layout& layout, const StepPrograms& programs, const Budgets& budgets);

// The store's traffic of a run with this history (StepExecutor::history), once all its moves are done. The
// traffic of the initialisation is not counted.
LinkBytes forecast(const Layout& layout, const StepPrograms& programs, const Budgets& budgets,
                   const History& history);

// The bytes of each budget to leave free for moves under way, so that a fetch need not wait for the
// write-back that makes room for it: the bytes that the tier's links have in flight at once (`in_flight`),
// and the bytes of the largest operation, as room for the next one. More would not let the drives read
// earlier, and would cost traffic: each byte left free is a byte that is not retained, and is read and
// written once more in every step. At most a quarter of a budget, since a small budget is better used for
// retained copies.
Budgets read_ahead_of(const TensorTable& table, const StepPrograms& programs, const Budgets& budgets,
                      const Budgets& in_flight);

// The smallest budgets under which the run fits, without the workspace; nothing if there are none. `device`:
// as for smallest_budgets() in dry_run.hpp. With hundreds of thousands of accesses per step the result is
// approximate: the run fits, but the budgets may be a few percent above the smallest, since finding the exact
// ones would take minutes.
std::optional<Budgets> smallest_budgets(const Layout& layout, const StepPrograms& programs,
                                        std::int64_t device, bool direct = false);

// The roofs of a machine: the highest rates of its arithmetic and its links, measured or given, each for use
// on its own.
struct Roofs {
  double flops = 0;                               // FLOP/s of matrix products
  double host_to_device = 0, device_to_host = 0;  // bytes per second
  double nvme_read = 0, nvme_write = 0;           // sum over drives, one way at a time; 0: no NVMe tier
  // The total rate of mixed reads and writes, where the share `nvme_mixed_reads` of the bytes is read. How
  // reads and writes slow each other down depends on the drive (flash, bus and host may be shared or not), so
  // this rate is measured and not derived. 0: reads and writes take turns (half duplex).
  double nvme_mixed = 0, nvme_mixed_reads = 0.5;
  // Bandwidth of first writes, to blocks that were never written since they were reserved: the drive, or a
  // virtual drive's host, may have to allocate them first. 0: first writes are as fast as others.
  double nvme_first_write = 0;
};

// The shortest time in which drives with these rates can read and write these bytes: as many as possible in
// the measured mixture, the rest one way at a time. `first_written` of the written bytes are first writes.
double nvme_seconds(const Roofs& roofs, std::int64_t read, std::int64_t written, std::int64_t first_written);

// Lower bounds of a step's time, in seconds, for compute and for each link. `seconds` is the largest of them,
// and `by` names it.
struct Bound {
  double seconds = 0;
  std::string by;  // "compute", "nvme", "host->device", "device->host"
  double compute = 0, nvme = 0, host_to_device = 0, device_to_host = 0;
};
Bound bound_of(const Roofs& roofs, double flops, const LinkBytes& traffic, std::int64_t first_written = 0);

// Corrects roofs after a step that took only `seconds`, less than its bound: then a roof was measured too low
// (under load, or for too short a time). Raises the roofs of each link whose time in `bound` exceeds
// `seconds`, such that its time becomes `seconds`. Returns whether any was raised.
bool raise_to(Roofs& roofs, const Bound& bound, double seconds);

// Measures the rates of matrix products in `dtype` and of memory copies. Takes a fraction of a second.
Roofs measure_roofs(DType dtype);

// Rates between host memory and a device, in bytes per second: each way while the other is idle, and the sum
// of both while both are busy.
struct LinkRates {
  double to_device = 0, to_host = 0, both = 0;
};
// The measure_ functions below return a device's rates, the best of several runs on random data. Each uses
// kRoofMemory bytes of the device's arena, or less if less is free, and host memory for a few copies, and
// takes a fraction of a second.
inline constexpr std::int64_t kRoofMemory = std::int64_t{640} << 20;
double measure_products(Device& device, DType dtype);  // FLOP/s
double measure_memory(Device& device);  // bytes read and written per second in the device's memory
LinkRates measure_link(Device& device);
// The roofs of matrix products and of the link to the host.
Roofs measure_roofs(Device& device, DType dtype);

}  // namespace zg
