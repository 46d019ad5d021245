// Generates text, or token ids, with a trained model, whose weights are held in memory in fp32.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ziggurat/data/tokenizer.hpp"
#include "ziggurat/model/config.hpp"

namespace zg {

struct GenerateOptions {
  std::int64_t tokens = 100;
  bool greedy = false;
  double temperature = 1.0;
  std::int64_t top_k = 0;  // tokens to choose from; 0: all
  std::uint64_t seed = 1337;
};

class Generator {
 public:
  // Reads a Hugging Face directory. Throws Error(kUsage).
  explicit Generator(const std::string& directory);
  ~Generator();

  const Tokenizer* tokenizer() const;  // null if the directory holds none
  const ModelConfig& config() const;
  // Continues `prompt`, which has one id or more. Calls `seen` with each new id; if that returns false,
  // stops.
  std::vector<std::int32_t> generate(const std::vector<std::int32_t>& prompt, const GenerateOptions& options,
                                     const std::function<bool(std::int32_t)>& seen);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zg
