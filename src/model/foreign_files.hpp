// Files that are not what their name says: other contents in place of a model's weights or JSON,
// told by its first bytes. And what a directory without the files of a model has. Private to src/model.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace zg::hf {

// Bytes at the begin of a file that tell what it is.
inline constexpr std::size_t kForeignHead = 512;

// Throws Error(kUsage) at `path` where a file that begins so is known to be something else than safetensors
// or JSON: a pointer of Git LFS, a pickle, GGUF, a page of HTML. `head`: all of the file, or kForeignHead of
// it.
void refuse_foreign(std::string_view head, const std::string& path);

// Whether there is a file of this name, of any kind. Throws Error(kUsage) where that cannot be told, and for
// a symbolic link to nothing.
bool is_there(const std::string& path);

// The text of a JSON file of a model's directory. Throws as read_text_file() and refuse_foreign() do.
std::string read_json_text(const std::string& path, const std::string& what);

// Throws Error(kUsage) that says what the directory has instead of `wanted`, the weights of a model, and the
// command that converts it.
[[noreturn]] void refuse_without_weights(const std::string& directory, const std::string& wanted);
// The same of the weights of an adapter.
[[noreturn]] void refuse_without_adapter(const std::string& directory, const std::string& wanted);
// The same of a directory without config.json.
[[noreturn]] void refuse_without_config(const std::string& directory);

}  // namespace zg::hf
