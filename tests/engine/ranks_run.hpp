// A training run on several ranks, each a thread with a TinyRun of its own, and what all of them together
// leave behind.
#pragma once
#include <exception>
#include <mutex>
#include <thread>

#include "engine/tiny_run.hpp"
#include "ziggurat/comm/comm.hpp"

namespace zg::test {

// `ranks` of each stage.
struct RanksWay {
  int ranks = 1, shards = 1;
  bool keep_weights = false;
  int context = 1;  // ranks with parts of the same sequences
  ContextMethod method = ContextMethod::kRing;
  int stages = 1;
  PipelineOptions pipeline = {};
  int world() const { return ranks * stages; }
};

struct RanksOutcome {
  std::vector<double> losses, norms, evals;  // an evaluation follows the first step and the last one
  std::vector<bool> skipped;
  std::map<std::string, std::vector<char>> weights;            // by unit, at the end
  std::map<std::string, std::vector<float>> masters, moments;  // by parameter, at the end
  // With Look::kInside: the weights after initialisation, and moment 0 after the first step.
  std::map<std::string, std::vector<char>> first_weights;
  std::map<std::string, std::vector<float>> first_gradients;
};

// Whether a run is looked into before its end. That moves bytes, so these are then not compared with what was
// foretold.
enum class Look { kAtTheEnd, kInside };

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

namespace ranks_run {

// This rank's part of the weights of all units. What another rank has brought already must be the same.
inline void collect_weights(TinyRun& run, std::map<std::string, std::vector<char>>& all,
                            std::map<std::string, std::vector<bool>>& brought) {
  for (std::size_t u = 0; u < run.model().units().size(); ++u) {
    const auto unit = static_cast<std::int32_t>(u);
    if (!run.layout().has_unit(unit)) continue;
    const Unit& of = run.model().units()[u];
    const Layout::Elements shard = run.layout().shard_elements(unit);
    const std::vector<char> part = run.content(run.layout().updated_weight(unit));
    const auto element = static_cast<std::int64_t>(size_of(run.model().dtype()));
    const std::int64_t count = std::clamp<std::int64_t>(of.count - shard.first, 0, shard.count);
    std::vector<char>& whole = all[of.name];
    std::vector<bool>& known = brought[of.name];
    whole.resize(static_cast<std::size_t>(of.count * element));
    known.resize(whole.size());
    const auto first = static_cast<std::size_t>(shard.first * element);
    for (std::size_t i = 0; i < static_cast<std::size_t>(count * element); ++i) {
      if (known[first + i] && whole[first + i] != part[i]) {
        ADD_FAILURE() << "two ranks differ at byte " << first + i << " of the weight of " << of.name;
        break;
      }
      whole[first + i] = part[i], known[first + i] = true;
    }
  }
}

inline void collect_masters(TinyRun& run, RanksOutcome& all) {
  const int moments = run.layout().state().format().moment_count;
  for (std::size_t u = 0; u < run.model().units().size(); ++u) {
    const auto unit = static_cast<std::int32_t>(u);
    for (const Param& p : run.model().units()[u].params) {
      const auto room = [&](std::vector<float>& values) {
        values.resize(static_cast<std::size_t>(p.count()));
        return values.data();
      };
      run.engine().read_master(unit, p, 0, p.count(), room(all.masters[p.name]));
      const auto& groups = run.layout().options.groups;
      const auto index = static_cast<std::size_t>(&p - run.model().units()[u].params.data());
      if (!groups.empty() && groups[u][index] == kFrozen) continue;
      for (int i = 0; i < moments; ++i)
        run.engine().read_moment(i, unit, p, 0, p.count(),
                                 room(all.moments[fmt::format("{} {}", p.name, i)]));
    }
  }
}

inline void collect_first_gradients(TinyRun& run, RanksOutcome& all) {
  if (run.layout().state().format().moment_count == 0) return;
  for (std::size_t u = 0; u < run.model().units().size(); ++u) {
    for (const Param& p : run.model().units()[u].params) {
      std::vector<float>& values = all.first_gradients[p.name];
      values.resize(static_cast<std::size_t>(p.count()));
      run.engine().read_moment(0, static_cast<std::int32_t>(u), p, 0, p.count(), values.data());
    }
  }
}

}  // namespace ranks_run

// On these ranks of this process: all that there are, unless other processes have the rest. `setup` has the
// micro-batches of all ranks together. A rank that throws ends the others, and its error is thrown here.
inline RanksOutcome train_on(const std::vector<std::unique_ptr<CommRank>>& ranks, const TinySetup& setup,
                             const RanksWay& way, int steps, Look look = Look::kAtTheEnd) {
  RanksOutcome all;
  std::mutex mutex;
  std::exception_ptr failure;
  std::map<std::string, std::vector<bool>> first_brought, brought;
  const auto work = [&](CommRank* comm) {
    TinySetup mine = setup;
    mine.layout.micro_batches = setup.layout.micro_batches / (way.ranks / way.context);
    mine.layout.sharding = {way.ranks, comm->rank() % way.ranks, way.shards, way.keep_weights};
    mine.layout.parts.context = way.context, mine.layout.parts.context_method = way.method;
    mine.layout.parts.stages = way.stages, mine.layout.parts.stage = comm->rank() / way.ranks;
    mine.layout.pipeline = way.pipeline;
    mine.comm = way.world() > 1 ? comm : nullptr;
    TinyRun run(mine);
    run.initialize();
    if (look == Look::kInside) {
      std::lock_guard lock(mutex);
      ranks_run::collect_weights(run, all.first_weights, first_brought);
    }
    RanksOutcome of_rank;
    for (int i = 0; i < steps; ++i) {
      const bool pause = i == 0 || i + 1 == steps;
      const StepResult r = run.step(pause ? Then::kPause : Then::kTrain);
      of_rank.losses.push_back(r.loss);
      of_rank.norms.push_back(r.grad_norm);
      of_rank.skipped.push_back(r.skipped);
      if (pause) of_rank.evals.push_back(run.evaluate());
      if (i > 0 || look != Look::kInside) continue;
      std::lock_guard lock(mutex);
      ranks_run::collect_first_gradients(run, all);
    }
    const Traffic moved = run.engine().settled_traffic();
    if (look == Look::kAtTheEnd) {
      EXPECT_EQ(moved, forecast(run.layout(), run.programs(), run.budgets(), run.engine().history()));
      EXPECT_EQ(run.engine().comm(), comm_forecast(run.layout(), run.programs(), run.engine().history()));
    }
    run.expect_within_budgets();
    std::lock_guard lock(mutex);
    ranks_run::collect_weights(run, all.weights, brought);
    ranks_run::collect_masters(run, all);
    if (!all.losses.empty()) {
      EXPECT_TRUE(same_bits(all.losses, of_rank.losses)) << "every rank knows the same";
      EXPECT_TRUE(same_bits(all.norms, of_rank.norms));
      EXPECT_TRUE(same_bits(all.evals, of_rank.evals));
      EXPECT_EQ(all.skipped, of_rank.skipped);
    }
    all.losses = of_rank.losses, all.norms = of_rank.norms, all.evals = of_rank.evals;
    all.skipped = of_rank.skipped;
  };
  std::vector<std::thread> threads;
  for (const auto& rank : ranks) {
    threads.emplace_back([&, comm = rank.get()] {
      try {
        work(comm);
      } catch (const Error& error) {
        comm->fail(error);
        std::lock_guard lock(mutex);
        if (failure == nullptr) failure = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
  return all;
}

inline RanksOutcome train_on_ranks(const TinySetup& setup, const RanksWay& way, int steps,
                                   Look look = Look::kAtTheEnd) {
  return train_on(make_local_ranks(way.world(), {.timeout_seconds = 60}), setup, way, steps, look);
}

}  // namespace zg::test
