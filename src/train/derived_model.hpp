// Directories of models that are made of another model's directory. Private to src/train.
#pragma once
#include <functional>
#include <string>

namespace zg {

// Throws Error(kUsage) if `out` is the directory `other`, which is read.
void refuse_same_directory(const std::string& out, const std::string& other);

// Lets `write` write weights and config.json of a new model into a new directory, adds the files beside those
// of the model `from` (tokenizer, templates, settings), and puts the directory in the place of `out`: it
// appears complete or not at all. Throws Error(kUsage) if `out` is `from`, Error(kIo), and what `write`
// throws.
void write_derived_model(const std::string& from, const std::string& out,
                         const std::function<void(const std::string& directory)>& write);

}  // namespace zg
