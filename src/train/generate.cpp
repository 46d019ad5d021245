#include "ziggurat/train/generate.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "train/inference.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {

struct Generator::State {
  State(const std::string& directory, std::int64_t memory, const std::string& adapters)
      : tokenizer(load_tokenizer(directory)),
        end_ids(read_hf_end_ids(directory)),
        inference(directory, memory, adapters) {}
  std::unique_ptr<Tokenizer> tokenizer;
  std::vector<std::int32_t> end_ids;
  Inference inference;
  std::uint64_t drawn = 0;  // tokens drawn so far; the next call draws other random numbers
};

namespace {

// One logit that is not finite makes every probability NaN, and then the last token would be drawn.
void check_logits(const std::vector<float>& logits) {
  const auto bad =
      std::find_if(logits.begin(), logits.end(), [](float logit) { return !std::isfinite(logit); });
  if (bad == logits.end()) return;
  throw Error(
      Errc::kNumeric, "generate",
      fmt::format("the model's logits are not finite: that of token {} is {}", bad - logits.begin(), *bad),
      "its training has diverged, or its weights are damaged: look at the losses of its run");
}

std::int32_t choose(const std::vector<float>& logits, const GenerateOptions& o, std::uint64_t index) {
  const auto best =
      static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  if (o.greedy || o.temperature <= 0) return best;
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto logit = [&](std::int32_t i) { return logits[static_cast<std::size_t>(i)]; };
  if (o.top_k > 0 && o.top_k < static_cast<std::int64_t>(order.size())) {
    std::nth_element(order.begin(), order.begin() + o.top_k, order.end(),
                     [&](auto a, auto b) { return logit(a) > logit(b) || (logit(a) == logit(b) && a < b); });
    order.resize(static_cast<std::size_t>(o.top_k));
    std::sort(order.begin(), order.end());
  }
  std::vector<double> weight(order.size());
  double sum = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    weight[i] = std::exp((static_cast<double>(logit(order[i])) - logit(best)) / o.temperature);
    sum += weight[i];
  }
  double at = NamedRandom(o.seed, "sample").uniform(index) * sum;
  for (std::size_t i = 0; i < order.size(); ++i) {
    at -= weight[i];
    if (at < 0) return order[i];
  }
  return order.back();
}

}  // namespace

Generator::Generator(const std::string& directory, std::int64_t memory, const std::string& adapters)
    : state_(std::make_unique<State>(directory, memory, adapters)) {}
Generator::~Generator() = default;
const Tokenizer* Generator::tokenizer() const {
  return state_->tokenizer.get();
}
const ModelConfig& Generator::config() const {
  return state_->inference.config();
}
const std::vector<std::int32_t>& Generator::end_ids() const {
  return state_->end_ids;
}

void Generator::check_ids(std::span<const std::int32_t> ids, const std::string& what) const {
  const std::int64_t vocab = config().vocab_size;
  for (const std::int32_t id : ids) {
    if (id < 0 || id >= vocab)
      throw Error(Errc::kUsage, what, fmt::format("has the token {}, the model knows 0 to {}", id, vocab - 1),
                  "the tokenizer and the model must belong together");
  }
}

std::vector<std::int32_t> Generator::generate(const std::vector<std::int32_t>& prompt,
                                              const GenerateOptions& options,
                                              const std::function<bool(std::int32_t)>& seen) {
  if (prompt.empty()) throw Error(Errc::kUsage, "prompt", "is empty", "give at least one token");
  check_ids(prompt, "prompt");
  const std::vector<std::int32_t>& ends = state_->end_ids;
  std::vector<std::int32_t> all = prompt, made;
  const std::int64_t room = static_cast<std::int64_t>(prompt.size()) + options.tokens;
  for (std::int64_t i = 0; i < options.tokens; ++i) {
    std::vector<float> logits = state_->inference.logits_after(all, room);
    // A model's embedding table may be padded to more rows than there are tokens.
    if (const Tokenizer* tokenizer = state_->tokenizer.get())
      logits.resize(std::min(logits.size(), static_cast<std::size_t>(tokenizer->vocab_size())));
    check_logits(logits);
    const std::int32_t id = choose(logits, options, state_->drawn++);
    all.push_back(id);
    made.push_back(id);
    if (!seen(id)) break;
    if (!options.past_the_end && std::find(ends.begin(), ends.end(), id) != ends.end()) break;
  }
  return made;
}

Generator::Loss Generator::loss_of(std::span<const std::int32_t> ids, std::span<const std::uint8_t> mask,
                                   std::int64_t context, const std::string& name,
                                   const std::function<bool()>& stop) {
  check_ids(ids, name);
  ZG_ASSERT(context >= 1 && context <= state_->inference.longest(), "a context of {}", context);
  ZG_ASSERT(mask.empty() || mask.size() == ids.size());
  Loss loss;
  std::vector<std::int32_t> targets;
  for (std::size_t first = 0; first + 1 < ids.size(); first += targets.size()) {
    if (stop && stop()) break;
    const std::size_t count = std::min(static_cast<std::size_t>(context), ids.size() - 1 - first);
    targets.assign(ids.begin() + static_cast<std::ptrdiff_t>(first + 1),
                   ids.begin() + static_cast<std::ptrdiff_t>(first + 1 + count));
    for (std::size_t i = 0; i < count; ++i) {
      if (!mask.empty() && mask[first + 1 + i] == 0) targets[i] = -1;
    }
    loss.tokens += std::count_if(targets.begin(), targets.end(), [](std::int32_t t) { return t >= 0; });
    loss.sum += state_->inference.loss_of(ids.subspan(first, count), targets);
  }
  return loss;
}

}  // namespace zg
