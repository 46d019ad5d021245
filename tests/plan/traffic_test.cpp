// Bytes: what a step moves is a closed form of the sizes of its units; the plan says it before the run, and
// the store counts it.
#include <random>

#include "engine/tiny_run.hpp"
#include "support/seed.hpp"

namespace zg::test {
namespace {

// What `steps` steps move, and the updates that they defer.
LinkBytes moved(const TinySetup& setup, std::int64_t steps) {
  TinyRun run(setup);
  run.initialize();
  for (std::int64_t i = 1; i <= steps; ++i) (void)run.step(i < steps ? Then::kTrain : Then::kPause);
  run.engine().flush();
  const LinkBytes t = run.engine().settled_traffic();
  EXPECT_EQ(t, forecast(run.layout(), run.programs(), run.budgets(), run.engine().history()));
  return t;
}

void expect_per_step(const TinySetup& setup, const LinkBytes& formula) {
  const auto text = [](const LinkBytes& t) {
    return fmt::format("nvme r {} w {}, h2d {}, d2h {}", t.nvme_read(), t.nvme_write(), t[kToDevice],
                       t[kToHost]);
  };
  EXPECT_EQ(text(moved(setup, 6) - moved(setup, 5)), text(formula));
  const TinyRun run(setup);
  EXPECT_EQ(text(make_plan(run.layout(), run.programs(), run.budgets()).per_step), text(formula));
}

// Sizes of one unit's tensors, computed from the model alone.
struct Sizes {
  std::int64_t weight = 0, gradient = 0, sum = 0;                                     // bytes
  std::int64_t weight_pages = 0, gradient_pages = 0, sum_pages = 0, state_pages = 0;  // in whole pages
};
std::int64_t pages(std::int64_t bytes) {
  return (bytes + 4095) / 4096 * 4096;
}
std::vector<Sizes> sizes_of(const TinySetup& s) {
  const Model model(s.model, s.dtype, host_ops());
  const std::int64_t element = s.dtype == DType::kBF16 ? 2 : 4;
  const StateLayout state{StateFormat{}};
  const std::int64_t step = state.elements_within(s.layout.state_segment_bytes);
  std::vector<Sizes> all;
  for (const Unit& u : model.units()) {
    Sizes x;
    x.weight = x.gradient = u.count * element;
    x.sum = u.count * 4;
    x.weight_pages = x.gradient_pages = pages(x.weight);
    x.sum_pages = pages(x.sum);
    for (std::int64_t first = 0; first < u.count; first += step)
      x.state_pages += pages(state.bytes(std::min(step, u.count - first)));
    all.push_back(x);
  }
  return all;
}
std::int64_t total(const std::vector<Sizes>& all, std::int64_t Sizes::*what) {
  std::int64_t sum = 0;
  for (const Sizes& s : all) sum += s.*what;
  return sum;
}

TEST(BytesPerStep, EverythingInTheDeviceMovesNothing) {
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama()}) {
    TinySetup s;
    s.model = model;
    s.layout.device_updates = kAllUnits;
    expect_per_step(s, {});
  }
}

// The classic: a device that holds weights, gradients and activations, and the optimizer at the host. New
// weights go up once, gradients come down once.
TEST(BytesPerStep, OptimizerAtTheHost) {
  for (const ModelConfig& model : {tiny_gpt2(), tiny_llama()}) {
    for (const UpdateTiming timing :
         {UpdateTiming::kDeferred, UpdateTiming::kEarly, UpdateTiming::kSeparate}) {
      for (const Accumulation order : {Accumulation::kLayerMajor, Accumulation::kMicroBatchMajor}) {
        for (const std::size_t on_device : {0, 1, 3}) {
          SCOPED_TRACE(fmt::format("{}, order {}, {} units on the device", name_of(timing),
                                   static_cast<int>(order), on_device));
          TinySetup s;
          s.model = model;
          s.dtype = DType::kBF16;
          s.timing = timing;
          s.clip = timing == UpdateTiming::kEarly ? 0 : 0.5;
          s.layout.optimizer = OffloadTarget::kHost;
          s.layout.accumulation = order;
          s.layout.device_updates = static_cast<std::int32_t>(on_device);
          // What is updated on the device stays there: weight, gradient and state.
          std::vector<Sizes> units = sizes_of(s);
          units.erase(units.begin(), units.begin() + static_cast<std::ptrdiff_t>(on_device));
          LinkBytes formula;
          formula[kToDevice] = total(units, &Sizes::weight);
          formula[kToHost] = total(units, &Sizes::gradient);
          expect_per_step(s, formula);
        }
      }
    }
  }
}

