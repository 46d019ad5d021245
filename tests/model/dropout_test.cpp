// What models drop: the masks of all topologies are the same, bit by bit, and those that the definition says.
//
// All weights are zero but for biases and norms, so that the residual stream shows the masks: the embedding's
// sum is 1, attention adds 1, and the MLP adds 3, each dropped.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <mutex>

#include "support/local_parts.hpp"
#include "support/reference.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kSequences = 4, kTime = 16, kWidth = 90, kLayers = 2;
constexpr std::uint64_t kSeed = 1234;
constexpr std::int64_t kStep = 0x1'0005;
constexpr double kEmbedding = 0.2, kResidual = 0.4;

// A width that ends in the middle of a block of random numbers.
ModelConfig config_of() {
  ModelConfig c = reference_gpt2();
  c.vocab_size = 11, c.context = kTime, c.width = kWidth, c.layers = kLayers, c.inner = 24;
  c.heads = c.kv_heads = 2, c.head_size = 45;
  c.dropout = {.embedding = kEmbedding, .residual = kResidual};
  return c;
}

double transparent_weight(const Param& p, std::int64_t, std::int64_t) {
  const auto is = [&](const char* end) { return p.name.ends_with(end); };
  if (p.init == Init::kOne || is("wte.weight") || is("attn.c_proj.bias")) return 1;
  return is("mlp.c_proj.bias") ? 3 : 0;
}

struct Way {
  std::int64_t batch = kSequences;  // sequences of a micro-batch
  int tensor = 1;
  bool sequence = false;
  int context = 1;
  ContextMethod method = ContextMethod::kRing;
};

// Attention, which is zero here, has nothing to exchange.
class NothingToExchange final : public ContextExchange {
 public:
  void begin_pass(Stream& s, const View&, const View& from_before) override {
    host_ops().zero(s, from_before);
  }
  void end_pass(Stream&) override {}
  void all_to_all(Stream& s, const View&, const View& out) override { host_ops().zero(s, out); }
};

// By unit (the embedding, and then each block, whose input is zero), sequence, position and column.
class Streams {
 public:
  Streams() : values_(static_cast<std::size_t>((kLayers + 1) * kSequences * kTime * kWidth), -1.0) {}
  double* row(std::int64_t unit, std::int64_t sequence, std::int64_t position) {
    return values_.data() + ((unit * kSequences + sequence) * kTime + position) * kWidth;
  }
  // Several parts may have the same row.
  void put(std::int64_t unit, std::int64_t sequence, std::int64_t position, const double* from) {
    double* const to = row(unit, sequence, position);
    if (to[0] >= 0) {
      EXPECT_EQ(std::memcmp(to, from, kWidth * sizeof(double)), 0) << "two parts differ";
    }
    std::copy_n(from, kWidth, to);
  }
  bool same_bits(const Streams& other) const {
    return std::memcmp(values_.data(), other.values_.data(), values_.size() * sizeof(double)) == 0;
  }

 private:
  std::vector<double> values_;
};

void run_part(const Way& way, BatchShape shape, std::int64_t first, std::int64_t step, std::uint64_t seed,
              const TensorShard& part, TensorParallelGroup& exchange,
              const std::function<void(int, const View&)>& take) {
  HostStream stream("test", HostStream::Mode::kInline);
  ModelRunner r(config_of(), DType::kF64, host_ops(), stream, 0, part, &exchange);
  r.fill(transparent_weight);
  r.drop_as(seed, step, first);
  const Batch batch{shape, std::vector<std::int32_t>(static_cast<std::size_t>(shape.rows()), 5), {}};
  const Bytes room(r.model().embedding_workspace_bytes(shape)), out(r.model().checkpoint_bytes(shape));
  r.model().run(stream, ModelCall::kEmbedding,
                {.shape = shape,
                 .weights = r.weights(0),
                 .ids = ModelRunner::ids(batch),
                 .output = r.rows(out, batch),
                 .workspace = room.data(),
                 .dropout = r.place(0)});
  take(0, r.rows(out, batch));
  Bytes nothing(r.model().checkpoint_bytes(shape));
  nothing.clear();
  NothingToExchange context;
  for (int u = 1; u <= kLayers; ++u) {
    const Bytes saved(r.model().saved_bytes(shape)), workspace(r.model().block_workspace_bytes(shape));
    const auto unit = static_cast<std::size_t>(u);
    r.model().run(stream, ModelCall::kBlock,
                  {.shape = shape,
                   .layer = u - 1,
                   .weights = r.weights(unit),
                   .input = r.rows(nothing, batch),
                   .output = r.rows(out, batch),
                   .saved = saved.data(),
                   .workspace = workspace.data(),
                   .dropout = r.place(unit),
                   .context = way.context > 1 ? &context : nullptr});
    take(u, r.rows(out, batch));
  }
}

