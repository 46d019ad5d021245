// Forward passes of a trained model over one sequence at a time, on this machine's CPU, in fp32.
//
// Keeps the keys and values of a sequence, so that continuing it costs only a pass over the new tokens.
//
// Threads: one at a time.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "train/unit_weights.hpp"

namespace zg {

class Inference {
 public:
  // `directory`: a Hugging Face directory; `memory`, `adapters`: see UnitWeights, whose errors it throws.
  Inference(const std::string& directory, std::int64_t memory, const std::string& adapters = "");

  const ModelConfig& config() const { return model_.config(); }
  std::int64_t longest() const { return config().longest_sequence(); }
  // Logits [vocabulary] of the token that follows `ids`, which are valid. If there are more than longest()
  // ids, only the last longest() of them are used. The beginning that they share with the last call's
  // sequence is not computed again, unless one pass over all tokens is cheaper than passes over the new ones.
  // `room`: the length that the sequence will reach, for which memory is allocated at once.
  std::vector<float> logits_after(std::span<const std::int32_t> ids, std::int64_t room);
  // The sum of -log p over the targets of a piece of at most longest() tokens. Targets below 0 do not count.
  double loss_of(std::span<const std::int32_t> ids, std::span<const std::int32_t> targets);
  // The number of tokens that all passes so far have computed.
  std::int64_t computed() const { return computed_; }

 private:
  // Computes the residual stream after the last block, [ids, width]. `ids` follow the first `first` tokens of
  // the sequence.
  View pass(std::span<const std::int32_t> ids, std::int64_t first);
  // Runs the experts of a layer after its block, whose call is given.
  void add_experts(UnitCall call);
  UnitCall head_call(const View& rows);  // the head's call on these rows of the residual stream
  void make_room(std::int64_t tokens);

  Model model_;
  UnitWeights weights_;
  HostStream stream_;
  std::vector<std::int32_t> known_;  // tokens whose keys and values are kept
  std::int64_t room_ = 0;            // tokens
  std::vector<Buffer> past_;         // keys and values of each layer: [room_, Model::past_columns()]
  Buffer x_, y_, saved_, routing_, sums_, workspace_;
  std::int64_t computed_ = 0;
};

}  // namespace zg
