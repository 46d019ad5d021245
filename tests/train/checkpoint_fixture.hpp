// What the tests of checkpoints share: runs that stop and go on, and what they leave.
#pragma once
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "train/run_fixture.hpp"
#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/checkpoint/files.hpp"
#include "ziggurat/model/hf.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg {

inline Strings operator+(Strings a, const Strings& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// How often a test does what it does: as the variable of the environment says, or as usual.
inline std::int64_t as_asked(const char* variable, std::int64_t usual) {
  const char* const text = std::getenv(variable);
  return text != nullptr ? std::atoll(text) : usual;
}

// All logical tensors of a checkpoint, whose hashes agree. Codes have a scale for each of them, however the
// checkpoint keeps scales.
using Tensors = std::map<std::string, std::vector<char>>;
inline Tensors tensors_in(const std::string& path) {
  const Checkpoint checkpoint(path);
  checkpoint.verify();
  checkpoint.expect(checkpoint.tensors());  // all pieces, and codes with their scales
  const std::map<std::string, std::int64_t> widths{
      {"F64", 8}, {"F32", 4}, {"BF16", 2}, {"F16", 2}, {"U8", 1}};
  Tensors all;
  std::map<std::string, std::int64_t> counts;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) counts[tensor.name] = tensor.count;
  const auto owner = [](const std::string& name) { return name.substr(0, name.rfind('.')); };
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    if (tensor.name.size() > 6 && tensor.name.substr(tensor.name.size() - 6) == ".scale") continue;
    std::vector<char>& bytes = all[tensor.name];
    if (tensor.dtype == "U8") {
      const std::int64_t count = counts.at(owner(tensor.name));  // of the master
      bytes.resize(static_cast<std::size_t>(5 * count));
      std::vector<float> scales(static_cast<std::size_t>(count));
      checkpoint.read_codes(tensor.name, {0, 1, count, 0}, reinterpret_cast<std::uint8_t*>(bytes.data()),
                            scales.data());
      std::memcpy(bytes.data() + count, scales.data(), static_cast<std::size_t>(4 * count));
      continue;
    }
    bytes.resize(static_cast<std::size_t>(tensor.count * widths.at(tensor.dtype)));
    checkpoint.read(tensor.name, 0, tensor.count, bytes.data());
  }
  return all;
}

// Expects that the index of a copy names each piece of each tensor, where it is, and nothing else.
inline void expect_index(const std::string& copy) {
  const Checkpoint checkpoint(copy);
  std::map<std::string, std::unique_ptr<SafeTensors>> files;
  std::size_t entries = 0;
  for (const CheckpointFile& file : checkpoint.manifest().files) {
    files[file.name] = std::make_unique<SafeTensors>(copy + "/" + file.name);
    entries += files[file.name]->entries().size();
  }
  const auto index = nlohmann::json::parse(test::read_file(copy + "/index.json")).at("tensors");
  std::size_t named = 0;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    ASSERT_TRUE(index.contains(tensor.name)) << tensor.name;
    std::int64_t elements = 0;
    bool boxes = false;
    for (const auto& piece : index.at(tensor.name).at("pieces")) {
      const SafeTensors& file = *files.at(piece.at("file"));
      const SafeTensors::Entry* const entry = file.find(piece.at("entry"));
      ASSERT_NE(entry, nullptr) << piece;
      EXPECT_EQ(entry->dtype, index.at(tensor.name).at("dtype"));
      EXPECT_EQ(entry->count(), piece.at("elements"));
      boxes = boxes || piece.contains("lines");
      if (!boxes) {
        EXPECT_EQ(piece.at("first"), elements) << piece;
      }
      elements += entry->count(), ++named;
      if (piece.contains("scales")) {
        EXPECT_NE(file.find(piece.at("scales")), nullptr) << piece;
        ++named;
      }
    }
    EXPECT_EQ(elements, tensor.count) << tensor.name;
  }
  EXPECT_EQ(index.size(), checkpoint.tensors().size());
  EXPECT_EQ(named, entries);
}
inline std::int64_t parameters_of(const Checkpoint& checkpoint) {
  std::int64_t sum = 0;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    if (tensor.name.find(".exp_avg") == std::string::npos) sum += tensor.count;
  }
  return sum;
}

// The smallest run, with a checkpoint after each step.
inline Strings small(std::int64_t steps) {
  return {fmt::format("steps={}", steps),
          "checkpoint.every=1",
          "model.n_embd=8",
          "model.n_positions=8",
          "data.seq_len=8",
          "train_batch_size=2",
          "train_micro_batch_size_per_gpu=2",
          "eval.every=0"};
}

class CheckpointFixture : public RunTest {
 protected:
  struct Outcome {
    std::vector<double> losses, norms;
    RunSummary summary;
    std::string newest;  // checkpoint
    Tensors tensors;     // in it
  };
  struct Steps final : TrainObserver {
    std::vector<double> losses, norms;
    void on_step(const StepRecord& r) override {
      losses.push_back(r.result.loss), norms.push_back(r.result.grad_norm);
    }
  };

  // Three steps of a tiny model, in the directory of this name.
  RunConfig config(const std::string& out, const Strings& overrides) const {
    return tiny({"train_batch_size=4", "train_micro_batch_size_per_gpu=2", "data.validation=0.2", "steps=3",
                 "eval.batches=1", "gradient_clipping=0.5", "model.n_layer=1", "checkpoint.every=100",
                 "optimizer.type=AdamW"},
                overrides + Strings{"output.dir=" + directory_ + "/" + out});
  }
  Outcome run(const std::string& out, const Strings& overrides,
              std::optional<std::string> resume = {}) const {
    Trainer trainer(config(out, overrides), {.resume = std::move(resume)});
    trainer.start();
    Steps steps;
    Outcome o;
    o.summary = trainer.run({&steps});
    EXPECT_EQ(o.summary.measured, o.summary.formula);
    o.losses = steps.losses, o.norms = steps.norms;
    const auto all = list_checkpoints(trainer.plan().config.checkpoint.path);
    EXPECT_EQ(all.size(), 1u);
    o.newest = all.empty() ? "" : all.front().path;
    if (!all.empty()) o.tensors = tensors_in(o.newest);
    return o;
  }
  // The outcome of a run, with its last steps alone.
  static void expect_tail(const Outcome& whole, const Outcome& tail) {
    const auto last = [&](const std::vector<double>& all) {
      return std::vector<double>(all.end() - static_cast<std::ptrdiff_t>(tail.losses.size()), all.end());
    };
    const auto same = [](const std::vector<double>& a, const std::vector<double>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
    };
    EXPECT_TRUE(same(last(whole.losses), tail.losses)) << testing::PrintToString(whole.losses) << "\n"
                                                       << testing::PrintToString(tail.losses);
    EXPECT_TRUE(same(last(whole.norms), tail.norms));
    ASSERT_EQ(whole.tensors.size(), tail.tensors.size());
    for (const auto& [name, bytes] : whole.tensors) EXPECT_TRUE(bytes == tail.tensors.at(name)) << name;
  }
  std::string read(const std::string& path) const { return test::read_file(path); }
};

}  // namespace zg
