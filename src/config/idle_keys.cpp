// Warns of settings that are accepted but have no effect in combination with the rest of the run.
#include "config/sections.hpp"

namespace zg::config {
namespace {

struct Idle {
  const char* key;
  bool (*idle)(const RunConfig& run);
  const char* why;
};

bool no_validation(const RunConfig& run) {
  return run.data.validation.empty() && run.data.validation_share == 0;
}
bool no_text(const RunConfig& run) {
  return run.sample_tokens == 0 && !run.sample_prompt.empty();
}
bool no_checkpoints(const RunConfig& run) {
  return !run.checkpoint.asked();
}
bool constant_scale(const RunConfig& run) {
  return run.dtype == DType::kF16 && run.loss_scale.loss_scale > 0;
}
bool one_stage(const RunConfig& run) {
  return run.parallel.pipeline == 1;
}

constexpr const char* kNoValidation = "nothing is kept for validation: data.validation is 0";
constexpr const char* kNoCheckpoints =
    "the run writes no checkpoints: checkpoint.every, every_seconds or on_interrupt asks for them";
constexpr const char* kConstant = "fp16.loss_scale is constant; 0 is one that follows the overflows";
constexpr const char* kOneStage = "it is for the stages of parallel.pipeline, which is 1";

const Idle kIdle[] = {
    {"model.quantize_cache", [](const RunConfig& run) { return !run.quantize.code; },
     "nothing is quantised: model.quantize is not given"},
    {"eval.every", [](const RunConfig& run) { return no_validation(run) && run.eval_every > 0; },
     kNoValidation},
    {"eval.batches", no_validation, kNoValidation},
    {"sample.prompt", no_text, "no text is generated: sample.tokens is 0"},
    {"checkpoint.keep", no_checkpoints, kNoCheckpoints},
    {"checkpoint.state", no_checkpoints, kNoCheckpoints},
    {"fp16.initial_scale_power", constant_scale, kConstant},
    {"fp16.loss_scale_window", constant_scale, kConstant},
    {"fp16.hysteresis", constant_scale, kConstant},
    {"fp16.consecutive_hysteresis", constant_scale, kConstant},
    {"fp16.min_loss_scale", constant_scale, kConstant},
    {"parallel.pipeline_schedule", one_stage, kOneStage},
    {"parallel.pipeline_group", one_stage, kOneStage},
    {"parallel.context_method", [](const RunConfig& run) { return run.parallel.context == 1; },
     "it is for the ranks of parallel.context, which is 1"},
    {"parallel.quantized_gradient_bits", [](const RunConfig& run) { return !run.quantize_gradients; },
     "it is for zero_optimization.zero_quantized_gradients, which is off"},
};

// Whether the merged configuration has a value there.
bool is_given(const Json& root, const std::string& section, const std::string& key) {
  const auto object = root.find(section);
  if (object == root.end() || !object->is_object()) return false;
  const auto value = object->find(key);
  return value != object->end() && !value->is_null();
}

}  // namespace

void warn_of_idle_keys(Section& root, const RunConfig& run) {
  for (const Idle& idle : kIdle) {
    const std::string path = idle.key;
    const std::size_t dot = path.find('.');
    if (is_given(root.json(), path.substr(0, dot), path.substr(dot + 1)) && idle.idle(run))
      root.notice(path, std::string("has no effect: ") + idle.why);
  }
}

}  // namespace zg::config
