#include "ziggurat/train/merge.hpp"

#include <algorithm>
#include <cmath>

#include "train/derived_model.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/model/adapter_files.hpp"

namespace zg {
std::int64_t merge_adapters(const std::string& base, const std::string& adapters, const std::string& out) {
  refuse_same_directory(out, adapters);
  const Model model(read_hf_config(base), DType::kF32, host_ops());
  const HfWeights weights(base, model);
  const AdapterWeights merged(adapters, model.config());
  std::int64_t changed = 0;
  write_derived_model(base, out, [&](const std::string& fresh) {
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
  });
  return changed;
}

}  // namespace zg
