// A trained model at work: what it generates with keys and values kept, with weights that memory does not
// hold, and how likely it finds a text.
#include "ziggurat/train/generate.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "support/errors.hpp"
#include "support/families.hpp"
#include "support/files.hpp"
#include "train/inference.hpp"

namespace zg::test {
namespace {

using Ids = std::vector<std::int32_t>;

// A model with windows, norms of heads, and two kinds of rotary embeddings.
class GenerateTest : public testing::Test {
 protected:
  GenerateTest() : config_(FamilyFile("gemma3").config()), model_(config_, DType::kF64, host_ops()) {
    save_hf(dir_.path(), model_, DType::kF32,
            [&](const Unit&, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
              for (std::int64_t i = begin; i < end; ++i) out[i - begin] = weight(p, i);
            });
  }
  float weight(const Param& p, std::int64_t i) const {
    return static_cast<float>(family_weight(config_, p, i / p.whole_cols, i % p.whole_cols));
  }
  static Ids some_ids(std::int64_t count, int from = 0) {
    Ids ids;
    for (std::int64_t i = 0; i < count; ++i)
      ids.push_back(
          static_cast<std::int32_t>(reference_hash("prompt", static_cast<std::uint64_t>(from + i)) % 97));
    return ids;
  }
  std::int64_t bytes(std::size_t first, std::size_t end) const {
    std::int64_t sum = 0;
    for (std::size_t u = first; u < end; ++u) sum += model_.units()[u].count * 4;
    return sum;
  }
  // What memory must hold at least: the ends, and two blocks.
  std::int64_t least() const {
    const std::size_t units = model_.units().size();
    return bytes(0, 1) + bytes(units - 1, units) + 2 * bytes(1, 2);
  }
  static Ids made(Generator& g, const Ids& prompt, const GenerateOptions& o) {
    return g.generate(prompt, o, [](std::int32_t) { return true; });
  }

