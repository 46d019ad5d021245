#include "ziggurat/train/merge.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "ziggurat/base/error.hpp"
#include "ziggurat/checkpoint/files.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/model/adapter_files.hpp"

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

void refuse_same(const std::string& out, const std::string& other) {
  std::error_code error;
  if (!fs::equivalent(out, other, error) || error) return;
  throw Error(Errc::kUsage, out, "is the directory that is read, " + other, "name a new directory");
}

}  // namespace

std::int64_t merge_adapters(const std::string& base, const std::string& adapters, const std::string& out) {
  refuse_same(out, base), refuse_same(out, adapters);
  const Model model(read_hf_config(base), DType::kF32, host_ops());
  const HfWeights weights(base, model);
  const AdapterWeights merged(adapters, model.config());
  std::int64_t changed = 0;
  replace_directory(out, [&](const std::string& fresh) {
    save_hf(fresh, model, weights.all_bf16() ? DType::kBF16 : DType::kF32,
            [&](const Unit&, const Param& p, std::int64_t begin, std::int64_t end, float* values) {
              weights.read(p, begin, end, values);
              const bool here = merged.merge(p, begin, end, values);
              if (here &&
                  !std::all_of(values, values + (end - begin), [](float v) { return std::isfinite(v); })) {
                throw Error(Errc::kUsage, adapters,
                            fmt::format("gives {} values that are not finite", p.name_in_files()),
                            "take the adapters of a run, or a step of it, whose loss is finite");
              }
              if (here && begin == 0 && p.file_row == 0) ++changed;
            });
    std::error_code error;
    const auto check = [&](const fs::path& path, const char* what) {
      if (error) throw Error(Errc::kIo, path, fmt::format("{}: {}", what, errno_text(error.value())));
    };
    for (fs::directory_iterator at(base, error), end; !error && at != end; at.increment(error)) {
      if (!is_beside(*at)) continue;
      fs::copy_file(at->path(), fs::path(fresh) / at->path().filename(), error);
      check(at->path(), "cannot be copied");
    }
    check(base, "cannot be listed");
  });
  return changed;
}

}  // namespace zg
