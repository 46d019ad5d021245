#include "train/optimizer_setup.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <map>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/device/ops.hpp"

namespace zg {

StateFormat state_format(const OptimizerConfig& config, DType weights) {
  StateFormat f;
  f.kind = config.kind;
  switch (config.kind) {
    case OptimizerKind::kAdam:
      f.moment_count = 2;
      break;
    case OptimizerKind::kSgd:
      f.moment_count = config.momentum > 0 ? 1 : 0;
      break;
    case OptimizerKind::kLion:
      f.moment_count = 1;
      break;
  }
  const bool small = config.state != StatePrecision::kFull;
  f.master = small && weights == DType::kBF16 ? MasterFormat::kSplit : MasterFormat::kFull;
  if (config.state == StatePrecision::kBf16) f.moments = MomentFormat::kBf16;
  if (config.state == StatePrecision::kInt8) f.moments = MomentFormat::kInt8;
  return f;
}

namespace {

// The patterns and groups that match some parameter.
struct Met {
  std::vector<std::vector<bool>> patterns;  // for each group: whether each pattern matched some name
  std::vector<bool> groups;                 // whether the group has some parameter

  explicit Met(const std::vector<ParamGroup>& all) : groups(all.size(), false) {
    for (const ParamGroup& group : all) patterns.emplace_back(group.patterns.size(), false);
  }
};

// The first group that matches, counted from 1. 0: none does.
int group_of(const std::vector<ParamGroup>& groups, const std::string& name, Met& met) {
  int found = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t p = 0; p < groups[g].patterns.size(); ++p) {
      if (fnmatch(groups[g].patterns[p].c_str(), name.c_str(), 0) != 0) continue;
      met.patterns[g][p] = true;  // even if an earlier group has the parameter
      if (found == 0) found = static_cast<int>(g) + 1;
    }
  }
  if (found > 0) met.groups[static_cast<std::size_t>(found - 1)] = true;
  return found > 0 && groups[static_cast<std::size_t>(found - 1)].frozen ? kFrozen : found;
}

void check_met(const std::vector<ParamGroup>& groups, const Met& met, const Model& model) {
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::string where = fmt::format("optimizer.param_groups.{}.params", g);
    for (std::size_t p = 0; p < groups[g].patterns.size(); ++p) {
      if (met.patterns[g][p]) continue;
      const Unit& block = model.block(0).unit();
      throw Error(
          Errc::kUsage, where, fmt::format("\"{}\" matches no parameter", groups[g].patterns[p]),
          fmt::format("the names are those of the weight files, e.g. \"{}\", \"{}\"; * matches any text",
                      block.params.front().name, block.params.back().name));
    }
    if (met.groups[g]) continue;
    throw Error(Errc::kUsage, where, "matches only parameters that earlier groups have taken",
                "the first group that matches holds: put this one before them");
  }
}

// A rank of an expert group does not see all names. So patterns are held against those of all experts, and
// the experts of all ranks must have the same groups, since ranks run the same program.
void meet_all_experts(const std::vector<ParamGroup>& groups, const Model& model, Met& met) {
  ModelConfig config = model.config();
  config.experts.in_unit = 1;
  const Model all(config, model.dtype(), host_ops());
  const std::int64_t own = model.shard().experts.count(config.experts.count);
  std::map<std::pair<std::int32_t, std::int64_t>, std::vector<int>> of_expert;  // by layer, place on a rank
  for (const Unit& unit : all.units()) {
    std::vector<int> found;
    for (const Param& param : unit.params) found.push_back(group_of(groups, param.name, met));
    if (!unit.is_experts()) continue;
    const auto [at, fresh] = of_expert.try_emplace({unit.layer, unit.first_expert % own}, found);
    if (fresh || at->second == found) continue;
    throw Error(Errc::kUsage, "optimizer.param_groups",
                fmt::format("treat {} unlike an expert that another rank has in its place (parallel.experts)",
                            unit.params.front().name),
                fmt::format("name the experts of a layer alike, or experts {} apart too, or set "
                            "parallel.experts to 1",
                            own));
  }
}

}  // namespace

std::vector<std::vector<int>> parameter_groups(const OptimizerConfig& config, const Model& model) {
  std::vector<std::vector<int>> groups;
  const bool adapted = model.config().lora.on();
  if (config.groups.empty() && !adapted) return groups;
  Met met(config.groups);
  bool trained = false;
  for (const Unit& unit : model.units()) {
    groups.emplace_back();
    for (const Param& param : unit.params) {
      // A run with adapters trains nothing else.
      const bool frozen = adapted && !param.adapter;
      groups.back().push_back(frozen ? kFrozen : group_of(config.groups, param.name, met));
      trained |= groups.back().back() != kFrozen;
    }
  }
  if (model.shard().experts.degree > 1 && !config.groups.empty()) meet_all_experts(config.groups, model, met);
  check_met(config.groups, met, model);
  if (!trained) {
    throw Error(Errc::kUsage, "optimizer.param_groups",
                "every parameter is frozen: there is nothing to train", "freeze fewer");
  }
  return groups;
}

UpdateRule update_rule(const RunConfig& config, std::int64_t updates) {
  const OptimizerConfig& o = config.optimizer;
  const ScheduleValue now = schedule_at(config.schedule, updates, o.lr, o.beta1);
  UpdateRule rule;
  rule.params.lr = now.lr;
  rule.params.beta1 = now.beta1;
  rule.params.beta2 = o.beta2;
  rule.params.eps = o.eps;
  rule.params.weight_decay = o.weight_decay;
  rule.params.decoupled = o.decoupled;
  rule.params.bias_correction = o.bias_correction;
  rule.params.momentum = o.momentum;
  rule.params.dampening = o.dampening;
  rule.params.nesterov = o.nesterov;
  rule.params.step = updates + 1;
  for (const ParamGroup& group : o.groups) rule.groups.push_back(group.rule);
  rule.decay_all = o.decay_all;
  rule.clip = config.gradient_clipping;
  return rule;
}

const char* optimizer_name(const OptimizerConfig& config) {
  switch (config.kind) {
    case OptimizerKind::kAdam:
      return config.decoupled ? "AdamW" : "Adam";
    case OptimizerKind::kSgd:
      return "SGD";
    case OptimizerKind::kLion:
      return "Lion";
  }
  return "?";
}

}  // namespace zg
