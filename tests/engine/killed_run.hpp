// A training run that can be killed at any moment and goes on from its last checkpoint: what the program that
// is killed (programs/killed_run.cpp) and the test that kills it (kill_test.cpp) both know.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "engine/tiny_run.hpp"

namespace zg::test {

// Each update halves every master (update_count_test.cpp), so masters count the updates; the moments hang on
// every gradient.
inline TinySetup killed_setup(UpdateTiming timing) {
  TinySetup s;
  s.dtype = DType::kBF16;
  s.timing = timing;
  s.clip = timing == UpdateTiming::kEarly ? 0 : 0.05;
  s.layout.state = {.master = MasterFormat::kSplit, .moments = MomentFormat::kInt8};
  s.layout.drives = 1;
  s.layout.state_versions = 2;
  s.layout.micro_batches = 2;
  s.layout.state_segment_bytes = 16 << 10;
  s.layout.device_updates = 1;
  s.room = Room::kSmallest;
  s.nvme = Nvme::kThreads;
  s.rule = [](std::int64_t, UpdateRule& rule) {
    rule.params.lr = 0x1p-100;
    rule.params.weight_decay = 0x1p99;
    rule.decay_all = true;
  };
  s.initial = [](const Param& p, std::int64_t i) {
    const double value = reference_element(p, i);
    return std::abs(value) < 0x1p-16 ? 0x1p-16 : value;
  };
  return s;
}

// All that a run is: how far it is, and what its tensors hold.
struct Checkpoint {
  std::int64_t steps = 0;
  std::vector<std::vector<char>> tensors;  // weight and state of each unit
  bool operator==(const Checkpoint&) const = default;
};

// After a step with Then::kPause.
inline Checkpoint checkpoint_of(TinyRun& run) {
  Checkpoint c;
  run.settle();
  c.steps = run.steps();
  for (const auto& unit : run.layout().tiles) {
    for (const TensorId id : {unit.weight, unit.state}) c.tensors.push_back(run.content(id));
  }
  return c;
}

// After initialize(), before the first step.
inline void resume(TinyRun& run, const Checkpoint& c) {
  std::size_t next = 0;
  for (const auto& unit : run.layout().tiles) {
    for (const TensorId id : {unit.weight, unit.state}) run.set_content(id, c.tensors.at(next++));
  }
  run.go_on_from(c.steps);
}

// Whole, or not at all: written aside and renamed.
inline void save(const Checkpoint& c, const std::string& path) {
  {
    std::ofstream file(path + ".new", std::ios::binary | std::ios::trunc);
    const auto number = [&file](std::int64_t n) { file.write(reinterpret_cast<const char*>(&n), sizeof n); };
    number(c.steps);
    number(static_cast<std::int64_t>(c.tensors.size()));
    for (const std::vector<char>& t : c.tensors) {
      number(static_cast<std::int64_t>(t.size()));
      file.write(t.data(), static_cast<std::streamsize>(t.size()));
    }
    file.flush();
    ZG_ASSERT(file.good(), "cannot write {}", path);
  }
  std::filesystem::rename(path + ".new", path);
}

inline std::optional<Checkpoint> load_checkpoint(const std::string& path) {
  if (!std::filesystem::exists(path)) return std::nullopt;
  std::ifstream file(path, std::ios::binary);
  const auto number = [&file] {
    std::int64_t n = 0;
    file.read(reinterpret_cast<char*>(&n), sizeof n);
    return n;
  };
  Checkpoint c;
  c.steps = number();
  c.tensors.resize(static_cast<std::size_t>(number()));
  for (std::vector<char>& t : c.tensors) {
    t.resize(static_cast<std::size_t>(number()));
    file.read(t.data(), static_cast<std::streamsize>(t.size()));
  }
  ZG_ASSERT(file.good(), "{} is cut off", path);
  return c;
}

}  // namespace zg::test
