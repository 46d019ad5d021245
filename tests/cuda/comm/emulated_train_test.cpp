// Whole runs on several GPUs that are fakes: what the trainer asks for CUDA devices and for NCCL, it gets
// from here.
#include <cstring>

#include "comm/nccl_ranks.hpp"
#include "device/cuda/device.hpp"
#include "tests/cuda/comm/fake_nccl.hpp"
#include "tests/cuda/host_blas.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/golden.hpp"
#include "train/run_fixture.hpp"
#include "ziggurat/comm/gpu.hpp"
#include "ziggurat/device/cuda.hpp"
#include "ziggurat/model/hf.hpp"
#include "ziggurat/plan/plan.hpp"

namespace zg {
namespace {

// The runtime of the run under way; a new one is made when nobody uses the last one any more.
std::weak_ptr<test::FakeRuntime> g_runtime;
std::weak_ptr<test::FakeNccl> g_nccl;
constexpr int kGpus = 4;

std::shared_ptr<test::FakeRuntime> runtime() {
  std::shared_ptr<test::FakeRuntime> now = g_runtime.lock();
  if (now != nullptr) return now;
  test::FakeOptions options;
  options.devices = kGpus;
  options.granule = 4096;
  options.memory = std::int64_t{256} << 20;
  now = std::make_shared<test::FakeRuntime>(options);
  g_runtime = now;
  return now;
}

}  // namespace

// A device on which rates are measured has matrices as large as its memory, so it has little.
std::unique_ptr<Device> make_cuda_device(const CudaOptions& options) {
  CudaOptions here = options;
  if (here.budget == kRoofMemory) here.budget = std::int64_t{4} << 20;
  return cuda::make_device(here, runtime(), test::make_host_blas);
}
std::string describe_attention(const CudaOptions&) {
  return "own kernels";
}
std::vector<GpuInfo> list_gpus(std::string*) {
  std::vector<GpuInfo> gpus;
  for (int i = 0; i < kGpus; ++i) {
    gpus.push_back({.device = i,
                    .name = "fake",
                    .pci = "",
                    .memory = std::int64_t{256} << 20,
                    .free = (std::int64_t{128} << 20) + (std::int64_t{1} << 30)});
  }
  return gpus;
}
std::vector<std::unique_ptr<CommRank>> make_gpu_ranks(std::span<Device* const> devices,
                                                      const GpuCommOptions& options) {
  const auto nccl = std::make_shared<test::FakeNccl>(runtime());
  g_nccl = nccl;
  return comm::make_nccl_ranks(devices, nccl, options);
}
std::string describe_nccl() {
  return "a fake NCCL";
}

namespace {

class TrainOnGpus : public RunTest {
 protected:
  struct Outcome {
    std::vector<float> weights;
    std::vector<double> losses;
    std::string text;
    std::int64_t gathers = 0;
  };
  // Runs all steps. All bytes are as foretold.
  static std::vector<double> losses_of(Trainer& trainer) {
    struct Losses final : TrainObserver {
      std::vector<double> all;
      void on_step(const StepRecord& r) override { all.push_back(r.result.loss); }
    } losses;
    trainer.start();
    const RunSummary summary = trainer.run({&losses});
    EXPECT_EQ(summary.measured, summary.formula);
    EXPECT_EQ(summary.comm, summary.comm_formula);
    return losses.all;
  }
  Outcome run(const std::string& devices, const Strings& settings) const {
    Strings all{"devices=\"" + devices + "\"", "steps=3", "train_batch_size=4", "cuda.attention=own",
                R"(optimizer={"type": "SGD", "params": {"lr": 0.1}})"};
    all.insert(all.end(), settings.begin(), settings.end());
    Trainer trainer(tiny(all, {}));
    Outcome out{.weights = {}, .losses = losses_of(trainer), .text = trainer.describe()};
    if (const auto nccl = g_nccl.lock()) out.gathers = nccl->calls("all_gather");
    const std::string directory = directory_ + "/model";
    trainer.save_model(directory);
    const HfWeights weights(directory, *trainer.plan().model);
    for (const Unit& unit : trainer.plan().model->units()) {
      for (const Param& p : unit.params) {
        const std::size_t at = out.weights.size();
        out.weights.resize(at + static_cast<std::size_t>(p.count()));
        weights.read(p, 0, p.count(), out.weights.data() + at);
      }
    }
    return out;
  }
};

// Stage and budgets do not change a bit; the processor's sums have another order inside a rank.
TEST_F(TrainOnGpus, EveryStageGivesTheSameBitsAndNearlyTheProcessors) {
  const Outcome first = run("cuda:0-1", {"zero_optimization.stage=0"});
  EXPECT_HAS(first.text, "device     cuda:0");
  EXPECT_HAS(first.text, "device     cuda:1");
  EXPECT_HAS(first.text, "exchange   2 GPUs, a fake NCCL");
  const Outcome sharded = run("cuda:0-1", {"zero_optimization.stage=3"});
  EXPECT_GT(sharded.gathers, first.gathers);
  std::filesystem::create_directories(directory_ + "/drive");
  const Outcome sinks = run("cuda:3,1", {"zero_optimization.stage=3", "tiers.device=36MiB", "tiers.host=1MiB",
                                         "tiers.nvme.0.path=" + directory_ + "/drive"});
  for (const Outcome* other : {&sharded, &sinks}) {
    EXPECT_EQ(other->losses, first.losses);
    ASSERT_EQ(other->weights.size(), first.weights.size());
    EXPECT_EQ(std::memcmp(other->weights.data(), first.weights.data(), 4 * first.weights.size()), 0);
  }
  const Outcome host = run("host:2", {"zero_optimization.stage=3"});
  ASSERT_EQ(host.weights.size(), first.weights.size());
  for (std::size_t i = 0; i < host.losses.size(); ++i) EXPECT_NEAR(host.losses[i], first.losses[i], 1e-5);
  for (std::size_t i = 0; i < host.weights.size(); ++i)
    ASSERT_NEAR(host.weights[i], first.weights[i], 2e-4) << i;
}

// Ranks with parts of the same sequences. What attention exchanges is no part of a graph that is replayed.
TEST_F(TrainOnGpus, PartsOfSequencesAreNearlyTheProcessors) {
  for (const char* method : {"ring", "ulysses"}) {
    SCOPED_TRACE(method);
    const Strings parts{"parallel.context=2", std::string("parallel.context_method=") + method,
                        "zero_optimization.stage=3"};
    Strings graphs = parts;
    graphs.push_back("cuda.graphs=true");
    const Outcome gpu = run("cuda:0-1", parts), replayed = run("cuda:0-1", graphs),
                  host = run("host:2", parts);
    EXPECT_EQ(replayed.losses, gpu.losses);
    EXPECT_EQ(replayed.weights, gpu.weights);
    for (std::size_t i = 0; i < host.losses.size(); ++i) EXPECT_NEAR(host.losses[i], gpu.losses[i], 1e-5);
    ASSERT_EQ(host.weights.size(), gpu.weights.size());
    for (std::size_t i = 0; i < host.weights.size(); ++i)
      ASSERT_NEAR(host.weights[i], gpu.weights[i], 2e-4) << i;
  }
}

// A base in codes, which the device decodes for each pass, whole or gathered from shards, gives the bits of
// its elements.
TEST_F(TrainOnGpus, OverCodesHaveTheBitsOfElements) {
  std::string shouting;
  while (shouting.size() < 4000) shouting += "ALL WORK AND NO PLAY MAKES JACK A DULL BOY, ";
  write("loud.txt", shouting);  // of the models' 97 tokens
  const auto losses = [&](const char* format, Strings settings) {
    const Strings usual{"model.from=" + test::reference_directory() + "coded/" + format,
                        "data.train=" + directory_ + "/loud.txt",
                        "data.validation=0",
                        "data.seq_len=16",
                        "lora.rank=4",
                        "steps=2",
                        "train_batch_size=2",
                        "train_micro_batch_size_per_gpu=1",
                        "cuda.attention=own",
                        "bf16.enabled=true"};
    settings.insert(settings.begin(), usual.begin(), usual.end());
    Trainer trainer(on_book(settings));
    return losses_of(trainer);
  };
  const Strings one{"devices=\"cuda:0\""}, two{"devices=\"cuda:0-1\"", "zero_optimization.stage=3"};
  for (const auto& [format, place] : {std::pair("nf4_double", one), {"int4_zeros", two}}) {
    SCOPED_TRACE(format);
    Strings codes = place;
    codes.push_back("lora.base=codes");
    EXPECT_EQ(losses(format, codes), losses(format, place));
  }
}

// The staging memory of communication counts against the budget, and the smallest budget says so.
TEST_F(TrainOnGpus, StagingIsAPartOfTheBudget) {
  const Error error = test::error_of([&] { run("cuda:0,1", {"tiers.device=32MiB", "tiers.host=64MiB"}); });
  EXPECT_EQ(error.code(), Errc::kMemory);
  const std::string hint = error.hint();
  EXPECT_HAS(hint, "tiers.device=");
  const std::int64_t least = std::stoll(hint.substr(hint.find("tiers.device=") + 13));
  EXPECT_GT(least, kGpuCommStaging);
  EXPECT_EQ(run("cuda:0,1", {fmt::format("tiers.device={}", least), "tiers.host=64MiB"}).losses.size(), 3u);
}

TEST_F(TrainOnGpus, AGpuThatIsNotThereIsNamed) {
  const Error error = test::error_of([&] { run("cuda:2-4", {"train_batch_size=6", "tiers.device=64MiB"}); });
  EXPECT_HAS(error.what(), "cuda:4");
  EXPECT_HAS(error.what(), "there are 4 GPUs");
}

}  // namespace
}  // namespace zg
