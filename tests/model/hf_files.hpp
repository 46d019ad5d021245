// Hugging Face directories made by tests: tiny models, their values, and safetensors files of any content.
//
// The writer here is not the one under test: headers are put together as text, in an order and with a length
// (no multiple of 8) that save_hf would not choose.
#pragma once
#include <fmt/core.h>

#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/errors.hpp"
#include "support/files.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg::test {

inline ModelConfig tiny_gpt2(bool tied = true) {
  ModelConfig c;
  c.arch = Arch::kGpt2;
  c.vocab_size = 37, c.context = 11, c.width = 12, c.layers = 2, c.heads = 3, c.kv_heads = 3, c.head_size = 4;
  c.inner = 20;
  c.tied = tied;
  return c;
}

inline ModelConfig tiny_llama(bool tied = false) {
  ModelConfig c;
  c.arch = Arch::kLlama;
  c.vocab_size = 29, c.context = 64, c.width = 10, c.layers = 2, c.heads = 6, c.kv_heads = 2, c.head_size = 4;
  c.inner = 14;
  c.norm_eps = 1e-6;
  c.block.rope.theta = 500000;
  c.tied = tied;
  return c;
}

// Element i of a parameter, in the layout of Param.
inline float value(const std::string& name, std::int64_t i) {
  return NamedRandom(7, name).uniform(static_cast<std::uint64_t>(i)) * 2 - 1;
}

struct Tensor {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
};
using Tensors = std::map<std::string, Tensor>;  // by name in the file

inline void append(std::string& bytes, const std::string& dtype, float x) {
  const auto put = [&](auto v) { bytes.append(reinterpret_cast<const char*>(&v), sizeof v); };
  if (dtype == "F64") return put(static_cast<double>(x));
  if (dtype == "F32") return put(x);
  if (dtype == "F16") return put(float_to_half(x));
  if (dtype == "BF16") return put(bf16(x));
  throw std::runtime_error(dtype);
}
// What is left of a value once a file of that dtype held it.
inline float rounded(const std::string& dtype, float x) {
  if (dtype == "F16") return half_to_float(float_to_half(x));
  if (dtype == "BF16") return static_cast<float>(bf16(x));
  return x;
}

inline std::string bytes_of(const SafeTensors& file, const SafeTensors::Entry& entry) {
  std::string bytes(static_cast<std::size_t>(entry.bytes), '\0');
  file.read(entry, 0, entry.bytes, bytes.data());
  return bytes;
}

// All parameters as a file has them: Conv1D matrices [in, out].
inline Tensors tensors_of(const Model& model, const std::string& dtype, const std::string& prefix = "") {
  Tensors tensors;
  for (const Unit& unit : model.units()) {
    for (const Param& p : unit.params) {
      Tensor t{dtype, {p.rows, p.cols}, ""};
      if (p.vector) t.shape = {p.cols};
      if (p.conv1d) t.shape = {p.cols, p.rows};
      for (std::int64_t k = 0; k < p.count(); ++k) {
        const std::int64_t i = p.conv1d ? k % p.rows * p.cols + k / p.rows : k;
        append(t.bytes, dtype, value(p.name, i));
      }
      tensors[p.name == "lm_head.weight" ? p.name : prefix + p.name] = t;
    }
  }
  return tensors;
}

inline std::string safetensors_bytes(const Tensors& tensors,
                                     const std::map<std::string, std::string>& metadata = {}) {
  std::string header = "{\"__metadata__\":{", data;
  for (const auto& [key, text] : metadata) {
    header += fmt::format("{}\"{}\":\"{}\"", header.back() == '{' ? "" : ",", key, text);
  }
  header += "}";
  for (const auto& [name, t] : tensors) {
    std::string shape;
    for (const auto n : t.shape) shape += fmt::format("{}{}", shape.empty() ? "" : ",", n);
    header += fmt::format(R"(,"{}":{{"data_offsets":[{},{}],"dtype":"{}","shape":[{}]}})", name, data.size(),
                          data.size() + t.bytes.size(), t.dtype, shape);
    data += t.bytes;
  }
  header += "}";
  while (header.size() % 8 != 3) header += " ";
  const std::uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + data;
}

}  // namespace zg::test
