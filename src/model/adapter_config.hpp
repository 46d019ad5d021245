// The contents of PEFT's adapter_config.json. Private to src/model.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ziggurat/model/config.hpp"

namespace zg::hf {

struct AdapterConfig {
  Lora lora;                          // `modules`: those that have an adapter in any layer
  std::vector<std::uint32_t> layers;  // the bits of the adapted modules, for each layer

  bool has(std::int64_t layer, LoraModule module) const {
    return (layers[static_cast<std::size_t>(layer)] >> static_cast<int>(module) & 1) != 0;
  }
};

// Throws Error(kUsage) at `where`, as parse_adapter_config() says.
AdapterConfig parse_adapters(const std::string& json_text, const std::string& where,
                             const ModelConfig& model);

}  // namespace zg::hf
