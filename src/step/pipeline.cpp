#include "ziggurat/step/pipeline.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

using Kind = PipelineStep::Kind;
using Steps = std::vector<PipelineStep>;

int group_of(const PipelineShape& s) {
  if (s.group > 0) return s.group;
  return s.schedule == PipelineSchedule::kDepthFirst ? s.stages : s.micro_batches;
}

// Pairs of chunk and micro-batch in the order of a stage's forwards. Its backwards have the same order, with
// the chunks reversed.
std::vector<std::pair<int, int>> table_of(const PipelineShape& s) {
  const int group = std::min(group_of(s), s.micro_batches);
  std::vector<std::pair<int, int>> table;
  for (int first = 0; first < s.micro_batches; first += group) {
    for (int c = 0; c < s.chunks; ++c) {
      for (int m = first; m < std::min(first + group, s.micro_batches); ++m) table.emplace_back(c, m);
    }
  }
  return table;
}

// The number of forwards of a stage before it alternates forwards and backwards.
int warm_up_of(const PipelineShape& s, int stage) {
  const int all = s.micro_batches * s.chunks, behind = s.stages - stage - 1;
  switch (s.schedule) {
    case PipelineSchedule::kBreadthFirst:
    case PipelineSchedule::kDepthFirst:
      return std::min(2 * behind + (s.chunks - 1) * group_of(s), all);
    case PipelineSchedule::kOneForwardOneBackward:
    case PipelineSchedule::kZeroBubble:
      return std::min(behind, all);
    case PipelineSchedule::kGPipe:
      break;
  }
  return all;
}

// The 1F1B order, with each weight gradient `stage` micro-batches after its input gradient. So the first
// stage, which waits least, holds no more activations than with 1F1B, and the other stages hold as many as
// the first.
Steps zero_bubble_steps(const PipelineShape& s, int stage) {
  Steps steps;
  const int all = s.micro_batches, warm_up = warm_up_of(s, stage);
  for (int m = 0; m < warm_up; ++m) steps.push_back({Kind::kForward, 0, m});
  for (int m = 0; m < all; ++m) {
    if (warm_up + m < all) steps.push_back({Kind::kForward, 0, warm_up + m});
    steps.push_back({Kind::kInputGradient, 0, m});
    if (m >= stage) steps.push_back({Kind::kWeightGradient, 0, m - stage});
  }
  for (int m = std::max(0, all - stage); m < all; ++m) steps.push_back({Kind::kWeightGradient, 0, m});
  return steps;
}

double duration(Kind kind, const PipelineTimes& times) {
  switch (kind) {
    case Kind::kForward:
      return times.forward;
    case Kind::kBackward:
      return times.input_gradient + times.weight_gradient;
    case Kind::kInputGradient:
      return times.input_gradient;
    case Kind::kWeightGradient:
      break;
  }
  return times.weight_gradient;
}

// Simulates the steps of all stages: each step runs as soon as its stage is free and its inputs exist.
class Simulation {
 public:
  Simulation(const PipelineShape& shape, PipelinePass pass, bool tied, const PipelineTimes& times)
      : shape_(shape), tied_(tied), training_(pass == PipelinePass::kTraining), times_(times) {
    for (int s = 0; s < shape.stages; ++s) steps_.push_back(pipeline_steps(shape, s, pass));
    next_.resize(steps_.size());
    free_.resize(steps_.size());
    forward_.assign(static_cast<std::size_t>(shape.parts() * shape.micro_batches), kNever);
    backward_ = forward_;
  }

