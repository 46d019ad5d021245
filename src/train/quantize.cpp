#include "ziggurat/train/quantize.hpp"

#include <algorithm>
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

// A directory whose weights are not coded.
struct PlainModel {
  explicit PlainModel(const std::string& from)
      : model(read_hf_config(from), DType::kF32, host_ops()), weights(from, model) {
    if (weights.any_coded()) {
      throw Error(Errc::kUsage, from, "has matrices that are coded in few bits already",
                  "quantise the model that it was made of");
    }
  }
  // The type in which tensors are written that get no code.
  DType type_of_rest() const { return weights.all_bf16() ? DType::kBF16 : DType::kF32; }

  const Model model;
  const HfWeights weights;
};

}  // namespace

SavedCode parse_code(const std::string& name) {
  for (const auto& [known, code] : kCodes) {
    if (name == known) return code;
  }
  throw Error(Errc::kUsage, "--to", "is " + name, "take nf4, nf4_double, fp8 or int4");
}

const char* name_of(SavedCode code) {
  const auto is_it = [&](const auto& known) { return known.second == code; };
  return std::find_if(kCodes.begin(), kCodes.end(), is_it)->first;
}

CodedSave quantize_model(const std::string& from, const std::string& out, SavedCode code,
                         const std::function<void(std::int64_t, std::int64_t)>& progress) {
  const PlainModel plain(from);
  const ReadParam read = [&](const Unit&, const Param& p, std::int64_t begin, std::int64_t end,
                             float* values) { plain.weights.read(p, begin, end, values); };
  CodedSave result;
  write_derived_model(from, out, [&](const std::string& fresh) {
    result = save_hf_coded(fresh, from, plain.model, code, plain.type_of_rest(), read, progress);
  });
  return result;
}

std::int64_t quantized_bytes(const std::string& from, SavedCode code) {
  const PlainModel plain(from);
  return coded_bytes(from, plain.model, code, plain.type_of_rest());
}

}  // namespace zg
