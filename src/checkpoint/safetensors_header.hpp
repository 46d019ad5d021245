// The header of the files that hold tensors.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace zg {

// The header of a safetensors file: length and text, filled up to a multiple of 8 bytes.
std::string safetensors_header(const nlohmann::ordered_json& json);

}  // namespace zg
