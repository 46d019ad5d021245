// "devices" and the section "cuda".
#include "config/config_fixture.hpp"

namespace zg {
namespace {

using Kind = DeviceConfig::Kind;

class ConfigDevices : public ConfigTest {};

TEST_F(ConfigDevices, AreReadAsTheyStand) {
  for (const bool gpu : {false, true}) {
    machine_.has_gpu = [gpu] { return gpu; };
    EXPECT_EQ(load_set({}).device.kind, gpu ? Kind::kCuda : Kind::kHost);
    EXPECT_EQ(load_set({"devices=auto"}).device.kind, gpu ? Kind::kCuda : Kind::kHost);
  }
  for (const char* host : {"host", "host:1"})
    EXPECT_EQ(load_set({std::string("devices=\"") + host + "\""}).device.kind, Kind::kHost) << host;
  const RunConfig plain = load_set({"devices=cuda"}), third = load_set({"devices=\"cuda:2\""});
  EXPECT_EQ(plain.device.kind, Kind::kCuda);
  EXPECT_EQ(plain.device.gpus, std::vector<int>{0});
  EXPECT_TRUE(plain.device.deterministic && plain.device.pin && !plain.device.tf32);
  EXPECT_EQ(third.device.gpus, std::vector<int>{2});
  EXPECT_EQ(third.device.ranks, 1);
  const RunConfig all = load_over(
      R"({"devices": "cuda", "cuda": {"deterministic": false, "tf32": true, "pin": false, "graphs": true, "attention": "cudnn",
          "gpudirect_storage": "on"}})");
  EXPECT_EQ(load_over(R"({"devices": "cuda", "aio": {"use_gds": true}})").device.direct,
            DeviceConfig::Direct::kOn);
  EXPECT_EQ(load_over(R"({"devices": "cuda", "aio": {"use_gds": false}})").device.direct,
            DeviceConfig::Direct::kAuto);
  EXPECT_EQ(plain.device.direct, DeviceConfig::Direct::kAuto);
  EXPECT_EQ(all.device.direct, DeviceConfig::Direct::kOn);
  EXPECT_TRUE(!all.device.deterministic && !all.device.pin && all.device.tf32 && all.device.graphs);
  EXPECT_FALSE(plain.device.graphs);
  EXPECT_EQ(all.device.attention, AttentionKernel::kCudnn);
}

// The files describe the run, whatever the number of processes that a launcher has started.
TEST_F(ConfigDevices, RanksAreThoseOfAllProcesses) {
  machine_.processes = 3;
  const RunConfig c =
      load_set({"devices=\"host:2\"", "train_batch_size=24", "train_micro_batch_size_per_gpu=2",
                "zero_optimization={\"stage\": 3, \"mics_shard_size\": 3}"});
  EXPECT_EQ(c.device.ranks, 2);
  EXPECT_EQ(c.ranks(), 6);
  EXPECT_EQ(c.accumulation_steps, 2);
  const Sharding s = c.place_of(4).sharding;
  EXPECT_EQ(s.ranks, 6);
  EXPECT_EQ(s.shards, 3);
  EXPECT_EQ(s.replica(), 1);
}

// The degree of tensor parallelism by its own name and by DeepSpeed's; the batch is divided among what is
// left.
TEST_F(ConfigDevices, PartsOfLayersAreOnNeighbouringRanks) {
  for (const char* degree : {R"("parallel": {"tensor": 2})", R"("tensor_parallel": {"autotp_size": 2})",
                             R"("tensor_parallel": {"tp": {"tp_size": 2}})"}) {
    const RunConfig c = load_over(fmt::format(R"({{"devices": "host:4", {}, "train_batch_size": 24,
      "train_micro_batch_size_per_gpu": 2, "zero_optimization": {{"stage": 3}}}})",
                                              degree));
    EXPECT_EQ(c.parallel.tensor, 2);
    EXPECT_FALSE(c.parallel.sequence);
    EXPECT_EQ(c.accumulation_steps, 6);
    const RankPlace place = c.place_of(3);
    EXPECT_EQ(place.parts.tensor_part, 1);
    EXPECT_EQ(place.sharding.rank, 1);
    EXPECT_EQ(place.sharding.shards, 2);
  }
  const RunConfig both = load_over(R"({"devices": "host:4", "parallel": {"tensor": 4, "sequence": true}})");
  EXPECT_TRUE(both.parallel.sequence);
  EXPECT_EQ(both.warnings, Strings{});
  const RunConfig alone = load_over(R"({"devices": "host:4", "parallel": {"sequence": true}})");
  EXPECT_TRUE(warns(alone, "has no effect: it is between the ranks of parallel.tensor, which is 1"));
}

// Tensor groups are neighbours; then come context and data, then the stages.
TEST(ConfigPlaces, EveryRankHasOne) {
  RunConfig c;
  c.device.ranks = 48;
  c.parallel.tensor = 2, c.parallel.context = 3, c.parallel.pipeline = 4;
  c.zero_stage = 3;
  EXPECT_EQ(c.sharding_ranks(), 6);
  EXPECT_EQ(c.data_ranks(), 2);
  for (int rank = 0; rank < c.ranks(); ++rank) {
    const RankPlace place = c.place_of(rank);
    EXPECT_EQ(place.rank(), rank);
    EXPECT_EQ(place.ranks(), c.ranks());
    EXPECT_EQ(place.sharding.shards, 6);
    EXPECT_EQ(place.parts.tensor_part, rank % 2);
    EXPECT_EQ(place.context_part(), rank / 2 % 3);
    EXPECT_EQ(place.data_rank(), rank / 6 % 2);
    EXPECT_EQ(place.parts.stage, rank / 12);
  }
}

