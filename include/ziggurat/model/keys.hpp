// The keys of a family's config.json that are allowed in the "model" section of a run. Constant; any thread.
#pragma once
#include <string>
#include <vector>

#include "ziggurat/model/config.hpp"

namespace zg {

// Texts may hold `code`, as in Markdown.
struct ModelKey {
  const char* name;
  std::string type;      // in words
  std::string fallback;  // the default as JSON (without blanks), in words (with blanks), or "required"
  const char* meaning;   // a sentence; for a key that must have its default: how the models behave
};
// All keys that parse_model_config() accepts for a family.
const std::vector<ModelKey>& model_keys(Arch arch);

}  // namespace zg
