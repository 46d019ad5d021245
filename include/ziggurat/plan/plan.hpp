// Plans of a run before its first step: whether it fits, which bytes it will move, and how fast it can be.
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
  std::optional<NoRoom> obstacle;  // where it does not fit
  LinkBytes per_step;              // the store's, of a step in the steady state
  CommTraffics comm_per_step;      // with other ranks
  Budgets peak;                    // bytes used of each budget, without the workspace
};

// Dry-runs all that a training run may do (first steps, evaluations, further steps) under these budgets,
// which do not include the workspace.
Plan make_plan(const Layout& layout, const StepPrograms& programs, const Budgets& budgets);

// The traffic of a run with this history (StepExecutor::history), once all its moves are done. The traffic of
// the initialisation is not counted.
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
// as for the smallest_budgets() of dry_run.hpp. With hundreds of thousands of accesses a step they fit, and
// may be a few hundredths above the smallest: the exact ones would take minutes.
std::optional<Budgets> smallest_budgets(const Layout& layout, const StepPrograms& programs,
                                        std::int64_t device, bool direct = false);

// The roofs of a machine: the rates of its arithmetic and its links, each used alone, as measured or given.
struct Roofs {
  double flops = 0;                               // of matrix products, per second
  double host_to_device = 0, device_to_host = 0;  // bytes per second
  double nvme_read = 0, nvme_write = 0;           // of all drives, one way at a time; 0: no NVMe tier
  // The sum of both ways while they are mixed and `nvme_mixed_reads` of the bytes are reads. How reads and
  // writes slow each other down depends on the drive (flash, bus and host may be shared or not), so this rate
  // is measured and not derived. 0: the ways take turns (half duplex).
  double nvme_mixed = 0, nvme_mixed_reads = 0.5;
  // Bandwidth of first writes, to blocks that were never written since they were reserved: the drive, or a
  // virtual drive's host, may have to allocate them first. 0: first writes are as fast as others.
  double nvme_first_write = 0;
};

// The least seconds in which drives with these rates read and write so many bytes: as many as possible in the
// measured mixture, the rest one way at a time. `first_written` of the bytes written are first writes.
double nvme_seconds(const Roofs& roofs, std::int64_t read, std::int64_t written, std::int64_t first_written);

// Lower bounds of the time of a step: `seconds` is the largest of those of compute and links, `by` names it.
struct Bound {
  double seconds = 0;
  std::string by;  // "compute", "nvme", "host->device", "device->host"
  double compute = 0, nvme = 0, host_to_device = 0, device_to_host = 0;
};
Bound bound_of(const Roofs& roofs, double flops, const LinkBytes& traffic, std::int64_t first_written = 0);

// A step that took less time than its bound shows that a roof was measured too low (under load, or for too
// short a time). Raises the roofs of each link whose time in `bound` is more than `seconds` so far that the
// time becomes `seconds`. Returns whether any was raised.
bool raise_to(Roofs& roofs, const Bound& bound, double seconds);

// Measures the rates of matrix products in `dtype` and of memory copies. Takes a fraction of a second.
Roofs measure_roofs(DType dtype);

// Rates between host memory and a device, in bytes per second: of each way while the other is idle, and the
// sum of both while both are busy.
struct LinkRates {
  double to_device = 0, to_host = 0, both = 0;
};
// Rates of a device, the best of several runs on random numbers. Each function uses kRoofMemory bytes of the
// device's arena, or less where less is free, and host memory for a few copies, and takes a fraction of a
// second.
inline constexpr std::int64_t kRoofMemory = std::int64_t{640} << 20;
double measure_products(Device& device, DType dtype);  // FLOP/s
double measure_memory(Device& device);  // bytes read and written per second in the device's memory
LinkRates measure_link(Device& device);
// The roofs of products and link.
Roofs measure_roofs(Device& device, DType dtype);

}  // namespace zg
