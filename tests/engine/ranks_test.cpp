// Data-parallel ranks: every way to shard gives the same bits, and all ranks together what one rank gives
// that takes all their micro-batches.
#include <mutex>
#include <thread>

#include "engine/tiny_run.hpp"

namespace zg::test {
namespace {

struct Outcome {
  std::vector<double> losses, norms, evals;
  std::map<std::string, std::vector<float>> masters;  // by parameter, whole
};

struct Way {
  std::string name;
  int ranks = 1, shards = 1;
  bool keep_weights = false;
  std::int32_t gather_ahead = 0;
};

// Three steps, two of which an evaluation follows. `setup`: with the micro-batches of all ranks together.
Outcome train(const TinySetup& setup, const Way& way) {
  Outcome out;
  std::mutex mutex;
  auto ranks = make_local_ranks(way.ranks, {.timeout_seconds = 60});
  std::vector<std::thread> threads;
  for (auto& rank : ranks) {
    threads.emplace_back([&, comm = rank.get()] {
      TinySetup mine = setup;
      mine.layout.micro_batches = setup.layout.micro_batches / way.ranks;
      mine.layout.sharding = {way.ranks, comm->rank(), way.shards, way.keep_weights};
      mine.gather_ahead = way.gather_ahead;
      mine.comm = way.ranks > 1 ? comm : nullptr;
      TinyRun run(mine);
      run.initialize();
      Outcome o;
      for (int i = 0; i < 3; ++i) {
        const StepResult r = run.step(i == 1 ? Then::kTrain : Then::kPause);
        o.losses.push_back(r.loss);
        o.norms.push_back(r.grad_norm);
        if (i != 1) o.evals.push_back(run.evaluate());
      }
      EXPECT_EQ(run.engine().settled_traffic(),
                forecast(run.layout(), run.programs(), run.budgets(), run.engine().history()));
      std::lock_guard lock(mutex);
      for (std::size_t u = 0; u < run.model().units().size(); ++u) {
        for (const Param& p : run.model().units()[u].params) {
          std::vector<float>& master = out.masters[p.name];
          master.resize(static_cast<std::size_t>(p.count()));
          run.engine().read_master(static_cast<std::int32_t>(u), p, 0, p.count(), master.data());
        }
      }
      if (!out.losses.empty()) {
        EXPECT_EQ(out.losses, o.losses) << "every rank knows the same";
        EXPECT_EQ(out.norms, o.norms);
        EXPECT_EQ(out.evals, o.evals);
      }
      out.losses = o.losses, out.norms = o.norms, out.evals = o.evals;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return out;
}

void expect_same(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  EXPECT_EQ(a.evals, b.evals);
  ASSERT_EQ(a.masters.size(), b.masters.size());
  for (const auto& [name, values] : a.masters) {
    const auto& other = b.masters.at(name);
    ASSERT_EQ(values.size(), other.size());
    EXPECT_EQ(std::memcmp(values.data(), other.data(), values.size() * sizeof(float)), 0) << name;
  }
}

// The largest difference of an element, relative to the largest element of its parameter.
double distance(const Outcome& a, const Outcome& b) {
  double most = 0;
  for (const auto& [name, values] : a.masters) {
    double scale = 0, far = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      scale = std::max(scale, std::abs(static_cast<double>(values[i])));
      far = std::max(far, std::abs(static_cast<double>(values[i]) - b.masters.at(name)[i]));
    }
    if (scale > 0) most = std::max(most, far / scale);
  }
  for (std::size_t i = 0; i < a.losses.size(); ++i) {
    most = std::max(most, std::abs(a.losses[i] / b.losses[i] - 1));
    most = std::max(most, std::abs(a.norms[i] / b.norms[i] - 1));
  }
  for (std::size_t i = 0; i < a.evals.size(); ++i)
    most = std::max(most, std::abs(a.evals[i] / b.evals[i] - 1));
  return most;
}

std::vector<Way> ways_of(int ranks) {
  std::vector<Way> ways = {{"zero0", ranks, 1, false},
                           {"zero1", ranks, ranks, true},
                           {"zero3", ranks, ranks, false},
                           {"zero1_ahead", ranks, ranks, true, 1},
                           {"zero3_ahead", ranks, ranks, false, 1}};
  for (int shards = 2; shards < ranks; ++shards) {
    if (ranks % shards != 0) continue;
    ways.push_back({"hybrid" + std::to_string(shards), ranks, shards, false});
    ways.push_back({"hybrid_kept" + std::to_string(shards), ranks, shards, true});
  }
  return ways;
}

struct Case {
  std::string name;
  TinySetup setup;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const char* name, auto&& change) {
    Case c{name, {}};
    c.setup.layout.micro_batches = 12;
    change(c.setup);
    all.push_back(std::move(c));
  };
  add("gpt2", [](TinySetup&) {});
  add("gpt2_nvme", [](TinySetup& s) { s.layout.drives = 1, s.room = Room::kSmallest; });
  add("llama", [](TinySetup& s) { s.model = tiny_llama(); });
  add("llama_micro_batch_major",
      [](TinySetup& s) { s.model = tiny_llama(), s.layout.accumulation = Accumulation::kMicroBatchMajor; });
  add("early", [](TinySetup& s) { s.timing = UpdateTiming::kEarly, s.clip = 0; });
  add("separate_device",
      [](TinySetup& s) { s.timing = UpdateTiming::kSeparate, s.layout.device_updates = kAllUnits; });
  add("bf16_split_int8", [](TinySetup& s) {
    s.dtype = DType::kBF16;
    s.layout.state.master = MasterFormat::kSplit, s.layout.state.moments = MomentFormat::kInt8;
  });
  return all;
}

class Ranks : public testing::TestWithParam<Case> {};

TEST_P(Ranks, EveryWayToShardGivesTheSameBits) {
  for (const int ranks : {2, 3, 4}) {
    SCOPED_TRACE(ranks);
    std::optional<Outcome> first;
    for (const Way& way : ways_of(ranks)) {
      SCOPED_TRACE(way.name);
      const Outcome outcome = train(GetParam().setup, way);
      if (first) {
        expect_same(*first, outcome);
      } else {
        first = outcome;
      }
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Setups, Ranks, testing::ValuesIn(cases()),
                         [](const auto& c) { return c.param.name; });

// What is exchanged in fewer bits: the same bits wherever weights are gathered, and near what is exchanged as
// it is, by the format's bounds. With SGD a step is as wrong as its gradient, at most a 14th of the largest
// element of a block from each rank; clipping bounds the gradient.
TEST(RanksInFewerBits, AreAlikeForAllShardings) {
  for (const bool llama : {false, true}) {
    TinySetup setup;
    if (llama) setup.model = tiny_llama();
    setup.layout.micro_batches = 12;
    setup.layout.state.kind = OptimizerKind::kSgd;
    setup.layout.state.moment_count = 0;
    const Outcome exact = train(setup, {"exact", 4, 4, false});
    for (const int gradient_bits : {0, 8, 4}) {
      for (const int weight_bits : {0, 8}) {
        if (gradient_bits + weight_bits == 0) continue;
        SCOPED_TRACE(testing::Message()
                     << weight_bits << " and " << gradient_bits << " bits, llama " << llama);
        setup.layout.weight_bits = weight_bits, setup.layout.gradient_bits = gradient_bits;
        const Outcome zero3 = train(setup, {"zero3", 4, 4, false});
        expect_same(zero3, train(setup, {"zero1", 4, 4, true}));
        expect_same(zero3, train(setup, {"zero3_ahead", 4, 4, false, 1}));
        const double far = distance(exact, zero3);
        EXPECT_GT(far, 0);
        EXPECT_LT(far, gradient_bits == 4 ? 0.1 : 0.01);
        // Sums are made in two steps, so gradients differ.
        EXPECT_LT(distance(zero3, train(setup, {"hybrid", 4, 2, false})), gradient_bits == 4 ? 0.1 : 0.01);
      }
    }
  }
}

// In fp64 the order of sums is all that differs, some 1e-16 relative to the terms; AdamW divides by the root
// of a second moment, so the test of the weights is with SGD.
TEST(RanksInFp64, AreOneRankToRoundoff) {
  for (const bool llama : {false, true}) {
    TinySetup setup;
    setup.dtype = DType::kF64;
    if (llama) setup.model = tiny_llama();
    setup.layout.micro_batches = 12;
    setup.layout.state.kind = OptimizerKind::kSgd;
    setup.layout.state.moment_count = 0;
    setup.lr = 0.1;
    setup.clip = 0;
    const Outcome one = train(setup, {"one"});
    for (const int ranks : {2, 3, 4}) {
      for (const Way& way : ways_of(ranks)) {
        SCOPED_TRACE(way.name);
        const double far = distance(one, train(setup, way));
        // Masters are read as floats here.
        EXPECT_LT(far, 1e-7);
      }
    }
  }
}

}  // namespace
}  // namespace zg::test
