// A training run on several ranks, each a thread with a TinyRun of its own, and what all of them together
// leave behind.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "engine/tiny_run.hpp"
#include "ziggurat/comm/comm.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/step/tile_elements.hpp"

namespace zg::test {

// `ranks` of each stage.
struct RanksWay {
  int ranks = 1, shards = 1;  // of those that compute with the same weights
  bool keep_weights = false;
  int tensor = 1;  // parts of each layer
  bool sequence = false;
  int context = 1;  // ranks with parts of the same sequences
  ContextMethod method = ContextMethod::kRing;
  int stages = 1;
  PipelineOptions pipeline = {};
  int experts = 1;  // ranks that divide the experts of a layer
  int world() const { return ranks * tensor * stages; }
};

inline RanksWay in_stages(int ranks, int shards, bool keep_weights, int stages,
                          const PipelineOptions& pipeline = {}) {
  RanksWay way{ranks, shards, keep_weights};
  way.stages = stages, way.pipeline = pipeline;
  return way;
}

struct RanksOutcome {
  std::vector<double> losses, norms, evals;  // an evaluation follows the first step and the last one
  std::vector<bool> skipped;
  std::map<std::string, std::vector<char>> weights;            // by parameter, whole, at the end
  std::map<std::string, std::vector<float>> masters, moments;  // by parameter, at the end
  std::vector<float> choice_biases;                            // StepExecutor::choice_biases(), at the end
  // With Look::kInside: the weights after initialisation and after the first step, and moment 0 after the
  // first step.
  std::map<std::string, std::vector<char>> first_weights, second_weights;
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

// Which elements ranks have brought already. Those of others must be the same, bit by bit.
using Brought = std::map<std::string, std::vector<bool>>;

// Puts held elements [first, first + values.size() / bytes) of a parameter to their places in the whole one.
inline void bring(const Param& p, std::int64_t first, const char* values, std::int64_t count,
                  std::int64_t bytes, const std::string& name, char* whole, Brought& brought) {
  std::vector<bool>& known = brought[name];
  known.resize(static_cast<std::size_t>(p.whole_count()));
  p.for_runs(first, first + count, [&](std::int64_t at, std::int64_t to, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      const char* const from = values + (at + i - first) * bytes;
      const auto element = static_cast<std::size_t>(to + i);
      if (known[element] &&
          std::memcmp(whole + (to + i) * bytes, from, static_cast<std::size_t>(bytes)) != 0) {
        ADD_FAILURE() << "two ranks differ at element " << element << " of " << name;
        return;
      }
      std::memcpy(whole + (to + i) * bytes, from, static_cast<std::size_t>(bytes));
      known[element] = true;
    }
  });
}

// Calls f(tile, first, count) for the elements of a parameter that the rank's shard of a tile has, as held.
template <class F>
void for_held(const TinyRun& run, std::int32_t unit, const Param& p, const F& f) {
  const Layout& layout = run.layout();
  for (std::int32_t t = layout.first_tile(unit); t < layout.first_tile(unit + 1); ++t) {
    const Layout::Elements shard = held_of_tile(layout, t);
    const std::int64_t first = std::clamp<std::int64_t>(shard.first - p.offset, 0, p.count());
    const std::int64_t end = std::clamp<std::int64_t>(shard.first + shard.count - p.offset, first, p.count());
    if (end > first) f(t, first, end - first);
  }
}

// Calls f(unit, parameter) for all of the model.
template <class F>
void for_params(const TinyRun& run, const F& f) {
  for (std::size_t u = 0; u < run.model().units().size(); ++u) {
    const auto unit = static_cast<std::int32_t>(u);
    if (!run.layout().has_unit(unit)) continue;
    for (const Param& p : run.model().units()[u].params) f(unit, p);
  }
}

// The weights of this rank's shard of a tile as they are computed with. `stored`: the bytes of the stored
// form.
inline std::vector<char> computed_form(const TinyRun& run, std::int32_t t, std::vector<char> stored) {
  const Layout& layout = run.layout();
  const Layout::TileTensors& tile = layout.tile(t);
  if (!layout.is_encoded(tile.unit)) return stored;
  const DType dtype = run.model().dtype();
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  const Layout::Elements shard = shard_elements(layout, t);
  const std::vector<Param>& params = run.model().units()[static_cast<std::size_t>(tile.unit)].params;
  std::vector<char> all(static_cast<std::size_t>(shard.count * size));
  HostStream stream("decode", HostStream::Mode::kInline);
  const char* const base = stored.data() - tile.sharding.shard() * static_cast<std::int64_t>(stored.size());
  for (std::size_t i = tile.first_run; i < tile.first_run + tile.ranges.size(); ++i) {
    const Layout::CodedRun& run_ = tile.coded[i];
    const std::int64_t at = params[static_cast<std::size_t>(run_.param)].offset + run_.first - shard.first;
    char* const to = all.data() + at * size;
    if (!run_.code) {
      std::memcpy(to, base + run_.places.codes, static_cast<std::size_t>(run_.count() * size));
      continue;
    }
    const std::int64_t count = run_.count();
    const auto array = [&](std::int64_t first, DType type, std::int64_t n) {
      return View(const_cast<char*>(base) + first, type, 1, n);
    };
    host_ops().decode(stream, {.format = run_.code->format,
                               .codes = array(run_.places.codes, DType::kU8, count),
                               .scales = array(run_.places.scales, DType::kF32,
                                               run_.code->format.blocks(run_.rows, run_.cols)),
                               .out = View(to, dtype, run_.rows, run_.cols)});
  }
  return all;
}

// This rank's part of the weights. The gaps between parameters are zero.
inline void collect_weights(TinyRun& run, std::map<std::string, std::vector<char>>& all, Brought& brought) {
  const auto bytes = static_cast<std::int64_t>(size_of(run.model().dtype()));
  std::int32_t last = -1;
  std::vector<char> content;
  for_params(run, [&](std::int32_t unit, const Param& p) {
    std::vector<char>& whole = all[p.name];
    whole.resize(static_cast<std::size_t>(p.whole_count() * bytes));
    for_held(run, unit, p, [&](std::int32_t t, std::int64_t first, std::int64_t count) {
      if (t != last) content = computed_form(run, t, run.content(run.layout().tile(last = t).stored));
      const std::int64_t at = p.offset + first - shard_elements(run.layout(), t).first;
      bring(p, first, content.data() + at * bytes, count, bytes, p.name, whole.data(), brought);
    });
  });
}

// read(unit, parameter, begin, end, out) reads floats.
template <class Read>
void collect(TinyRun& run, std::map<std::string, std::vector<float>>& all, Brought& brought,
             const std::string& suffix, const Read& read) {
  for_params(run, [&](std::int32_t unit, const Param& p) {
    std::vector<float>& whole = all[p.name + suffix];
    whole.resize(static_cast<std::size_t>(p.whole_count()));
    for_held(run, unit, p, [&](std::int32_t, std::int64_t first, std::int64_t count) {
      std::vector<float> values(static_cast<std::size_t>(count));
      read(unit, p, first, first + count, values.data());
      bring(p, first, reinterpret_cast<const char*>(values.data()), count, sizeof(float), p.name + suffix,
            reinterpret_cast<char*>(whole.data()), brought);
    });
  });
}

inline void collect_moment(TinyRun& run, int which, std::map<std::string, std::vector<float>>& all,
                           Brought& brought, const std::string& suffix) {
  const auto& groups = run.layout().options.groups;
  collect(run, all, brought, suffix, [&](auto unit, const Param& p, auto begin, auto end, float* out) {
    const auto u = static_cast<std::size_t>(unit);
    const auto index = static_cast<std::size_t>(&p - run.model().units()[u].params.data());
    if (groups.empty() || groups[u][index] != kFrozen)
      run.engine().read_moment(which, unit, p, begin, end, out);
  });
}

inline void collect_masters(TinyRun& run, RanksOutcome& all, Brought& masters, Brought& moments) {
  collect(run, all.masters, masters, "", [&](auto unit, const Param& p, auto begin, auto end, float* out) {
    run.engine().read_master(unit, p, begin, end, out);
  });
  for (int i = 0; i < run.layout().state().format().moment_count; ++i)
    collect_moment(run, i, all.moments, moments, fmt::format(" {}", i));
}

inline void collect_first_gradients(TinyRun& run, RanksOutcome& all, Brought& brought) {
  if (run.layout().state().format().moment_count > 0)
    collect_moment(run, 0, all.first_gradients, brought, "");
}

// LayoutOptions::groups of all experts, as those of a rank that has some of them.
inline std::vector<std::vector<int>> groups_of_rank(const TinySetup& setup, const LayoutOptions& mine) {
  std::vector<std::vector<int>> groups;
  if (setup.layout.groups.empty()) return groups;
  const Model all(setup.model, setup.dtype, host_ops());
  const Model own(setup.model, setup.dtype, host_ops(), 0,
                  {1, 0, false, {mine.parts.experts, mine.place().expert_part()}});
  std::map<std::string, int> by_name;
  for (std::size_t u = 0; u < all.units().size(); ++u) {
    const std::vector<Param>& params = all.units()[u].params;
    for (std::size_t i = 0; i < params.size(); ++i) by_name[params[i].name] = setup.layout.groups[u][i];
  }
  for (const Unit& unit : own.units()) {
    groups.emplace_back();
    for (const Param& p : unit.params) groups.back().push_back(by_name.at(p.name));
  }
  return groups;
}

}  // namespace ranks_run