  std::vector<PipelineEvent> run() {
    for (int stage = earliest(); stage >= 0; stage = earliest()) do_next(stage);
    for (std::size_t s = 0; s < steps_.size(); ++s)
      ZG_ASSERT(next_[s] == steps_[s].size(), "stage {} of a pipeline waits for ever", s);
    // Tensors are passed before the steps that begin at the same moment.
    std::stable_sort(events_.begin(), events_.end(), [](const PipelineEvent& a, const PipelineEvent& b) {
      const auto order = [](const PipelineEvent& e) {
        return std::pair(e.begin, e.kind == PipelineEvent::Kind::kStep);
      };
      return order(a) < order(b);
    });
    return std::move(events_);
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  std::size_t at(int part, int m) const { return static_cast<std::size_t>(part * shape_.micro_batches + m); }
  const PipelineStep& next_of(int stage) const {
    const auto s = static_cast<std::size_t>(stage);
    return steps_[s][next_[s]];
  }
  // When the stage can begin its next step.
  double begin_of(int stage) const {
    const PipelineStep& step = next_of(stage);
    const int part = shape_.part(stage, step.chunk), m = step.micro_batch;
    double begin = free_[static_cast<std::size_t>(stage)];
    if (step.kind == Kind::kForward) return part == 0 ? begin : std::max(begin, forward_[at(part - 1, m)]);
    if (step.kind == Kind::kWeightGradient) return std::max(begin, backward_[at(part, m)]);
    begin = std::max(begin, forward_[at(part, m)]);
    return part + 1 == shape_.parts() ? begin : std::max(begin, backward_[at(part + 1, m)]);
  }
  int earliest() const {
    int best = -1;
    double begin = kNever;
    for (int s = 0; s < shape_.stages; ++s) {
      if (next_[static_cast<std::size_t>(s)] == steps_[static_cast<std::size_t>(s)].size()) continue;
      if (const double b = begin_of(s); b < begin) best = s, begin = b;
    }
    return best;
  }
  void do_next(int stage) {
    const auto s = static_cast<std::size_t>(stage);
    const PipelineStep step = next_of(stage);
    const double begin = begin_of(stage), end = begin + duration(step.kind, times_);
    const int part = shape_.part(stage, step.chunk), last = shape_.stages - 1;
    using Passed = PipelineEvent::Kind;
    events_.push_back({Passed::kStep, stage, -1, step, begin, end});
    free_[s] = end;
    ++next_[s];
    const auto pass = [&](Passed what, int to) { events_.push_back({what, stage, to, step, end, end}); };
    const bool of_first = step.micro_batch == 0, of_last = step.micro_batch + 1 == shape_.micro_batches;
    if (step.kind == Kind::kForward) {
      forward_[at(part, step.micro_batch)] = end;
      if (part + 1 < shape_.parts()) pass(Passed::kActivation, (stage + 1) % shape_.stages);
      if (tied_ && part == 0 && of_first) pass(Passed::kTable, last);
    } else if (step.kind != Kind::kWeightGradient) {
      backward_[at(part, step.micro_batch)] = end;
      if (part > 0) pass(Passed::kGradient, (stage + last) % shape_.stages);
      if (tied_ && training_ && part + 1 == shape_.parts() && of_last) pass(Passed::kTableGradient, 0);
    }
  }

  const PipelineShape& shape_;
  const bool tied_, training_;
  const PipelineTimes& times_;
  std::vector<Steps> steps_;
  std::vector<std::size_t> next_;
  std::vector<double> free_;
  std::vector<double> forward_, backward_;  // [chunk of the pipeline][micro-batch]: when its result exists
  std::vector<PipelineEvent> events_;
};

}  // namespace

const char* name_of(PipelineSchedule schedule) {
  static constexpr const char* kNames[] = {"breadth_first", "depth_first", "1f1b", "gpipe", "zero_bubble"};
  return kNames[static_cast<int>(schedule)];
}

std::string problem_of(const PipelineShape& s) {
  const int group = group_of(s);
  const bool plain =
      s.schedule == PipelineSchedule::kOneForwardOneBackward || s.schedule == PipelineSchedule::kZeroBubble;
  if (plain && s.chunks > 1)
    return fmt::format("{} has one chunk a stage, not {}", name_of(s.schedule), s.chunks);
  if (s.stages == 1 || s.chunks == 1) return "";
  if (s.micro_batches < s.stages)
    return fmt::format("{} chunks a stage need at least as many micro-batches as the {} stages, not {}",
                       s.chunks, s.stages, s.micro_batches);
  if (s.schedule == PipelineSchedule::kGPipe) return "";
  const int rest = s.micro_batches % group;
  if (group < s.stages || group > s.micro_batches || (rest != 0 && rest < s.stages))
    return fmt::format(
        "of {} micro-batches in groups of {}, some group has fewer than the {} stages, or "
        "more than there are",
        s.micro_batches, group, s.stages);
  return "";
}

