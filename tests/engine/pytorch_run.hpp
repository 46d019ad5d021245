// What tests/reference/make_ranks.py and make_parts.py train: eight micro-batches a step, all different and
// with other numbers of valid targets. See tests/reference/README.md.
#pragma once
#include "engine/ranks_run.hpp"

namespace zg::test {

inline constexpr std::int64_t kPyTorchMicroBatches = 8;  // of all ranks, in a step

// Micro-batch `m` of a step, [2, time].
inline Batch pytorch_batch(std::int64_t step, std::int64_t m, std::int64_t time) {
  Batch b{{2, time}, {}, {}};
  const std::int64_t number = step * kPyTorchMicroBatches + m, rows = b.shape.rows();
  const auto valid = static_cast<std::int64_t>(reference_hash("valid", static_cast<std::uint64_t>(number)) %
                                               static_cast<std::uint64_t>(rows + 1));
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto n = static_cast<std::uint64_t>(number * rows + i);
    b.ids.push_back(static_cast<std::int32_t>(reference_hash("tokens", n) % 257));
    b.targets.push_back(i < valid ? static_cast<std::int32_t>(reference_hash("targets", n) % 257) : -100);
  }
  return b;
}

// The setup of "gpt2" or "llama", with sequences of `time` tokens, through all three tiers, each at its
// smallest budget.
inline TinySetup pytorch_setup(const std::string& model, std::int64_t time) {
  TinySetup s;
  if (model == "llama") {
    s.model = reference_llama();
  } else {
    s.model = reference_gpt2();
    s.model.width = 176, s.model.heads = s.model.kv_heads = 8, s.model.head_size = 22;
    s.model.inner = 704, s.model.layers = 5;
  }
  s.layout.micro_batch = {2, time};
  s.layout.micro_batches = kPyTorchMicroBatches;
  s.layout.state_segment_bytes = 300000;
  s.layout.drives = 1;
  s.nvme = Nvme::kRam;
  s.room = Room::kSmallest;
  s.data = [time](std::int64_t step, std::int64_t m) { return pytorch_batch(step, m, time); };
  s.eval_micro_batches = 1;
  return s;
}

}  // namespace zg::test
