// A model's weights in few bits of which nothing but the headers takes space: for plans of models of any
// size.
#pragma once
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "support/files.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/kernels/coded.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg::test {

// Writes model.safetensors beside the config.json of `directory`: a sparse file, in which the matrices of all
// layers are FP8 in blocks if config.json says so, or else NF4 as bitsandbytes has it, or where files have
// all experts of a layer in one tensor, these are MXFP4; the rest is bf16.
inline void write_coded_headers(const std::string& directory) {
  const Model model(read_hf_config(directory), DType::kBF16, host_ops());
  nlohmann::json header;
  std::vector<std::pair<std::int64_t, std::string>> contents;
  std::int64_t at = 0;
  const auto add = [&](const std::string& name, const char* dtype, std::vector<std::int64_t> shape,
                       std::int64_t bytes, std::string content = {}) {
    header[name] = {{"dtype", dtype}, {"shape", std::move(shape)}, {"data_offsets", {at, at + bytes}}};
    if (!content.empty()) contents.emplace_back(at, std::move(content));
    at += bytes;
  };
  const std::string config = read_file(directory + "/config.json");
  const bool fp8 = config.find("\"quant_method\": \"fp8\"") != config.npos;
  bool fused = false;
  for (const Unit& unit : model.units()) {
    for (const Param& p : unit.params) fused = fused || p.file_slices > 0;
  }
  for (const Unit& unit : model.units()) {
    if (unit.choice_bias)
      add(unit.choice_bias->name, "F32", unit.choice_bias->shape_in_files(), 4 * unit.choice_bias->cols);
    const bool block = &unit != &model.units().front() && &unit != &model.units().back();
    for (const Param& p : unit.params) {
      const std::vector<std::int64_t> shape = p.shape_in_files();
      const std::int64_t count = p.rows_in_files() * p.whole_cols;
      if (p.file_row > 0) continue;  // has been added
      if (!p.vector && p.file_slices > 0) {
        const std::int64_t rows = p.rows_in_files() / p.file_slices, blocks = p.whole_cols / 32;
        add(p.file_name + "_blocks", "U8", {p.file_slices, rows, blocks, 16}, count / 2);
        add(p.file_name + "_scales", "U8", {p.file_slices, rows, blocks}, count / 32);
        continue;
      }
      if (p.vector || !block || p.routes || fused) {
        add(p.name_in_files(), "BF16", shape, 2 * count);
        continue;
      }
      if (fp8) {
        const auto blocks = [](std::int64_t n) { return (n + 127) / 128; };
        const std::vector scales{blocks(shape[0]), blocks(shape[1])};
        add(p.name_in_files(), "F8_E4M3", shape, count);
        add(p.name.substr(0, p.name.rfind(".weight")) + ".weight_scale_inv", "F32", scales,
            4 * scales[0] * scales[1]);
        continue;
      }
      const std::string state = nlohmann::json{
          {"quant_type", "nf4"},
          {"blocksize", 64},
          {"dtype", "bfloat16"},
          {"shape",
           {p.rows, p.cols}}}.dump();
      add(p.name, "U8", {p.count() / 2, 1}, p.count() / 2);
      add(p.name + ".absmax", "F32", {p.count() / 64}, p.count() / 16);
      add(p.name + ".quant_map", "F32", {16}, 64,
          {reinterpret_cast<const char*>(kNf4Levels.data()), sizeof kNf4Levels});
      add(p.name + ".quant_state.bitsandbytes__nf4", "U8", {std::ssize(state)}, std::ssize(state), state);
    }
  }
  const std::string text = header.dump();
  const std::uint64_t length = text.size();
  std::string all(8, '\0');
  std::memcpy(all.data(), &length, sizeof length);
  write_file(directory + "/model.safetensors", all + text);
  const int fd = ::open((directory + "/model.safetensors").c_str(), O_WRONLY);
  const auto begin = static_cast<off_t>(8 + length);
  bool good = fd >= 0 && ::ftruncate(fd, begin + at) == 0;
  for (const auto& [place, content] : contents)
    good = good && ::pwrite(fd, content.data(), content.size(), begin + place) == std::ssize(content);
  ::close(fd);
  EXPECT_TRUE(good) << "a sparse file of " << at << " bytes in " << directory;
}

}  // namespace zg::test
