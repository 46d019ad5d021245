// A run's description, before its first step.
#include "train/run_checkpoints.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg {
namespace {

// Describes how the ranks are numbered, if the run is parallel along several axes.
std::string grid_text(const RankPlace& place) {
  const ParallelDegrees& p = place.parts;
  const std::int64_t axes = (p.tensor > 1) + (p.context > 1) + (place.data_ranks() > 1) + (p.stages > 1);
  if (axes < 2) return "";
  return fmt::format("\ngrid       tensor {} x context {} x data {} x pipeline {}, the first axis fastest",
                     p.tensor, p.context, place.data_ranks(), p.stages);
}

}  // namespace

std::string Trainer::describe() const {
  const Layout& layout = *plan().layout;
  std::string text = plan().describe();
  if (ranks() > 1) {
    const Sharding& s = layout.options.sharding;
    static constexpr const char* kKept[] = {"gathered for forward and backward", "gathered once a step"};
    const RankPlace place = layout.options.place();
    text += fmt::format(
        "\nranks      {}{}{}, {}", ranks(),
        processes_.count() > 1 ? fmt::format(" in {} processes", processes_.count()) : "",
        place.parts.tensor == 1 ? ""
                                : fmt::format(", {} with the parts of each layer{}", place.parts.tensor,
                                              plan().model->shard().sequence ? " and of the sequence" : ""),
        s.shards == 1 ? layout.options.is_pipeline() ? "each with the weights and the state of its stage"
                                                     : "each with all weights and state"
                      : fmt::format("in groups of {} that hold {} once; weights are {}, {}", s.shards,
                                    layout.options.is_pipeline() ? "their stage" : "everything",
                                    kKept[s.keep_weights ? 1 : 0],
                                    plan().programs->gather_ahead > 0 ? "one unit ahead of their use"
                                                                      : "just before their use"));
  }
  text += grid_text(layout.options.place());
  if (const ParallelDegrees& parts = layout.options.parts; parts.context > 1) {
    text += fmt::format("\nsequences  in parts, one on each of {} ranks ({})", parts.context,
                        parts.context_method == ContextMethod::kRing ? "ring" : "ulysses");
  }
  if (const int experts = layout.options.parts.experts; experts > 1) {
    text += fmt::format("\nexperts    {} of each layer on each of {} ranks, which exchange their tokens",
                        plan().model_config.experts.count / experts, experts);
  }
  if (layout.options.is_pipeline()) {
    const PipelineShape shape = layout.options.pipeline_shape();
    text += fmt::format("\npipeline   {} stages of {} chunk{} each, {}, bubble {:.1f}% of a step; layers",
                        shape.stages, shape.chunks, shape.chunks == 1 ? "" : "s", name_of(shape.schedule),
                        100 * plan().bubble_share());
    for (std::size_t i = 0; i + 1 < layout.first_layer.size(); ++i)
      text +=
          fmt::format("{} {}-{}", i == 0 ? "" : " |", layout.first_layer[i], layout.first_layer[i + 1] - 1);
  }
  for (const OpenGpu& gpu : gpus_) text += "\ndevice     " + gpu.device->describe();
  if (!gpus_.empty() && !comm_.empty()) text += "\nexchange   " + comm_.front()->describe();
  text += fmt::format("\ntiers      device {} ({} workspace), host {}", format_bytes(totals().budgets.device),
                      format_bytes(ranks() * layout.workspace_bytes()), format_bytes(totals().budgets.host));
  if (has_drives()) {
    text += fmt::format(", nvme {} on {} path(s){}\nI/O        {}", format_bytes(totals().nvme),
                        layout.table.drives(),
                        layout.options.state_versions > 1
                            ? fmt::format(", {} versions of the state", layout.options.state_versions)
                            : "",
                        node_->io()->describe());
  }
  if (!ranks_.empty() && plan().budgets.host > 0) {
    const HostMemoryReport got = node_->host().report();
    text += fmt::format("\nmemory     {} of the host tier taken, {} in huge pages", format_bytes(got.taken),
                        format_bytes(got.huge));
  }
  text += "\nsaves      " + checkpoints_->describe();
  return text + "\nthreads    " + (node_ != nullptr ? node_->cores() : plan().cores).describe();
}

}  // namespace zg
