// The settings on which a run's results depend bit by bit, so that a resumed run can be compared with the run
// that it continues. Private to src/train.
#pragma once
#include <string>
#include <vector>

#include "ziggurat/checkpoint/model_bits.hpp"
#include "ziggurat/data/dataset.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {

// The resolved keys of the configuration that change results, and keys for the data and the processor. Left
// out are keys that change no bit: budgets, tiers, drives, threads, ZeRO stages, outputs, evaluations.
BitKeys bit_keys(const RunPlan& plan, const DataSet& data);
// Compares a checkpoint's keys with the keys of the run that resumes from it. Returns messages for the user:
// changes that `allow` permits, and changes after which results agree with an uninterrupted run's only to
// rounding. Throws Error(kUsage) that lists all other changes.
std::vector<std::string> compare_bits(const BitKeys& checkpoint, const BitKeys& run,
                                      const std::vector<std::string>& allow, const std::string& where);

}  // namespace zg
