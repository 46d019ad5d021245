#include "ziggurat/train/run_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "train/adapter_setup.hpp"
#include "train/drives.hpp"
#include "train/optimizer_setup.hpp"
#include "train/run_checks.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/depth.hpp"
#include "ziggurat/model/hf.hpp"
#include "ziggurat/step/pinned_weights.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {
namespace {

// The most checkpoints that can be pinned at once: a tensor has at most 64 versions on NVMe.
constexpr std::int64_t kMostKept = 63;

UpdateTiming update_timing(const RunConfig& config) {
  if (!config.optimizer.overlap) return UpdateTiming::kSeparate;
  // The clip factor and whether a step is skipped are known only once all gradients are known.
  const bool verdict = config.gradient_clipping > 0 || config.dtype == DType::kF16;
  return verdict ? UpdateTiming::kDeferred : UpdateTiming::kEarly;
}

// Makes a plan in stages, each of which needs the results of the stages before it.
class Planner {
 public:
  Planner(RunPlan& plan, const Hardware& hardware)
      : plan_(plan),
        config_(plan.config),
        hardware_(hardware),
        ranks_(plan.config.device.ranks * hardware.processes) {
    if (config_.tiers.host) host_ = *config_.tiers.host / ranks_;
  }

  void run(const std::optional<RankChoices>& asked) {
    may_pin_ = !asked || asked->pins, must_pin_ = asked && asked->pins;
    must_be_in_tiles_ =
        asked ? asked->blocks == BlockTiling::kInTiles : config_.tiers.tiles == TierConfig::Tiles::kOn;
    check_run(config_, plan_.model_config);
    make_model(must_be_in_tiles_ ? BlockTiling::kInTiles : BlockTiling::kWhole);
    make_layout();
    find_budgets();
    choose_programs(asked);
    check_tiles();
    assign_threads();
  }

 private:
  const Layout& layout() const { return *plan_.layout; }
  const OpSizes& op_sizes() const { return hardware_.gpu ? *hardware_.gpu->sizes : host_ops(); }

  // Bytes of the device budget that do not hold tensors.
  std::int64_t beside_tensors() const {
    return layout().workspace_charge() + (hardware_.gpu ? hardware_.gpu->staging : 0);
  }

  // The largest device budget. The host device shares the machine's memory with the host tier.
  std::int64_t device_limit() const {
    if (hardware_.gpu) return hardware_.gpu->memory;
    return config_.tiers.device.value_or(hardware_.memory.left() / 2 / ranks_);
  }

  void make_model(BlockTiling blocks) {
    plan_.choices.blocks = blocks;
    // Each chunk of logits adds to the gradient of the output matrix, so their size is part of the
    // arithmetic: it must not depend on budgets.
    const std::int64_t logits = op_sizes().logits_bytes();
    Ops* const ops = hardware_.gpu ? hardware_.gpu->ops : &host_ops();
    codes_.clear();
    const RankPlace place = config_.place_of(plan_.rank);
    const ParallelDegrees& parts = place.parts;
    const TensorShard part{
        parts.tensor, parts.tensor_part, config_.parallel.sequence, {parts.experts, place.expert_part()}};
    plan_.model =
        ops != nullptr
            ? std::make_unique<Model>(plan_.model_config, config_.dtype, *ops, logits, part, blocks)
            : std::make_unique<Model>(plan_.model_config, config_.dtype, op_sizes(), logits, part, blocks);
  }

