// What the bits of a run depend on, so that a resumed run can be compared with the one that it goes on from.
// Private to src/train.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "ziggurat/data/dataset.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {

// Keys of the configuration, resolved, and the like: data, processor. What changes no bit is not among them:
// budgets, tiers, drives, threads, ZeRO stages, outputs, evaluations.
using BitKeys = std::vector<std::pair<std::string, std::string>>;
BitKeys bit_keys(const RunPlan& plan, const DataSet& data);
// The keys that the model contributes.
BitKeys model_bits(const ModelConfig& model);

// The sizes of the model that they are of. Throws Error(kUsage) at `where` for a key that is missing or
// wrong.
ModelConfig model_of(const BitKeys& bits, const std::string& where);

// Compares those of a checkpoint with those of the run that resumes from it. Returns what the user should
// know: changes that are allowed, and those after which results agree with an uninterrupted run's to rounding
// only. Throws Error(kUsage) with all others.
std::vector<std::string> compare_bits(const BitKeys& checkpoint, const BitKeys& run,
                                      const std::vector<std::string>& allow, const std::string& where);

}  // namespace zg
