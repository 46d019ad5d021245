// log.jsonl: one JSON object a step. docs/training.md has the schema.
#pragma once
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "ziggurat/engine/engine.hpp"
#include "ziggurat/plan/plan.hpp"

namespace zg {

struct StepRecord {
  std::int64_t step = 0;  // from 1: steps done
  double lr = 0;
  StepResult result;
  double flops = 0;  // of the step's products
  Bound bound;
  Roofs roofs;
  std::int64_t peak_device = 0, peak_host = 0, peak_nvme = 0;
  std::optional<double> val_loss;
  std::optional<double> loss_scale;  // of the step's gradients; with fp16
  std::int64_t skipped = 0;          // steps so far that were left out
};

// Owned by the training loop. Lines are written through: a run that is killed keeps what it logged.
class MetricsLog {
 public:
  explicit MetricsLog(const std::string& path);  // throws Error(kIo)
  void write(const StepRecord& record);

 private:
  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

}  // namespace zg
