#include "ziggurat/train/quantize.hpp"

#include <array>
#include <utility>

#include "train/derived_model.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/printable.hpp"
#include "ziggurat/device/ops.hpp"

namespace zg {
namespace {

constexpr std::array<std::pair<const char*, SavedCode>, 4> kCodes = {{{"nf4", SavedCode::kNf4},
                                                                      {"nf4_double", SavedCode::kNf4Double},
                                                                      {"fp8", SavedCode::kFp8},
                                                                      {"int4", SavedCode::kInt4}}};

}  // namespace

SavedCode parse_code(const std::string& name) {
  for (const auto& [known, code] : kCodes) {
    if (name == known) return code;
  }
  throw Error(Errc::kUsage, "--to", "is " + name, "take nf4, nf4_double, fp8 or int4");
}

CodedSave quantize_model(const std::string& from, const std::string& out, SavedCode code,
                         const std::function<void(std::int64_t, std::int64_t)>& progress) {
  const Model model(read_hf_config(from), DType::kF32, host_ops());
  const HfWeights weights(from, model);
  if (weights.any_coded()) {
    throw Error(Errc::kUsage, from, "has matrices that are coded in few bits already",
                "quantise the model that it was made of");
  }
  const ReadParam read = [&](const Unit&, const Param& p, std::int64_t begin, std::int64_t end,
                             float* values) { weights.read(p, begin, end, values); };
  CodedSave result;
  write_derived_model(from, out, [&](const std::string& fresh) {
    const DType plain = weights.all_bf16() ? DType::kBF16 : DType::kF32;
    result = save_hf_coded(fresh, from, model, code, plain, read, progress);
  });
  return result;
}

}  // namespace zg
