// Runs of a pipeline: the bits of one stage with the same micro-batches, whatever the stages, chunks,
// schedule, sharding and tiers; and what its stages exchange.
#include <fmt/core.h>

#include <set>

#include "engine/ranks_distance.hpp"

namespace zg::test {
namespace {

using enum PipelineSchedule;

// Five layers, so that stages are uneven, and sizes that are no multiples of anything.
ModelConfig odd_model(bool llama, bool tied) {
  ModelConfig c = reference_llama();
  if (!llama) {
    c = reference_gpt2();
    c.width = 176, c.heads = c.kv_heads = 8, c.head_size = 22, c.inner = 172;
  }
  c.vocab_size = 257, c.layers = 5;
  c.tied = tied;
  return c;
}

TinySetup setup_of(bool llama, bool tied, DType dtype) {
  TinySetup s;
  s.model = odd_model(llama, tied);
  s.dtype = dtype;
  s.layout.micro_batch = {1, 7};
  s.layout.micro_batches = 8;
  s.layout.state_segment_bytes = 300000;
  return s;
}

struct Case {
  std::string name;
  int stages = 2;
  PipelineOptions pipeline = {};
  int shards = 1;  // of two data ranks, if above 0: 1 holds everything; -2: sharded, and kept for the step
  std::function<void(TinySetup&)> change = {};
};

// Each way to schedule with and without chunks, and everything else with some of them.
std::vector<Case> cases() {
  const auto device = [](TinySetup& s) { s.layout.device_updates = kAllUnits; };
  const auto host = [](TinySetup& s) { s.room = Room::kSmallest; };
  const auto nvme = [](TinySetup& s) { s.layout.drives = 2, s.room = Room::kSmallest; };
  return {
      {"p2_breadth_first", 2, {kBreadthFirst}, 0, {}},
      {"p2_1f1b_nvme", 2, {kOneForwardOneBackward}, 0, nvme},
      {"p2_gpipe_zero0", 2, {kGPipe}, 1, host},
      {"p2_v2_breadth_first_zero3_nvme", 2, {kBreadthFirst, 2}, 2, nvme},
      {"p2_v2_depth_first_zero1", 2, {kDepthFirst, 2}, -2, device},
      {"p2_v2_groups_of_3_host", 2, {kDepthFirst, 2, 3}, 0, host},
      {"p2_v2_gpipe_device", 2, {kGPipe, 2}, 0, device},
      {"p4_breadth_first_zero3", 4, {kBreadthFirst}, 2, host},
      {"p4_1f1b", 4, {kOneForwardOneBackward}, 0, device},
      {"p4_gpipe_nvme", 4, {kGPipe}, 0, nvme},
      {"p5_depth_first", 5, {kDepthFirst}, 0, {}},
      {"p2_1f1b_zero3_early",
       2,
       {kOneForwardOneBackward},
       2,
       [](TinySetup& s) { s.timing = UpdateTiming::kEarly, s.clip = 0; }},
      {"p2_v2_separate_kept",
       2,
       {kBreadthFirst, 2},
       0,
       [](TinySetup& s) { s.timing = UpdateTiming::kSeparate, s.layout.recompute = false; }},
      {"p4_kept_nvme",
       4,
       {kOneForwardOneBackward},
       1,
       [](TinySetup& s) { s.layout.recompute = false, s.layout.drives = 1, s.room = Room::kSmallest; }},
      {"p2_no_prefetch_both_updates",
       2,
       {kBreadthFirst},
       2,
       [](TinySetup& s) { s.prefetch = 0, s.layout.device_updates = 3; }},
      {"p3_few_micro_batches", 3, {kBreadthFirst}, 0, [](TinySetup& s) { s.layout.micro_batches = 2; }},
      {"p2_zero_bubble", 2, {kZeroBubble}, 0, {}},
      {"p5_zero_bubble_nvme", 5, {kZeroBubble}, 0, nvme},
      {"p4_zero_bubble_zero1", 4, {kZeroBubble}, -2, device},
      {"p2_zero_bubble_zero3_early",
       2,
       {kZeroBubble},
       2,
       [](TinySetup& s) { s.timing = UpdateTiming::kEarly, s.clip = 0; }},
      {"p4_zero_bubble_kept_nvme",
       4,
       {kZeroBubble},
       1,
       [](TinySetup& s) { s.layout.recompute = false, s.layout.drives = 1, s.room = Room::kSmallest; }},
      {"p3_zero_bubble_few_micro_batches",
       3,
       {kZeroBubble},
       0,
       [](TinySetup& s) {
         s.layout.micro_batches = 2, s.layout.recompute = false, s.timing = UpdateTiming::kSeparate;
       }},
      {"p2_v2_zero3_one_unit_ahead",
       2,
       {kDepthFirst, 2},
       2,
       [](TinySetup& s) { s.gather_ahead = 1, s.room = Room::kSmallest; }},
      {"p4_zero_bubble_zero3_one_unit_ahead_early",
       4,
       {kZeroBubble},
       2,
       [](TinySetup& s) { s.gather_ahead = 1, s.timing = UpdateTiming::kEarly, s.clip = 0; }},
      {"p2_zero1_one_unit_ahead", 2, {kOneForwardOneBackward}, -2, [](TinySetup& s) { s.gather_ahead = 1; }},
      {"p2_v2_layers_as_given",
       2,
       {kBreadthFirst, 2},
       2,
       [](TinySetup& s) {
         s.layout.stage_layers = {1, 1, 2, 1}, s.room = Room::kSmallest;
       }},
      {"p2_one_micro_batch",
       2,
       {kOneForwardOneBackward},
       0,
       [](TinySetup& s) { s.layout.micro_batches = 1, s.layout.drives = 1, s.room = Room::kSmallest; }},
  };
}

class PipelineRuns : public testing::TestWithParam<int> {};

// What comes of one stage does not depend on tiers, sharding, timing or recomputation; other tests see to
// that.
TEST_P(PipelineRuns, HaveTheBitsOfOneStage) {
  const bool llama = GetParam() / 2 == 1, tied = GetParam() % 2 == 0;
  std::map<std::string, RanksOutcome> plain;
  const DType dtype = llama == tied ? DType::kBF16 : DType::kF64;
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name);
    TinySetup setup = setup_of(llama, tied, dtype);
    if (c.change) c.change(setup);
    const int ranks = c.shards == 0 ? 1 : 2, shards = std::max(1, std::abs(c.shards));
    if (c.shards != 0) setup.layout.micro_batches *= 2;
    TinySetup one = setup_of(llama, tied, dtype);
    one.layout.micro_batches = setup.layout.micro_batches, one.clip = setup.clip;
    const std::string key = fmt::format("{} {} {}", ranks, one.layout.micro_batches, one.clip);
    auto it = plain.find(key);
    if (it == plain.end()) it = plain.emplace(key, train_on_ranks(one, {ranks}, 3)).first;
    const RanksWay way = in_stages(ranks, shards, c.shards < 0, c.stages, c.pipeline);
    expect_same(train_on_ranks(setup, way, 3), it->second);
    if (HasFailure()) return;
  }
}

