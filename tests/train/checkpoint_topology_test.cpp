// Checkpoints of runs whose ranks have parts of layers, stages or parts of sequences: the tensors in them are
// whole, so that any topology goes on from any other's.
#include "train/checkpoint_fixture.hpp"
#include "ziggurat/checkpoint/commit.hpp"
#include "ziggurat/checkpoint/rank_file.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

struct Topology {
  const char* name;
  Strings settings;
};
Strings llama(int heads, int kv_heads, bool tied) {
  return {fmt::format(
      R"(model={{"arch": "llama", "vocab_size": 257, "hidden_size": 40, "num_hidden_layers": 4,
        "num_attention_heads": {}, "num_key_value_heads": {}, "head_dim": 10, "intermediate_size": 44,
        "max_position_embeddings": 32, "tie_word_embeddings": {}}})",
      heads, kv_heads, tied)};
}
Strings gpt2() {
  return {R"(model={"arch": "gpt2", "vocab_size": 257, "n_layer": 4, "n_head": 4, "n_embd": 36,
              "n_positions": 32, "n_inner": 52})"};
}
const std::vector<Topology>& topologies() {
  static const std::vector<Topology> all{
      {"tensor 2 x ZeRO 3 on 2", {"devices=host:4", "parallel.tensor=2", "zero_optimization.stage=3"}},
      {"2 stages x ZeRO 3 on 2", {"devices=host:4", "parallel.pipeline=2", "zero_optimization.stage=3"}},
      {"tensor 4 with sequence", {"devices=host:4", "parallel.tensor=4", "parallel.sequence=true"}},
      {"context 2 x ZeRO 1", {"devices=host:4", "parallel.context=2", "zero_optimization.stage=1"}},
      {"ZeRO 2 on 3", {"devices=host:3", "zero_optimization.stage=2"}},
      {"ZeRO 3 on 4 x tensor 2 x 2 stages",
       {"devices=host:16", "parallel.tensor=2", "parallel.pipeline=2", "zero_optimization.stage=3"}},
      {"4 stages", {"devices=host:4", "parallel.pipeline=4"}},
      {"tensor 2, replicas", {"devices=host:4", "parallel.tensor=2", "zero_optimization.stage=0"}},
      {"1", {}}};
  return all;
}

class CheckpointTopology : public CheckpointFixture {
 protected:
  // Twelve sequences, which all these topologies divide.
  static Strings batch() {
    return {"train_batch_size=12", "train_micro_batch_size_per_gpu=1",
            R"(optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}})"};
  }
  // What a run has loaded, as it would save it.
  std::string saved_again(const std::string& from, const std::string& to, const Strings& settings) {
    Trainer trainer(config("look", settings + Strings{"steps=9"}), {.resume = from});
    trainer.start();
    CheckpointManifest m = trainer.resumed_from()->manifest();
    m.files.clear();
    m.format = format_of(*trainer.plan().layout);
    const std::string path = directory_ + "/" + to, part = path + ".part-0";
    fs::create_directories(part);
    for (int r = 0; r < trainer.local_ranks(); ++r) {
      const Layout& layout = *trainer.plans()[static_cast<std::size_t>(r)].layout;
      if (!writes_file(layout)) continue;
      RankFile file(layout, r);
      file.create(system_files(), part);
      trainer.rank(r).engine().save_state([&](const StateTile& tile) { file.write(tile); });
      EXPECT_EQ(file.written(), 1.0);
      m.files.push_back(file.finish());
    }
    commit_checkpoint(system_files(), part, path, m.text());
    return path;
  }
  static void expect_same(const Tensors& a, const Tensors& b) {
    ASSERT_EQ(a.size(), b.size());
    for (const auto& [name, bytes] : a) EXPECT_TRUE(bytes == b.at(name)) << name;
  }
};

// One topology after the other: what each has loaded it saves again, byte by byte.
TEST_F(CheckpointTopology, TensorsAreTheSameBytesInEach) {
  int i = 0;
  for (const Strings& model : {gpt2(), llama(4, 1, true), llama(12, 3, false)}) {
    const std::string begin = run(fmt::format("begin{}", i), batch() + model).newest;
    const Tensors tensors = tensors_in(begin);
    std::string path = begin;
    for (const Topology& topology : topologies()) {
      SCOPED_TRACE(model[0] + " " + topology.name);
      path = saved_again(path, fmt::format("again{}", i++), batch() + model + topology.settings);
      expect_same(tensors, tensors_in(path));
      std::int64_t elements = 0;
      const std::vector<Checkpoint::Piece> pieces = Checkpoint(path).pieces();
      for (const Checkpoint::Piece& p : pieces) elements += p.box.count();
      std::int64_t once = 0;
      const std::vector<CheckpointTensor> whole = Checkpoint(begin).tensors();
      for (const CheckpointTensor& tensor : whole) once += tensor.count;
      EXPECT_EQ(elements, once) << "copies are written once";
    }
  }
}

