// Settings that must be the same on all ranks of a run.
#pragma once
#include <string>
#include <vector>

#include "ziggurat/train/run_plan.hpp"

namespace zg {

// A line for each part of the configuration on which results or the order of collective calls depend, and for
// each of these calls. Settings that may differ are left out: budgets, drives, threads, outputs.
std::vector<std::string> agreement_of(const RunPlan& plan);

}  // namespace zg