Streams run(const Way& way, std::int64_t step = kStep, std::uint64_t seed = kSeed) {
  Streams all;
  std::mutex mutex;
  for (std::int64_t first = 0; first < kSequences; first += way.batch) {
    for (int c = 0; c < way.context; ++c) {
      const BatchShape shape{way.batch, kTime / way.context, {way.context, c, way.method}};
      const RowPositions positions = shape.sequence_shard.positions(shape.time);
      LocalParts(way.tensor).run([&](int part, TensorParallelGroup& exchange) {
        const auto take = [&](int unit, const View& x) {
          std::lock_guard lock(mutex);
          for (std::int64_t r = 0; r < x.rows; ++r) {
            const std::int64_t row = r + (way.sequence ? part * x.rows : 0);
            all.put(unit, first + row / shape.time, positions.of(row), x.as<double>() + r * x.ld);
          }
        };
        run_part(way, shape, first, step, seed, {way.tensor, part, way.sequence}, exchange, take);
      });
    }
  }
  return all;
}

TEST(ModelDropout, MasksAreThoseOfTheDefinition) {
  Streams all = run({});
  const double from_embedding = 1 / (1 - kEmbedding), from_branch = 1 / (1 - kResidual);
  std::int64_t kept[3] = {}, both = 0;
  for (std::int64_t u = 0; u <= kLayers; ++u) {
    const std::string name = u == 0 ? "embedding" : fmt::format("block.{}", u - 1);
    const NamedRandom first(kSeed, name + ".dropout"), second(kSeed, name + ".mlp.dropout");
    for (std::int64_t s = 0; s < kSequences; ++s) {
      for (std::int64_t t = 0; t < kTime; ++t) {
        for (std::int64_t c = 0; c < kWidth; ++c) {
          const auto keeps = [&](const NamedRandom& random, double rate) {
            const Philox4 words =
                philox4x32_10({static_cast<std::uint32_t>(c / 4), static_cast<std::uint32_t>(t),
                               static_cast<std::uint32_t>(s), static_cast<std::uint32_t>(kStep)},
                              random.key());
            return words[static_cast<std::size_t>(c % 4)] >= rate * 0x1p32;
          };
          double expected = 0;
          if (u == 0) {
            const bool stays = keeps(first, kEmbedding);
            expected = stays ? from_embedding : 0;
            kept[0] += stays;
          } else {
            const bool attention = keeps(first, kResidual), mlp = keeps(second, kResidual);
            expected = (attention ? from_branch : 0) + (mlp ? 3 * from_branch : 0);
            kept[1] += attention, kept[2] += mlp, both += attention && mlp;
          }
          ASSERT_NEAR(all.row(u, s, t)[c], expected, 1e-14) << name << ", " << s << ", " << t << ", " << c;
        }
      }
    }
  }
  // Binomial; five standard deviations. That attention and MLP keep is independent.
  const auto expect_share = [](std::int64_t count, std::int64_t of, double share) {
    const auto n = static_cast<double>(of);
    EXPECT_NEAR(static_cast<double>(count), share * n, 5 * std::sqrt(share * (1 - share) * n));
  };
  constexpr std::int64_t kElements = kSequences * kTime * kWidth;
  expect_share(kept[0], kElements, 1 - kEmbedding);
  expect_share(kept[1], kLayers * kElements, 1 - kResidual);
  expect_share(kept[2], kLayers * kElements, 1 - kResidual);
  expect_share(both, kLayers * kElements, (1 - kResidual) * (1 - kResidual));
}

TEST(ModelDropout, MasksAreTheSameHoweverABatchIsSpread) {
  const Streams whole = run({});
  for (const std::int64_t batch : {1, 2, 4}) {
    for (const int tensor : {1, 2}) {
      for (const bool sequence : {false, true}) {
        for (const int context : {1, 2, 4}) {
          for (const ContextMethod method : {ContextMethod::kRing, ContextMethod::kUlysses}) {
            const bool ulysses = method == ContextMethod::kUlysses;
            if (ulysses && (context != 2 || tensor > 1)) continue;  // two heads
            if (sequence && tensor == 1) continue;
            SCOPED_TRACE(fmt::format("micro-batches of {}, tensor {}, sequence {}, context {}{}", batch,
                                     tensor, sequence, context, ulysses ? " by ulysses" : ""));
            EXPECT_TRUE(run({batch, tensor, sequence, context, method}).same_bits(whole));
          }
        }
      }
    }
  }
}