  void make_layout() {
    LayoutOptions o;
    o.micro_batch = {config_.micro_batch, config_.data.seq_len / config_.parallel.context};
    o.micro_batches = config_.accumulation_steps;
    o.accumulation = config_.accumulation;
    o.recompute = config_.recompute;
    o.balance = config_.balance;
    o.gradient = config_.gradient_dtype;
    o.weights = config_.offload_param;
    o.optimizer = config_.offload_optimizer;
    o.activations = config_.offload_activation;
    o.drives = static_cast<int>(config_.tiers.nvme.size());
    const RankPlace place = config_.place_of(plan_.rank);
    o.sharding = place.sharding;
    o.parts = place.parts;
    o.pipeline = {config_.parallel.pipeline_schedule, config_.parallel.chunks,
                  config_.parallel.pipeline_group};
    o.stage_layers = config_.parallel.stage_layers;
    o.stored_weights = config_.tiers.weights;
    o.weight_bits = config_.quantize_weights ? 8 : 0;
    o.gradient_bits =
        config_.quantize_gradients ? static_cast<int>(config_.parallel.quantized_gradient_bits) : 0;
    if (hardware_.gpu) o.device_granule = hardware_.gpu->granule;
    o.state = state_format(config_.optimizer, config_.dtype);
    o.groups = parameter_groups(config_.optimizer, *plan_.model);
    if (config_.lora.base == LoraConfig::Base::kCodes) {
      if (codes_.empty()) codes_ = codes_of_base(config_, *plan_.model);
      o.codes = codes_;
    }
    o.saves = config_.checkpoint.asked();
    plan_.copies_because.clear(), plan_.choices.pins = false;
    o.micro_batch.documents = config_.data.packing == Packing::kDocuments;
    // With small budgets segments must be small, since several must fit at once.
    const std::int64_t host = host_.value_or(kGiB);
    o.state_segment_bytes = std::clamp<std::int64_t>(host / 24 / 65536 * 65536, 3 * 65536, 12 * kMiB);
    plan_.layout = std::make_unique<Layout>(*plan_.model, o);
    o.device_updates = device_units_.value_or(device_updates());
    if (o.device_updates > 0) plan_.layout = std::make_unique<Layout>(*plan_.model, o);
    if (pins_state(o)) return;
    if (o.drives > 0 && config_.aio.backend != io::Backend::kRam) {
      o.state_versions = 2;
      auto twice = std::make_unique<Layout>(*plan_.model, o);
      if (drives_have_room(ranks_ * twice->table.nvme_bytes())) plan_.layout = std::move(twice);
    }
  }

  // Makes the layout for checkpoints that pin the state on the drives, if that is asked for and possible.
  // Returns whether it did.
  bool pins_state(LayoutOptions o) {
    using State = CheckpointConfig::State;
    const CheckpointConfig& asked = config_.checkpoint;
    if (!asked.asked() || asked.state == State::kCopy) return false;
    std::string& why = plan_.copies_because;
    o.saves = false, o.pins = true;
    o.state_versions = static_cast<int>(std::min<std::int64_t>(asked.most_kept(), kMostKept)) + 1;
    auto layout = std::make_unique<Layout>(*plan_.model, o);
    why = may_pin_ ? why_not_pinned(*layout) : "another rank cannot pin its state";
    const std::int64_t bytes = ranks_ * layout->table.nvme_bytes();
    if (why.empty() && !must_pin_ && !drives_have_room(bytes, asked.state == State::kPin ? 1 : 2)) {
      why = fmt::format("the drives have no room for {} versions of the state, {} with all else",
                        o.state_versions, format_bytes(bytes));
    }
    if (why.empty()) {
      plan_.layout = std::move(layout);
      plan_.choices.pins = true;
      return true;
    }
    if (asked.state == State::kPin) {
      throw Error(Errc::kUsage, "checkpoint.state", "is \"pin\", but " + why,
                  "say \"copy\", which writes all state into the checkpoint, or \"auto\"");
    }
    // Without a file to pin state in, nobody expects pinning, so there is nothing to explain.
    if (o.drives == 0 || config_.aio.backend == io::Backend::kRam) why.clear();
    return false;
  }

  // Why state cannot be pinned with the candidate `layout`; empty: it can.
  std::string why_not_pinned(const Layout& layout) const {
    if (config_.tiers.nvme.empty()) return "tiers.nvme names no drive";
    if (config_.aio.backend == io::Backend::kRam) return "aio.backend is ram, which has no files";
    if (config_.processes > hardware_.processes) return "the run's processes are on several machines";
    if (!config_.aio.verify) return "aio.verify is off, and pinned state needs its checksums";
    if (const std::int64_t more = config_.checkpoint.most_kept() - kMostKept; more > 0)
      return fmt::format("checkpoint.keep is more than {}", config_.checkpoint.keep - more);
    const auto reaches_drives = [&](TensorId id) {
      return id == Layout::kNone || layout.table.tensor(id).spec.lowest == Tier::kNvme;
    };
    for (std::int32_t t = 0; t < static_cast<std::int32_t>(layout.tiles.size()); ++t) {
      if (!reaches_drives(layout.tile(t).state))
        return "some of the state may not be demoted to the drives (offload_optimizer)";
      if (pins_weight(layout, t) && !reaches_drives(layout.tile(t).stored))
        return "some of the weights may not be demoted to the drives (offload_param), and are split or "
               "frozen";
    }
    return {};
  }

