// A plan's description for users.
#include <algorithm>
#include <string>

#include "train/optimizer_setup.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/step/tile_elements.hpp"
#include "ziggurat/train/quantize.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {
namespace {

// Describes the tiles of layers and tables, if there are any.
std::string describe_tiles(const RunPlan& plan) {
  if (plan.tile_bytes() == 0) return "";
  const auto tiles = [](const Unit& unit) {
    return std::count_if(unit.tiles.begin(), unit.tiles.end(), [](const Tile& t) { return t.param >= 0; });
  };
  const auto bytes = [&](std::int64_t count) {
    return format_bytes(count * static_cast<std::int64_t>(size_of(plan.model->dtype())));
  };
  const Unit &layer = plan.model->largest_block().unit(), &embedding = plan.model->units().front(),
             &head = plan.model->units().back();
  std::string text = fmt::format("\ntiles      the {} of weights of each layer come in {} tiles",
                                 bytes(layer.adapted ? layer.tiles.back().first : layer.count), tiles(layer));
  if (embedding.in_tiles())
    text += fmt::format(", the {} of the embedding in {}", bytes(embedding.count), tiles(embedding));
  if (head.in_tiles()) text += fmt::format(", those of the output matrix in {}", tiles(head));
  return text + fmt::format(
                    ", of at most {} each{}; results agree with those of whole layers to rounding",
                    format_bytes(plan.tile_bytes()),
                    plan.config.tiers.tiles == TierConfig::Tiles::kOn ? "" : ", since whole ones do not fit");
}

std::string describe_update(const RunPlan& plan) {
  static constexpr const char* kWhen[] = {"deferred into the next forward",
                                          "early, in backward (no clipping)",
                                          "in a phase of its own (optimizer.overlap is off)"};
  const Layout& layout = *plan.layout;
  std::string when = kWhen[static_cast<int>(plan.programs->timing)];
  if (plan.programs->timing == UpdateTiming::kDeferred) {
    when += plan.config.gradient_clipping > 0 ? " (gradients are clipped)"
                                              : " (fp16: it is left out if gradients overflow)";
  }
  const std::int32_t units = layout.head_unit() + 1, on_device = layout.options.device_updates;
  const std::string where =
      on_device == units ? "on the device"
      : on_device == 0
          ? "on the host"
          : fmt::format("of {} of {} units on the device, of the others on the host", on_device, units);
  std::int64_t frozen = 0;
  for (std::size_t u = 0; u < layout.options.groups.size(); ++u) {
    const Unit& unit = plan.model->units()[u];
    for (std::size_t i = 0; i < unit.params.size(); ++i) {
      if (layout.options.groups[u][i] == kFrozen)
        frozen += plan.model->ranks_with_such(unit) * unit.params[i].whole_count();
    }
  }
  return fmt::format("{} with {:.3g} bytes of state per parameter, {}, {}{}",
                     optimizer_name(plan.config.optimizer), layout.state().bytes_per_element(), where, when,
                     frozen > 0 ? fmt::format("; {} parameters are frozen", frozen) : "");
}

std::string describe_source(const RunConfig& config) {
  if (config.model_from.empty()) return "from scratch";
  const auto& code = config.quantize.code;
  return fmt::format("from {}{}", config.base_name(), code ? fmt::format(" in {}", name_of(*code)) : "");
}

// Describes the adapters, if the run trains them.
std::string describe_adapters(const RunPlan& plan) {
  const Lora& lora = plan.model_config.lora;
  if (!lora.on()) return "";
  std::int64_t count = 0;
  for (const Unit& unit : plan.model->units()) {
    for (const Param& p : unit.params)
      count += p.adapter ? plan.model->ranks_with_such(unit) * p.whole_count() : 0;
  }
  return fmt::format("\nadapters   {}, {}{}; {:.3f} M of the parameters, which alone are trained",
                     shape_of(lora), arithmetic_of(lora),
                     plan.config.lora.from.empty() ? "" : ", from " + plan.config.lora.from,
                     static_cast<double>(count) / 1e6);
}

// Describes the form in which layers are kept, if it is not the one that they are computed with.
std::string describe_stored(const RunPlan& plan) {
  const Layout& layout = *plan.layout;
  if (layout.options.stored_weights != StoredWeights::kFp8) return "";
  std::int64_t codes = 0, elements = 0;
  for (std::int32_t t = 0; t < static_cast<std::int32_t>(layout.tiles.size()); ++t) {
    const Layout::TileTensors& tile = layout.tile(t);
    if (!layout.is_encoded(tile.unit) || tile.stored == Layout::kNone) continue;
    codes += layout.table.tensor(tile.stored).spec.count;
    elements += shard_elements(layout, t).count;
  }
  const DType dtype = plan.config.dtype;
  return fmt::format(
      "\nweights    matrices of layers in FP8, {} of layers in place of {} in {}; results differ",
      format_bytes(codes), format_bytes(elements * static_cast<std::int64_t>(size_of(dtype))),
      name_of(dtype));
}

}  // namespace

std::string RunPlan::describe() const {
  static constexpr const char* kPlaces[] = {"wherever there is room", "on the device",
                                            "no lower than the host", "as low as NVMe"};
  const ModelConfig& m = model_config;
  const std::string dropout = m.dropout == DropoutRates{}
                                  ? ""
                                  : fmt::format(", dropout {} of embeddings and {} of residual branches",
                                                m.dropout.embedding, m.dropout.residual);
  return fmt::format(
      "model      {} {}, {} layers of width {}, {:.1f} M parameters, {} weights{}{}\n"
      "state      {} (weights, gradients, optimizer); weights lie {}, optimizer state {}\n"
      "update     {}\n"
      "batch      {} sequences of {} tokens in {} micro-batch{}{}, {}, recomputation {}{}",
      title_of(m.arch), describe_source(config), m.layers, m.width,
      static_cast<double>(model->parameter_count()) / 1e6, name_of(config.dtype), m.tied ? ", tied head" : "",
      dropout, format_bytes(layout->state_bytes()), kPlaces[static_cast<int>(config.offload_param)],
      kPlaces[static_cast<int>(config.offload_optimizer)], describe_update(*this),
      config.data_ranks() * config.micro_batch * config.accumulation_steps, config.data.seq_len,
      config.accumulation_steps, config.accumulation_steps == 1 ? "" : "es",
      config.data_ranks() == 1 ? "" : " of each rank",
      config.parallel.pipeline > 1                       ? name_of(config.parallel.pipeline_schedule)
      : config.accumulation == Accumulation::kLayerMajor ? "layer-major"
                                                         : "micro-batch-major",
      config.recompute ? "on" : "off",
      describe_tiles(*this) + describe_stored(*this) + describe_adapters(*this));
}

}  // namespace zg
