// Merges adapters into their model.
#pragma once
#include <cstdint>
#include <string>

namespace zg {

// Writes the model of `base` with the adapters of `adapters` merged into its weights to `out`, as a Hugging
// Face directory that includes the tokenizer's files. Sums are computed in fp32 and rounded once: to bf16 if
// all of the base's weights are bf16, else to fp32. Matrices are merged one after the other, so the function
// needs memory only for one matrix's B and A and a few MiB. `out` appears complete or not at all. Returns the
// number of matrices that were changed. Throws Error(kUsage) for directories that do not fit together, and if
// `out` is one of the two; Error(kIo).
std::int64_t merge_adapters(const std::string& base, const std::string& adapters, const std::string& out);

}  // namespace zg