  // Whether the drives have room for `bytes`, for example two versions of the optimizer state, so that a
  // write never overwrites the only one. The room is the files' stated sizes or, if none is stated, 1 /
  // `part` of the free space.
  bool drives_have_room(std::int64_t bytes, std::int64_t part = 2) const {
    std::vector<DriveSpace> space;
    for (const Hardware::Drive& drive : hardware_.drives)
      space.push_back({drive.space.free_bytes / part, drive.space.file_system});
    try {
      (void)drives_for(config_.tiers.nvme, space, bytes);
      return true;
    } catch (const Error&) {  // opening the drives will report the error
      return false;
    }
  }

  // The bytes of each budget that are left free for moves in flight. Computed from sizes only, not from
  // rates, so that a plan made on another machine predicts the same traffic.
  Budgets read_ahead(const Budgets& budgets, const StepPrograms& programs) const {
    if (const std::optional<double> share = config_.tiers.read_ahead) {
      const auto of = [&](std::int64_t bytes) {
        return static_cast<std::int64_t>(*share * static_cast<double>(bytes));
      };
      return {of(budgets.device), of(budgets.host), budgets.direct};
    }
    // The smallest queue depth decides, for each byte left free costs two bytes moved in every step. A deeper
    // queue makes drives faster without more room.
    const AioConfig& aio = config_.aio;
    const std::int64_t depth =
        aio.queue_depth > 0 ? aio.queue_depth : io::queue_depth_within(0, drives(), aio.block_size);
    return read_ahead_of(layout().table, programs, budgets,
                         {2 * TensorStore::kCopiesInFlight, depth * aio.block_size * drives()});
  }

  std::int64_t drives() const { return static_cast<std::int64_t>(config_.tiers.nvme.size()); }
  // Blocks in flight on a drive if each rank has `host` bytes of host memory.
  int queue_depth(std::int64_t host) const {
    const AioConfig& aio = config_.aio;
    if (aio.queue_depth > 0) return aio.queue_depth;
    return io::queue_depth_within(host * config_.device.ranks, drives(), aio.block_size);
  }

  // The number of units that are updated on the device, which then holds their state. All units, if the user
  // wants the state on the device or if everything fits there. Otherwise the first units, since the next
  // forward waits for them: a configured share of the parameters, or as many units as fit besides the
  // weights, gradients and activations, which are used more often per byte.
  std::int32_t device_updates() const {
    const OffloadTarget wanted = config_.offload_optimizer;
    const std::int32_t units = layout().head_unit() + 1;
    if (wanted == OffloadTarget::kDevice) return units;
    if (wanted != OffloadTarget::kAuto) return units_within(1 - config_.host_update_share);
    const std::int64_t device = device_limit();
    const auto state_of = [&](std::int32_t u) {
      std::int64_t charge = 0;
      for (std::int32_t t = layout().first_tile(u); t < layout().first_tile(u + 1); ++t) {
        for (std::int32_t i = 0; i < layout().state_segments(t); ++i)
          charge += layout().table.segment(layout().state_segment(t, i)).device_charge;
      }
      return charge;
    };
    std::int64_t used = beside_tensors() + layout().table.total_charge(Tier::kDevice);
    for (std::int32_t u = 0; u < units; ++u) used -= state_of(u);
    const StepPrograms programs(layout(), update_timing(config_));
    const std::int64_t room = device - read_ahead({device, 0}, programs).device;
    std::int32_t n = 0;
    for (; n < units; ++n) {
      used += state_of(n);
      if (used > (n + 1 == units ? device : room)) break;
    }
    return n;
  }

