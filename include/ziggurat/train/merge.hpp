// A model with its adapters as one model.
#pragma once
#include <cstdint>
#include <string>

namespace zg {

// Writes the model of `base` with the adapters of `adapters` merged into its weights to `out`, as a Hugging
// Face directory, with the tokenizer's files beside it. Sums are in fp32 and rounded once, to bf16 where all
// of the base's weights are bf16, else to fp32. Matrices pass one after the other, so memory is that of one
// matrix's B and A and a few MiB. `out` appears whole or not at all. Returns the number of matrices that have
// changed. Throws Error(kUsage) for directories that do not fit together, and where `out` is one of the two;
// kIo.
std::int64_t merge_adapters(const std::string& base, const std::string& adapters, const std::string& out);

}  // namespace zg
