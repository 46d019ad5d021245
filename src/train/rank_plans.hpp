// The plans of a process's ranks, which agree on what all ranks of a run do alike.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "ziggurat/comm/processes.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {

// The plan of this process's rank number `local`, as asked, or as it chooses itself.
using PlanOf = std::function<RunPlan(int local, const std::optional<RankChoices>& asked)>;

// One plan for each of this process's `ranks`, in their order. The first rank of the first process chooses
// for all; with `each` every rank chooses how far it gathers ahead, and whether checkpoints pin state, and
// the least of all processes' holds, since stages of a pipeline differ in what they have room for. All
// processes call it together.
std::vector<RunPlan> plan_ranks(Processes& processes, int ranks, bool each, const PlanOf& plan_of);

}  // namespace zg
