#include "ziggurat/train/generate.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ziggurat/base/buffer.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {

struct Generator::State {
  explicit State(const std::string& directory)
      : tokenizer(load_tokenizer(directory)), model(read_hf_config(directory), DType::kF32, host_ops()) {
    const HfWeights source(directory, model);
    for (const Unit& unit : model.units()) {
      auto* flat_data = reinterpret_cast<float*>(weights.emplace_back(unit.count * 4).data());
      std::fill(flat_data, flat_data + unit.count, 0.0f);
      for (const Param& p : unit.params) source.read(p, 0, p.count(), flat_data + p.offset);
    }
  }

  View flat(std::size_t unit) { return {weights[unit].data(), DType::kF32, 1, model.units()[unit].count}; }

  // The logits of the last token. The sequence is padded to a multiple of 64, so that few shapes occur;
  // attention is causal, so the padding has no influence.
  std::vector<float> logits_after(const std::vector<std::int32_t>& all) {
    const ModelConfig& c = model.config();
    const std::int64_t most = c.longest_sequence();
    const auto used = std::min<std::int64_t>(static_cast<std::int64_t>(all.size()), most);
    const BatchShape shape{1, std::min(round_up(used, 64), most)};
    std::vector<std::int32_t> ids(static_cast<std::size_t>(shape.time), 0);
    std::copy(all.end() - used, all.end(), ids.begin());
    x.reserve(model.checkpoint_bytes(shape));
    y.reserve(model.checkpoint_bytes(shape));
    saved.reserve(model.saved_bytes(shape));
    workspace.reserve(std::max(model.block_workspace_bytes(shape), model.head_workspace_bytes(shape)));
    View in(x.data(), DType::kF32, shape.time, c.width), out(y.data(), DType::kF32, shape.time, c.width);
    HostStream now("generate", HostStream::Mode::kInline);
    model.embedding_forward(now, shape, flat(0), View(ids.data(), DType::kI32, 1, shape.time), in);
    for (std::int64_t l = 0; l < c.layers; ++l) {
      model.block_forward(now, shape, flat(static_cast<std::size_t>(l) + 1), in, out, saved.data(),
                          workspace.data(), nullptr, nullptr, nullptr, l);
      std::swap(in, out);
    }
    std::vector<float> logits(static_cast<std::size_t>(c.vocab_size));
    const std::size_t head = model.units().size() - 1;
    model.head_logits(now, flat(head), c.tied ? flat(0) : flat(head), in.row_range(used - 1, 1),
                      View(logits.data(), DType::kF32, 1, c.vocab_size), workspace.data());
    for (float& logit : logits) logit = static_cast<float>(capped_logit(c, static_cast<double>(logit)));
    return logits;
  }

  std::unique_ptr<Tokenizer> tokenizer;
  Model model;
  std::vector<Buffer> weights;
  Buffer x, y, saved, workspace;
};

namespace {

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

Generator::Generator(const std::string& directory) : state_(std::make_unique<State>(directory)) {}
Generator::~Generator() = default;
const Tokenizer* Generator::tokenizer() const {
  return state_->tokenizer.get();
}
const ModelConfig& Generator::config() const {
  return state_->model.config();
}

std::vector<std::int32_t> Generator::generate(const std::vector<std::int32_t>& prompt,
                                              const GenerateOptions& options,
                                              const std::function<bool(std::int32_t)>& seen) {
  if (prompt.empty()) throw Error(Errc::kUsage, "prompt", "is empty", "give at least one token");
  const std::int64_t vocab = config().vocab_size;
  for (const std::int32_t id : prompt) {
    if (id < 0 || id >= vocab) {
      throw Error(Errc::kUsage, "prompt",
                  fmt::format("has the token {}, the model knows 0 to {}", id, vocab - 1));
    }
  }
  std::vector<std::int32_t> all = prompt, made;
  for (std::int64_t i = 0; i < options.tokens; ++i) {
    const std::int32_t id = choose(state_->logits_after(all), options, static_cast<std::uint64_t>(i));
    all.push_back(id);
    made.push_back(id);
    if (!seen(id)) break;
  }
  return made;
}

}  // namespace zg
