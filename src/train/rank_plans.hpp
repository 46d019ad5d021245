// Makes the plans of a process's ranks, with choices that are the same on all ranks of a run.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "ziggurat/comm/processes.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {

// Makes the plan of this process's rank number `local`, with the choices `asked`, or with its own choices.
using PlanOf = std::function<RunPlan(int local, const std::optional<RankChoices>& asked)>;

// One plan for each of this process's `ranks`, in order. The first rank of the first process chooses for all.
// With `each`, every rank chooses how far it gathers ahead and whether checkpoints pin state, and the minimum
// over all ranks is used, since pipeline stages differ in the room that they have. All processes call it
// together.
std::vector<RunPlan> plan_ranks(Processes& processes, int ranks, bool each, const PlanOf& plan_of);

}  // namespace zg
