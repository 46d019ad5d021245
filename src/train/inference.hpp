// Forward passes of a trained model over one sequence at a time, on this machine's processor, in fp32.
//
// The keys and values of a sequence are kept, so that a sequence that goes on costs a pass over its new
// tokens.
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
  // Logits [vocabulary] of the token that follows `ids`, which are valid. Of more than longest() the last
  // ones count. What they have in common with the sequence of the call before is not computed
  // again, unless one pass over all is cheaper than passes over the new tokens. `room`:
  // tokens that the sequence is going to have, for which memory is taken at once.
  std::vector<float> logits_after(std::span<const std::int32_t> ids, std::int64_t room);
  // The sum of -log p over the targets of a piece of at most longest() tokens; a target below 0 is none.
  double loss_of(std::span<const std::int32_t> ids, std::span<const std::int32_t> targets);
  // Tokens that passes went over so far.
  std::int64_t computed() const { return computed_; }

 private:
  // The residual stream behind the blocks, [ids, width], of tokens behind the first `first` of the sequence.
  View pass(std::span<const std::int32_t> ids, std::int64_t first);
  UnitCall head_call(const View& rows);  // of the head, on these rows of the residual stream
  void make_room(std::int64_t tokens);

  Model model_;
  UnitWeights weights_;
  HostStream stream_;
  std::vector<std::int32_t> known_;  // tokens whose keys and values are there
  std::int64_t room_ = 0;            // tokens
  std::vector<Buffer> past_;         // by layer: [room_, Model::past_columns()]
  Buffer x_, y_, saved_, workspace_;
  std::int64_t computed_ = 0;
};

}  // namespace zg
