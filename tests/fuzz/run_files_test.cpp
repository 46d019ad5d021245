// Files of runs: configurations, recorded traces, the state of io-tune.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "cli/io_tune_state.hpp"
#include "fuzz/loop.hpp"
#include "store/trace_support.hpp"
#include "support/files.hpp"
#include "support/places.hpp"
#include "ziggurat/config/run_config.hpp"
#include "ziggurat/store/access_trace.hpp"
#include "ziggurat/store/policy.hpp"
#include "ziggurat/store/replay.hpp"

namespace zg::fuzz {
namespace {

namespace fs = std::filesystem;

void use_config(const RunConfig& run) {
  require(run.ranks() >= 1 && run.sharding_ranks() >= 1 && run.data_ranks() >= 0, "no ranks");
  require(run.micro_batch >= 1 && run.accumulation_steps >= 1 && run.steps >= 0, "no steps");
  require(run.data.seq_len >= 1, "sequences without tokens");
  require(std::isfinite(run.optimizer.lr) && std::isfinite(run.gradient_clipping), "numbers that are none");
  for (int rank = 0; rank < std::min(run.ranks(), 64); ++rank) (void)run.place_of(rank);
}

TEST(Fuzz, RunConfig) {
  std::vector<Case> corpus;
  for (const auto& entry : fs::recursive_directory_iterator(test::in_source("configs"))) {
    if (entry.path().extension() != ".json") continue;
    const std::string path = entry.path();
    try {  // overlays are no configurations by themselves
      (void)load_config({{path}, {}}, {});
      corpus.push_back({{"run.json", test::read_file(path)}});
    } catch (const Error&) {
    }
  }
  ASSERT_GT(corpus.size(), 5u);
  std::sort(corpus.begin(), corpus.end(),
            [](const Case& a, const Case& b) { return a.front().content < b.front().content; });
  const auto use = [](const std::string& dir, const std::vector<std::string>& overrides) {
    const RunConfig run = load_config({{dir + "/run.json"}, overrides}, {});
    use_config(run);
    const std::string again = test::write_file(dir + "/again.json", run.resolved_json);
    require(load_config({{again}, {}}, {}).resolved_json == run.resolved_json,
            "what was resolved is another configuration");
  };
  fuzz({.name = "run.json",
        .corpus = corpus,
        .use = [&](const Case&, const std::string& dir) { use(dir, {}); },
        .on_disk = true});
  for (Case& input : corpus) input.push_back({"override", "optimizer.params.lr=0.001"});
  corpus[0][1].content = R"(tiers.nvme=[{"path": "/mnt/x", "bytes": "16MiB"}])";
  corpus[1][1].content = "data.blend.0.weight=2";
  corpus[1][0].content = R"({"model": {"arch": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64,
      "n_positions": 64}, "data": {"blend": [{"paths": ["a.txt"], "weight": 1}], "seq_len": 32}, "steps": 5})";
  fuzz({.name = "override",
        .corpus = {corpus[0], corpus[2], corpus[3]},
        .use = [&](const Case& input, const std::string& dir) { use(dir, {content_of(input, "override")}); },
        .on_disk = true,
        .changed = {"override"}});
}

constexpr const char* kTrace = R"({"format": "ziggurat access trace", "version": 1,
 "drives": 1, "budgets": {"device": 16384, "host": 32768},
 "tensors": [
  ["block.0.weight", "bf16", 2048, "weight", "nvme", 0, 0],
  ["block.0.moments", "f32", 8192, "optimizer state", "nvme", 1024, 1, 2],
  ["x", "f32", 100, "activation", "host", 0, 0]],
 "programs": [
  {"name": "step", "times": [1, 2, 1], "ops": [[0, "dr", 1, "hw"], [2, "do!"], [3, "hr", 4, "ho"]]},
  {"name": "other", "ops": [[0, "dw"]]}],
 "sequence": [[0, 1], [1, 2]]})";

// What a trace asks to replay may be long; a user can interrupt that.
bool is_short(const AccessTrace& trace) {
  std::int64_t accesses = 0;
  for (const Program& program : trace.programs) accesses += program.op_count();
  return trace.sequence.size() <= 64 && accesses <= 500 && trace.table.segment_count() <= 500;
}

TEST(Fuzz, AccessTrace) {
  test::Random random(5);
  AccessTrace made = test::equal_trace(6, test::random_accesses(random, 6, 30, {20, 20}));
  const test::TempDir dir;
  save_trace(made, dir / "made");
  fuzz({.name = "access.trace",
        .corpus = {{{"t.json", kTrace}}, {{"t.json", test::read_file(dir / "made")}}},
        .use =
            [](const Case&, const std::string& directory) {
              const AccessTrace trace = load_trace(directory + "/t.json");
              if (!is_short(trace)) return;
              save_trace(trace, directory + "/again");
              require(load_trace(directory + "/again").sequence == trace.sequence, "another one was written");
              ReplayOptions options;
              options.rounds = 2;
              (void)replay(trace, trace.budgets, default_policy(), options);
              std::vector<const Program*> sequence;
              for (const std::int32_t i : trace.sequence)
                sequence.push_back(&trace.programs[static_cast<std::size_t>(i)]);
              (void)reuse_distances(trace.table, sequence);
              (void)nvme_bound(trace, trace.budgets, 2);
            },
        .on_disk = true});
}

TEST(Fuzz, StateOfIoTune) {
  const test::TempDir dir;
  const std::string made = dir / "state.jsonl";
  {
    cli::TuneState state(made, false);
    state.match({.machine = "a processor, 2 cores",
                 .kernel = "6.1",
                 .paths = {{"/mnt/a", "ext4", "/dev/sda"}},
                 .size = 1 << 30,
                 .goal = "both"});
    for (const int depth : {4, 8}) {
      io::TuneRecord r{.point = {io::Backend::kLibaio, 1 << 20, depth, 1}, .round = depth - 5};
      r.sample.read = {2.5e9, 0.125, 1e-3, 2e-3};
      r.sample.write = {1.5e9, 0.25, 3e-3, 4e-3};
      state.append(r);
    }
  }
  fuzz({.name = "state.jsonl",
        .corpus = {{{"state.jsonl", test::read_file(made)}}},
        .use =
            [](const Case&, const std::string& directory) {
              const cli::TuneState state(directory + "/state.jsonl", false);
              for (const io::TuneRecord& r : state.records())
                require(r.point.queue_depth > 0 && r.point.block_size > 0, "a point without sizes");
            },
        .on_disk = true,
        .writes = true});
}

}  // namespace
}  // namespace zg::fuzz
