// What ranks exchange: the counters of a run are what was forecast for each rank, and both are the closed
// forms of the sizes of the units.
#include "ziggurat/step/communication.hpp"

#include <array>
#include <atomic>
#include <mutex>
#include <thread>

#include "engine/tiny_run.hpp"

namespace zg::test {
namespace {

// work(run, comm) on a thread of each rank. `setup`: of one rank, without its sharding.
template <class Work>
void on_ranks(const TinySetup& setup, const Sharding& sharding, Work&& work) {
  auto ranks = make_local_ranks(sharding.ranks, {.timeout_seconds = 60});
  std::vector<std::thread> threads;
  for (auto& rank : ranks) {
    threads.emplace_back([&, comm = rank.get()] {
      TinySetup mine = setup;
      mine.layout.sharding = sharding;
      mine.layout.sharding.rank = comm->rank();
      mine.comm = comm;
      TinyRun run(mine);
      run.initialize();
      work(run);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

struct Way {
  const char* name;
  int shards;
  bool keep_weights;
};
std::vector<Way> ways_of(int ranks) {
  std::vector<Way> ways{{"zero 0", 1, true}, {"zero 1 and 2", ranks, true}, {"zero 3", ranks, false}};
  if (ranks == 4) ways.insert(ways.end(), {{"hybrid", 2, false}, {"hybrid, kept", 2, true}});
  return ways;
}

// What each rank sends in a step, from the sizes of the model alone. Of d members with B bytes together, a
// gather and a sum send B (d - 1) / d each.
CommTraffics closed_form(const TinySetup& s, const Model& model, const Sharding& sharding) {
  const std::int64_t d = sharding.ranks, shards = sharding.shards, groups = d / shards;
  const auto weight = static_cast<std::int64_t>(size_of(s.dtype)), sum = std::int64_t{4};
  const std::int64_t passes =
      s.layout.accumulation == Accumulation::kMicroBatchMajor && !sharding.keep_weights
          ? s.layout.micro_batches
          : 1;
  CommTraffics t;
  const auto add = [&](CommAxis axis, std::int64_t bytes, std::int64_t calls) {
    t[axis] += {calls * bytes, calls * bytes, calls};
  };
  const auto last = static_cast<std::int64_t>(model.units().size()) - 1;
  for (std::int64_t u = 0; u <= last; ++u) {
    const std::int64_t count = model.units()[static_cast<std::size_t>(u)].count;
    const std::int64_t padded = d * ((count + d * 256 - 1) / (d * 256) * 256);
    add(CommAxis::kDataParallel, padded * sum * (d - 1) / d, 1);
    // A shard has `groups` pieces, each of which another replica has summed. One that is all padding has
    // none.
    const bool has_parameters = sharding.shard() * padded / shards < count;
    if (groups > 1 && has_parameters)
      add(CommAxis::kReplicas, padded / shards * weight * (groups - 1) / groups, 1);
    // For the forward; for the backward again, unless it is kept. The head does both at once, and the
    // embedding needs its weight in the backward only as a tied output matrix.
    const bool twice = !sharding.keep_weights && u < last && (u > 0 || s.model.tied);
    if (shards > 1) add(CommAxis::kShards, padded * weight * (shards - 1) / shards, passes * (twice ? 2 : 1));
  }
  add(CommAxis::kScalars, 8 * (d - 1), 1);                   // valid tokens
  add(CommAxis::kScalars, 8 * (d - 1) * (1 + last + 1), 1);  // the loss and the units' norms
  return t;
}

// All members of a group see the same group, and the groups of an axis are all ranks.
TEST(RankPlaces, GroupsAreTheSameForAllMembers) {
  const auto place_of = [](int rank) {
    return RankPlace{{6, rank / 2 % 6, 3, false}, {2, 3, 4, rank % 2, rank / 12, ContextMethod::kRing, 3}};
  };
  const int sizes[kCommAxes] = {3, 6, 2, 48, 2, 3, 4, 2, 3};
  for (int a = 0; a < kCommAxes; ++a) {
    const auto axis = static_cast<CommAxis>(a);
    for (int rank = 0; rank < 48; ++rank) {
      ASSERT_EQ(place_of(rank).rank(), rank);
      const std::vector<int> members = members_of(place_of(rank), axis);
      EXPECT_EQ(members.size(), static_cast<std::size_t>(sizes[a])) << name_of(axis);
      EXPECT_EQ(std::count(members.begin(), members.end(), rank), 1) << name_of(axis);
      for (const int member : members) EXPECT_EQ(members_of(place_of(member), axis), members);
    }
  }
  EXPECT_EQ(members_of(place_of(0), CommAxis::kTensor), (std::vector{0, 1}));
  EXPECT_EQ(members_of(place_of(0), CommAxis::kContext), (std::vector{0, 2, 4}));
  EXPECT_EQ(members_of(place_of(0), CommAxis::kShards), (std::vector{0, 2, 4}));
  EXPECT_EQ(members_of(place_of(0), CommAxis::kReplicas), (std::vector{0, 6}));
  EXPECT_EQ(members_of(place_of(0), CommAxis::kStages), (std::vector{0, 12, 24, 36}));
  EXPECT_EQ(members_of(place_of(0), CommAxis::kExperts), (std::vector{0, 2, 4}));
  EXPECT_EQ(members_of(place_of(9), CommAxis::kExperts), (std::vector{7, 9, 11}));
}

TEST(CommBytes, AreTheClosedFormsAsForecast) {
  struct Case {
    ModelConfig model;
    DType dtype;
    Accumulation order;
    UpdateTiming timing;
  };
  using enum Accumulation;
  using enum UpdateTiming;
  for (const Case& c : {Case{tiny_gpt2(), DType::kF32, kLayerMajor, kDeferred},
                        Case{tiny_llama(), DType::kBF16, kMicroBatchMajor, kEarly},
                        Case{tiny_gpt2(), DType::kBF16, kMicroBatchMajor, kSeparate}}) {
    TinySetup setup;
    setup.model = c.model, setup.dtype = c.dtype, setup.timing = c.timing;
    setup.layout.accumulation = c.order;
    if (c.timing == kEarly) setup.clip = 0;
    for (const int ranks : {2, 3, 4}) {
      for (const Way& way : ways_of(ranks)) {
        SCOPED_TRACE(fmt::format("{} on {} ranks, {}", way.name, ranks, name_of(c.timing)));
        std::mutex mutex;
        on_ranks(setup, {ranks, 0, way.shards, way.keep_weights}, [&](TinyRun& run) {
          StepResult step;
          for (const Then then : {Then::kTrain, Then::kPause}) step = run.step(then);
          (void)run.evaluate();
          (void)run.step(Then::kPause);
          run.engine().flush();
          (void)run.engine().of_all_ranks(std::array{1.0});  // of others, and not counted
          const Layout& layout = run.layout();
          const CommTraffics formula = closed_form(run.setup(), run.model(), layout.options.sharding);
          std::lock_guard lock(mutex);
          EXPECT_EQ(step.comm, formula);
          EXPECT_EQ(make_plan(layout, run.programs(), run.budgets()).comm_per_step, formula);
          EXPECT_EQ(run.engine().comm(), comm_forecast(layout, run.programs(), run.engine().history()));
        });
        if (HasFailure()) return;
      }
    }
  }
}

// Stage 0 is an all-reduce where gradients stay in their sums' type.
TEST(CommBytes, OfStage0AreAnAllReduce) {
  for (const int ranks : {2, 3, 4}) {
    on_ranks(TinySetup(), {ranks, 0, 1, true}, [&](TinyRun& run) {
      const CommTraffics step = run.step(Then::kPause).comm;
      std::int64_t padded = 0;
      for (std::int32_t u = 0; u <= run.layout().head_unit(); ++u)
        padded += ranks * run.layout().unit(u).piece;
      EXPECT_EQ(step[CommAxis::kDataParallel].sent + step[CommAxis::kReplicas].sent,
                2 * (ranks - 1) * padded * 4 / ranks);
      EXPECT_EQ(step[CommAxis::kShards], CommTraffic());
    });
  }
}

// A shard without trained parameters has no gradient that its replicas would exchange.
TEST(CommBytes, OfFrozenParametersAreForecastForEachRank) {
  TinySetup setup;
  const Model model(setup.model, setup.dtype, host_ops());
  for (const Unit& unit : model.units()) {
    setup.layout.groups.emplace_back(unit.params.size(), kFrozen);
    setup.layout.groups.back().front() = setup.layout.groups.size() == 2 ? 0 : kFrozen;
  }
  std::mutex mutex;
  std::vector<std::int64_t> calls(4);
  on_ranks(setup, {4, 0, 2, false}, [&](TinyRun& run) {
    (void)run.step(Then::kPause);
    run.engine().flush();
    std::lock_guard lock(mutex);
    EXPECT_EQ(run.engine().comm(), comm_forecast(run.layout(), run.programs(), run.engine().history()));
    calls[static_cast<std::size_t>(run.layout().options.place().rank())] =
        run.engine().comm()[CommAxis::kReplicas].calls;
  });
  EXPECT_EQ(calls, (std::vector<std::int64_t>{1, 0, 1, 0}));
}

TEST(CommBytes, OneRankExchangesNothing) {
  TinyRun run{TinySetup()};
  run.initialize();
  const StepResult r = run.step(Then::kPause);
  EXPECT_EQ(r.comm, CommTraffics());
  EXPECT_EQ(r.comm_seconds, ByAxis<double>());
  EXPECT_EQ(r.stall_for[StallCause::kGathers], 0);
  EXPECT_EQ(r.stall_for[StallCause::kRanks], 0);
  EXPECT_EQ(r.own_seconds(), r.seconds);
  EXPECT_EQ(make_plan(run.layout(), run.programs(), run.budgets()).comm_per_step, CommTraffics());
}

// A rank that comes late: the others wait for it, and what it does itself tells it apart.
TEST(CommSeconds, TellWhoWaitedAndForWhat) {
  constexpr std::chrono::milliseconds kLate{300};
  const double late = std::chrono::duration<double>(kLate).count();
  TinySetup setup;
  std::mutex mutex;
  std::vector<StepResult> by_rank(3);
  on_ranks(setup, {3, 0, 3, false}, [&](TinyRun& run) {
    const int rank = run.layout().options.place().rank();
    (void)run.step(Then::kTrain);
    if (rank == 1) std::this_thread::sleep_for(kLate);
    const StepResult r = run.step(Then::kPause);
    std::lock_guard lock(mutex);
    by_rank[static_cast<std::size_t>(rank)] = r;
  });
  for (std::size_t rank = 0; rank < 3; ++rank) {
    SCOPED_TRACE(rank);
    const StepResult& r = by_rank[rank];
    for (const CommAxis axis : {CommAxis::kShards, CommAxis::kDataParallel, CommAxis::kScalars})
      EXPECT_GT(r.comm_seconds[axis], 0) << name_of(axis);
    EXPECT_EQ(r.comm_seconds[CommAxis::kReplicas], 0);
    EXPECT_GT(r.stall_for[StallCause::kGathers], 0);
    EXPECT_LE(r.stall, r.seconds + 1e-3);
    if (rank == 1) continue;
    // It waits for the late one in its first exchange, with a part of the delay behind the step before.
    EXPECT_GT(r.stall_for[StallCause::kRanks], late / 2);
    EXPECT_GT(r.comm_seconds[CommAxis::kScalars], late / 2);
    EXPECT_LT(r.own_seconds(), r.seconds - late / 2);
  }
}

TEST(Agreement, NamesTheRanksAndTheFirstThingThatDiffers) {
  const std::vector<std::string> lines{"seed 1", "seed 2", "seed 1", ""};
  const Error error = disagreement(lines);
  EXPECT_EQ(error.exit_code(), 2);
  EXPECT_EQ(error.message(),
            "differ: ranks 0, 2 have \"seed 1\"; rank 1 has \"seed 2\"; rank 3 has no more calls");
  std::vector<int> many;
  for (int r = 0; r < 12; ++r) many.push_back(r);
  EXPECT_EQ(text_of(many), "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (12 ranks)");
}

// Two groups of two ranks. Each rank waits for what it needs: rank 1 for its group's other shard, ranks 2 and
// 3 for whoever has not come to what all ranks exchange.
TEST(Meetings, SayWhoIsWaitedForAndInWhat) {
  std::mutex mutex;
  std::vector<const StepExecutor*> engines(4);
  std::atomic<int> there{0};
  const auto meeting = [&](int rank, CommAxis axis) {
    return engines[static_cast<std::size_t>(rank)]->meeting(axis);
  };
  on_ranks(TinySetup(), {4, 0, 2, false}, [&](TinyRun& run) {
    const int rank = run.layout().options.place().rank();
    (void)run.step(Then::kPause);
    {
      std::lock_guard lock(mutex);
      engines[static_cast<std::size_t>(rank)] = &run.engine();
    }
    ++there;
    while (there < 4) std::this_thread::yield();
    const Batch batch = run.batch(0, 0);
    (void)run.engine().evaluate(4, [&](std::int64_t) {
      const auto begin = Clock::now();
      const auto waits = [&](int r, CommAxis axis) { return meeting(r, axis).inside; };
      while (rank == 0 && seconds_between(begin, Clock::now()) < 60 &&
             !(waits(1, CommAxis::kShards) && waits(2, CommAxis::kScalars) && waits(3, CommAxis::kScalars)))
        std::this_thread::yield();
      if (rank == 0) {
        EXPECT_EQ(meeting(1, CommAxis::kShards).what, "gather of the embedding");
        EXPECT_EQ(meeting(1, CommAxis::kShards).calls, meeting(0, CommAxis::kShards).calls + 1);
        EXPECT_EQ(meeting(2, CommAxis::kScalars).what, "exchange of numbers");
        EXPECT_EQ(meeting(2, CommAxis::kScalars).calls, meeting(1, CommAxis::kScalars).calls + 1);
        EXPECT_EQ(run.engine().whereabouts(), "in no operation; step 1 was the last to begin");
        EXPECT_EQ(engines[1]->work(), "weight of the embedding");
      }
      return MicroBatch{batch.ids.data(), batch.targets.data()};
    });
    ++there;
    while (there < 8) std::this_thread::yield();
  });
}

// The errors of the ranks, which compare what their setups have in common.
std::vector<std::string> errors_of(const std::vector<TinySetup>& setups) {
  const auto count = setups.size();
  auto ranks = make_local_ranks(static_cast<int>(count), {.timeout_seconds = 20});
  std::vector<std::string> errors(count);
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < count; ++r) {
    threads.emplace_back([&, r] {
      TinySetup mine = setups[r];
      mine.layout.sharding.ranks = static_cast<int>(count);
      mine.layout.sharding.rank = static_cast<int>(r);
      mine.comm = ranks[r].get();
      TinyRun run(mine);
      const auto error = thrown_by([&] { agree(run.engine(), agreement_of(run.layout(), run.programs())); });
      if (error) errors[r] = error->what();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// However they differ, every rank learns of it before anything is exchanged along the programs.
TEST(Agreement, IsComparedByAllRanks) {
  TinySetup setup;
  setup.layout.sharding.shards = 2;
  const auto differing = [&](auto&& change) {
    TinySetup other = setup;
    change(other);
    return errors_of({setup, other, setup, setup});
  };
  EXPECT_EQ(differing([](TinySetup&) {}), std::vector<std::string>(4));
  // Budgets, tiers and the way that state is kept may differ.
  EXPECT_EQ(differing([](TinySetup& s) { s.layout.drives = 1, s.room = Room::kSmallest; }),
            std::vector<std::string>(4));
  const auto expect = [&](const std::vector<std::string>& errors, const std::string& part) {
    for (const std::string& error : errors) {
      EXPECT_HAS(error, "the ranks of this run");
      EXPECT_HAS(error, "ranks 0, 2, 3 have");
      EXPECT_HAS(error, "; rank 1 has");
      EXPECT_HAS(error, part);
    }
  };
  expect(differing([](TinySetup& s) { s.layout.sharding.shards = 4; }), "4 ranks in groups of 4");
  expect(differing([](TinySetup& s) { s.layout.sharding.keep_weights = true; }), "weights kept: true");
  expect(differing([](TinySetup& s) { s.layout.micro_batches = 2; }), "2 micro-batches of 2 x 13 tokens");
  expect(differing([](TinySetup& s) { s.model.inner = 288; }), "materialize of unit 1");
  expect(differing([](TinySetup& s) { s.dtype = DType::kBF16; }), "bf16 of each rank");
  expect(differing([](TinySetup& s) { s.model.layers = 2; }), "");
}

}  // namespace
}  // namespace zg::test
