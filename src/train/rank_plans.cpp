#include "train/rank_plans.hpp"

#include <algorithm>
#include <array>

namespace zg {

std::vector<RunPlan> plan_ranks(Processes& processes, int ranks, bool each, const PlanOf& plan_of) {
  std::vector<RunPlan> plans;
  const int choosing = each ? ranks : processes.number() == 0 ? 1 : 0;
  for (int r = 0; r < choosing; ++r) plans.push_back(plan_of(r, {}));
  RankChoices mine = plans.empty() ? RankChoices{} : plans.front().choices;
  for (const RunPlan& plan : plans) {
    mine.gather_ahead = std::min(mine.gather_ahead, plan.choices.gather_ahead);
    mine.pins = mine.pins && plan.choices.pins;
    mine.blocks = std::max(mine.blocks, plan.choices.blocks);
  }
  const std::array numbers{static_cast<double>(mine.gather_ahead), static_cast<double>(mine.blocks),
                           mine.pins ? 1.0 : 0.0};
  const std::vector<std::vector<double>> all = processes.all_gather(numbers);
  RankChoices choices{static_cast<std::int32_t>(all.front()[0]),
                      static_cast<BlockTiling>(static_cast<int>(all.front()[1])), all.front()[2] > 0};
  for (std::size_t p = 0; each && p < all.size(); ++p) {
    choices.gather_ahead = std::min(choices.gather_ahead, static_cast<std::int32_t>(all[p][0]));
    choices.blocks = std::max(choices.blocks, static_cast<BlockTiling>(static_cast<int>(all[p][1])));
    choices.pins = choices.pins && all[p][2] > 0;
  }
  for (int r = 0; r < choosing; ++r) {
    RunPlan& plan = plans[static_cast<std::size_t>(r)];
    if (!(plan.choices == choices)) plan = plan_of(r, choices);
  }
  for (int r = choosing; r < ranks; ++r) plans.push_back(plan_of(r, choices));
  return plans;
}

}  // namespace zg
