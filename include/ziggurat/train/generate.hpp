// A trained model at work: it generates text, or token ids, and says how likely a text is.
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
  bool past_the_end = false;  // goes on behind a token that ends a text
};

class Generator {
 public:
  // Reads a Hugging Face directory. `memory`: the most bytes that the weights, which are kept in fp32, may
  // take; what does not fit is read from the directory's files for each token. 0: most of what the process
  // may have. Throws Error: kUsage for a directory that holds no such model, kMemory where not even two
  // layers fit. `adapters`: a directory of adapters (LoRA) that are merged into the weights, in fp32; empty:
  // none.
  explicit Generator(const std::string& directory, std::int64_t memory = 0, const std::string& adapters = "");
  ~Generator();

  const Tokenizer* tokenizer() const;  // null if the directory holds none
  const ModelConfig& config() const;
  const std::vector<std::int32_t>& end_ids() const;  // of tokens that end a text: read_hf_end_ids()
  // Continues `prompt`, which has one id or more. Calls `seen` with each new id; if that returns false, or
  // the id is one that ends a text, stops. A prompt that goes on where the last call ended costs its new
  // tokens, unless these are so many that one pass over all is cheaper. Each call draws further random
  // numbers of the seed. Behind the model's longest sequence the last tokens of that length count, and each
  // token costs all of them.
  std::vector<std::int32_t> generate(const std::vector<std::int32_t>& prompt, const GenerateOptions& options,
                                     const std::function<bool(std::int32_t)>& seen);

  struct Loss {
    double sum = 0;  // of -log p, natural logarithms
    std::int64_t tokens = 0;
    double mean() const { return tokens == 0 ? 0 : sum / static_cast<double>(tokens); }
  };
  // The loss of a document's tokens, each given those before it in its piece of `context` tokens; the first
  // token of all is given. mask: 0 where a token does not count; empty: all do. `name` names it in errors.
  // Stops at the end of a piece where `stop` says so.
  Loss loss_of(std::span<const std::int32_t> ids, std::span<const std::uint8_t> mask, std::int64_t context,
               const std::string& name = "document", const std::function<bool()>& stop = {});

 private:
  void check_ids(std::span<const std::int32_t> ids, const std::string& what) const;

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace zg