  TempDir dir_;
  ModelConfig config_;
  Model model_;
};

TEST_F(GenerateTest, KeysAndValuesThatAreKeptChangeNoToken) {
  Generator kept(dir_.path());
  const GenerateOptions greedy{.tokens = 20, .greedy = true};
  const Ids prompt = some_ids(9), tokens = made(kept, prompt, greedy);
  ASSERT_EQ(tokens.size(), 20u);
  Ids all = prompt;
  for (const std::int32_t id : tokens) {
    Generator fresh(dir_.path());
    EXPECT_EQ(made(fresh, all, {.tokens = 1, .greedy = true}), Ids{id}) << all.size();
    all.push_back(id);
  }
}

TEST_F(GenerateTest, ASequenceThatGoesOnCostsItsNewTokens) {
  Inference inference(dir_.path(), 0);
  Ids ids = some_ids(20);
  (void)inference.logits_after(ids, 30);
  EXPECT_EQ(inference.computed(), 20);
  ids.push_back(5);
  const std::vector<float> next = inference.logits_after(ids, 30);
  EXPECT_EQ(inference.computed(), 21);
  EXPECT_EQ(inference.logits_after(ids, 30), next);  // the same again: its last token alone
  EXPECT_EQ(inference.computed(), 22);
  ids[3] ^= 1;  // another sequence, which shares three tokens with the one before
  const std::vector<float> other = inference.logits_after(ids, 30);
  EXPECT_EQ(inference.computed(), 22 + 21);
  EXPECT_EQ(other, Inference(dir_.path(), 0).logits_after(ids, 0));
}

TEST_F(GenerateTest, LayersThatMemoryDoesNotHoldAreReadAndGiveTheSameBits) {
  const Ids ids = some_ids(12);
  const std::vector<float> expected = Inference(dir_.path(), 0).logits_after(ids, 0);
  ASSERT_EQ(config_.layers, 3);
  for (const auto& [memory, read_anew] : {std::pair(least(), std::size_t{3}), {least() + bytes(1, 2), 0}}) {
    const UnitWeights weights(dir_.path(), model_, memory);
    EXPECT_EQ(weights.read_anew(), read_anew);
    Inference inference(dir_.path(), memory);
    Ids some(ids.begin(), ids.begin() + 6);
    for (std::size_t i = some.size(); i <= ids.size(); ++i) {
      const std::vector<float> logits = inference.logits_after(some, 0);
      if (i == ids.size()) {
        for (std::size_t v = 0; v < logits.size(); ++v) EXPECT_NEAR(logits[v], expected[v], 1e-4);
      } else {
        some.push_back(ids[i]);
      }
    }
    EXPECT_EQ(Inference(dir_.path(), memory).logits_after(ids, 0), expected);
  }
}

TEST_F(GenerateTest, MemoryForLessThanTwoLayersIsRefused) {
  const Error error = error_of([&] { Generator generator(dir_.path(), least() - 1); });
  EXPECT_EQ(error.code(), Errc::kMemory);
  EXPECT_EQ(error.where(), "--memory");
  EXPECT_TRUE(has(error, "needs at least"));
}

// Beyond the longest sequence the last tokens count, as if the text began with them.
TEST_F(GenerateTest, GoesOnBehindTheLongestSequence) {
  Generator generator(dir_.path());
  const std::int64_t longest = config_.longest_sequence();
  const Ids prompt = some_ids(longest - 2);
  Ids all = prompt;
  for (const std::int32_t id : made(generator, prompt, {.tokens = 6, .greedy = true})) {
    const std::size_t drop = std::max<std::size_t>(all.size(), static_cast<std::size_t>(longest)) -
                             static_cast<std::size_t>(longest);
    Generator fresh(dir_.path());
    const Ids last(all.begin() + static_cast<std::ptrdiff_t>(drop), all.end());
    EXPECT_EQ(made(fresh, last, {.tokens = 1, .greedy = true}), Ids{id}) << all.size();
    all.push_back(id);
  }
}

TEST_F(GenerateTest, ATokenThatEndsATextEndsIt) {
  const GenerateOptions greedy{.tokens = 12, .greedy = true};
  const Ids prompt = some_ids(5);
  Generator endless(dir_.path());
  EXPECT_TRUE(endless.end_ids().empty());
  const Ids tokens = made(endless, prompt, greedy);
  const std::int32_t end = tokens[6];
  const auto first = std::find(tokens.begin(), tokens.end(), end);
  write_file(dir_ / "generation_config.json", fmt::format(R"({{"eos_token_id": [{}, 90000]}})", end));
  Generator generator(dir_.path());
  EXPECT_EQ(made(generator, prompt, greedy), Ids(tokens.begin(), first + 1));
  GenerateOptions past = greedy;
  past.past_the_end = true;
  EXPECT_EQ(made(generator, prompt, past), tokens);
  write_file(dir_ / "generation_config.json", R"({"eos_token_id": "two"})");
  EXPECT_TRUE(has(error_of([&] { Generator damaged(dir_.path()); }), "eos_token_id"));
}

// A weight that is not finite, in the row of a token that the prompt has not: the table is the output matrix,
// too. Gemma 2 caps its logits, which must not make a number of it.
TEST_F(GenerateTest, LogitsThatAreNotFiniteAreAnErrorAndNoToken) {
  for (const char* family : {"gemma3", "gemma2"}) {
    const ModelConfig config = FamilyFile(family).config();
    const Model model(config, DType::kF64, host_ops());
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      SCOPED_TRACE(fmt::format("{}, {}", family, bad));
      TempDir dir;
      save_hf(dir.path(), model, DType::kF32,
              [&](const Unit& unit, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
                for (std::int64_t i = begin; i < end; ++i)
                  out[i - begin] =
                      static_cast<float>(family_weight(config, p, i / p.whole_cols, i % p.whole_cols));
                const std::int64_t place = 50 * p.whole_cols + 1;
                const bool table = &unit == &model.units().front() && &p == &unit.params.front();
                if (table && begin <= place && place < end) out[place - begin] = bad;
              });
      Generator generator(dir.path());
      for (const bool greedy : {false, true}) {
        const Error error = error_of([&] { (void)made(generator, {1, 2, 3}, {.greedy = greedy}); });
        EXPECT_EQ(error.code(), Errc::kNumeric);
        EXPECT_TRUE(has(error, "not finite")) << error.what();
        EXPECT_TRUE(has(error, "token 50")) << error.what();
      }
    }
  }
}

TEST_F(GenerateTest, LossIsThatOfTheTokensThatCountPieceByPiece) {
  HostStream stream("test", HostStream::Mode::kInline);
  ModelRunner runner(config_, DType::kF32, host_ops(), stream);
  runner.fill([&](const Param& p, std::int64_t r, std::int64_t c) {
    return static_cast<double>(weight(p, r * p.whole_cols + c));
  });
  const Ids ids = some_ids(30);
  std::vector<std::uint8_t> mask(ids.size(), 1);
  mask[0] = mask[4] = mask[21] = 0;
  Generator generator(dir_.path());
  for (const bool masked : {false, true}) {
    for (const std::int64_t context : {7, 24}) {
      double sum = 0;
      std::int64_t tokens = 0;
      for (std::int64_t first = 0; first < 29; first += context) {
        const std::int64_t count = std::min<std::int64_t>(context, 29 - first);
        Batch piece{{1, count}, {}, {}};
        for (std::int64_t i = first; i < first + count; ++i) {
          const auto at = static_cast<std::size_t>(i);
          const bool counts = !masked || mask[at + 1] != 0;
          piece.ids.push_back(ids[at]);
          piece.targets.push_back(counts ? ids[at + 1] : -1);
          tokens += counts;
        }
        sum += runner.loss(piece);
      }
      const Generator::Loss loss = generator.loss_of(
          ids, masked ? std::span<const std::uint8_t>(mask) : std::span<const std::uint8_t>(), context);
      EXPECT_EQ(loss.tokens, tokens);
      EXPECT_NEAR(loss.sum, sum, 1e-5 * sum);
    }
  }
  EXPECT_EQ(generator.loss_of(some_ids(1), {}, 7).tokens, 0);
  EXPECT_EQ(generator.loss_of({}, {}, 7).tokens, 0);
}

}  // namespace
}  // namespace zg::test
