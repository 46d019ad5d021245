// What the tests of the program share: a folder of their own with a text and a configuration in it.
#pragma once
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "support/errors.hpp"
#include "support/files.hpp"
#include "support/places.hpp"
#include "support/process.hpp"

namespace zg::cli_test {

namespace fs = std::filesystem;
using test::Launch;
using test::Outcome;
using Strings = std::vector<std::string>;

inline Strings operator+(Strings a, const Strings& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// "--set key=value" for each.
inline Strings sets(const Strings& values) {
  Strings words;
  for (const std::string& value : values) words.insert(words.end(), {"--set", value});
  return words;
}

inline Strings lines_of(const std::string& text) {
  Strings lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// Two layers of width 32, seconds to train at most; everything below the folder of the test, paths relative
// to it.
inline constexpr const char* kConfig = R"({
  "model": {"arch": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32},
  "data": {"train": "text.txt", "validation": 0.1, "tokenizer": "bytes", "seq_len": 16},
  "steps": 5, "eval": {"every": 2, "batches": 2},
  "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2,
  "gradient_clipping": 1.0,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
  "output": {"dir": "out"}
})";

class CliTest : public ::testing::Test {
 protected:
  CliTest() {
    write("config.json", kConfig);
    std::string text;
    const Strings words{"let", "there", "be",  "light",   "and",     "it",
                        "was", "good",  "the", "evening", "morning", "day"};
    for (std::size_t i = 0; text.size() < 12000; ++i)
      text += words[(i * i + i / 7) % words.size()] + (i % 11 == 0 ? ".\n" : " ");
    write("text.txt", text);
  }

  std::string path(const std::string& name) const { return temporary_ / name; }
  void write(const std::string& name, const std::string& content) const {
    test::write_file(path(name), content);
  }
  std::string read(const std::string& name) const { return test::read_file(path(name)); }

  Outcome run(const Strings& arguments) const { return run(Launch{.arguments = arguments}); }
  Outcome run(Launch what) const {
    what.directory = directory_;
    return test::launch(test::built_program(), what);
  }
  // Trains config.json with these overrides; must succeed.
  Outcome train(const Strings& overrides, const Strings& flags = {}) const {
    const Outcome o = run(Strings{"train", "config.json"} + sets(overrides) + flags);
    EXPECT_EQ(o.code, 0) << o.err;
    return o;
  }
  std::vector<nlohmann::json> log(const std::string& name = "out/log.jsonl") const {
    std::vector<nlohmann::json> records;
    for (const std::string& line : lines_of(read(name))) records.push_back(nlohmann::json::parse(line));
    return records;
  }

  // The message of a run that failed: exactly one, at the end, and behind nothing but log lines.
  static std::string message_of(const Outcome& o) {
    EXPECT_FALSE(o.timed_out);
    EXPECT_EQ(o.signal, 0) << o.err;
    std::string message;
    for (const std::string& line : lines_of(o.err)) {
      if (line.rfind("ziggurat: ", 0) == 0) {
        EXPECT_TRUE(message.empty()) << "a second message:\n" << o.err;
        message = line;
      } else if (!message.empty()) {
        EXPECT_EQ(line.rfind("  hint: ", 0), 0u) << "more than a message and its hint:\n" << o.err;
        message += "\n" + line;
      }
    }
    EXPECT_FALSE(message.empty()) << o.err;
    EXPECT_LE(lines_of(message).size(), 2u) << message;
    EXPECT_LE(message.size(), 700u) << "too long to be read: " << message;
    for (const char* noise : {"terminate called", "assertion", "what()", " error: ", "Sanitizer"}) {
      EXPECT_HAS_NOT(o.err, noise);
    }
    return message;
  }

  // Nothing is left of a run that was refused.
  void expect_nothing_half_written() const {
    for (const auto& entry :
         fs::recursive_directory_iterator(directory_, fs::directory_options::skip_permission_denied)) {
      const std::string name = entry.path().filename().string();
      EXPECT_HAS_NOT(name, ".part") << entry.path();
      EXPECT_HAS_NOT(name, ".tmp") << entry.path();
      EXPECT_NE(name.rfind(".ziggurat-", 0), 0u) << entry.path();
    }
    for (const char* name : {"out/log.jsonl", "out/config.json", "out/model"})
      EXPECT_FALSE(fs::exists(path(name))) << name;
  }

  const test::TempDir temporary_;
  const std::string& directory_ = temporary_.path();
};

}  // namespace zg::cli_test