// With as many data ranks the stages of ZeRO, those of a pipeline and the tiers change no bit, before the
// checkpoint and behind it.
TEST_F(CheckpointTopology, WithAsManyDataRanksTheRunGoesOnToTheBit) {
  fs::create_directories(directory_ + "/disk");
  const std::vector<Topology> same{
      {"2 ranks", {"devices=host:2"}},
      {"2 stages", {"devices=host:4", "parallel.pipeline=2"}},
      {"2 stages of 2 chunks, ZeRO 3",
       {"devices=host:4", "parallel.pipeline=2", "parallel.chunks=2", "zero_optimization.stage=3"}},
      {"2 stages on a drive",
       {"devices=host:4", "parallel.pipeline=2", "zero_optimization.stage=1", "tiers.device=1MiB",
        "tiers.host=1500KiB", "tiers.nvme.0.path=" + directory_ + "/disk", "aio.backend=threads"}}};
  int i = 0;
  for (const Strings& model : {gpt2(), llama(4, 2, false)}) {
    const Strings settings = batch() + model;
    const Outcome whole = run(fmt::format("whole{}", i++), settings + same[0].settings + Strings{"steps=5"});
    for (const Topology& before : same) {
      const std::string three = run(fmt::format("three{}", i++), settings + before.settings).newest;
      for (const Topology& after : same) {
        SCOPED_TRACE(fmt::format("{}: {}, then {}", model[0], before.name, after.name));
        expect_tail(whole,
                    run(fmt::format("rest{}", i++), settings + after.settings + Strings{"steps=5"}, three));
      }
    }
  }
}

// The same with parts of each layer, in all formats of the state: codes of eight bits are in blocks of a
// part's elements.
TEST_F(CheckpointTopology, WithTheSamePartsTheRunGoesOnToTheBit) {
  const Strings parts{"devices=host:4", "parallel.tensor=2", "parallel.sequence=true"};
  int i = 0;
  for (const char* state : {"fp32", "split", "bf16", "int8"}) {
    const Strings settings =
        batch() + llama(4, 2, false) +
        Strings{
            "bf16.enabled=true",
            fmt::format(R"(optimizer={{"type": "AdamW", "params": {{"lr": 1e-2}}, "state": "{}"}})", state)} +
        parts;
    const Outcome whole = run(fmt::format("whole{}", i++), settings + Strings{"steps=5"});
    const std::string three =
        run(fmt::format("three{}", i++), settings + Strings{"zero_optimization.stage=3"}).newest;
    EXPECT_EQ(Checkpoint(three).manifest().files.size(), 4u);
    EXPECT_EQ(Checkpoint(three).manifest().format, 2);
    for (const char* stage : {"0", "1", "3"}) {
      SCOPED_TRACE(fmt::format("{}, then ZeRO {}", state, stage));
      const Outcome rest =
          run(fmt::format("rest{}", i++),
              settings + Strings{"steps=5", fmt::format("zero_optimization.stage={}", stage)}, three);
      expect_tail(whole, rest);
    }
  }
}

// Elsewhere the run goes on to rounding, also with codes, whose blocks differ there.
TEST_F(CheckpointTopology, WithOtherPartsTheRunGoesOn) {
  int i = 0;
  for (const char* state : {"fp32", "int8"}) {
    const Strings settings =
        batch() + gpt2() +
        Strings{
            fmt::format(R"(optimizer={{"type": "AdamW", "params": {{"lr": 1e-3}}, "state": "{}"}})", state)};
    const Outcome whole = run(fmt::format("whole{}", i++), settings + Strings{"steps=5"});
    const std::vector<Topology> all{topologies()[0], topologies()[2], topologies().back()};
    for (const Topology& before : all) {
      const std::string three = run(fmt::format("three{}", i++), settings + before.settings).newest;
      for (const Topology& after : all) {
        SCOPED_TRACE(fmt::format("{}: {}, then {}", state, before.name, after.name));
        const Outcome rest =
            run(fmt::format("rest{}", i++), settings + after.settings + Strings{"steps=5"}, three);
        ASSERT_EQ(rest.losses.size(), 2u);
        for (std::size_t s = 0; s < 2; ++s)
          EXPECT_NEAR(rest.losses[s] / whole.losses[3 + s], 1, std::string(state) == "fp32" ? 1e-5 : 2e-3);
      }
    }
  }
}

}  // namespace
}  // namespace zg
