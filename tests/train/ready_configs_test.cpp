// The configurations for fine-tuning that are shipped fit the machine that they name: one node of eight GPUs
// of 80 GB, or one GPU. tests/reference/configs has each model's sizes, written by hand as its config.json
// has them.
#include "config/config_fixture.hpp"
#include "support/coded_headers.hpp"
#include "support/places.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {
namespace {

struct Ready {
  const char* name;
  double billions;    // of parameters, by the model's card
  bool on_drives;     // whether state lies there
  bool lora = false;  // the file beside it, which trains adapters
};
void PrintTo(const Ready& ready, std::ostream* out) {
  *out << ready.name;
}

struct GpuSizes final : OpSizes {
  std::int64_t row_groups() const override { return 264; }
  std::int64_t attention_scratch_bytes(DType, const AttentionShape&) const override { return 3 << 20; }
  std::int64_t logits_bytes() const override { return std::int64_t{2} << 30; }
  bool pads_logits() const override { return true; }
};

class ReadyConfigurations : public ConfigTest, public testing::WithParamInterface<Ready> {
 protected:
  RunConfig load_ready() const {
    const std::string name = GetParam().name, model = directory_ + "/model";
    write("model/config.json", test::read_file(test::in_source("tests/reference/configs/") + name + ".json"));
    Machine machine;
    machine.has_gpu = [] { return true; };
    machine.gpu_count = [] { return 8; };
    return load_config(
        {{test::in_source("configs/finetune/") + name + (GetParam().lora ? "-lora.json" : ".json")},
         {"model.from=" + model}},
        machine);
  }
  Hardware node_of_eight(const RunConfig& run) const {
    Hardware machine;
    machine.memory.available = 2048 * kGiB;
    machine.cores.nodes = {{0, {}}, {1, {}}};
    for (int cpu = 0; cpu < 128; ++cpu)
      machine.cores.nodes[static_cast<std::size_t>(cpu / 64)].cores.push_back({cpu, cpu});
    for (std::size_t i = 0; i < run.tiers.nvme.size(); ++i)
      machine.drives.push_back({static_cast<int>(i), {4096 * kGiB, i + 1}});
    machine.gpu = Hardware::Gpu{.sizes = &sizes_,
                                .memory = 76 * kGiB,
                                .granule = 2 * kMiB,
                                .numa_nodes = {0, 0, 0, 0, 1, 1, 1, 1},
                                .staging = kGiB};
    return machine;
  }
  GpuSizes sizes_;
};

TEST_P(ReadyConfigurations, FitsItsNode) {
  const RunConfig run = load_ready();
  EXPECT_EQ(run.ranks(), 8);
  const ModelConfig model = model_of(run);
  const Hardware node = node_of_eight(run);
  for (const int rank : {0, 7}) {
    const RunPlan plan = make_run_plan(run, model, 1'000'000, node, rank);
    EXPECT_TRUE(plan.dry_run.fits);
    std::int64_t adapters = 0;
    for (const Unit& unit : plan.model->units()) {
      for (const Param& p : unit.params) adapters += p.adapter ? p.whole_count() : 0;
    }
    EXPECT_EQ(adapters > 0, GetParam().lora);
    EXPECT_NEAR(static_cast<double>(plan.model->parameter_count() - adapters) / 1e9, GetParam().billions,
                0.05);
    EXPECT_EQ(plan.tile_bytes(), 0);  // layers are whole
    EXPECT_EQ(plan.dry_run.per_step.nvme_read() > 0, GetParam().on_drives);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shipped, ReadyConfigurations,
    testing::Values(Ready{"llama-3.1-8b", 8.03, false}, Ready{"llama-3.1-70b", 70.55, false},
                    Ready{"qwen3-8b", 8.19, false}, Ready{"qwen3-32b", 32.76, false},
                    Ready{"mistral-7b", 7.25, false}, Ready{"gemma-2-9b", 9.24, false},
                    Ready{"llama-3.1-8b", 8.03, false, true}, Ready{"llama-3.1-70b", 70.55, false, true},
                    Ready{"qwen3-8b", 8.19, false, true}, Ready{"qwen3-32b", 32.76, false, true},
                    Ready{"mistral-7b", 7.25, false, true}, Ready{"gemma-2-9b", 9.24, false, true},
                    Ready{"qwen3-30b-a3b", 30.53, false}, Ready{"qwen3-30b-a3b", 30.53, false, true}),
    [](const auto& one) {
      std::string name = std::string(one.param.name) + (one.param.lora ? "_lora" : "");
      for (char& c : name) c = c == '-' || c == '.' ? '_' : c;
      return name;
    });

// QLoRA of the largest mixtures of experts, whose codes the eight GPUs of a node share.
struct Largest {
  const char* name;
  double billions;  // of parameters
  double codes;     // 10^9 bytes of the codes and scales of all ranks
  bool reads_drive;
};
void PrintTo(const Largest& one, std::ostream* out) {
  *out << one.name;
}

class ReadyMixtures : public ConfigTest, public testing::WithParamInterface<Largest> {};

TEST_P(ReadyMixtures, FitsItsNode) {
  const std::string name = GetParam().name, model = directory_ + "/model";
  write("model/config.json", test::read_file(test::in_source("tests/reference/configs/") + name + ".json"));
  test::write_coded_headers(model);
  Machine asked;
  asked.has_gpu = [] { return true; };
  asked.gpu_count = [] { return 8; };
  const RunConfig run = load_config(
      {{test::in_source("configs/finetune/") + name + "-qlora.json"}, {"model.from=" + model}}, asked);
  const GpuSizes sizes;
  Hardware node;
  node.memory.available = 1024 * kGiB;
  node.cores.nodes = {{0, {}}, {1, {}}};
  for (int cpu = 0; cpu < 128; ++cpu)
    node.cores.nodes[static_cast<std::size_t>(cpu / 64)].cores.push_back({cpu, cpu});
  for (std::size_t i = 0; i < run.tiers.nvme.size(); ++i)
    node.drives.push_back({static_cast<int>(i), {4096 * kGiB, i + 1}});
  node.gpu = Hardware::Gpu{.sizes = &sizes,
                           .memory = 76 * kGiB,
                           .granule = 2 * kMiB,
                           .numa_nodes = {0, 0, 0, 0, 1, 1, 1, 1},
                           .staging = kGiB};
  const RunPlan plan = make_run_plan(run, model_of(run), 1'000'000, node, 3);
  EXPECT_TRUE(plan.dry_run.fits);
  std::int64_t codes = 0, adapters = 0;
  for (const Layout::TileTensors& tile : plan.layout->tiles) {
    if (tile.is_coded()) codes += plan.layout->table.tensor(tile.stored).spec.count;
  }
  for (const Unit& unit : plan.model->units()) {
    for (const Param& p : unit.params) adapters += p.adapter ? p.whole_count() : 0;
  }
  EXPECT_NEAR(static_cast<double>(plan.model->parameter_count() - adapters) / 1e9, GetParam().billions, 0.05);
  EXPECT_NEAR(8 * static_cast<double>(codes) / 1e9, GetParam().codes, 0.01 * GetParam().codes);
  EXPECT_EQ(plan.dry_run.per_step.nvme_read() > 0, GetParam().reads_drive)
      << plan.dry_run.per_step.nvme_read();
  // Codes are never written; a little of what changes may be.
  EXPECT_LT(plan.dry_run.per_step.nvme_write(), codes / 1000);
}

INSTANTIATE_TEST_SUITE_P(Shipped, ReadyMixtures,
                         testing::Values(Largest{"deepseek-v3", 671.03, 669.2, false},
                                         Largest{"kimi-k2", 1026.41, 1024.1, true}),
                         [](const auto& one) {
                           std::string name = one.param.name;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

// QLoRA on one GPU: a machine with 24 GB on it, 64 GB of memory and a drive, and one with 80 GB.
struct OneGpu {
  const char* name;
  double codes;      // 10^9 bytes of all codes and scales
  bool reads_drive;  // with 24 GB and 64 GB
};
void PrintTo(const OneGpu& one, std::ostream* out) {
  *out << one.name;
}

class ReadyQlora : public ConfigTest, public testing::WithParamInterface<OneGpu> {};

TEST_P(ReadyQlora, FitsOneGpu) {
  const std::string name = GetParam().name, model = directory_ + "/model";
  write("model/config.json", test::read_file(test::in_source("tests/reference/configs/") + name + ".json"));
  test::write_coded_headers(model);
  Machine asked;
  asked.has_gpu = [] { return true; };
  asked.gpu_count = [] { return 1; };
  const RunConfig run = load_config(
      {{test::in_source("configs/finetune/") + name + "-qlora.json"}, {"model.from=" + model}}, asked);
  EXPECT_EQ(run.ranks(), 1);
  const GpuSizes sizes;
  for (const std::int64_t gib : {22, 76}) {
    SCOPED_TRACE(gib);
    Hardware machine;
    machine.memory.available = 60 * kGiB;
    machine.cores.nodes = {{0, {}}};
    for (int cpu = 0; cpu < 16; ++cpu) machine.cores.nodes[0].cores.push_back({cpu, cpu});
    for (std::size_t i = 0; i < run.tiers.nvme.size(); ++i)
      machine.drives.push_back({static_cast<int>(i), {1024 * kGiB, i + 1}});
    machine.gpu = Hardware::Gpu{
        .sizes = &sizes, .memory = gib * kGiB, .granule = 2 * kMiB, .numa_nodes = {0}, .staging = 0};
    const RunPlan plan = make_run_plan(run, model_of(run), 1'000'000, machine, 0);
    EXPECT_TRUE(plan.dry_run.fits);
    EXPECT_EQ(plan.tile_bytes(), 0);  // layers are whole
    std::int64_t codes = 0;
    for (const Layout::TileTensors& tile : plan.layout->tiles) {
      if (tile.is_coded()) codes += plan.layout->table.tensor(tile.stored).spec.count;
    }
    EXPECT_NEAR(static_cast<double>(codes) / 1e9, GetParam().codes, 0.05);
    const LinkBytes& moved = plan.dry_run.per_step;
    const bool small = gib < 76;
    // With 80 GB a hundredth of the largest model's codes has no room beside the rest.
    EXPECT_EQ(moved.nvme_read() > codes / 50, small && GetParam().reads_drive) << moved.nvme_read();
    EXPECT_EQ(moved.nvme_write(), 0) << "neither codes nor activations are written in a step";
    if (!small) {
      EXPECT_LT(moved[kToDevice], codes) << "codes stay on a GPU of 80 GB";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shipped, ReadyQlora,
                         testing::Values(OneGpu{"llama-3.1-8b", 3.93, false},
                                         OneGpu{"llama-3.1-70b", 38.5, true},
                                         OneGpu{"qwen3-32b", 17.6, false},
                                         OneGpu{"gpt-oss-20b", 10.17, false},
                                         OneGpu{"gpt-oss-120b", 60.99, true}),
                         [](const auto& one) {
                           std::string name = one.param.name;
                           for (char& c : name) c = c == '-' || c == '.' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace zg
