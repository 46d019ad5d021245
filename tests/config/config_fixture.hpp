// What the tests of the configuration share: a complete base file, and overlays on top of it.
#pragma once
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "support/errors.hpp"
#include "support/files.hpp"
#include "support/places.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/config/run_config.hpp"

namespace zg {

using Strings = std::vector<std::string>;

// Complete, and without any DeepSpeed section that a test would have to undo.
inline constexpr const char* kBase = R"({
  "model": {"arch": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64},
  "data": {"train": "book.txt", "seq_len": 32},
  "steps": 50,
  "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2
})";

class ConfigTest : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& text) const {
    return test::write_file(temporary_ / name, text);
  }
  // The base with `overlay` on top.
  RunConfig load_over(const std::string& overlay, const Strings& overrides = {}) const {
    return load({{base_, write("over.json", overlay)}, overrides});
  }
  RunConfig load_set(const Strings& overrides) const { return load({{base_}, overrides}); }
  // For machine_, which has neither a GPU nor bf16 instructions unless a test says otherwise.
  RunConfig load(const ConfigSource& source) const { return load_config(source, machine_); }

  // What is wrong with the user's input: the error that `work` must throw.
  template <class Work>
  static Error usage_error(const Work& work) {
    const Error error = test::error_of(work);
    EXPECT_EQ(error.code(), Errc::kUsage);
    EXPECT_EQ(error.exit_code(), 2);
    return error;
  }

  // The keys of the warnings that a known key has no effect; all must come from `file`.
  static std::set<std::string> without_effect(const RunConfig& run, const std::string& file) {
    std::set<std::string> keys;
    for (const std::string& line : run.warnings) {
      const std::size_t at = line.find(": has no effect: ");
      if (at == std::string::npos) continue;
      EXPECT_EQ(line.rfind(file + ": ", 0), 0u) << line;
      EXPECT_GT(line.size(), at + 25) << "a reason is missing: " << line;
      keys.insert(line.substr(file.size() + 2, at - file.size() - 2));
    }
    return keys;
  }
  static bool warns(const RunConfig& run, const std::string& part) {
    return std::any_of(run.warnings.begin(), run.warnings.end(),
                       [&](const std::string& line) { return line.find(part) != std::string::npos; });
  }

  const test::TempDir temporary_;
  const std::string directory_ = temporary_.path(), base_ = write("base.json", kBase);
  Machine machine_;
};

inline std::string shipped(const std::string& name) {
  return test::in_source("configs/") + name;
}

inline Strings shipped_in(const std::string& folder) {
  Strings files;
  for (const auto& entry : std::filesystem::directory_iterator(shipped(folder))) {
    if (entry.path().extension() == ".json") files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace zg
