// What the bits of a run depend on, so that a resumed run can be compared with the one that it goes on from.
// Private to src/train.
#pragma once
#include <string>
#include <vector>

#include "ziggurat/checkpoint/model_bits.hpp"
#include "ziggurat/data/dataset.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {

// Keys of the configuration, resolved, and the like: data, processor. Keys that change no bit are not among
// them: budgets, tiers, drives, threads, ZeRO stages, outputs, evaluations.
BitKeys bit_keys(const RunPlan& plan, const DataSet& data);
// Compares those of a checkpoint with those of the run that resumes from it. Returns what the user should
// know: changes that are allowed, and those after which results agree with an uninterrupted run's to rounding
// only. Throws Error(kUsage) with all others.
std::vector<std::string> compare_bits(const BitKeys& checkpoint, const BitKeys& run,
                                      const std::vector<std::string>& allow, const std::string& where);

}  // namespace zg
