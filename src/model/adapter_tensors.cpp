#include "model/adapter_tensors.hpp"

#include <fmt/format.h>

#include "model/adapters.hpp"
#include "model/families/family.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::model {

std::string expert_path(const ModelConfig& model, std::int64_t expert) {
  return fmt::format("{}.{}", family_of(model.arch).files.block.experts, expert);
}

std::vector<AdapterTensor> adapter_tensors(const ModelConfig& model, std::int64_t layer) {
  const FileNames& files = family_of(model.arch).files;
  const std::string prefix = fmt::format("{}.{}.", files.layers, layer);
  const std::int64_t rank = model.lora.rank;
  std::vector<AdapterTensor> tensors;
  // paths: of the adapter's module in each of the experts that the tensors hold, or the only one.
  const auto add = [&](const Adapter& one, const std::string& name, const std::vector<std::string>& paths) {
    const auto experts = static_cast<std::int64_t>(paths.size());
    for (const bool b : {false, true}) {
      const char* const end = b ? ".lora_B.weight" : ".lora_A.weight";
      AdapterTensor tensor{
          prefix + name + end, b ? one.out : experts * rank, b ? rank * experts : one.in, b, {}};
      for (const std::string& path : paths) tensor.params.push_back(prefix + path + end);
      tensors.push_back(std::move(tensor));
    }
  };
  const AdapterList block(model, layer);
  for (const Adapter& one : block.all()) add(one, one.path(), {one.path()});
  if (!model.has_experts(layer)) return tensors;
  const AdapterList expert = AdapterList::of_expert(model);
  if (model.lora.experts_as() == ExpertsAs::kModules) {
    for (std::int64_t e = 0; e < model.experts.count; ++e) {
      for (const Adapter& one : expert.all()) {
        const std::string path = expert_path(model, e) + "." + one.path();
        add(one, path, {path});
      }
    }
    return tensors;
  }
  for (const Adapter& one : expert.all()) {
    std::vector<std::string> paths;
    for (std::int64_t e = 0; e < model.experts.count; ++e)
      paths.push_back(expert_path(model, e) + "." + one.path());
    // PEFT wraps the module in the order of its parameters: first for gate_up_proj, and around that for
    // down_proj.
    const bool inside =
        one.module == LoraModule::kAllExpertsGateUp && model.lora.has(LoraModule::kAllExpertsDown);
    add(one, std::string(files.block.all_experts) + (inside ? ".base_layer" : ""), paths);
  }
  return tensors;
}

void split_experts(const float* file, std::int64_t pairs, std::int64_t experts, float* by_expert) {
  parallel_for(pairs, 4096, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      for (std::int64_t e = 0; e < experts; ++e) by_expert[e * pairs + i] = file[i * experts + e];
    }
  });
}

void join_expert(const float* one, std::int64_t pairs, std::int64_t expert, std::int64_t experts,
                 float* file) {
  for (std::int64_t i = 0; i < pairs; ++i) file[i * experts + expert] = one[i];
}

}  // namespace zg::model
