// Several ranks and what they share: the drives, host memory, and the numbers that weights begin with.
#include <algorithm>
#include <charconv>

#include "support/places.hpp"
#include "support/process.hpp"
#include "train/run_fixture.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/train/run_plan.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg {
namespace {

std::int64_t number_after(const std::string& text, const std::string& key) {
  std::int64_t value = 0;
  const std::size_t at = text.find(key);
  if (at != std::string::npos)
    std::from_chars(text.data() + at + key.size(), text.data() + text.size(), value);
  return value;
}

using RanksInitialise = RunTest;

// A weight's first value depends on its name and place alone.
TEST_F(RanksInitialise, WithTheSameWeightsForAnyNumber) {
  const auto saved = [&](const Strings& overrides) {
    Strings settings{"train_batch_size=24", "train_micro_batch_size_per_gpu=1"};
    settings.insert(settings.end(), overrides.begin(), overrides.end());
    Trainer trainer(tiny(settings, {}));
    trainer.start();
    trainer.save_model(directory_ + "/model");
    return test::read_file(directory_ + "/model/model.safetensors");
  };
  const std::string one = saved({});
  for (const int ranks : {2, 3, 4, 8}) {
    for (const int stage : {0, 1, 2, 3}) {
      SCOPED_TRACE(fmt::format("{} ranks, stage {}", ranks, stage));
      EXPECT_TRUE(saved({fmt::format("devices=host:{}", ranks),
                         fmt::format("zero_optimization={{\"stage\": {}}}", stage)}) == one);
    }
  }
}

// Four ranks with their state on drives of memory, and a quarter of the host's tier each.
class RanksOnDrives : public RunTest {
 protected:
  RunConfig config(int ranks, std::int64_t device, std::int64_t host) const {
    Strings settings{"model.n_embd=128",
                     "model.n_layer=8",
                     "data.seq_len=16",
                     "steps=3",
                     "train_batch_size=4",
                     "train_micro_batch_size_per_gpu=1",
                     "gradient_clipping=0.5",
                     "zero_optimization={\"stage\": 3}",
                     "aio.backend=ram",
                     "tiers.nvme.0.path=" + directory_,
                     "tiers.tiles=off",  // tiles need less device memory, and move more
                     fmt::format("devices=host:{}", ranks),
                     fmt::format("tiers.device={}", device),
                     fmt::format("tiers.host={}", host)};
    return on_book(settings);
  }
  std::int64_t smallest_device(int ranks, std::int64_t host) const {
    const Error error = test::error_of([&] { Trainer trainer(config(ranks, 4096, host)); });
    return number_after(error.hint(), "tiers.device=");
  }
};

// Each rank moves its own shard, so the drives move what they do for one rank, but for the padding of shards,
// and what is kept in the tiers: segments are smaller, and other ones fit. Weights that the next update
// rebuilds are not written back.
TEST_F(RanksOnDrives, MoveTheBytesOfOne) {
  constexpr std::int64_t kHost = 8 * kMiB;
  const auto per_step = [&](int ranks) {
    Trainer trainer(config(ranks, smallest_device(ranks, kHost), kHost));
    trainer.start();
    const RunSummary summary = trainer.run();
    EXPECT_EQ(summary.measured, summary.formula);
    LinkBytes sum;
    for (const RunPlan& plan : trainer.plans()) sum += plan.dry_run.per_step;
    return sum;
  };
  const LinkBytes one = per_step(1);
  EXPECT_GT(one.nvme_read(), 20 << 20);
  for (const int ranks : {2, 4}) {
    SCOPED_TRACE(fmt::format("{} ranks", ranks));
    const LinkBytes many = per_step(ranks);
    EXPECT_LE(static_cast<double>(many.nvme_read()), 1.02 * static_cast<double>(one.nvme_read()));
    EXPECT_LE(static_cast<double>(many.nvme_write()), 1.02 * static_cast<double>(one.nvme_write()));
  }
}

// The memory of a process with several ranks: what is stated for the tiers, what any process takes, and so
// much for each further rank (its threads, their stacks and heaps): 15.7 to 17.1 MiB were measured, the more
// the busier the machine was.
constexpr std::int64_t kRankOverhead = 20 * kMiB;

TEST(RanksInMemory, TakeTheirBudgetsAndALittleEach) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need memory of their own";
#endif
  const test::TempDir directory;
  const NamedRandom letters(7, "text");
  std::string text;
  for (std::uint64_t i = 0; i < 20000; ++i) text += static_cast<char>('a' + letters.below(i, 26));
  test::write_file(directory / "text.txt", text);
  // 16 layers of 12 * 288^2 elements: with weights, gradients, master and moments 20 bytes each.
  test::write_file(directory / "config.json", R"({
  "model": {"arch": "gpt2", "n_layer": 16, "n_head": 6, "n_embd": 288, "n_positions": 32},
  "data": {"train": "text.txt", "tokenizer": "bytes", "seq_len": 32}, "steps": 2,
  "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
  "zero_optimization": {"stage": 3}, "output": {"dir": "out"}
})");
  constexpr std::int64_t kHost = 16 * kMiB, kState = 5 * 4 * 16 * 12 * 288 * 288;
  const auto train = [&](int ranks, std::int64_t device) {
    std::vector<std::string> words{"train", "config.json", "--devices", fmt::format("host:{}", ranks)};
    for (const std::string& setting :
         {fmt::format("tiers.device={}", device), fmt::format("tiers.host={}", kHost),
          fmt::format("train_batch_size={}", std::max(2, ranks)), std::string("tiers.nvme.0.path=.")})
      words.insert(words.end(), {"--set", setting});
    test::Outcome outcome =
        test::launch(test::built_program(),
                     {.arguments = words, .directory = directory.path(), .limit = std::chrono::seconds(500)});
    outcome.out += outcome.err;
    return outcome;
  };
  std::int64_t alone = 0;  // what one rank's process has beside its budgets
  for (const int ranks : {1, 4}) {
    SCOPED_TRACE(fmt::format("{} ranks", ranks));
    const std::int64_t device = number_after(train(ranks, 4096).out, "tiers.device=");
    ASSERT_GT(device, 0);
    const test::Outcome ended = train(ranks, device);
    ASSERT_EQ(ended.code, 0) << ended.out;
    const std::int64_t budgets = ranks * device + kHost, beside = ended.peak_bytes - budgets;
    ASSERT_LT(budgets + kProcessOverhead, kState + ranks * kRankOverhead);
    EXPECT_LE(beside, kProcessOverhead + (ranks - 1) * kRankOverhead);
    if (ranks == 1) alone = beside;
    EXPECT_LE(beside, alone + (ranks - 1) * kRankOverhead);
    RecordProperty(fmt::format("beside_budgets_of_{}_ranks", ranks), std::to_string(beside));
  }
}

}  // namespace
}  // namespace zg
