#include "train/derived_model.hpp"

#include <filesystem>

#include "ziggurat/base/error.hpp"
#include "ziggurat/checkpoint/files.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

// Whether a file of the model's directory is copied as it is: tokenizer, template, generation settings.
bool is_beside(const fs::directory_entry& entry) {
  constexpr std::uintmax_t kMost = 256 << 20;
  const std::string name = entry.path().filename(), kind = entry.path().extension();
  const bool weights = kind == ".safetensors" || kind == ".bin" || kind == ".pt" || kind == ".pth" ||
                       kind == ".gguf" || kind == ".h5" || name.find(".index.json") != name.npos;
  std::error_code error;  // set for a link to nothing or to itself, which is not copied
  return !weights && name != "config.json" && entry.is_regular_file(error) && !error &&
         entry.file_size(error) <= kMost && !error;
}

}  // namespace

void refuse_same_directory(const std::string& out, const std::string& other) {
  std::error_code error;
  if (!fs::equivalent(out, other, error) || error) return;
  throw Error(Errc::kUsage, out, "is the directory that is read, " + other, "name a new directory");
}

void write_derived_model(const std::string& from, const std::string& out,
                         const std::function<void(const std::string& directory)>& write) {
  refuse_same_directory(out, from);
  replace_directory(out, [&](const std::string& fresh) {
    write(fresh);
    std::error_code error;
    const auto check = [&](const fs::path& path, const char* what) {
      if (error) throw Error(Errc::kIo, path, fmt::format("{}: {}", what, errno_text(error.value())));
    };
    for (fs::directory_iterator at(from, error), end; !error && at != end; at.increment(error)) {
      if (!is_beside(*at)) continue;
      fs::copy_file(at->path(), fs::path(fresh) / at->path().filename(), error);
      check(at->path(), "cannot be copied");
    }
    check(from, "cannot be listed");
  });
}

}  // namespace zg