// Ranks with parts of the same sequences count once in the batch.
TEST_F(ConfigDevices, AContextGroupIsOneOfTheBatch) {
  const RunConfig c = load_set({"devices=host:4", "parallel.context=2", "train_batch_size=8",
                                "train_micro_batch_size_per_gpu=1", "zero_optimization.stage=3"});
  EXPECT_EQ(c.parallel.context_method, ContextMethod::kRing);
  EXPECT_EQ(c.data_ranks(), 2);
  EXPECT_EQ(c.accumulation_steps, 4);
  EXPECT_EQ(c.place_of(3).sharding.ranks, 4);
  EXPECT_EQ(c.place_of(3).sharding.shards, 4);
  EXPECT_EQ(c.place_of(3).context_part(), 1);
  EXPECT_EQ(c.place_of(3).data_rank(), 1);
  const RunConfig ulysses =
      load_set({"devices=host:4", "parallel.context=4", "parallel.context_method=ulysses"});
  EXPECT_EQ(ulysses.place_of(2).parts.context_method, ContextMethod::kUlysses);
}

TEST_F(ConfigDevices, MistakesAreNamed) {
  struct Case {
    const char* overlay;
    const char* key;
    const char* part;  // of message or hint
  };
  const Case cases[] = {
      {R"({"devices": "tpu"})", "devices", "\"host:N\", \"cuda:N\""},
      {R"({"devices": "host:0"})", "devices", "host:4 has four ranks"},
      {R"({"devices": "host:x"})", "devices", "host:4 has four ranks"},
      {R"({"devices": "host:257"})", "devices", "at most 256"},
      {R"({"devices": "cuda:0,0"})", "devices", "GPU 0 several times"},
      {R"({"devices": "cuda:0-2,1"})", "devices", "GPU 1 several times"},
      {R"({"devices": "cuda:3-1"})", "devices", "cuda:0 is the first"},
      {R"({"devices": "cuda:0,"})", "devices", "cuda:0 is the first"},
      {R"({"devices": "cuda:0-64"})", "devices", "at most 64"},
      {R"({"devices": "cuda:0,2000000000-2147483647"})", "devices", "at most 64"},
      {R"({"devices": "cuda:all"})", "devices", "there is none; ziggurat probe says why"},
      {R"({"devices": "cuda:0,1", "cuda": {"gpudirect_storage": "on"}})", "cuda.gpudirect_storage",
       "one GPU alone"},
      {R"({"devices": "cuda:x"})", "devices", "cuda:0 is the first"},
      {R"({"devices": "cuda:-1"})", "devices", "cuda:0 is the first"},
      {R"({"devices": "cuda:"})", "devices", "cuda:0 is the first"},
      {R"({"cuda": {"attention": "flash"}})", "cuda.attention", "own"},
      {R"({"cuda": {"gpudirect_storage": true}})", "cuda.gpudirect_storage", "auto"},
      {R"({"devices": "host", "cuda": {"gpudirect_storage": "on"}})", "cuda.gpudirect_storage",
       "trains on the processor"},
      {R"({"devices": "cuda", "cuda": {"gpudirect_storage": "off"}, "aio": {"use_gds": true}})",
       "aio.use_gds", "off"},
      {R"({"cuda": {"deterministc": true}})", "cuda.deterministc", "did you mean deterministic?"},
      {R"({"cuda": {"tf32": 1}})", "cuda.tf32", "true"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.overlay);
    const Error e = usage_error([&] { load_over(c.overlay); });
    EXPECT_EQ(e.exit_code(), 2);
    EXPECT_HAS(e.where(), c.key);
    EXPECT_HAS(e.message() + e.hint(), c.part) << e.message() << "; " << e.hint();
  }
}

TEST_F(ConfigDevices, SeveralGpusAreRanks) {
  machine_.gpu_count = [] { return 3; };
  const std::pair<const char*, std::vector<int>> cases[] = {
      {"cuda:0,2", {0, 2}}, {"cuda:2-3", {2, 3}}, {"cuda:0-1,5", {0, 1, 5}}, {"cuda:all", {0, 1, 2}}};
  for (const auto& [text, gpus] : cases) {
    SCOPED_TRACE(text);
    const RunConfig c = load_over(fmt::format(
        R"({{"devices": "{}", "train_batch_size": 12, "gradient_accumulation_steps": 1}})", text));
    EXPECT_EQ(c.device.kind, Kind::kCuda);
    EXPECT_EQ(c.device.gpus, gpus);
    EXPECT_EQ(c.device.ranks, static_cast<int>(gpus.size()));
    EXPECT_EQ(c.micro_batch * c.device.ranks, 12);
  }
}

// A GPU with bf16 instructions decides "auto", whatever the processor has.
TEST_F(ConfigDevices, DecideWhatAutoTakes) {
  EXPECT_EQ(load_over(R"({"devices": "cuda:0", "bf16": {"enabled": "auto"}})").dtype, DType::kBF16);
}

}  // namespace
}  // namespace zg
