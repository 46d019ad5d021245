// Errors for files whose contents do not match their name, recognised by their first bytes, where a model's
// weights or JSON should be; and errors for directories that lack a model's files. Private to src/model.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

namespace zg::hf {

// Bytes from the beginning of a file that suffice to recognise its format.
inline constexpr std::size_t kForeignHead = 512;

// Throws Error(kUsage) at `path` if a file that begins with `head` is known to be neither safetensors nor
// JSON: a pointer of Git LFS, a pickle, GGUF, a page of HTML. `head`: the whole file, or its first
// kForeignHead bytes.
void refuse_foreign(std::string_view head, const std::string& path);

// Whether there is a file of this name, of any kind. Throws Error(kUsage) if that cannot be determined, and
// for a dangling symbolic link.
bool is_there(const std::string& path);

// The text of a JSON file of a model's directory. Throws as read_text_file() and refuse_foreign() do.
std::string read_json_text(const std::string& path, const std::string& what);

// Throws Error(kUsage) that names the file that the directory has instead of `wanted`, the weights of a
// model, and the command that converts it.
[[noreturn]] void refuse_without_weights(const std::string& directory, const std::string& wanted);
// The same for the weights of an adapter.
[[noreturn]] void refuse_without_adapter(const std::string& directory, const std::string& wanted);
// The same for a directory without config.json.
[[noreturn]] void refuse_without_config(const std::string& directory);

}  // namespace zg::hf