std::vector<PipelineStep> pipeline_steps(const PipelineShape& s, int stage, PipelinePass pass) {
  const auto table = table_of(s);
  Steps steps;
  const auto forward = [&](std::size_t k) {
    steps.push_back({Kind::kForward, table[k].first, table[k].second});
  };
  if (pass == PipelinePass::kEvaluation) {
    for (std::size_t k = 0; k < table.size(); ++k) forward(k);
    return steps;
  }
  if (s.schedule == PipelineSchedule::kZeroBubble) return zero_bubble_steps(s, stage);
  const auto backward = [&](std::size_t k) {
    steps.push_back({Kind::kBackward, s.chunks - 1 - table[k].first, table[k].second});
  };
  const auto warm_up = static_cast<std::size_t>(warm_up_of(s, stage));
  for (std::size_t k = 0; k < warm_up; ++k) forward(k);
  for (std::size_t k = warm_up; k < table.size(); ++k) forward(k), backward(k - warm_up);
  for (std::size_t k = table.size() - warm_up; k < table.size(); ++k) backward(k);
  return steps;
}

int live_activations(std::span<const PipelineStep> steps) {
  int live = 0, most = 0;
  for (const PipelineStep& step : steps) {
    if (step.kind == Kind::kForward) most = std::max(most, ++live);
    if (step.kind == Kind::kBackward || step.kind == Kind::kWeightGradient) --live;
  }
  return most;
}

double bubble_formula(const PipelineShape& s) {
  const double p = s.stages, all = s.micro_batches;
  if (s.schedule == PipelineSchedule::kZeroBubble) return (p - 1 + std::max(0.0, p - all)) / (3 * all);
  return (p - 1) / (all * s.chunks);
}

std::vector<PipelineEvent> pipeline_events(const PipelineShape& shape, PipelinePass pass, bool tied,
                                           const PipelineTimes& times) {
  return Simulation(shape, pass, tied, times).run();
}

int pipeline_buffers(std::span<const PipelineEvent> events, const PipelineShape& shape, int stage, int chunk,
                     PipelineBuffer which) {
  using Passed = PipelineEvent::Kind;
  const int part = shape.part(stage, chunk);
  const bool of_activation = which == PipelineBuffer::kActivation, of_kept = which == PipelineBuffer::kKept;
  const Passed comes = of_activation ? Passed::kActivation : Passed::kGradient;
  const auto all = static_cast<std::size_t>(shape.micro_batches);
  std::vector<std::size_t> from(all, events.size()), to(all, 0);
  std::size_t table = 0;
  for (std::size_t i = 0; i < events.size(); ++i) {
    const PipelineEvent& e = events[i];
    const auto m = static_cast<std::size_t>(e.step.micro_batch);
    if (e.kind == Passed::kTableGradient && part == 0 && which == PipelineBuffer::kGradient) table = i;
    const int of = shape.part(e.stage, e.step.chunk);
    const bool is_own = of == part && e.kind == Passed::kStep;
    const bool is_backward = is_own && e.step.kind != Kind::kForward;
    const bool is_second_half = is_own && e.step.kind == Kind::kWeightGradient;
    const bool arrives = !of_kept && e.kind == comes && of == (of_activation ? part - 1 : part + 1);
    const bool is_passed = of == part && e.kind == comes && !of_activation && !of_kept;
    const bool is_used = of_activation ? is_own : of_kept ? is_backward : is_backward && !is_second_half;
    if (arrives || is_passed || is_used) {
      from[m] = std::min(from[m], i);
      to[m] = std::max(to[m], i);
    }
  }
  int most = 1;
  for (std::size_t m = 0, oldest = 0; m < all; ++m) {
    while (oldest < m && std::max(to[oldest], table) < from[m]) ++oldest;
    most = std::max(most, static_cast<int>(m - oldest) + 1);
  }
  return most;
}

