// The keys of a family's config.json, as the "model" section of a run has them. Constant; any thread.
#pragma once
#include <vector>

#include "ziggurat/model/config.hpp"

namespace zg {

// Texts may hold `code`, as in Markdown.
struct ModelKey {
  const char* name;
  const char* type;      // in words
  const char* fallback;  // as JSON; in words that hold a blank; or "required"
  const char* meaning;   // a sentence; of a key that may only have its default: what the models do
};
// All that parse_model_config() takes for a family.
const std::vector<ModelKey>& model_keys(Arch arch);

}  // namespace zg