// On these ranks of this process: all that there are, unless other processes have the rest. `setup` has the
// micro-batches of all ranks together. A rank that throws ends the others, and its error is thrown here.
inline RanksOutcome train_on(const std::vector<std::unique_ptr<CommRank>>& ranks, const TinySetup& setup,
                             const RanksWay& way, int steps, Look look = Look::kAtTheEnd) {
  RanksOutcome all;
  std::mutex mutex;
  std::exception_ptr failure;
  ranks_run::Brought first_brought, second_brought, brought, gradients, masters, moments;
  const auto work = [&](CommRank* comm) {
    TinySetup mine = setup;
    mine.layout.micro_batches = setup.layout.micro_batches / (way.ranks / way.context);
    mine.layout.sharding = {way.ranks, comm->rank() / way.tensor % way.ranks, way.shards, way.keep_weights};
    mine.layout.parts = {.tensor = way.tensor,
                         .context = way.context,
                         .stages = way.stages,
                         .tensor_part = comm->rank() % way.tensor,
                         .stage = comm->rank() / (way.tensor * way.ranks),
                         .context_method = way.method,
                         .experts = way.experts};
    mine.layout.pipeline = way.pipeline;
    if (way.experts > 1) mine.layout.groups = ranks_run::groups_of_rank(setup, mine.layout);
    mine.sequence = way.sequence;
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
      run.settle();
      std::lock_guard lock(mutex);
      ranks_run::collect_weights(run, all.second_weights, second_brought);
      ranks_run::collect_first_gradients(run, all, gradients);
    }
    EXPECT_EQ(run.engine().comm(), comm_forecast(run.layout(), run.programs(), run.engine().history()));
    const LinkBytes moved = run.engine().settled_traffic();
    if (look == Look::kAtTheEnd) {
      EXPECT_EQ(moved, forecast(run.layout(), run.programs(), run.budgets(), run.engine().history()));
      EXPECT_EQ(run.engine().comm(), comm_forecast(run.layout(), run.programs(), run.engine().history()));
    }
    run.expect_within_budgets();
    std::lock_guard lock(mutex);
    ranks_run::collect_weights(run, all.weights, brought);
    ranks_run::collect_masters(run, all, masters, moments);
    const std::vector<float> choice_biases = run.engine().choice_biases();
    if (!all.losses.empty()) {
      EXPECT_TRUE(same_bits(all.choice_biases, choice_biases));
      EXPECT_TRUE(same_bits(all.losses, of_rank.losses)) << "every rank knows the same";
      EXPECT_TRUE(same_bits(all.norms, of_rank.norms));
      EXPECT_TRUE(same_bits(all.evals, of_rank.evals));
      EXPECT_EQ(all.skipped, of_rank.skipped);
    }
    all.losses = of_rank.losses, all.norms = of_rank.norms, all.evals = of_rank.evals;
    all.skipped = of_rank.skipped, all.choice_biases = choice_biases;
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

inline void expect_same_tensors(const RanksOutcome& a, const RanksOutcome& b) {
  const auto same = [](const auto& x, const auto& y, const char* what) {
    ASSERT_EQ(x.size(), y.size()) << what;
    for (const auto& [name, values] : x) EXPECT_TRUE(same_bits(values, y.at(name))) << what << " " << name;
  };
  same(a.weights, b.weights, "weights");
  same(a.masters, b.masters, "masters");
  same(a.moments, b.moments, "moments");
  EXPECT_TRUE(same_bits(a.choice_biases, b.choice_biases)) << "choice biases";
}

inline void expect_same(const RanksOutcome& a, const RanksOutcome& b) {
  const auto text = [](const auto& x, const auto& y) {
    return testing::PrintToString(x) + "\n" + testing::PrintToString(y);
  };
  EXPECT_TRUE(same_bits(a.losses, b.losses)) << text(a.losses, b.losses);
  EXPECT_TRUE(same_bits(a.norms, b.norms)) << text(a.norms, b.norms);
  EXPECT_TRUE(same_bits(a.evals, b.evals)) << text(a.evals, b.evals);
  EXPECT_EQ(a.skipped, b.skipped);
  expect_same_tensors(a, b);
}

// The second norm of each GPT-2 block is not trained.
inline TinySetup with_frozen_norms(TinySetup s) {
  const Model model(s.model, s.dtype, host_ops());
  for (const Unit& unit : model.units()) {
    s.layout.groups.emplace_back();
    for (const Param& p : unit.params)
      s.layout.groups.back().push_back(p.name.find("ln_2") != std::string::npos ? kFrozen : 0);
  }
  return s;
}

// Plain gradients: what scales or repeats them shows, which AdamW would hide.
inline TinySetup with_sgd(TinySetup s) {
  s.layout.state.kind = OptimizerKind::kSgd;
  s.layout.state.moment_count = 0;
  s.clip = 0;
  s.rule = [](std::int64_t, UpdateRule& rule) { rule.params.lr = 1, rule.params.weight_decay = 0; };
  return s;
}

// Initial weights with which SGD of rate 1 does not diverge, in ten steps and with few tokens: the final norm
// gives a tenth of what it would, so logits and gradients are small.
inline double steady_element(const Param& p, std::int64_t element) {
  const bool final_norm = p.name.rfind("ln_f.", 0) == 0 || p.name == "model.norm.weight";
  return reference_element(p, element) * (final_norm ? 0.1 : 1);
}

}  // namespace zg::test