std::string model_name(const testing::TestParamInfo<int>& model) {
  static constexpr const char* kNames[] = {"gpt2_tied", "gpt2_untied", "llama_tied", "llama_untied"};
  return kNames[model.param];
}
INSTANTIATE_TEST_SUITE_P(Models, PipelineRuns, testing::Range(0, 4), model_name);

// The order of sums over ranks is all that differs from one rank; in fp64.
TEST(PipelineRunsInFp64, AreOneRankToRoundoff) {
  for (const bool adam : {false, true}) {
    TinySetup setup = setup_of(true, true, DType::kF64);
    if (!adam) {
      setup.layout.state.kind = OptimizerKind::kSgd, setup.layout.state.moment_count = 0;
      setup.lr = 1, setup.clip = 0;
    }
    const int steps = adam ? 10 : 3;
    const RanksOutcome one = train_on_ranks(setup, {}, steps);
    for (const RanksWay& way :
         {in_stages(2, 2, false, 2, {kBreadthFirst, 2}), in_stages(2, 1, false, 4, {kGPipe}),
          in_stages(1, 1, false, 4, {kOneForwardOneBackward}), in_stages(2, 1, false, 4, {kZeroBubble})}) {
      expect_near_in_fp64(train_on_ranks(setup, way, steps), one);
    }
  }
}

