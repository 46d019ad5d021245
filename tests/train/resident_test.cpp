// The memory of the whole process stays within its budgets: the program itself trains a model whose state is
// twenty times the host's budget.
#include <gtest/gtest.h>

#include <charconv>
#include <string>
#include <vector>

#include "support/errors.hpp"
#include "support/files.hpp"
#include "support/places.hpp"
#include "support/process.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {
namespace {

class ResidentMemory : public testing::Test {
 protected:
  ResidentMemory() {
    const NamedRandom letters(7, "text");
    std::string text;
    for (std::uint64_t i = 0; i < 20000; ++i) text += static_cast<char>('a' + letters.below(i, 26));
    test::write_file(directory_ / "text.txt", text);
    // 18 layers of 12 * 288^2 elements: with weights, gradients, master and moments 20 bytes each.
    test::write_file(directory_ / "config.json", R"({
  "model": {"arch": "gpt2", "n_layer": 18, "n_head": 6, "n_embd": 288, "n_positions": 32},
  "data": {"train": "text.txt", "validation": 0.1, "tokenizer": "bytes", "seq_len": 32},
  "steps": 3, "eval": {"batches": 1},
  "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
  "output": {"dir": "out"}
})");
  }

  test::Outcome train(const std::vector<std::string>& overrides) const {
    std::vector<std::string> words{"train", "config.json"};
    for (const std::string& o : overrides) words.insert(words.end(), {"--set", o});
    test::Outcome outcome =
        test::launch(test::built_program(), {.arguments = words, .directory = directory_.path()});
    outcome.out += outcome.err;
    return outcome;
  }

  const test::TempDir directory_;
};

std::int64_t number_after(const std::string& text, const std::string& key) {
  std::int64_t value = 0;
  const std::size_t at = text.find(key);
  if (at != std::string::npos)
    std::from_chars(text.data() + at + key.size(), text.data() + text.size(), value);
  return value;
}

TEST_F(ResidentMemory, StaysWithinBudgetsWithStateTwentyTimesTheHost) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need memory of their own";
#endif
  constexpr std::int64_t kHost = 16 * kMiB;
  const std::vector<std::string> tiers{"tiers.host=" + std::to_string(kHost), "tiers.nvme.0.path=."};
  const auto with_device = [&](std::int64_t bytes) {
    std::vector<std::string> all = tiers;
    all.push_back("tiers.device=" + std::to_string(bytes));
    return all;
  };
  const test::Outcome refused = train(with_device(4096));
  ASSERT_GT(refused.code, 0) << refused.out;
  const std::int64_t device = number_after(refused.out, "tiers.device=");
  ASSERT_GT(device, 0) << refused.out;

  const test::Outcome ended = train(with_device(device));
  ASSERT_EQ(ended.code, 0) << ended.out;
  // weights, gradients, master, two moments: fp32
  const std::int64_t state = 5 * 4 * 18 * 12 * 288 * 288;
  ASSERT_GE(state, 20 * kHost);
  ASSERT_LT(device + kHost + kProcessOverhead, state);
  EXPECT_LE(ended.peak_bytes, device + kHost + kProcessOverhead) << ended.out;
  // What the program says of itself is what the kernel says, and it says that all bytes were foretold.
  EXPECT_HAS(ended.out, "process (resident)");
  EXPECT_HAS(ended.out, "exact");
  EXPECT_HAS_NOT(ended.out, "differs");
  RecordProperty("resident_bytes", std::to_string(ended.peak_bytes));
  RecordProperty("state_bytes", std::to_string(state));
}

}  // namespace
}  // namespace zg