  // The largest number of leading units that together have at most this share of the optimizer state.
  std::int32_t units_within(double share) const {
    const std::int32_t units = layout().head_unit() + 1;
    std::int64_t all = 0, sum = 0;
    for (std::int32_t u = 0; u < units; ++u) all += layout().unit_state_elements(u);
    const std::int64_t most = std::llround(share * static_cast<double>(all));
    std::int32_t n = 0;
    if (most == 0) return n;  // frozen units have no state, and do not count
    while (n < units && (sum += layout().unit_state_elements(n)) <= most) ++n;
    return n;
  }

  // Budgets into which all tensors fit.
  Budgets everything() const {
    return {layout().table.total_charge(Tier::kDevice), layout().table.total_charge(Tier::kHost)};
  }

  // A tier without a configured budget gets as much as the run can use and the machine has.
  void find_budgets() {
    const Budgets all = everything();
    const std::int64_t device = all.device + beside_tensors(), available = hardware_.memory.left() / ranks_;
    const TierConfig& tiers = config_.tiers;
    const std::int64_t host = tiers.host.value_or(0);  // for all ranks of this machine
    Budgets& budgets = plan_.budgets;
    if (hardware_.gpu) {
      budgets.device = tiers.device.value_or(std::min(device, device_limit()));
      budgets.host = host_.value_or(std::min(all.host, available / 4 * 3));
      check_memory(hardware_.memory, {.name = "tiers.host", .bytes = host});
    } else {
      budgets.device = tiers.device.value_or(std::min(device, available / 2));
      budgets.host = host_.value_or(std::min(all.host, available / 3));
      // Check both together before either is allocated, since each alone may fit.
      check_memory(hardware_.memory, {.name = "tiers.device and tiers.host",
                                      .bytes = ranks_ * tiers.device.value_or(0) + host});
    }
    check_stated_sizes(tiers.nvme, ranks_ * layout().table.nvme_bytes());
  }

  // Weights are gathered one unit ahead of their use, while the unit before computes, unless there is no room
  // for one more gathered weight, or that room costs more than a hundredth of the step's traffic. Tiles are
  // gathered just before their use.
  void choose_programs(const std::optional<RankChoices>& asked) {
    const std::int32_t ahead = asked ? asked->gather_ahead : 0;
    if (!fit(ahead) && !fit_with_more_on_the_device(ahead) &&
        (asked || !may_become_tiles() || !fit_in_tiles()))
      throw_no_room();
    if (asked || layout().options.sharding.shards == 1 || in_tiles()) return;
    const std::int64_t most = total(plan_.dry_run.per_step);
    if (!fit(1) || total(plan_.dry_run.per_step) > most + most / 100) fit(0);
  }

  // device_updates() assumes that all weights, gradients and activations of a step are on the device at once.
  // They are not, so the device has room for the state of more units, which is used if the host lacks room
  // and there is no drive. Only for one rank, since several would have to agree on the number of units.
  bool fit_with_more_on_the_device(std::int32_t gather_ahead) {
    if (config_.offload_optimizer != OffloadTarget::kAuto || drives() > 0 || config_.ranks() > 1)
      return false;
    // Bisects for the smallest number of units with which the run fits. With `few` it does not fit the host;
    // with `many` it fits, or does not fit the device.
    const std::int32_t all = layout().head_unit() + 1;
    std::int32_t few = layout().options.device_updates, many = all + 1;
    std::optional<std::int32_t> fewest;
    const auto fits = [&](std::int32_t units) {
      device_units_ = units;
      make_layout();
      if (!fit(gather_ahead, kNoReadAhead)) return false;
      fewest = many = units;
      return true;
    };
    while (many - few > 1) {
      const std::int32_t units = few + (many - few) / 2;
      if (!fits(units)) (plan_.dry_run.obstacle->tier == Tier::kHost ? few : many) = units;
    }
    // If all units are updated on the device, state may leave it again, so this can need less than a part.
    if (!fewest && few < all) (void)fits(all);
    device_units_ = fewest;
    make_layout();
    return fit(gather_ahead);
  }

