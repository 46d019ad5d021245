// The tiny models of tests/reference/families, whose values transformers computed in fp64.
#pragma once
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/golden.hpp"

namespace zg::test {

inline constexpr const char* kFamilyNames[] = {"llama3",
                                               "llama_bias",
                                               "llama_mlp_bias",
                                               "mistral",
                                               "qwen2",
                                               "qwen3",
                                               "phi3",
                                               "olmo2",
                                               "gemma2",
                                               "gemma3",
                                               "mistral_sinks",
                                               "mixtral",
                                               "qwen2_moe",
                                               "qwen3_moe",
                                               "olmoe",
                                               "granite_moe",
                                               "gpt_oss",
                                               "glm4_moe",
                                               "minimax_m2",
                                               "ernie4_moe",
                                               "deepseek_v2",
                                               "deepseek_v2_bias",
                                               "deepseek_v3",
                                               "deepseek_v3_halves",
                                               "deepseek_v2_moe",
                                               "deepseek_v3_moe"};

class FamilyFile {
 public:
  explicit FamilyFile(const std::string& name, const std::string& folder = "families/")
      : file_(reference_directory() + folder + name + ".safetensors") {}

  std::string text(const std::string& name) const {
    for (const auto& [key, value] : file_.metadata()) {
      if (key == name) return value;
    }
    throw std::runtime_error("no " + name);
  }
  std::string config_text() const { return text("config"); }
  ModelConfig config() const { return parse_hf_config(config_text(), file_.path()); }
  template <class T>
  std::vector<T> values(const std::string& name) const {
    const SafeTensors::Entry* e = file_.find(name);
    if (e == nullptr || e->bytes != e->count() * static_cast<std::int64_t>(sizeof(T)))
      throw std::runtime_error("no tensor " + name);
    std::vector<T> list(static_cast<std::size_t>(e->count()));
    file_.read(*e, 0, e->bytes, list.data());
    return list;
  }

 private:
  SafeTensors file_;
};

// Element (row, column) of a whole parameter: by its name in files, and its place there.
inline double family_weight(const ModelConfig& c, const Param& p, std::int64_t row, std::int64_t column) {
  const auto place = static_cast<std::uint64_t>((p.file_row + row) * p.whole_cols + column);
  const double u = static_cast<double>(reference_hash(p.name_in_files(), place) >> 40) * 0x1p-24 - 0.5;
  const double one = c.block.norm_weight == NormWeight::kPlusOne ? 0 : 1;
  const double size = p.name.ends_with("gate_up_proj_bias") ? 20 : 0.4;
  return (p.name.find("norm.weight") != p.name.npos ? one : 0) + size * u;
}

inline constexpr double kFamilyValid = 58;
// The two ragged micro-batches of 2 x 24.
inline std::vector<Batch> family_batches() {
  constexpr std::int64_t kRows = 48;
  constexpr std::int64_t kValid[] = {41, 17};
  std::vector<Batch> batches;
  for (std::int64_t m = 0; m < 2; ++m) {
    Batch b{{2, 24}, {}, {}};
    for (std::int64_t i = 0; i < kRows; ++i) {
      const auto n = static_cast<std::uint64_t>(m * kRows + i);
      b.ids.push_back(static_cast<std::int32_t>(reference_hash("tokens", n) % 97));
      b.targets.push_back(i < kValid[m] ? static_cast<std::int32_t>(reference_hash("targets", n) % 97)
                                        : -100);
    }
    batches.push_back(std::move(b));
  }
  return batches;
}

// Norm, sum, three signed sums, and up to 16 elements at equal distances.
inline std::vector<double> family_digest(const std::vector<double>& x) {
  long double square = 0, sums[4] = {};
  for (std::size_t i = 0; i < x.size(); ++i) {
    const long double value = x[i];
    square += value * value;
    sums[0] += value;
    for (int j = 0; j < 3; ++j) {
      const std::string name = {'s', 'i', 'g', 'n', static_cast<char>('0' + j)};
      sums[j + 1] += (reference_hash(name, i) >> 63) != 0 ? -value : value;
    }
  }
  std::vector<double> d{static_cast<double>(std::sqrt(square))};
  for (const long double sum : sums) d.push_back(static_cast<double>(sum));
  const std::size_t stride = std::max<std::size_t>(1, x.size() / 16);
  for (std::size_t i = 0; i < x.size() && d.size() < 21; i += stride) d.push_back(x[i]);
  return d;
}

// The values of each tensor of a file. A fused tensor has those of its parameters one after the other.
using FileTensors = std::map<std::string, std::vector<double>>;
template <class ViewOf>
FileTensors file_tensors(const std::vector<Unit>& units, double scale, const ViewOf& view_of) {
  FileTensors tensors;
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (const Param& p : units[u].params) {
      const View view = view_of(u, p);
      for (std::int64_t r = 0; r < p.rows; ++r) {
        for (std::int64_t c = 0; c < p.cols; ++c)
          tensors[p.name_in_files()].push_back(load(view, r, c) * scale);
      }
    }
  }
  return tensors;
}

}  // namespace zg::test
