// Flags of the commands that use a trained model.
#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::cli {

inline void add_adapter(CLI::App& command, std::string& adapter) {
  command.add_option("--adapter", adapter,
                     "Directory of adapters (LoRA), in PEFT's layout, to merge into the weights in memory (a "
                     "run with a section lora leaves one in output.dir/adapter)");
}

inline void add_memory(CLI::App& command, std::string& memory) {
  command.add_option("--memory", memory,
                     "Most memory for the weights, in fp32, e.g. 48GiB; layers that do not fit are read from "
                     "the model's files in every pass (default: three quarters of what is free)");
}

// In bytes; 0: the flag was not given.
inline std::int64_t memory_of(const std::string& text) {
  if (text.empty()) return 0;
  if (const auto bytes = parse_bytes(text); bytes && *bytes > 0) return *bytes;
  throw Error(Errc::kUsage, "--memory", "found " + text + ", expected a size", "write it like --memory 8GiB");
}

}  // namespace zg::cli