  // Tiles save memory because they are moved one by one, so weights that stay on the device gain nothing from
  // them, and small units gain little.
  bool may_become_tiles() const {
    constexpr std::int64_t kLeast = 1 << 16;  // elements
    return config_.tiers.tiles == TierConfig::Tiles::kAuto &&
           config_.offload_param != OffloadTarget::kDevice &&
           std::any_of(plan_.model->units().begin(), plan_.model->units().end(),
                       [](const Unit& unit) { return unit.count >= kLeast; });
  }
  bool in_tiles() const { return plan_.choices.blocks == BlockTiling::kInTiles; }

  bool fit_in_tiles() {
    make_model(BlockTiling::kInTiles);
    make_layout();
    return fit(0) || fit_with_more_on_the_device(0);
  }

  void check_tiles() const {
    if (!in_tiles()) return;
    check_stated_sizes(config_.tiers.nvme, ranks_ * layout().table.nvme_bytes());
  }

  // "each layer of 6.8 MiB is"; also names the embedding table if that is larger.
  std::string tiled_units() const {
    const auto bytes = [&](const Unit& unit) {
      return unit.count * static_cast<std::int64_t>(size_of(plan_.model->dtype()));
    };
    const std::int64_t layer = bytes(plan_.model->largest_block().unit()),
                       table = bytes(plan_.model->units().front());
    const std::string of_layers = fmt::format("each layer of {}", format_bytes(layer));
    return table > layer ? fmt::format("{} and the embedding of {} are", of_layers, format_bytes(table))
                         : of_layers + " is";
  }

  static constexpr std::int64_t kNoReadAhead = 32;

  // Makes the programs, and decides the store's share of the budgets. Returns whether the budgets suffice.
  // `part`: read-ahead gets 1 / `part` of its room at first, and less if the run does not fit.
  bool fit(std::int32_t gather_ahead, std::int64_t part = 1) {
    plan_.choices.gather_ahead = gather_ahead;
    plan_.programs = std::make_unique<StepPrograms>(layout(), update_timing(config_), gather_ahead);
    const Budgets inside{plan_.budgets.device - beside_tensors(), plan_.budgets.host,
                         hardware_.gpu && hardware_.gpu->direct};
    const Budgets all = everything();
    const Budgets ahead = read_ahead(inside, *plan_.programs);
    plan_.queue_depth = queue_depth(inside.host);
    // Leave less room for read-ahead as long as the budgets are too small.
    for (; part <= kNoReadAhead; part *= 2) {
      // A tier that holds everything needs no room for moves.
      const auto rest = [&](std::int64_t bytes, std::int64_t everything, std::int64_t free) {
        return bytes >= everything || part == kNoReadAhead ? bytes : bytes - free / part;
      };
      plan_.resident = {rest(inside.device, all.device, ahead.device),
                        rest(inside.host, all.host, ahead.host), inside.direct};
      plan_.dry_run = make_plan(layout(), *plan_.programs, plan_.resident);
      if (plan_.dry_run.fits) return true;
    }
    return false;
  }

  static std::int64_t total(const LinkBytes& t) {
    return t.nvme_read() + t.nvme_write() + t[kToDevice] + t[kToHost] + t[kDirectRead] + t[kDirectWrite];
  }

  // The smallest budgets for the present layout, including beside_tensors(); call after fit().
  std::optional<Budgets> smallest() const {
    auto least = smallest_budgets(layout(), *plan_.programs, plan_.resident.device, plan_.resident.direct);
    if (least) least->device += beside_tensors();
    return least;
  }

  // The larger of `least` and the smallest budgets of the other pipeline stages, with layers tiled as
  // `blocks` says. Empty if some stage fits no budgets.
  std::optional<Budgets> smallest_of_all_stages(std::optional<Budgets> least, BlockTiling blocks) const {
    const int stages = config_.parallel.pipeline, ranks = config_.ranks() / stages;
    for (int stage = 0; stage < stages && least; ++stage) {
      if (stage == config_.place_of(plan_.rank).parts.stage) continue;
      RunPlan other;
      other.rank = stage * ranks, other.config = config_, other.model_config = plan_.model_config;
      other.validation_sequences = plan_.validation_sequences;
      Planner planner(other, hardware_);
      planner.may_pin_ = may_pin_, planner.must_pin_ = must_pin_;
      planner.make_model(blocks);
      planner.make_layout();
      planner.find_budgets();
      planner.fit(0);
      const std::optional<Budgets> of_stage = planner.smallest();
      if (!of_stage) return of_stage;
      least->device = std::max(least->device, of_stage->device);
      least->host = std::max(least->host, of_stage->host);
    }
    return least;
  }

