// Whether a run that goes on from a checkpoint takes over the drives' files with the state that is pinned in
// them: then none of it is written again, and what no checkpoint pins is free space. Private to src/train.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ziggurat/checkpoint/pins.hpp"
#include "ziggurat/comm/processes.hpp"
#include "ziggurat/store/store.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {

struct Adoption {
  // The file on each drive, in this process's directory there. Empty: all ranks of this process hold what
  // others do.
  std::vector<std::string> files;
  std::vector<DriveRates> rates;          // as an earlier run has measured the drives; empty: not known
  std::vector<io::StoredPiece> places;    // of all versions
  std::vector<AdoptedVersions> versions;  // by rank of this process; empty: it holds what another one does
  // By rank: the versions that each checkpoint pins, by its number.
  std::vector<std::map<std::int64_t, std::vector<PinnedVersion>>> pins;
  std::vector<std::string> surplus;  // checkpoints beyond checkpoint.keep, which must go first
};

// `plans`: of this process's ranks. All processes call it: they adopt together, or none does, and then `why`
// says so and the result is empty.
std::optional<Adoption> find_adoption(const std::vector<RunPlan>& plans, const Checkpoint& from,
                                      Processes& processes, std::string& why);

}  // namespace zg
