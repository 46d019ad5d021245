// The memory of the whole process stays within its budgets: the program itself trains a model whose state is
// twenty times the host's budget.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

struct Ended {
  int status = 0;
  std::int64_t resident = 0;  // the most, in bytes, as the kernel counted it
  std::string text;           // of both outputs
};

class ResidentMemory : public testing::Test {
 protected:
  ResidentMemory() {
    std::string pattern = (fs::temp_directory_path() / "zg_resident_XXXXXX").string();
    ZG_ASSERT(mkdtemp(pattern.data()) != nullptr, "{}", errno_text(errno));
    directory_ = pattern;
    std::ofstream text(directory_ + "/text.txt", std::ios::binary);
    const NamedRandom letters(7, "text");
    for (std::uint64_t i = 0; i < 20000; ++i) text << static_cast<char>('a' + letters.below(i, 26));
    // 24 layers of 12 * 288^2 elements: with weights, gradients, master and moments 20 bytes each.
    std::ofstream(directory_ + "/config.json") << R"({
  "model": {"arch": "gpt2", "n_layer": 24, "n_head": 6, "n_embd": 288, "n_positions": 32},
  "data": {"train": "text.txt", "validation": 0.1, "tokenizer": "bytes", "seq_len": 32},
  "steps": 3, "eval": {"batches": 1},
  "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
  "output": {"dir": "out"}
})";
  }
  ~ResidentMemory() override {
    std::error_code ignored;
    fs::remove_all(directory_, ignored);
  }

  Ended train(const std::vector<std::string>& overrides) const {
    std::vector<std::string> words{ZG_BINARY, "train", "config.json"};
    for (const std::string& o : overrides) words.insert(words.end(), {"--set", o});
    std::vector<char*> argv;
    for (std::string& w : words) argv.push_back(w.data());
    argv.push_back(nullptr);
    const std::string log = directory_ + "/output.txt";
    const pid_t pid = fork();
    if (pid == 0) {
      const int out = open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      if (out < 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0 || chdir(directory_.c_str()) != 0) _exit(126);
      execv(argv[0], argv.data());
      _exit(127);
    }
    ZG_ASSERT(pid > 0, "{}", errno_text(errno));
    Ended ended;
    rusage usage{};
    while (wait4(pid, &ended.status, 0, &usage) < 0) ZG_ASSERT_EQ(errno, EINTR);
    ended.resident = static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
    std::ifstream in(log);
    std::ostringstream text;
    text << in.rdbuf();
    ended.text = text.str();
    return ended;
  }

  std::string directory_;
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
  const Ended refused = train(with_device(4096));
  ASSERT_TRUE(WIFEXITED(refused.status) && WEXITSTATUS(refused.status) != 0) << refused.text;
  const std::int64_t device = number_after(refused.text, "tiers.device=");
  ASSERT_GT(device, 0) << refused.text;

  const Ended ended = train(with_device(device));
  ASSERT_TRUE(WIFEXITED(ended.status)) << ended.text;
  ASSERT_EQ(WEXITSTATUS(ended.status), 0) << ended.text;
  // weights, gradients, master, two moments: fp32
  const std::int64_t state = 5 * 4 * 24 * 12 * 288 * 288;
  ASSERT_GE(state, 20 * kHost);
  ASSERT_LT(device + kHost + kProcessOverhead, state);
  EXPECT_LE(ended.resident, device + kHost + kProcessOverhead) << ended.text;
  // What the program says of itself is what the kernel says, and it says that all bytes were foretold.
  EXPECT_NE(ended.text.find("process (resident)"), std::string::npos) << ended.text;
  EXPECT_NE(ended.text.find("exact"), std::string::npos) << ended.text;
  EXPECT_EQ(ended.text.find("differs"), std::string::npos) << ended.text;
  RecordProperty("resident_bytes", std::to_string(ended.resident));
  RecordProperty("state_bytes", std::to_string(state));
}

}  // namespace
}  // namespace zg