// A device with room for two blocks (fp32: a block and its gradient sum) beside the activations, which stay.
// So
//   - the embedding is kept from its forward to the tied head: up once
//   - the head needs the embedding and its sum, which pushes the last block out: every block comes up once
//   for
//     its forward and once for its backward
//   - the embedding's sum, begun in the head, is in the way of every block's backward: down and up once
//   - gradients come down once
// The activations that are not there yet, or no more, leave room that is too small for a further block or for
// the embedding's sum; the test makes sure of that.
TEST(BytesPerStep, DeviceOfTwoBlocks) {
  TinySetup s;
  s.layout.micro_batch = {1, 8};  // a page per activation
  s.layout.micro_batches = 2;
  s.layout.activations = OffloadTarget::kDevice;
  s.layout.state_segment_bytes = 1 << 20;
  const std::vector<Sizes> units = sizes_of(s);
  const std::int64_t layers = s.model.layers;
  const Sizes &embedding = units[0], &block = units[1], &head = units.back();
  const std::int64_t activations = 4096 * s.layout.micro_batches * (layers + 2);
  ASSERT_LE(s.layout.micro_batch.rows() * s.model.width * 4, 4096);
  ASSERT_LT(activations, embedding.sum_pages);
  ASSERT_LT(embedding.sum_pages, block.sum_pages);
  ASSERT_GT(embedding.weight_pages + 2 * block.weight_pages,
            2 * block.weight_pages + activations);  // forward keeps no block
  ASSERT_LE(embedding.weight_pages + embedding.sum_pages + head.weight_pages + head.sum_pages,
            2 * block.weight_pages);
  ASSERT_GT(embedding.weight_pages + embedding.sum_pages + block.weight_pages,
            2 * block.weight_pages + 4096 * s.layout.micro_batches);
  s.room = Room::kGiven;
  s.budgets = {2 * block.weight_pages + activations, 16 << 20};
  LinkBytes formula;
  formula[kToDevice] = embedding.weight + 2 * layers * block.weight + head.weight + embedding.sum;
  formula[kToHost] = total(units, &Sizes::gradient) + embedding.sum;
  expect_per_step(s, formula);
}

// Weights, gradients and state that are demoted to NVMe through a host that holds just the update of one
// block, all its segments at once: gradient, weight and state. Every block's update pushes everything else
// out, so
//   - every state segment is read and written once
//   - a new weight that is not in the device yet when the next block is updated is written, and read again
// Deferred, that is all but the last block's (only the small head is updated before that block's forward) and
// the head's own. Early, all but the two that are updated last, the first block and the embedding, which the
// next forward fetches before any other update. With an ample device, weights then stay there until they are
// updated, and gradients come down straight to their update: no copy of a gradient or an activation sinks any
// further. With a device as tight as the host there is no closed form: what is left over in either after each
// operation depends on the sizes of all, and is used.
TEST(BytesPerStep, HostOfOneUpdate) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const UpdateTiming timing : {UpdateTiming::kDeferred, UpdateTiming::kEarly}) {
      for (const std::int64_t layers : {3, 6}) {
        SCOPED_TRACE(fmt::format("{}, {}, {} layers", name_of(dtype), static_cast<int>(timing), layers));
        TinySetup s;
        s.model.layers = layers;
        s.dtype = dtype;
        s.timing = timing;
        s.clip = timing == UpdateTiming::kDeferred ? 0.5 : 0;
        s.layout.drives = 1;
        s.layout.weights = s.layout.optimizer = OffloadTarget::kNvme;
        s.layout.state_segment_bytes = 1 << 20;
        const std::vector<Sizes> units = sizes_of(s);
        const Sizes &block = units[1], &head = units.back();
        const auto update = [](const Sizes& u) { return u.gradient_pages + u.weight_pages + u.state_pages; };
        ASSERT_LE(update(units[0]), update(block));
        ASSERT_LE(update(head), block.weight_pages);
        s.room = Room::kGiven;
        s.budgets = {16 << 20, update(block)};
        const TinyRun run(s);
        EXPECT_EQ(smallest_budgets(run.layout(), run.programs(), s.budgets.device)->host, update(block));
        const std::int64_t all_weights = total(units, &Sizes::weight_pages);
        const std::int64_t kept = timing == UpdateTiming::kDeferred
                                      ? block.weight_pages + head.weight_pages
                                      : block.weight_pages + units[0].weight_pages;
        LinkBytes formula;
        formula[kNvmeRead] = formula[kNvmeWrite] = total(units, &Sizes::state_pages) + all_weights - kept;
        formula[kToDevice] = total(units, &Sizes::weight);
        formula[kToHost] = total(units, &Sizes::gradient);
        expect_per_step(s, formula);
      }
    }
  }
}

