// The tensors of a training run, how they are cut into segments, and how far each may be demoted.
#pragma once
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "ziggurat/model/model.hpp"
#include "ziggurat/optim/state.hpp"
#include "ziggurat/step/pipeline.hpp"
#include "ziggurat/step/schedule.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

inline constexpr int kFrozen = -1;  // group of a parameter that is not trained and has no state

inline constexpr std::int32_t kAllUnits = std::numeric_limits<std::int32_t>::max();

struct LayoutOptions {
  BatchShape micro_batch;          // its part is that of `parts` and `sharding`, which the layout puts there
  std::int64_t micro_batches = 1;  // per step
  Accumulation accumulation = Accumulation::kLayerMajor;
  bool recompute = true;          // keep only each block's input, and run its forward again in backward
  DType gradient = DType::kBF16;  // type of the gradients that the optimizer reads
  OffloadTarget weights = OffloadTarget::kAuto, optimizer = OffloadTarget::kAuto,
                activations = OffloadTarget::kAuto;
  StateFormat state = {};  // its `full` is ignored: the model's accumulator type is used
  // By unit and parameter: the parameter's group (an index into UpdateRule::groups), or kFrozen. Empty: all
  // parameters are in group 0.
  std::vector<std::vector<int>> groups = {};
  // Units [0, device_updates) are updated on the device, the others on the host; each where its state is. The
  // first units are those that the next forward waits for.
  std::int32_t device_updates = 0;
  std::int64_t state_segment_bytes = 12 << 20;  // an update works on one segment at a time
  int state_versions = 1;  // versions of state on NVMe; with 2, a write-back leaves the one before it whole
  int drives = 0;          // of the NVMe tier; 0: there is none
  Sharding sharding = {};
  ParallelDegrees parts = {};
  PipelineOptions pipeline = {};  // with several parts.stages; they accumulate layer-major
  // Layers of each part of the pipeline, in their order, which add up to the model's. Empty: by their cost.
  std::vector<std::int32_t> stage_layers = {};
  // Bits of weights and of gradients on their way between ranks, 8 or 4; 0: they are sent as they are.
  int weight_bits = 0, gradient_bits = 0;
  std::int64_t device_granule = 4096;  // Arena::granule() of the device
  bool saves = false;                  // the run may save its state between steps (StepExecutor::save_state)
  bool pins = false;                   // the same where the state lies on NVMe (StepExecutor::write_state)

  RankPlace place() const { return {sharding, parts}; }
  SequenceShard sequence_shard() const {
    return {parts.context, place().context_part(), parts.context_method};
  }
  // Number of micro-batches that pass through the model side by side. Without a pipeline the activations of
  // so many exist at the same time.
  std::int64_t live_micro_batches() const {
    return accumulation == Accumulation::kLayerMajor ? micro_batches : 1;
  }
  bool is_pipeline() const { return parts.stages > 1; }
  PipelineShape pipeline_shape() const {
    return {parts.stages, pipeline.chunks, static_cast<int>(micro_batches), pipeline.schedule,
            pipeline.group};
  }
  bool in_halves() const { return is_pipeline() && pipeline.schedule == PipelineSchedule::kZeroBubble; }
  Backward backward() const { return in_halves() ? Backward::kInHalves : Backward::kWhole; }
};

// A stage of a pipeline has the tensors of its own units only. With a tied embedding the last stage also has
// the embedding's weight, which it is sent, and an accumulator for it.
struct Layout {
  Layout(const Model& model, const LayoutOptions& options);

  static constexpr TensorId kNone = -1;
  // Consecutive elements of a trained parameter, with the gap after it. Begins at a multiple of kQuantBlock
  // in the unit and in the state.
  struct StateRange {
    std::int32_t param = 0;  // its index in the unit
    int group = 0;
    std::int64_t unit_first = 0, state_first = 0, count = 0;
    std::int64_t param_first = 0;  // element of the parameter; not 0 where its shard begins within it
  };
  // The tensors of one tile; a unit that is not cut is one tile. TensorSpec has the type and the number of
  // elements of each tensor, and `sharding` says which elements of the tile this rank's shard has.
  struct TileTensors {
    std::int32_t unit = 0;
    std::int64_t first = 0, count = 0;  // elements of the unit
    Sharding sharding = {};
    // weight: the form that products read; accumulator: the sum of gradients. Both are flat, and padded to a
    // whole number of pieces (Sharding). kNone: the unit is another stage's, or, for the accumulator, frozen.
    TensorId weight = kNone, accumulator = kNone;
    // The form of the weight that is kept between its uses and that the update writes: this rank's shard,
    // from which OpKind::kMaterialize makes the weight, or the weight itself.
    TensorId stored = kNone;
    std::int64_t piece = 0;                    // elements
    TensorId gradient = kNone, state = kNone;  // kNone: no parameter of the unit is trained
    std::vector<StateRange> ranges;  // of this rank's shard; ascending, in the unit and in the state
    // Elements [first, second) that another part of the model counts for the norm; ascending.
    std::vector<std::pair<std::int64_t, std::int64_t>> uncounted;
    std::int64_t state_elements = 0;

    bool is_sharded() const { return sharding.shards > 1; }
    bool is_materialized() const { return stored != weight; }
  };

