// Inference with a trained model: generates text or token ids, and computes the loss of a text.
//
// Threads: one at a time for each object.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
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
  bool past_the_end = false;  // continue after a token that ends a text
};

class Generator {
 public:
  // Reads a Hugging Face directory. `memory`: the most bytes that the fp32 weights may take; layers that do
  // not fit are read from the directory's files for each token. 0: most of the memory that the process may
  // have. `adapters`: a directory of adapters (LoRA) that are merged into the weights, in fp32; empty: none.
  // Throws Error: kUsage for a directory that has no supported model, kMemory if not even two layers fit.
  explicit Generator(const std::string& directory, std::int64_t memory = 0, const std::string& adapters = "");
  ~Generator();

  const Tokenizer* tokenizer() const;  // null if the directory holds none
  const ModelConfig& config() const;
  const std::vector<std::int32_t>& end_ids() const;  // the tokens that end a text: read_hf_end_ids()
  // Continues `prompt`, which has one id or more. Calls `seen` with each new id; stops if that returns false,
  // or if the id ends a text. A prompt that continues the last call's text costs only passes over its new
  // tokens, unless these are so many that one pass over all tokens is cheaper. Each call draws further random
  // numbers of the seed. If the text is longer than the model's longest sequence, the model sees the last
  // tokens of that length, and each new token costs a pass over all of these.
  std::vector<std::int32_t> generate(const std::vector<std::int32_t>& prompt, const GenerateOptions& options,
                                     const std::function<bool(std::int32_t)>& seen);

  struct Loss {
    double sum = 0;  // the sum of -log p, natural logarithms
    std::int64_t tokens = 0;
    double mean() const { return tokens == 0 ? 0 : sum / static_cast<double>(tokens); }
  };
  // The loss of a document's tokens. The document is cut into pieces of `context` tokens; each token is
  // predicted from the tokens before it in its piece. The document's first token is not predicted. mask: 0
  // for a token that does not count; empty: all count. `name` names the document in errors. Ends after a
  // piece if `stop` returns true.
  Loss loss_of(std::span<const std::int32_t> ids, std::span<const std::uint8_t> mask, std::int64_t context,
               const std::string& name = "document", const std::function<bool()>& stop = {});

 private:
  void check_ids(std::span<const std::int32_t> ids, const std::string& what) const;

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zg
