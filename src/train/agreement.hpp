// What all ranks of a run must have in common.
#pragma once
#include <string>
#include <vector>

#include "ziggurat/train/run_plan.hpp"

namespace zg {

// A line for each part of the configuration on which results or the order of calls depend, and for each call
// that all ranks make. Not what may differ: budgets, drives, threads, outputs.
std::vector<std::string> agreement_of(const RunPlan& plan);

}  // namespace zg