  const Model* model;
  LayoutOptions options;
  TensorTable table;
  // The tensors of all tiles (Unit::tiles): those of unit u are [first_tile(u), first_tile(u + 1)). Where no
  // unit is in tiles, a tile's number is the unit's.
  std::vector<TileTensors> tiles;
  // [layer][micro-batch]: the input of block `layer` (the last entry: of the head), and what the block's
  // backward needs besides. Empty where another stage has the block, unless this one makes its input. With
  // recomputation `saved` is only for those that are between the halves of a backward.
  std::vector<std::vector<TensorId>> activation, saved;
  std::vector<TensorId> activation_gradient;  // [micro-batch]; of each chunk of a stage one after the other
  std::vector<std::int32_t> first_layer;      // of each part of the pipeline, and the number of layers

  std::int64_t layers() const { return model->config().layers; }
  std::int32_t head_unit() const { return static_cast<std::int32_t>(model->units().size()) - 1; }
  // The part of the pipeline that the unit is in, and the stage that has it, its gradient and its state.
  int chunk_of(std::int32_t unit) const;
  int stage_of(std::int32_t unit) const { return chunk_of(unit) % options.parts.stages; }
  bool has_unit(std::int32_t unit) const { return stage_of(unit) == options.parts.stage; }
  // The tensor of a micro-batch. Micro-batches whose tensors do not exist at the same time share them.
  TensorId activation_of(std::int32_t layer, std::int32_t m) const;
  TensorId saved_of(std::int32_t layer, std::int32_t m) const;
  TensorId activation_gradient_of(std::int32_t unit, std::int32_t m) const;
  SegmentId whole(TensorId id) const;  // the only segment of a tensor that is not cut
  std::int32_t first_tile(std::int32_t unit) const { return first_tile_[static_cast<std::size_t>(unit)]; }
  bool in_tiles(std::int32_t unit) const { return model->units()[static_cast<std::size_t>(unit)].in_tiles(); }
  // The tile with the unit's adapters, -1: it has none.
  std::int32_t adapter_tile(std::int32_t unit) const {
    const Unit& u = model->units()[static_cast<std::size_t>(unit)];
    return u.adapted ? first_tile(unit) + static_cast<std::int32_t>(u.tiles.size()) - 1 : -1;
  }
  // The tile that has a parameter of a unit that is not in tiles.
  std::int32_t tile_of(std::int32_t unit, const Param& param) const {
    return param.adapter ? adapter_tile(unit) : first_tile(unit);
  }
  const TileTensors& tile(std::int32_t t) const { return tiles[static_cast<std::size_t>(t)]; }
  // The tensors of a unit that is not in tiles.
  const TileTensors& unit(std::int32_t u) const { return tile(first_tile(u)); }
  const StateLayout& state() const { return state_; }
  std::int32_t state_segments(std::int32_t tile) const;
  std::int64_t unit_state_elements(std::int32_t unit) const;  // of all its tiles
  struct Elements {
    std::int64_t first = 0, count = 0;
  };
  // The elements of the tile's state that its segment `i` holds.
  Elements state_elements(std::int32_t tile, std::int32_t i) const;
  SegmentId state_segment(std::int32_t tile, std::int32_t i) const;
  // When the weights of a unit are made from their stored forms; the same for all of its tiles.
  Materialize materialize(std::int32_t unit) const;
  bool is_sharded(std::int32_t unit) const { return tile(first_tile(unit)).is_sharded(); }
  std::int64_t largest_copy() const { return largest_copy_; }  // elements of the largest CopySum with bands
  Tier update_at(std::int32_t unit) const {
    return unit < options.device_updates ? Tier::kDevice : Tier::kHost;
  }
  // Whether the update rebuilds the whole weight of the tile from its master, so that the weight's content
  // may be dropped before the update.
  bool update_rebuilds_weight(std::int32_t tile) const;

  // Whether some parameter of the unit is not trained.
  bool has_frozen(std::int32_t unit) const;
  // Whether no gradient of the unit's own parameters is computed, so that it has no accumulator: none of them
  // is trained.
  bool is_frozen(std::int32_t unit) const { return frozen_[static_cast<std::size_t>(unit)]; }
  // Whether something of the unit is trained, its adapters or its own parameters.
  bool is_trained(std::int32_t unit) const { return !is_frozen(unit) || adapter_tile(unit) >= 0; }
  // The tile whose gradient the unit's last backward completes: that of its adapters, or the first.
  std::int32_t trained_tile(std::int32_t unit) const {
    const std::int32_t adapters = adapter_tile(unit);
    return adapters >= 0 ? adapters : first_tile(unit);
  }
  // The first unit that a backward passes: the first one of which something is trained.
  std::int32_t first_trained() const { return first_trained_; }

  // Device memory besides the tensors: scratch of the largest operation, tokens, sums.
  std::int64_t workspace_bytes() const;
  // The same as it is charged to the device's budget.
  std::int64_t workspace_charge() const;
  // Bytes of weights, gradients and optimizer state together.
  std::int64_t state_bytes() const;

 private:
  class Builder;

  std::vector<std::int32_t> first_tile_;  // by unit, and the number of tiles
  std::vector<bool> frozen_;              // by unit
  std::int32_t first_trained_ = 0;
  std::vector<std::int64_t> chunk_gradients_;  // by chunk of this stage: its part of activation_gradient
  StateLayout state_;
  std::int64_t largest_copy_ = 0;
  std::int64_t segment_elements_;  // of a state segment
};

}  // namespace zg
