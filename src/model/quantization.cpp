#include "model/quantization.hpp"

#include "model/foreign_files.hpp"
#include "model/hf_text.hpp"

namespace zg::hf {
namespace {

constexpr const char* kKey = "quantization_config";
constexpr const char* kReadable =
    "weights of bitsandbytes (NF4), fp8, mxfp4, compressed-tensors (pack-quantized INT4, MXFP4, FP8), gptq "
    "and "
    "awq (4 bits) can be read; fetch the model in one of these forms, or with plain weights";

[[noreturn]] void refuse(const Keys& keys, const std::string& problem, const std::string& hint = kReadable) {
  throw Error(Errc::kUsage, keys.where(), problem, hint);
}

void demand_bits(const Keys& keys, const char* key) {
  if (keys.size(key, 4) != 4)
    refuse(keys, fmt::format("\"{}\" is {}; weights of 4 bits can be read", key, keys.size(key)));
}

Quantization read_bitsandbytes(const Keys& keys) {
  if (keys.flag("load_in_8bit", false) || keys.flag("_load_in_8bit", false))
    refuse(keys, "weights are in the 8 bits of LLM.int8(), which cannot be read");
  const std::string type = keys.text("bnb_4bit_quant_type", "nf4");
  if (type != "nf4")
    refuse(keys, fmt::format("\"bnb_4bit_quant_type\" is {}; only \"nf4\" can be read", in_quotes(type)));
  return {.method = Quantization::Method::kBitsAndBytes};
}

Quantization read_fp8(const Keys& keys) {
  Quantization q{.method = Quantization::Method::kFp8};
  if (const std::string format = keys.text("fmt", "e4m3"); format != "e4m3")
    refuse(keys, fmt::format("\"fmt\" is {}; only \"e4m3\" can be read", in_quotes(format)));
  if (!keys.has("weight_block_size")) return q;
  const json& size = keys.at("weight_block_size");
  const auto is_size = [](const json& n) { return n.is_number_unsigned() && n > 0 && n <= 1 << 20; };
  if (!size.is_array() || size.size() != 2 || !is_size(size[0]) || !is_size(size[1]))
    keys.wrong("weight_block_size", "two whole numbers, the rows and columns that share a scale");
  q.block_rows = size[0].get<std::int64_t>(), q.block_cols = size[1].get<std::int64_t>();
  if (q.block_cols % 2 != 0) keys.wrong("weight_block_size", "blocks with an even number of columns");
  return q;
}

Quantization read_compressed_tensors(const Keys& keys) {
  const std::string format = keys.text("format", "pack-quantized");
  for (const char* known :
       {"pack-quantized", "mxfp4-pack-quantized", "float-quantized", "naive-quantized", "mixed-precision"}) {
    if (format == known) return {.method = Quantization::Method::kCompressedTensors};
  }
  refuse(keys,
         fmt::format("\"format\" of compressed-tensors is {}, which cannot be read", in_quotes(format)));
}

std::int64_t group_size(const Keys& keys) {
  const bool whole = keys.has("group_size") && keys.at("group_size") == -1;
  const std::int64_t group = whole ? 0 : keys.size("group_size", 128);
  if (group % 2 != 0) keys.wrong("group_size", "an even number of inputs, or -1");
  return group;
}

Quantization read_gptq(const Keys& keys) {
  demand_bits(keys, "bits");
  const std::string format = keys.text("checkpoint_format", "gptq");
  if (format != "gptq" && format != "gptq_v2") {
    refuse(keys, fmt::format("\"checkpoint_format\" is {}; \"gptq\" and \"gptq_v2\" can be read",
                             in_quotes(format)));
  }
  return {
      .method = Quantization::Method::kGptq, .group = group_size(keys), .zeros_less_one = format == "gptq"};
}

Quantization read_awq(const Keys& keys) {
  demand_bits(keys, keys.has("w_bit") ? "w_bit" : "bits");
  std::string version = keys.text("version", "gemm");
  for (char& c : version) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (version != "gemm")
    refuse(keys, fmt::format("\"version\" of AWQ is {}; only \"gemm\" can be read", in_quotes(version)));
  return {.method = Quantization::Method::kAwq, .group = group_size(keys)};
}

}  // namespace

Quantization read_quantization(const Keys& config) {
  if (!config.has(kKey)) return {};
  const json& section = config.at(kKey);
  if (!section.is_object()) config.wrong(kKey, "an object");
  const Keys keys(section, config.where() + ": " + kKey);
  const std::string method = keys.text("quant_method", "");
  if (method == "bitsandbytes") return read_bitsandbytes(keys);
  if (method == "fp8") return read_fp8(keys);
  if (method == "compressed-tensors") return read_compressed_tensors(keys);
  if (method == "gptq") return read_gptq(keys);
  if (method == "awq") return read_awq(keys);
  if (method == "mxfp4") return {.method = Quantization::Method::kMxfp4};
  refuse(keys, method.empty() ? "has no \"quant_method\""
                              : fmt::format("\"quant_method\" is {}", in_quotes(method)));
}

Quantization read_quantization(const std::string& directory) {
  const std::string path = directory + "/config.json";
  if (!is_there(path)) return {};
  const json object = parse_object(read_json_text(path, "the model's configuration"), path);
  return read_quantization(Keys(object, path));
}

}  // namespace zg::hf