// fp16: all stages skip a step together, whichever of them has the gradient that overflows.
TEST(PipelineRunsInFp16, SkipTogether) {
  TinySetup setup = setup_of(false, true, DType::kF16);
  setup.clip = 0.5;
  setup.rule = [](std::int64_t step, UpdateRule& rule) { rule.loss_scale = step == 1 ? 0x1p40 : 0x1p10; };
  const RanksOutcome one = train_on_ranks(setup, {}, 4);
  EXPECT_EQ(one.skipped, (std::vector<bool>{false, true, false, false}));
  expect_same(train_on_ranks(setup, in_stages(1, 1, false, 2, {kBreadthFirst, 2}), 4), one);
  expect_same(train_on_ranks(setup, in_stages(1, 1, false, 4, {kOneForwardOneBackward}), 4), one);
  expect_same(train_on_ranks(setup, in_stages(1, 1, false, 4, {kZeroBubble}), 4), one);
}

// A frozen unit on some stages, the embedding among them, and a unit of which a part is frozen.
TEST(PipelineRunsWithFrozenUnits, HaveTheBitsOfOneStage) {
  for (const bool tied : {false, true}) {
    TinySetup setup = setup_of(true, tied, DType::kF32);
    const Model sizes(setup.model, setup.dtype, host_ops());
    for (const Unit& unit : sizes.units()) setup.layout.groups.emplace_back(unit.params.size(), 0);
    std::fill(setup.layout.groups[0].begin(), setup.layout.groups[0].end(), kFrozen);
    std::fill(setup.layout.groups[4].begin(), setup.layout.groups[4].end(), kFrozen);
    setup.layout.groups[2][1] = kFrozen;
    const RanksOutcome one = train_on_ranks(setup, {}, 3);
    for (const int stages : {2, 4})
      expect_same(train_on_ranks(setup, in_stages(1, 1, false, stages), 3), one);
    expect_same(train_on_ranks(setup, in_stages(1, 1, false, 4, {kZeroBubble}), 3), one);
  }
}