  // Call after fit(). If the run may have whole layers, the error mentions tiles only if they need less
  // memory.
  [[noreturn]] void throw_no_room() {
    log::progress("the run does not fit; looking for the smallest budgets with which it does");
    std::optional<Budgets> least = smallest();
    bool tiles_need_less = in_tiles();
    if (in_tiles() && !must_be_in_tiles_) {
      make_model(BlockTiling::kWhole);
      make_layout();
      fit(0);
      const std::optional<Budgets> of_whole = smallest();
      if (of_whole && (!least || of_whole->device <= least->device))
        least = of_whole, tiles_need_less = false;
    }
    const NoRoom obstacle = *plan_.dry_run.obstacle;
    const std::string name = layout().table.segment_name(obstacle.segment);
    least = smallest_of_all_stages(least, tiles_need_less ? BlockTiling::kInTiles : BlockTiling::kWhole);
    log::progress("");
    std::string tiles;
    if (tiles_need_less) tiles = fmt::format(", where {} multiplied in tiles", tiled_units());
    if (!least) {
      throw Error(
          Errc::kMemory, "tiers",
          "this run fits no budgets: what may not leave the device or the host is too much",
          "allow more to be demoted (zero_optimization.offload_param and offload_optimizer), or name a drive "
          "in tiers.nvme");
    }
    // The ranks of a machine have equal shares of tiers.host.
    const std::int64_t device = least->device, host = ranks_ * least->host;
    throw Error(
        Errc::kMemory, fmt::format("tiers.{}", obstacle.tier == Tier::kDevice ? "device" : "host"),
        fmt::format("the run does not fit device {} and host {}{} (no room for {}, {})",
                    format_bytes(plan_.budgets.device), format_bytes(plan_.budgets.host),
                    ranks_ > 1 ? " of each rank" : "", name, format_bytes(obstacle.needed)),
        fmt::format("the smallest budgets that do: tiers.device={} ({}), and with device {} tiers.host={} "
                    "({}{}){}",
                    device, format_bytes(device), format_bytes(std::max(plan_.budgets.device, device)), host,
                    format_bytes(host), ranks_ > 1 ? fmt::format(" for {} ranks", ranks_) : "", tiles));
  }

  // Each GPU has a thread that waits for its completions, and that thread gets a core. The host device has no
  // such thread.
  void assign_threads() {
    const ThreadsConfig& threads = config_.threads;
    CoreWishes wishes{.compute = threads.compute, .reserved = threads.reserved, .bind = threads.bind};
    for (const Hardware::Drive& drive : hardware_.drives) wishes.drives.push_back(drive.numa_node);
    if (hardware_.gpu) wishes.devices = hardware_.gpu->numa_nodes;
    plan_.cores = assign_cores(hardware_.cores, wishes);
  }

  RunPlan& plan_;
  const RunConfig& config_;
  const Hardware& hardware_;
  const std::int64_t ranks_;  // on this machine
  std::optional<std::int32_t>
      device_units_;                  // units that are updated on the device; none: device_updates() decides
  std::optional<std::int64_t> host_;  // this rank's share of tiers.host
  std::vector<std::vector<std::optional<ParamCode>>> codes_;  // of the model; empty: not read yet, or none
  bool may_pin_ = true, must_pin_ = false;                    // as all ranks have chosen
  bool must_be_in_tiles_ = false;                             // as all ranks have chosen, or as configured
};

}  // namespace

double RunPlan::bubble_share() const {
  const double bubble = bubble_formula(layout->options.pipeline_shape());
  return bubble / (1 + bubble);
}

std::int64_t RunPlan::tile_bytes() const {
  std::int64_t most = 0;
  for (const Unit& unit : model->units()) {
    for (const Tile& tile : unit.tiles) {
      if (tile.param >= 0) most = std::max(most, tile.count);
    }
  }
  return most * static_cast<std::int64_t>(size_of(model->dtype()));
}