// Every two rows differ, whichever of their coordinates do: with shares p, elements of two masks are alike as
// often as by chance, p^2 + (1 - p)^2.
TEST(ModelDropout, EveryCoordinateMatters) {
  Streams here = run({}), next_step = run({}, kStep + 1), other_seed = run({}, kStep, kSeed + 1);
  const auto expect_apart = [&](Streams& a, Streams& b, std::int64_t unit, const auto& place) {
    std::int64_t alike = 0;
    for (std::int64_t s = 0; s < kSequences; ++s) {
      for (std::int64_t t = 0; t < kTime; ++t) {
        const auto [other_unit, other_s, other_t] = place(unit, s, t);
        for (std::int64_t c = 0; c < kWidth; ++c)
          alike += (a.row(unit, s, t)[c] > 0) == (b.row(other_unit, other_s, other_t)[c] > 0);
      }
    }
    const double p = unit == 0 ? kEmbedding : kResidual * kResidual;  // the share that is dropped
    const double chance = p * p + (1 - p) * (1 - p), n = kSequences * kTime * kWidth;
    // Each pair may be counted twice, where rows are neighbours in a circle.
    EXPECT_NEAR(static_cast<double>(alike), chance * n, 5 * std::sqrt(2 * chance * (1 - chance) * n));
  };
  using Place = std::array<std::int64_t, 3>;
  const auto same = [](auto u, auto s, auto t) { return Place{u, s, t}; };
  for (const std::int64_t unit : {0, 1, 2}) {
    SCOPED_TRACE(unit);
    expect_apart(here, next_step, unit, same);
    expect_apart(here, other_seed, unit, same);
    expect_apart(here, here, unit, [](auto u, auto s, auto t) { return Place{u, (s + 1) % kSequences, t}; });
    expect_apart(here, here, unit, [](auto u, auto s, auto t) { return Place{u, s, (t + 1) % kTime}; });
  }
  expect_apart(here, here, 1, [](auto, auto s, auto t) { return Place{2, s, t}; });
}

Batch some_batch() {
  Batch b{{3, 7}, {}, {}};
  for (std::uint64_t i = 0; i < 21; ++i) {
    b.ids.push_back(static_cast<std::int32_t>(reference_hash("tokens", i) % 257));
    b.targets.push_back(static_cast<std::int32_t>(reference_hash("targets", i) % 257));
  }
  return b;
}

// Without a place in a training step nothing is dropped: evaluations, and texts that are generated.
TEST(ModelDropout, IsOfTrainingAlone) {
  for (ModelConfig c : {reference_gpt2(), reference_llama()}) {
    HostStream stream("test", HostStream::Mode::kInline);
    ModelRunner without(c, DType::kF32, host_ops(), stream);
    c.dropout = {.embedding = 0.1, .residual = 0.1};
    ModelRunner with(c, DType::kF32, host_ops(), stream);
    without.fill(reference_weight), with.fill(reference_weight);
    const double loss = without.loss(some_batch());
    EXPECT_EQ(with.loss(some_batch()), loss);
    with.drop_as(1, 2, 3);
    EXPECT_NE(with.loss(some_batch()), loss);
  }
}

TEST(ModelDropout, RecomputationDropsTheSame) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (ModelConfig c : {reference_gpt2(), reference_llama()}) {
      c.dropout = {.embedding = 0.1, .residual = 0.3};
      std::vector<std::vector<char>> gradients;
      for (const Recompute recompute : {Recompute::kNo, Recompute::kYes}) {
        HostStream stream("test", HostStream::Mode::kInline);
        ModelRunner r(c, dtype, host_ops(), stream);
        r.fill(reference_weight);
        r.drop_as(1, 2, 3);
        r.forward_backward(some_batch(), recompute);
        gradients.emplace_back();
        for (std::size_t u = 0; u < r.units().size(); ++u) {
          const auto* const data = static_cast<const char*>(r.grads(u).data);
          gradients.back().insert(
              gradients.back().end(), data,
              data + r.grads(u).count() * static_cast<std::int64_t>(size_of(r.grads(u).dtype)));
        }
      }
      EXPECT_EQ(gradients[0], gradients[1]);
    }
  }
}

}  // namespace
}  // namespace zg::test
