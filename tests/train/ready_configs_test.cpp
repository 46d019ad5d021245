// The configurations for fine-tuning that are shipped fit the machine that they name: one node of eight GPUs
// of 80 GB. tests/reference/configs has each model's sizes, written by hand as its config.json has them.
#include "config/config_fixture.hpp"
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

class ReadyConfigurations : public ConfigTest, public testing::WithParamInterface<Ready> {
 protected:
  struct Gpu80 final : OpSizes {
    std::int64_t row_groups() const override { return 264; }
    std::int64_t attention_scratch_bytes(DType, const AttentionShape&) const override { return 3 << 20; }
    std::int64_t logits_bytes() const override { return std::int64_t{2} << 30; }
    bool pads_logits() const override { return true; }
  };

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
  Gpu80 sizes_;
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
                    Ready{"mistral-7b", 7.25, false, true}, Ready{"gemma-2-9b", 9.24, false, true}),
    [](const auto& one) {
      std::string name = std::string(one.param.name) + (one.param.lora ? "_lora" : "");
      for (char& c : name) c = c == '-' || c == '.' ? '_' : c;
      return name;
    });

}  // namespace
}  // namespace zg