// What the engine moves besides: sums of zero, in units of 256 bytes, and the tokens up, the sums down.
TEST(BytesPerStep, TheEngineAddsTokensAndSums) {
  TinySetup s;
  TinyRun run(s);
  run.initialize();
  const LinkBytes before = run.engine().traffic();
  for (int i = 0; i < 4; ++i) (void)run.step(i < 3 ? Then::kTrain : Then::kPause);
  run.engine().flush();
  const LinkBytes of_store = run.engine().settled_traffic(), own = run.engine().traffic() - before - of_store;
  const std::int64_t tokens = 2 * 4 * s.layout.micro_batches * s.layout.micro_batch.rows();
  const auto sums = static_cast<std::int64_t>(8 * (1 + run.model().units().size()));
  ASSERT_LE(sums, 256);
  EXPECT_EQ(own, (LinkBytes{4 * (256 + tokens), 4 * sums}));
  EXPECT_EQ(engine_traffic_per_step(run.layout()), (LinkBytes{256 + tokens, sums}));
}

// Whatever the budgets: the store moves what the plan foretells, to the byte, with evaluations between the
// steps.
struct ForecastCase {
  std::uint64_t seed;
  bool direct;
};
class Forecast : public testing::TestWithParam<ForecastCase> {};

TEST_P(Forecast, IsWhatMovesUnderAnyBudgets) {
  const std::uint64_t seed = test_seed(GetParam().seed);
  const bool direct = GetParam().direct;
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  std::mt19937_64 random(seed);
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  };
  const auto may_demote = [](OffloadTarget p) {
    return p == OffloadTarget::kAuto || p == OffloadTarget::kNvme;
  };
  int with_traffic = 0, refused = 0;
  for (int i = 0; i < 60; ++i) {
    TinySetup s;
    s.model = below(2) == 0 ? tiny_gpt2() : tiny_llama();
    s.dtype = below(2) == 0 ? DType::kF32 : DType::kBF16;
    s.timing = static_cast<UpdateTiming>(below(3));
    s.clip = s.timing == UpdateTiming::kEarly ? 0 : 0.5;
    s.layout.accumulation = below(2) == 0 ? Accumulation::kLayerMajor : Accumulation::kMicroBatchMajor;
    s.layout.recompute = below(2) == 0;
    s.layout.device_updates = static_cast<std::int32_t>(below(3) == 0 ? kAllUnits : below(2) * below(4));
    s.layout.drives = static_cast<int>(below(3));
    s.layout.micro_batches = 1 + below(3);
    s.layout.weights = static_cast<OffloadTarget>(below(4));
    s.layout.optimizer =
        s.layout.device_updates == kAllUnits || below(2) == 0 ? OffloadTarget::kAuto : OffloadTarget::kHost;
    s.layout.activations = static_cast<OffloadTarget>(below(4));
    s.prefetch = static_cast<int>(below(3) * 40);
    s.nvme = below(2) == 0 ? Nvme::kRam : Nvme::kMemory;
    s.layout.state_segment_bytes = 3 * (16384 + 4096 * below(30));
    s.layout.state_versions = static_cast<int>(1 + below(2));
    s.layout.state.master =
        s.dtype == DType::kBF16 && below(2) == 0 ? MasterFormat::kSplit : MasterFormat::kFull;
    s.layout.state.moments = static_cast<MomentFormat>(below(3));
    if (below(3) == 0) {  // some parameters are not trained, and perhaps a unit
      const Model model(s.model, s.dtype, host_ops());
      const std::int64_t unit = below(2 * static_cast<std::int64_t>(model.units().size()));
      for (const Unit& u : model.units()) {
        const bool whole = unit == static_cast<std::int64_t>(s.layout.groups.size());
        s.layout.groups.emplace_back();
        for (std::size_t p = 0; p < u.params.size(); ++p)
          s.layout.groups.back().push_back(whole || below(4) == 0 ? kFrozen : 0);
      }
    }
    SCOPED_TRACE(fmt::format(
        "case {}: {} {}, {}, {} of it trained, state {} {}, order {}, recompute {}, {} units on the device, "
        "{} drives, "
        "placements {} {} {}",
        i, s.model.tied ? "gpt2" : "llama", name_of(s.dtype), name_of(s.timing),
        s.layout.groups.empty() ? "all" : "part", static_cast<int>(s.layout.state.master),
        static_cast<int>(s.layout.state.moments), static_cast<int>(s.layout.accumulation), s.layout.recompute,
        s.layout.device_updates, s.layout.drives, static_cast<int>(s.layout.weights),
        static_cast<int>(s.layout.optimizer), static_cast<int>(s.layout.activations)));
    TinySetup ample = s;
    ample.layout.drives = 0;
    s.room = Room::kGiven;
    const std::int64_t everything = TinyRun(ample).everything();
    {
      s.budgets = {everything, everything, direct};
      const TinyRun probe(s);
      const auto least_device = smallest_budgets(probe.layout(), probe.programs(), 0, direct);
      ASSERT_TRUE(least_device.has_value());
      s.budgets.device = least_device->device + below(3) * below(everything - least_device->device + 1) / 4;
      const auto least_host = smallest_budgets(probe.layout(), probe.programs(), s.budgets.device, direct);
      ASSERT_TRUE(least_host.has_value());
      s.budgets.host = least_host->host + below(3) * below(everything - least_host->host + 1) / 4;
    }
    TinyRun run(s);
    if (!make_plan(run.layout(), run.programs(), run.budgets()).fits) {
      // More room can fit less well where what may not be demoted got there first: refused, as it must be.
      ASSERT_FALSE(may_demote(s.layout.weights) && may_demote(s.layout.optimizer) &&
                   may_demote(s.layout.activations));
      ++refused;
      continue;
    }
    run.initialize();
    const std::int64_t steps = 2 + below(6);
    for (std::int64_t step = 1; step <= steps; ++step) {
      const bool evaluation = below(3) == 0;
      (void)run.step(evaluation || step == steps ? Then::kPause : Then::kTrain);
      if (evaluation) (void)run.evaluate();
    }
    run.engine().flush();
    const LinkBytes t = run.engine().settled_traffic();
    EXPECT_EQ(t, forecast(run.layout(), run.programs(), run.budgets(), run.engine().history()));
    run.expect_within_budgets();
    with_traffic += t == LinkBytes{} ? 0 : 1;
    if (HasFailure()) break;
  }
  EXPECT_GT(with_traffic, 40);
  EXPECT_LE(refused, 3);
}
// In 4 there are runs whose weights keep their state from sinking when it is loaded, and runs that fit or not
// depending on whether an evaluation follows the first step.
INSTANTIATE_TEST_SUITE_P(Seeds, Forecast,
                         testing::Values(ForecastCase{20260725u, false}, ForecastCase{4u, false},
                                         ForecastCase{7u, true}),
                         [](const auto& test) {
                           return fmt::format("{}{}", test.param.seed, test.param.direct ? "_direct" : "");
                         });

// What was run is remembered by its kinds, not by its length.
TEST(History, OfALongRunIsShort) {
  for (const UpdateTiming timing : {UpdateTiming::kDeferred, UpdateTiming::kEarly, UpdateTiming::kSeparate}) {
    TinySetup s;
    s.timing = timing;
    s.clip = 0;
    s.layout.drives = 1;
    s.room = Room::kSmallest;
    TinyRun run(s);
    run.initialize();
    for (int i = 0; i < 30; ++i) (void)run.step(i % 10 < 9 ? Then::kTrain : Then::kPause);
    const auto& history = run.engine().history();
    std::int64_t steps = 0;
    for (const auto& [activity, times] : history)
      steps += activity == Activity::kStep || activity == Activity::kStepThenPause ? times : 0;
    EXPECT_EQ(steps, 30);
    // The initialisation, and of each ten: nine, and the last.
    EXPECT_EQ(history.size(), 7u) << name_of(timing);
    run.engine().flush();
    const LinkBytes t = run.engine().settled_traffic();
    EXPECT_EQ(t, forecast(run.layout(), run.programs(), run.budgets(), run.engine().history()));
  }
}

}  // namespace
}  // namespace zg::test
