// Adoption: a run that continues from a checkpoint may take over the drives' files with the state that is
// pinned in them. Then none of it is written again, and space that no checkpoint pins is free. Private to
// src/train.
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
  // The file on each drive, in this process's directory there. Empty: the ranks of this process write no
  // pins, since ranks of other processes hold the same state.
  std::vector<std::string> files;
  std::vector<DriveRates> rates;          // as an earlier run has measured the drives; empty: not known
  std::vector<io::StoredPiece> places;    // places of all adopted versions
  std::vector<AdoptedVersions> versions;  // by local rank; empty if another rank writes the same state
  // Indexed by local rank: the versions that each checkpoint pins, keyed by checkpoint number.
  std::vector<std::map<std::int64_t, std::vector<PinnedVersion>>> pins;
  std::vector<std::string> surplus;  // checkpoints beyond checkpoint.keep, which must be removed first
};

// Finds out whether the run can adopt the drives' files. `plans`: the plans of this process's ranks. All
// processes call it together and adopt together. If one cannot, the result is empty and `why` says why.
std::optional<Adoption> find_adoption(const std::vector<RunPlan>& plans, const Checkpoint& from,
                                      Processes& processes, std::string& why);

}  // namespace zg