// The model's FLOPs, minus the products that frozen units do not need, plus the products of adapters and the
// products that tiles repeat.
double RunPlan::flops_per_step() const {
  const std::int64_t tokens =
      config.data_ranks() * config.micro_batch * config.accumulation_steps * config.data.seq_len;
  double products = 0;  // the difference, in multiply-adds per token
  const bool tied = model_config.tied;
  for (std::int32_t u = 0; u <= layout->head_unit(); ++u) {
    const bool block = u > 0 && u < layout->head_unit(), below = block && u < layout->first_trained();
    // The passes that a frozen block saves: its weight gradients; below the first trained unit all but the
    // forward pass.
    const int again = config.recompute ? 1 : 0, spared = !layout->is_frozen(u) ? 0 : below ? 2 + again : 1;
    if (!block && u != (tied ? 0 : layout->head_unit())) continue;
    // The logits of an output matrix in tiles are computed twice.
    const int more = !block && layout->in_tiles(u) ? 1 : 0;
    for (const Param& p : model->units()[static_cast<std::size_t>(u)].params) {
      if (p.vector || (u == 0 && &p != model->units().front().params.data())) continue;
      const Experts& experts = model_config.experts;
      const double share =
          model->units()[static_cast<std::size_t>(u)].is_experts()
              ? static_cast<double>(experts.router.per_token) / static_cast<double>(experts.count)
              : 1;
      const Unit& unit = model->units()[static_cast<std::size_t>(u)];
      const double count = share * static_cast<double>(model->ranks_with_such(unit) * p.whole_count());
      products += p.adapter ? (3 + again) * count : (more - spared) * count;
    }
  }
  return model->training_flops(tokens, config.data.seq_len, config.recompute) +
         2 * static_cast<double>(tokens) * products;
}

AfterStep RunPlan::after_step(std::int64_t step, bool stop) const {
  const bool last = stop || step + 1 == config.steps;
  const bool due = last || (config.eval_every > 0 && (step + 1) % config.eval_every == 0);
  const CheckpointConfig& checkpoint = config.checkpoint;
  const bool save = (checkpoint.every > 0 && (step + 1) % checkpoint.every == 0) ||
                    (checkpoint.regular() && step + 1 == config.steps) || (checkpoint.on_interrupt && stop);
  return {.evaluate = due && validation_sequences > 0, .last = last, .save = save};
}

std::int64_t RunPlan::evaluation_batches() const {
  const std::int64_t sequences = std::max<std::int64_t>(1, validation_sequences);
  return std::min(config.eval_batches, (sequences + config.micro_batch - 1) / config.micro_batch);
}

History RunPlan::history(std::int64_t steps) const {
  const std::int64_t batches = evaluation_batches();
  const std::int64_t group = layout->options.live_micro_batches() * config.data_ranks();
  History history;
  for (std::int64_t step = 0; step < steps; ++step) {
    const AfterStep after = after_step(step, step + 1 == steps);
    note(history, after.then() == Then::kPause ? Activity::kStepThenPause : Activity::kStep);
    for (std::int64_t first = 0; after.evaluate && first < batches; first += group)
      note(history, first + group < batches ? Activity::kEvaluateMore : Activity::kEvaluate);
    if (after.save) note(history, pins() ? Activity::kPin : Activity::kSave);
    if (after.last) break;
  }
  note(history, Activity::kFlush);
  return history;
}

ModelConfig model_of(const RunConfig& config) {
  ModelConfig model = config.model_from.empty() ? *config.model : read_hf_config(config.model_from);
  model.dropout = config.dropout;
  model.lora = lora_of(config, model);
  return model;
}

RunPlan make_run_plan(const RunConfig& config, const ModelConfig& model_config,
                      std::int64_t validation_sequences, const Hardware& hardware, int rank,
                      const std::optional<RankChoices>& asked) {
  RunPlan plan;
  plan.rank = rank;
  plan.config = config;
  plan.model_config = model_config;
  plan.validation_sequences = validation_sequences;
  Planner(plan, hardware).run(asked);
  return plan;
}

}  // namespace zg