std::vector<std::int32_t> split_layers(std::span<const double> layer_costs, double before, double after,
                                       int parts) {
  const auto layers = static_cast<std::int32_t>(layer_costs.size());
  ZG_ASSERT_LE(parts, layers);
  struct Cost {
    double most = std::numeric_limits<double>::infinity(), squares = 0;
    auto operator<=>(const Cost&) const = default;
  };
  const auto n = static_cast<std::size_t>(layers) + 1, p = static_cast<std::size_t>(parts);
  // best[l]: the cost of the first l layers in the chunks placed so far; begin[i][l]: where chunk i then
  // begins.
  std::vector<Cost> best(n);
  std::vector<std::vector<std::int32_t>> begin(p, std::vector<std::int32_t>(n));
  best[0] = {0, 0};
  std::vector<double> before_layer(n);  // the summed costs of all layers before each layer
  std::partial_sum(layer_costs.begin(), layer_costs.end(), before_layer.begin() + 1);
  for (std::size_t i = 0; i < p; ++i) {
    std::vector<Cost> with(n);
    for (std::size_t end = i + 1; end + (p - 1 - i) < n; ++end) {
      for (std::size_t first = i; first < end; ++first) {
        if (i + 1 == p && end + 1 != n) break;
        const double c =
            before_layer[end] - before_layer[first] + (i == 0 ? before : 0) + (i + 1 == p ? after : 0);
        const Cost all{std::max(best[first].most, c), best[first].squares + c * c};
        if (all < with[end]) with[end] = all, begin[i][end] = static_cast<std::int32_t>(first);
      }
    }
    best = std::move(with);
  }
  std::vector<std::int32_t> first(p + 1, layers);
  for (std::size_t i = p; i > 0; --i) first[i - 1] = begin[i - 1][static_cast<std::size_t>(first[i])];
  return first;
}

std::vector<std::int32_t> layers_by_time(const PipelineShape& shape, std::span<const std::int32_t> first,
                                         std::span<const double> seconds) {
  constexpr double kWorthIt = 0.9;
  const auto stages = static_cast<std::size_t>(shape.stages), last = stages - 1;
  ZG_ASSERT_EQ(seconds.size(), stages);
  const auto layers_of = [&](std::span<const std::int32_t> split) {
    std::vector<double> layers(stages);
    for (std::size_t part = 0; part + 1 < split.size(); ++part)
      layers[part % stages] += split[part + 1] - split[part];
    return layers;
  };
  const std::vector<double> had = layers_of(first);
  const std::size_t begin = stages > 2 ? 1 : 0, end = stages > 2 ? last : 1;
  double time = 0, layers = 0;
  for (std::size_t s = begin; s < end; ++s) time += seconds[s], layers += had[s];
  const double layer = time / layers;
  const double before = std::max(0.0, seconds[0] - layer * had[0]),
               after = std::max(0.0, seconds[last] - layer * had[last]);
  const auto most = [&](std::span<const std::int32_t> split) {
    double most_of = 0;
    const std::vector<double> of = layers_of(split);
    for (std::size_t s = 0; s < stages; ++s)
      most_of = std::max(most_of, layer * of[s] + (s == 0 ? before : 0) + (s == last ? after : 0));
    return most_of;
  };
  // A layer costs 1, so that equally many layers cost exactly the same.
  const double unit = layer > 0 ? layer : 1;
  const std::vector<double> costs(static_cast<std::size_t>(first.back()), layer / unit);
  const std::vector<std::int32_t> split = split_layers(costs, before / unit, after / unit, shape.parts());
  std::vector<std::int32_t> counts;
  if (!(most(split) < kWorthIt * *std::max_element(seconds.begin(), seconds.end()))) return counts;
  for (std::size_t part = 0; part + 1 < split.size(); ++part) counts.push_back(split[part + 1] - split[part]);
  return counts;
}

std::string drawing_of(const PipelineShape& shape, int width) {
  const auto events = pipeline_events(shape, PipelinePass::kTraining, false);
  const auto cell = static_cast<int>(std::to_string(shape.micro_batches - 1).size()) + 2;
  std::string text;
  for (int s = 0; s < shape.stages; ++s) {
    std::string row = fmt::format("stage {:<4}", s);
    double now = 0;
    const auto add = [&](double until, const std::string& what) {
      for (; now < until; ++now) row += fmt::format("{:<{}}", what, cell);
    };
    for (const PipelineEvent& e : events) {
      if (e.kind != PipelineEvent::Kind::kStep || e.stage != s) continue;
      add(e.begin, ".");
      const char first = e.step.kind == Kind::kForward ? 'a' : 'A';
      const bool is_weight = e.step.kind == Kind::kWeightGradient;  // a stage then has one chunk
      add(e.end, fmt::format("{}{}", is_weight ? 'W' : static_cast<char>(first + e.step.chunk % 26),
                             e.step.micro_batch));
    }
    while (!row.empty() && row.back() == ' ') row.pop_back();
    if (static_cast<int>(row.size()) > width)
      row = row.substr(0, static_cast<std::size_t>(width) - 4) + " ...";
    text += row + "\n";
  }
  return text;
}

}  // namespace zg
