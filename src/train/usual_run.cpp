#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "ziggurat/base/file.hpp"
#include "ziggurat/model/hf.hpp"
#include "ziggurat/train/forecast.hpp"

namespace zg {

bool is_model(const std::string& path) {
  if (std::filesystem::is_directory(path)) return true;
  const auto object = nlohmann::json::parse(read_text_file(path, "a configuration"), nullptr, false, true);
  return object.is_object() && (object.contains("model_type") || object.contains("architectures"));
}

std::string usual_run(const std::string& model, const MachineFile& machine) {
  const int ranks = machine.gpus ? machine.gpus->count : 1;
  nlohmann::ordered_json o;
  o["model"]["from"] = model;
  const std::string config = std::filesystem::is_directory(model) ? model + "/config.json" : model;
  const ModelConfig read = parse_hf_config(read_text_file(config, "the model's configuration"), config);
  o["data"] = {{"train", "data/train.jsonl"}, {"seq_len", std::min<std::int64_t>(4096, read.context)}};
  o["steps"] = 1000;
  o["devices"] = machine.gpus ? "cuda:all" : "host";
  o["zero_optimization"] = {{"stage", ranks > 1 ? 3 : 0}};
  o["train_batch_size"] = 8 * ranks, o["train_micro_batch_size_per_gpu"] = 1;
  o["accumulation"] = "layer_major";
  o["activation_checkpointing"] = {{"recompute", true}};
  o["bf16"] = {{"enabled", true}};
  o["optimizer"] = {{"type", "AdamW"}, {"params", {{"lr", 1e-5}}}, {"state", "split"}};
  o["gradient_clipping"] = 1.0;
  nlohmann::ordered_json drives = nlohmann::ordered_json::array();
  for (int d = 0; machine.drives && d < machine.drives->count; ++d)
    drives.push_back({{"path", fmt::format("/mnt/nvme{}", d)}});
  o["tiers"]["host"] = static_cast<std::int64_t>(0.9 * machine.host.memory.value);
  if (!drives.empty()) o["tiers"]["nvme"] = drives;
  return o.dump(2);
}

}  // namespace zg
