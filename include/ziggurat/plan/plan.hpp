// Does a run fit, what will it move, and how fast can it be: answered before step 1, without moving a byte.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/engine/program_sequence.hpp"
#include "ziggurat/store/residency.hpp"

namespace zg {

struct Plan {
  bool fits = false;
  std::optional<NoRoom> obstacle;  // when it does not
  Traffic per_step;                // of the store, once the run is under way
  Budgets peak;                    // bytes used of each budget, workspace not included
};

// Dry run of the whole life of a training run (first steps, evaluation, more steps) under these budgets
// (workspace not included).
Plan make_plan(const Layout& layout, const StepPrograms& programs, const Budgets& budgets);

// What a run with this history (Engine::history) has moved when all of it is done; what initialisation moved is
// not counted.
Traffic forecast(const Layout& layout, const StepPrograms& programs, const Budgets& budgets,
                 const History& history);

// Bytes of each budget that stay free for what is on its way in or out, so that a fetch need not wait for the
// write-back that makes room for it: what the tier's links have in flight at once (`in_flight`), and what the
// largest operation has there, for the one that comes next. Beyond that more room fetches nothing earlier
// that drives are free to fetch, and each byte of it is a byte that does not stay: it is read and written
// once more in every step. No more than a quarter of a budget, since a small one is needed for what stays.
Budgets read_ahead_of(const TensorTable& table, const StepPrograms& programs, const Budgets& budgets,
                      const Budgets& in_flight);

// The smallest budgets that do: first the device's with as much host memory as there is need for, then the
// host's with `device` bytes (or the smallest, if that is more) of device memory. Workspace not included.
// Nothing if no budget does.
std::optional<Budgets> smallest_budgets(const Layout& layout, const StepPrograms& programs,
                                        std::int64_t device, bool direct = false);

// Speeds of this machine's links, measured or given.
struct Roofs {
  double flops = 0;                               // of the matrix products, per second
  double host_to_device = 0, device_to_host = 0;  // bytes per second
  double nvme_read = 0, nvme_write = 0;           // all drives together, one way alone; 0: no NVMe tier
  // Both ways together, while `nvme_mixed_reads` of the bytes are read. A drive's two ways share what it has
  // in a manner of their own (flash, bus and host are each shared or not), so this is measured and not
  // derived. 0: the ways take turns (half duplex).
  double nvme_mixed = 0, nvme_mixed_reads = 0.5;
  // To blocks that were never written since they were reserved: a drive, or what provides it, may have to
  // find room for them first. 0: as fast as any.
  double nvme_first_write = 0;
};

// The least seconds in which drives of these speeds read and write so many bytes: as much as possible in the
// measured mixture, the rest one way alone. `first_written` of the bytes written go to blocks that never
// were.
double nvme_seconds(const Roofs& roofs, std::int64_t read, std::int64_t written, std::int64_t first_written);

// The least time a step can take, by link: T_step >= max of these.
struct Bound {
  double seconds = 0;
  std::string by;  // "compute", "nvme", "host->device", "device->host"
  double compute = 0, nvme = 0, host_to_device = 0, device_to_host = 0;
};
Bound bound_of(const Roofs& roofs, double flops, const Traffic& traffic, std::int64_t first_written = 0);

// A step that took less than its bound shows that a roof was measured too low (under load, or for too short a
// time). Raises those of each link whose time in `bound` is more than `seconds`, to meet it; true if there
// was one.
bool raise_to(Roofs& roofs, const Bound& bound, double seconds);

// Measures the speed of matrix products in `dtype` and of memory copies; a fraction of a second.
Roofs measure_roofs(DType dtype);

// Between host memory and a device, bytes per second: each way while the other rests, and the sum of the two
// while both are under way.
struct LinkRates {
  double to_device = 0, to_host = 0, both = 0;
};
// A device's own speeds, the best of several runs on random numbers. Each takes some of the arena,
// kRoofMemory where that much is free, and of the host as much as a few copies need; a fraction of a second.
inline constexpr std::int64_t kRoofMemory = std::int64_t{640} << 20;
double measure_products(Device& device, DType dtype);  // FLOP/s
double measure_memory(Device& device);  // bytes per second, read and written, of its own memory
LinkRates measure_link(Device& device);
// Products and link.
Roofs measure_roofs(Device& device, DType dtype);

}  // namespace zg