// work(run) on a thread of each rank.
template <class Work>
std::vector<std::string> on_stages(const TinySetup& setup, const RanksWay& way, double timeout, Work&& work) {
  auto ranks = make_local_ranks(way.world(), {.timeout_seconds = timeout});
  std::vector<std::string> errors(ranks.size());
  std::vector<std::thread> threads;
  for (auto& rank : ranks) {
    threads.emplace_back([&, comm = rank.get()] {
      TinySetup mine = setup;
      mine.layout.sharding = {way.ranks, comm->rank() % way.ranks, way.shards, way.keep_weights};
      mine.layout.parts.stages = way.stages, mine.layout.parts.stage = comm->rank() / way.ranks;
      mine.layout.pipeline = way.pipeline;
      mine.comm = comm;
      try {
        TinyRun run(mine);
        run.initialize();
        work(run);
      } catch (const Error& error) {
        comm->fail(error);
        errors[static_cast<std::size_t>(comm->rank())] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// Bytes by formula: each boundary between parts once a micro-batch and direction, the table once each way.
TEST(PipelineComm, IsTheClosedForm) {
  for (const bool tied : {false, true}) {
    for (const RanksWay& way :
         {in_stages(1, 1, false, 4, {kOneForwardOneBackward}), in_stages(1, 1, false, 4, {kZeroBubble}),
          in_stages(2, 2, false, 2, {kBreadthFirst, 2})}) {
      TinySetup setup = setup_of(true, tied, DType::kBF16);
      std::mutex mutex;
      const auto errors = on_stages(setup, way, 60, [&](TinyRun& run) {
        (void)run.step(Then::kTrain);
        const StepResult r = run.step(Then::kPause);
        const Layout& layout = run.layout();
        const int stage = layout.options.parts.stage, p = way.stages, v = way.pipeline.chunks;
        const std::int64_t one = 7 * setup.model.width * 2, all = setup.layout.micro_batches;
        const std::int64_t table = tied ? run.model().units().front().count : 0;
        CommTraffic expected;
        for (int c = 0; c < v; ++c) {
          const bool begins = c == 0 && stage == 0, ends = c == v - 1 && stage == p - 1;
          const std::int64_t sends = all * (!begins + !ends);
          expected += {sends * one, sends * one, 2 * sends};
        }
        if (tied && stage == 0) expected += {table * 2, table * 4, 2};
        if (tied && stage == p - 1) expected += {table * 4, table * 2, 2};
        std::lock_guard lock(mutex);
        EXPECT_EQ(r.comm[CommAxis::kStages], expected) << "stage " << stage;
        EXPECT_EQ(comm_per_step(layout, run.programs()), r.comm);
      });
      EXPECT_EQ(errors, std::vector<std::string>(errors.size()));
    }
  }
}

// Weights are gathered each time that a stage comes to a chunk: breadth-first in 2 v - 1 of v chunks' passes,
// and once a step where they are kept. A gradient is summed once a step.
TEST(PipelineComm, GathersAChunkWheneverItsTurnComes) {
  const auto gathers = [](const RanksWay& way) {
    std::vector<std::int64_t> calls(static_cast<std::size_t>(way.stages)), sums = calls;
    (void)on_stages(setup_of(false, false, DType::kF32), way, 60, [&](TinyRun& run) {
      const StepResult r = run.step(Then::kPause);
      if (run.layout().options.sharding.rank > 0) return;
      calls[static_cast<std::size_t>(run.layout().options.parts.stage)] = r.comm[CommAxis::kShards].calls;
      sums[static_cast<std::size_t>(run.layout().options.parts.stage)] =
          r.comm[CommAxis::kDataParallel].calls;
    });
    calls.insert(calls.end(), sums.begin(), sums.end());
    return calls;
  };
  using Calls = std::vector<std::int64_t>;
  // Layers 0 | 1 | 2, 3 | 4, with the embedding before and the head behind them.
  EXPECT_EQ(gathers(in_stages(2, 2, true, 2, {kBreadthFirst, 2})), (Calls{4, 3, 4, 3}));
  // The first chunk of a stage twice, the second once; the embedding in the forward alone.
  EXPECT_EQ(gathers(in_stages(2, 2, false, 2, {kBreadthFirst, 2})), (Calls{1 + 2 * 1 + 2, 2 * 1 + 2, 4, 3}));
  // In groups of two of eight micro-batches stages go back and forth between their chunks.
  const Calls deep = gathers(in_stages(2, 2, false, 2, {kDepthFirst, 2}));
  EXPECT_GT(deep[0], 3 * 5);
  EXPECT_EQ(deep[2], 4);
}

// How often a stage comes back to its first chunk for a forward, among others.
std::int64_t forward_turns(const PipelineShape& shape, int stage) {
  std::int64_t turns = 0;
  int last = -1;
  bool counted = false;
  for (const PipelineStep& step : pipeline_steps(shape, stage, PipelinePass::kTraining)) {
    counted = counted && step.chunk == last;
    last = step.chunk;
    if (step.chunk > 0 || step.kind != PipelineStep::Kind::kForward || counted) continue;
    ++turns, counted = true;
  }
  return turns;
}

// The table by which schedules are chosen under tiers, by counters: how often the first stage comes back to a
// chunk of one layer, and so gathers it. The embedding is gathered with its chunk where that has a forward.
TEST(PipelineComm, GathersAsOftenAsTheTableSays) {
  struct Row {
    int stages, chunks;
    PipelineSchedule schedule;
    std::int64_t chunk_fetches;
  };
  TinySetup setup = setup_of(true, false, DType::kF32);
  setup.model.layers = setup.layout.micro_batches = 16;
  for (const Row& row : {Row{4, 4, kDepthFirst, 75}, Row{4, 4, kBreadthFirst, 7}, Row{2, 8, kDepthFirst, 227},
                         Row{2, 8, kBreadthFirst, 15}}) {
    SCOPED_TRACE(fmt::format("{} stages, {} chunks, {} fetches", row.stages, row.chunks, row.chunk_fetches));
    const std::int64_t embedding = forward_turns({row.stages, row.chunks, 16, row.schedule}, 0);
    const RanksWay way = in_stages(2, 2, false, row.stages, {row.schedule, row.chunks});
    const auto errors = on_stages(setup, way, 60, [&](TinyRun& run) {
      const StepResult r = run.step(Then::kPause);
      if (run.layout().options.parts.stage > 0) return;
      EXPECT_EQ(r.comm[CommAxis::kShards].calls, row.chunk_fetches + embedding);
      EXPECT_EQ(r.comm[CommAxis::kDataParallel].calls, row.chunks + 1) << "a gradient is summed once a step";
    });
    EXPECT_EQ(errors, std::vector<std::string>(errors.size()));
  }
}

// One unit ahead each gather comes where the one before it would, after the update of its unit and after the
// last use of the weight that it overwrites; all else stays in its order.
TEST(PipelineGathers, ComeOneUnitAheadIfAsked) {
  struct Placed {
    Schedule others, gathers;
    std::vector<std::size_t> place;  // of each gather: how many others come before it
  };
  const auto placed = [](const Schedule& schedule) {
    Placed p;
    std::set<std::int32_t> waits, there;
    for (const Slot& slot : schedule) {
      if (slot.kind == OpKind::kUpdate) waits.insert(slot.unit);
    }
    for (const Slot& slot : schedule) {
      if (slot.kind == OpKind::kUpdate) {
        waits.erase(slot.unit);
        continue;
      }
      if (slot.kind == OpKind::kMaterialize) {
        EXPECT_EQ(waits.count(slot.unit), 0u) << "unit " << slot.unit << " is gathered before it is updated";
        EXPECT_TRUE(there.insert(slot.unit).second) << "unit " << slot.unit << " is gathered twice";
        p.gathers.push_back(slot), p.place.push_back(p.others.size());
        continue;
      }
      const bool computes = slot.kind == OpKind::kForward || slot.kind == OpKind::kBackward ||
                            slot.kind == OpKind::kBackwardInput || slot.kind == OpKind::kHead;
      EXPECT_TRUE(!computes || there.count(slot.unit) == 1) << "unit " << slot.unit << " is not there";
      if (slot.drop) there.erase(slot.unit);
      p.others.push_back(slot);
    }
    EXPECT_TRUE(there.empty());
    return p;
  };
  for (const PipelineOptions& o : {PipelineOptions{kBreadthFirst, 2}, PipelineOptions{kDepthFirst, 2},
                                   PipelineOptions{kOneForwardOneBackward}, PipelineOptions{kZeroBubble}}) {
    for (const bool keep : {false, true}) {
      for (const bool tied : {false, true}) {
        for (int stage = 0; stage < 2; ++stage) {
          const Materialize when = keep ? Materialize::kOnceAStep : Materialize::kForEachPass;
          const std::vector<Materialize> materialize(8, when);
          StageShape shape{{6, 8, Accumulation::kLayerMajor, UpdateTiming::kDeferred, tied, materialize},
                           {2, o.chunks, 8, o.schedule},
                           stage,
                           split_layers(std::vector<double>(6, 1), 0, 1, 2 * o.chunks)};
          const Placed now = placed(stage_schedule(shape, PipelinePass::kTraining, true));
          shape.step.gather_ahead = 1;
          const Placed early = placed(stage_schedule(shape, PipelinePass::kTraining, true));
          EXPECT_EQ(early.others, now.others);
          EXPECT_EQ(early.gathers, now.gathers);
          ASSERT_GT(now.place.size(), 1u);
          for (std::size_t k = 0; k < now.place.size(); ++k)
            EXPECT_EQ(early.place[k], k == 0 ? 0 : now.place[k - 1]);
        }
      }
    }
  }
}

// A stage holds no more micro-batches' activations than its schedule needs.
TEST(PipelineLayouts, HaveTensorsForTheirStageAlone) {
  TinySetup setup = setup_of(true, true, DType::kF32);
  const Model model(setup.model, setup.dtype, host_ops());
  const auto layout = [&](int stage, const PipelineOptions& pipeline, int stages = 4) {
    LayoutOptions o = setup.layout;
    o.parts.stages = stages, o.parts.stage = stage, o.pipeline = pipeline;
    return Layout(model, o);
  };
  std::int64_t states = 0, whole = Layout(model, setup.layout).state_bytes();
  for (int stage = 0; stage < 4; ++stage) {
    const Layout l = layout(stage, {kOneForwardOneBackward});
    states += l.state_bytes();
    for (std::int32_t u = 0; u <= l.head_unit(); ++u) {
      const bool table = u == 0 && stage == 3;
      EXPECT_EQ(l.unit(u).weight != Layout::kNone, l.has_unit(u) || table);
      EXPECT_EQ(l.unit(u).state != Layout::kNone, l.has_unit(u));
    }
    const auto first = static_cast<std::size_t>(l.first_layer[static_cast<std::size_t>(stage)]);
    EXPECT_LE(l.activation[first].size(), static_cast<std::size_t>(4 - stage + 1));
    EXPECT_EQ(layout(stage, {kGPipe}).activation[first].size(), 8u);
    // In halves, until the second one: as many as the first stage has.
    const Layout halves = layout(stage, {kZeroBubble});
    EXPECT_EQ(halves.activation[first].size(), 4u);
    EXPECT_GE(halves.workspace_bytes(),
              model.block_workspace_bytes(setup.layout.micro_batch, Backward::kInHalves));
    EXPECT_EQ(halves.saved[first].size(), static_cast<std::size_t>(stage + 1));
    EXPECT_EQ(l.saved[first].size(), 0u);
  }
  EXPECT_EQ(states, whole);
  EXPECT_EQ(layout(0, {kBreadthFirst}).first_layer, layout(3, {kGPipe}).first_layer);
  setup.layout.stage_layers = {2, 1, 1, 1};
  EXPECT_EQ(layout(0, {kBreadthFirst}).first_layer, (std::vector<std::int32_t>{0, 2, 3, 4, 5}));
}

// The weights lie at the host, and the device has room for those of one chunk: a stage fetches as often as it
// comes back to a chunk.
TEST(PipelineTiers, BreadthFirstFetchesWeightsLeast) {
  TinySetup setup = setup_of(true, false, DType::kF32);
  setup.model.layers = 8;
  const Model model(setup.model, setup.dtype, host_ops());
  const auto fetched = [&](PipelineSchedule schedule) {
    LayoutOptions o = setup.layout;
    o.weights = o.optimizer = OffloadTarget::kHost, o.activations = OffloadTarget::kDevice;
    o.parts.stages = 2, o.parts.stage = 1, o.pipeline = {schedule, 4};
    const Layout layout(model, o);
    const StepPrograms programs(layout, UpdateTiming::kDeferred);
    std::int64_t device = 0, chunk = 0, gradient = 0;
    for (std::int32_t u = 0; u <= layout.head_unit(); ++u) {
      if (!layout.has_unit(u)) continue;
      const auto charge = [&](TensorId id) { return layout.table.segment(layout.whole(id)).device_charge; };
      device += charge(layout.unit(u).accumulator);
      gradient = std::max(gradient, charge(layout.unit(u).gradient));
      chunk = std::max(chunk, charge(layout.unit(u).weight) + (u == layout.head_unit() ? chunk : 0));
    }
    for (const auto& of_layer : layout.activation) {
      for (const TensorId id : of_layer) device += layout.table.segment(layout.whole(id)).device_charge;
    }
    for (const TensorId id : layout.activation_gradient)
      device += layout.table.segment(layout.whole(id)).device_charge;
    const Plan plan =
        make_plan(layout, programs, {device + gradient + chunk, layout.table.total_charge(Tier::kHost)});
    EXPECT_TRUE(plan.fits);
    std::int64_t weights = 0;  // of the stage, once
    for (std::int32_t u = 0; u <= layout.head_unit(); ++u) {
      if (layout.has_unit(u)) weights += model.units()[static_cast<std::size_t>(u)].count * 4;
    }
    return static_cast<double>(plan.per_step[kToDevice]) / static_cast<double>(weights);
  };
  const double breadth = fetched(PipelineSchedule::kBreadthFirst),
               depth = fetched(PipelineSchedule::kDepthFirst);
  // 2 v - 1 of v chunks' weights, and as often as groups of two of eight micro-batches change chunks.
  EXPECT_LT(breadth, 2.2);
  EXPECT_GT(depth, 3 * breadth);
}

// Neighbours that would not fit each other learn of it before the first step.
TEST(PipelineAgreement, IsComparedByAllRanks) {
  const auto errors = [](const PipelineOptions& other) {
    auto ranks = make_local_ranks(4, {.timeout_seconds = 20});
    std::vector<std::string> all(4);
    std::vector<std::thread> threads;
    for (auto& rank : ranks) {
      threads.emplace_back([&, comm = rank.get()] {
        TinySetup mine = setup_of(false, true, DType::kF32);
        mine.layout.parts.stages = 4, mine.layout.parts.stage = comm->rank();
        if (comm->rank() == 2) mine.layout.pipeline = other;
        mine.comm = comm;
        TinyRun run(mine);
        const auto error =
            thrown_by([&] { agree(run.engine(), agreement_of(run.layout(), run.programs())); });
        if (error) all[static_cast<std::size_t>(comm->rank())] = error->what();
      });
    }
    for (std::thread& thread : threads) thread.join();
    return all;
  };
  EXPECT_EQ(errors({}), std::vector<std::string>(4));
  for (const std::string& error : errors({kGPipe})) {
    EXPECT_HAS(error, "ranks 0, 1, 3 have \"pipeline of 4 stages with 1 chunks each, breadth_first");
    EXPECT_HAS(error, "; rank 2 has \"pipeline of 4 stages with 1 chunks each, gpipe");
  }
}

// A stage that does not come is named by those that wait for what it passes on.
TEST(PipelineFailures, NameTheStageThatIsWaitedFor) {
  TinySetup setup = setup_of(false, false, DType::kF32);
  const RanksWay way = in_stages(1, 1, false, 2, {kOneForwardOneBackward});
  std::atomic<bool> over = false;
  std::mutex mutex;
  std::vector<const StepExecutor*> engines(2);
  std::atomic<int> there{0};
  StepExecutor::Meeting met;
  const auto errors = on_stages(setup, way, 3, [&](TinyRun& run) {
    const int rank = run.layout().options.place().rank();
    {
      std::lock_guard lock(mutex);
      engines[static_cast<std::size_t>(rank)] = &run.engine();
    }
    ++there;
    while (there < 2) std::this_thread::yield();
    // Stage 0 gives its batches one by one, and stays away with the first; stage 1 waits for activations.
    const Batch batch = run.batch(0, 0);
    try {
      (void)run.engine().evaluate(8, [&](std::int64_t) {
        while (rank == 0 && !over) {
          if (const auto m = engines[1]->meeting(CommAxis::kStages); m.inside && !over) met = m;
          std::this_thread::yield();
        }
        if (rank == 0 && there < 4) there = 4;
        return MicroBatch{batch.ids.data(), batch.targets.data()};
      });
    } catch (const Error&) {
      over = true;
      for (++there; there < 4;) std::this_thread::yield();  // until nobody looks at this engine
      throw;
    }
  });
  EXPECT_EQ(met.from, 0);
  EXPECT_HAS(met.what, "receiving for layer");
  EXPECT_HAS(errors[1], "rank 1, which receives from rank 0");
}

// What one stage throws in the middle of a step ends the others with its error, receives under way too.
TEST(PipelineFailures, OfOneStageEndAll) {
  TinySetup setup = setup_of(false, true, DType::kF32);
  const auto errors = on_stages(setup, in_stages(1, 1, false, 4, {kBreadthFirst}), 60, [&](TinyRun& run) {
    (void)run.step(Then::kTrain);
    if (run.layout().options.place().rank() == 2) throw Error(Errc::kUsage, "stage 2", "has had enough");
    (void)run.step(Then::kPause);
  });
  for (std::size_t r = 0; r < errors.size(); ++r) EXPECT_HAS(errors[r], "has had enough") << r;
}

// Idle time because another stage is late is its own cause.
TEST(PipelineStalls, AreThoseOfStages) {
  const auto errors = on_stages(setup_of(false, true, DType::kF32), in_stages(1, 1, false, 4, {kGPipe}), 60,
                                [](TinyRun& run) {
                                  (void)run.step(Then::kPause);
                                  const StepResult r = run.step(Then::kPause);
                                  EXPECT_NEAR(r.stall, r.stall_for.total(), 1e-12);
                                  EXPECT_GT(r.stall_for[StallCause::kStages], 0);
                                  EXPECT_GT(r.comm_seconds[CommAxis::kStages], 0);
                                  EXPECT_LT(r.own_seconds(), r.seconds);
                                });
  EXPECT_EQ(errors, std::vector<std::string>(4));
}

}  // namespace
}  // namespace zg::test
