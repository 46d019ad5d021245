// Writes a model with the matrices of its layers in 4 or 8 bits.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "ziggurat/model/hf.hpp"

namespace zg {

// The code of a name ("nf4", "nf4_double", "fp8", "int4"). Throws Error(kUsage) with the names that there are.
SavedCode parse_code(const std::string& name);
const char* name_of(SavedCode code);

// Writes the model of `from`, whose weights are plain, to `out`, as a Hugging Face directory that includes
// the tokenizer's files: matrices of layers in `code`, the rest in bf16 if all of the model's weights are
// bf16, else in fp32. Needs memory for 128 rows of a matrix (kNf4Double: and its codes) and a few MiB; gives
// the same bytes each time. `out` appears complete or not at all. save_hf_coded() explains `progress`;
// null: none. What `progress` throws ends the work, and nothing is left of it. Throws Error(kUsage) as
// save_hf_coded() does, for a model that is coded already, and if `out` is `from`; Error(kIo).
CodedSave quantize_model(const std::string& from, const std::string& out, SavedCode code,
                         const std::function<void(std::int64_t done, std::int64_t all)>& progress = {});
// The bytes of all tensors that quantize_model() would write. Throws Error(kUsage) as quantize_model() does,
// except for elements that are not finite.
std::int64_t quantized_bytes(const std::string& from, SavedCode code);

}  // namespace zg
