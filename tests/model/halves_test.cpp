// A backward in halves: the gradients of the whole one to the bit, and no more memory than it says.
#include <gtest/gtest.h>

#include "support/errors.hpp"
#include "support/local_parts.hpp"
#include "support/reference.hpp"

namespace zg::test {
namespace {

enum class Kind { kGpt2, kLlama, kEveryOption, kNormsAfter, kGpt2Lora, kLlamaLora, kEveryOptionLora };
constexpr const char* kNames[] = {"gpt2_",      "llama_",      "every_option_",     "norms_after_",
                                  "gpt2_lora_", "llama_lora_", "every_option_lora_"};

struct Case {
  Kind kind = Kind::kGpt2;
  DType dtype = DType::kF32;
  Recompute recompute = Recompute::kNo;
};

ModelConfig model_of(Kind kind) {
  const bool gpt2 = kind == Kind::kGpt2 || kind == Kind::kGpt2Lora;
  ModelConfig c = gpt2 ? reference_gpt2() : reference_llama();
  if (gpt2) c.inner = 172;  // 43 for each of four parts
  c.layers = 2;
  if (kind == Kind::kEveryOption || kind == Kind::kEveryOptionLora) c = with_every_option(c);
  if (kind == Kind::kNormsAfter) c = with_norms_after(c);
  c.dropout = {.embedding = 0.1, .residual = 0.3};  // where a runner says where it stands
  if (kind >= Kind::kGpt2Lora) c = with_adapters(c, 0.2);
  return c;
}

Batch some_batch(std::uint64_t seed) {
  Batch b{{2, 20}, {}, {}};
  for (std::uint64_t i = 0; i < 40; ++i) {
    b.ids.push_back(static_cast<std::int32_t>(reference_hash("tokens", seed + i) % 257));
    b.targets.push_back(i % 9 == 7 ? -1
                                   : static_cast<std::int32_t>(reference_hash("targets", seed + i) % 257));
  }
  return b;
}

// The bytes of all gradients after two micro-batches, of which the first one overwrites what was there.
std::vector<std::string> gradients(ModelRunner& r, Recompute recompute, Backward how, double& loss) {
  r.fill(reference_weight);
  r.poison_grads();
  loss = r.forward_backward(some_batch(0), recompute, 1, Gradients::kOverwrite, how);
  loss += r.forward_backward(some_batch(100), recompute, 1, Gradients::kAdd, how);
  std::vector<std::string> all;
  for (std::size_t u = 0; u < r.units().size(); ++u) {
    const View g = r.grads(u);
    all.emplace_back(static_cast<const char*>(g.data), static_cast<std::size_t>(g.cols) * size_of(g.dtype));
  }
  return all;
}

class BackwardInHalves : public testing::TestWithParam<Case> {};

TEST_P(BackwardInHalves, HasTheBitsOfTheWhole) {
  const auto [kind, dtype, recompute] = GetParam();
  for (const int parts : {1, 2, 4}) {
    for (const bool sequence : {false, true}) {
      if (parts == 1 && sequence) continue;
      // A norm over all heads together has no parts.
      if (parts > 1 && GetParam().kind == Kind::kNormsAfter) continue;
      SCOPED_TRACE(testing::Message() << parts << " parts, sequence " << sequence);
      LocalParts(parts).run([&, kind = kind, dtype = dtype, recompute = recompute](
                                int part, TensorParallelGroup& exchange) {
        HostStream stream("test", HostStream::Mode::kInline);
        ModelRunner r(model_of(kind), dtype, host_ops(), stream, 0, {parts, part, sequence},
                      parts > 1 ? &exchange : nullptr);
        for (const bool dropped : {false, true}) {
          if (dropped) r.drop_as(77, 3, 4);
          double whole_loss = 0, loss = 0;
          const auto whole = gradients(r, recompute, Backward::kWhole, whole_loss);
          EXPECT_TRUE(gradients(r, recompute, Backward::kInHalves, loss) == whole) << "dropped " << dropped;
          EXPECT_EQ(loss, whole_loss);
          EXPECT_TRUE(std::isfinite(loss));
        }
      });
      if (HasFailure()) return;
    }
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Kind kind : {Kind::kGpt2, Kind::kLlama, Kind::kEveryOption, Kind::kNormsAfter, Kind::kGpt2Lora,
                          Kind::kLlamaLora, Kind::kEveryOptionLora}) {
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
      all.push_back({kind, dtype, Recompute::kNo});
      all.push_back({kind, dtype, Recompute::kYes});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Models, BackwardInHalves, testing::ValuesIn(cases()), [](const auto& c) {
  return std::string(kNames[static_cast<int>(c.param.kind)]) + name_of(c.param.dtype) +
         (c.param.recompute == Recompute::kYes ? "_recomputed" : "");
});

// What is kept between the halves lies where the first one has used something up: only the sums of the norms
// are more, and of the workspace a row of the residual stream for each token.
TEST(BackwardInHalves, KeepsLittleMoreThanIsSaved) {
  for (const Kind kind : {Kind::kGpt2, Kind::kLlama, Kind::kEveryOption, Kind::kNormsAfter}) {
    const ModelConfig c = model_of(kind);
    const Model model(c, DType::kBF16, host_ops());
    const BatchShape shape{2, 64};
    const auto more = [&](auto bytes) { return bytes(Backward::kInHalves) - bytes(Backward::kWhole); };
    const std::int64_t width = (c.width + 255) / 256 * 256;
    // With every option, the sinks of the heads are summed as norms are.
    const auto norms_of = [](Kind k) { return k == Kind::kLlama ? 2 : k == Kind::kEveryOption ? 7 : 4; };
    EXPECT_EQ(more([&](Backward how) { return model.saved_bytes(shape, how); }), norms_of(kind) * width * 4);
    EXPECT_EQ(more([&](Backward how) { return model.block_workspace_bytes(shape, how); }),
              shape.rows() * c.width * 2);
  }
}

// Where the rows are split, beside adapters those alone are gathered that their gradients need.
TEST(BackwardInHalves, GatherWhatAdaptersNeedAlone) {
  ModelConfig c = model_of(Kind::kLlama);
  for (const auto& [modules, second, frozen] :
       {std::tuple("q_proj", 1, 3), {"o_proj", 1, 2}, {"up_proj", 1, 3}, {"*_proj", 4, 4}}) {
    c.lora = {.rank = 2, .alpha = 2, .modules = match_modules(c, modules)};
    const Model model(c, DType::kF32, host_ops(), 0, {4, 1, true});
    const auto gathers = [&](ModelCall call) {
      const auto calls = model.block(0).exchanges(call, {2, 20});
      return std::count_if(calls.begin(), calls.end(), [](const TensorParallelCall& one) {
        return one.kind == TensorParallelCall::Kind::kAllGather;
      });
    };
    EXPECT_EQ(gathers(ModelCall::kBlockBackwardInput), 2) << modules;
    EXPECT_EQ(gathers(ModelCall::kBlockBackwardWeight), second) << modules;
    EXPECT_EQ(gathers(ModelCall::kBlockBackwardFrozen), frozen) << modules;
  }
}

// The halves sum what the whole one sums. With the rows split, each half gathers the gradients of two
// outputs.
TEST(BackwardInHalves, ExchangesWhatTheWholeDoes) {
  for (const bool sequence : {false, true}) {
    const Model model(model_of(Kind::kLlama), DType::kF32, host_ops(), 0, {4, 1, sequence});
    const auto count = [&](ModelCall call, TensorParallelCall::Kind kind) {
      const auto calls = model.block(0).exchanges(call, {2, 20});
      return std::count_if(calls.begin(), calls.end(),
                           [&](const TensorParallelCall& c) { return c.kind == kind; });
    };
    using enum TensorParallelCall::Kind;
    for (const auto kind : {kAllReduce, kReduceScatter, kAllGather}) {
      EXPECT_EQ(count(ModelCall::kBlockBackwardInput, kind) + count(ModelCall::kBlockBackwardWeight, kind),
                count(ModelCall::kBlockBackward, kind) + (sequence && kind == kAllGather ? 2 : 0));
    }
    EXPECT_EQ(model.block(0).exchanges(ModelCall::kBlockBackwardWeight, {2, 20}).size(), sequence ? 4u : 0u);
  }
}

}  // namespace
}  // namespace zg::test
