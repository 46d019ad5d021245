// Parts of a model: together they have each element of the whole model, and their losses and gradients are
// those of the whole.
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "model/tensor_shard.hpp"
#include "support/errors.hpp"
#include "support/local_parts.hpp"
#include "support/naive_ops.hpp"
#include "support/reference.hpp"

namespace zg::test {
namespace {

struct Case {
  std::string name;
  ModelConfig config;
};

// Odd sizes: 257 tokens, 43 elements of the inner width for each of four parts, and heads of keys and values
// that several parts must have: one for all, and three, which neither divide the parts nor are divided by
// them.
std::vector<Case> cases() {
  std::vector<Case> all;
  ModelConfig gpt2 = reference_gpt2(), llama = reference_llama();
  gpt2.layers = llama.layers = 2;
  gpt2.inner = 172;
  for (const bool tied : {true, false}) {
    gpt2.tied = llama.tied = tied;
    all.push_back({tied ? "gpt2" : "gpt2_untied", gpt2});
    all.push_back({tied ? "llama" : "llama_untied", llama});
  }
  llama.kv_heads = 1;
  all.push_back({"one_kv_head", llama});
  llama.heads = 12, llama.kv_heads = 3, llama.head_size = 14;
  all.push_back({"three_kv_heads", llama});
  all.push_back({"every_option", with_every_option(llama)});
  // Beside adapters these alone have gradients.
  gpt2.dropout.residual = 0.2;
  all.push_back({"gpt2_lora", with_adapters(gpt2, 0.3)});
  all.push_back({"fused_lora", with_adapters(with_fused_matrices(llama), 0.3)});
  all.push_back({"every_option_lora", with_adapters(with_every_option(llama))});
  llama = reference_llama(), llama.layers = 2, llama.dropout.residual = 0.2;
  all.push_back({"llama_lora", with_adapters(llama, 0.3)});
  llama.kv_heads = 1;
  all.push_back({"one_kv_head_lora", with_adapters(llama)});
  return all;
}
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

// Forward and backward of the whole model, or of all of its parts.
struct Outcome {
  double loss = 0;
  std::map<std::string, std::vector<double>> gradients;  // by parameter, whole
};

// More rows than a chunk of logits has.
Batch some_batch() {
  Batch b{{2, 40}, {}, {}};
  for (std::uint64_t i = 0; i < 80; ++i) {
    b.ids.push_back(static_cast<std::int32_t>(reference_hash("tokens", i) % 257));
    b.targets.push_back(i % 9 == 7 ? -1 : static_cast<std::int32_t>(reference_hash("targets", i) % 257));
  }
  b.ids[3] = 256, b.targets[3] = 256, b.targets[5] = 0;
  return b;
}

// Copies of a gradient are alike, but for those that are summed.
void collect(ModelRunner& r, Outcome& out, std::map<std::string, std::vector<bool>>& known) {
  for (std::size_t u = 0; u < r.units().size(); ++u) {
    const View flat = r.grads(u);
    const bool adapted = r.model().config().lora.on();
    if (adapted && !r.units()[u].adapted) continue;
    std::int64_t at = adapted ? r.units()[u].tiles.back().first : 0;
    for (const Param& p : r.units()[u].params) {
      if (p.adapter != adapted) continue;
      for (; at < p.offset; ++at) EXPECT_EQ(load(flat, 0, at), 0) << "in the gap before " << p.name;
      std::vector<double>& whole = out.gradients[p.name];
      std::vector<bool>& have = known[p.name];
      whole.resize(static_cast<std::size_t>(p.whole_count()));
      have.resize(whole.size());
      for (std::int64_t i = 0; i < p.count(); ++i, ++at) {
        const auto e = static_cast<std::size_t>(p.whole_element(i));
        const double g = load(flat, 0, p.offset + i);
        if (p.summed) {
          whole[e] += g;
        } else if (have[e]) {
          ASSERT_EQ(whole[e], g) << "two parts differ in element " << e << " of " << p.name;
        } else {
          whole[e] = g;
        }
        have[e] = true;
      }
    }
    for (; at < flat.cols; ++at) EXPECT_EQ(load(flat, 0, at), 0) << "behind unit " << u;
  }
}

Outcome run(const ModelConfig& config, Ops& ops, int parts, bool sequence, Recompute recompute) {
  Outcome out;
  std::mutex mutex;
  std::map<std::string, std::vector<bool>> known;
  LocalParts(parts).run([&](int part, TensorParallelGroup& exchange) {
    HostStream stream("test", HostStream::Mode::kInline);
    ModelRunner r(config, DType::kF64, ops, stream, 64 * 1024, {parts, part, sequence}, &exchange);
    r.fill(reference_weight);
    if (config.dropout.residual > 0) r.drop_as(77, 3, 4);
    // What gradients hold at first does not matter, chunks of logits do not, and nor does a second
    // micro-batch.
    r.poison_grads();
    const double loss = r.forward_backward(some_batch(), recompute, 1, Gradients::kOverwrite);
    EXPECT_EQ(loss, r.loss(some_batch()));
    EXPECT_EQ(loss, r.forward_backward(some_batch(), recompute, 1));
    std::lock_guard lock(mutex);
    if (out.gradients.empty()) out.loss = loss;
    EXPECT_EQ(out.loss, loss) << "every part knows the same";
    collect(r, out, known);
  });
  for (const auto& [name, have] : known)
    EXPECT_TRUE(std::all_of(have.begin(), have.end(), [](bool x) { return x; })) << name;
  return out;
}

class Parts : public testing::TestWithParam<Case> {};

TEST_P(Parts, HaveTheLossAndTheGradientsOfTheWhole) {
  const Outcome whole = run(GetParam().config, host_ops(), 1, false, Recompute::kNo);
  for (const int parts : {2, 4}) {
    for (const bool sequence : {false, true}) {
      SCOPED_TRACE(testing::Message() << parts << " parts, sequence " << sequence);
      const Outcome split =
          run(GetParam().config, host_ops(), parts, sequence, sequence ? Recompute::kYes : Recompute::kNo);
      EXPECT_NEAR(split.loss, whole.loss, 1e-13 * whole.loss);
      ASSERT_EQ(split.gradients.size(), whole.gradients.size());
      for (const auto& [name, expected] : whole.gradients) {
        double far = 0, scale = 0;
        for (std::size_t i = 0; i < expected.size(); ++i) {
          far = std::max(far, std::abs(split.gradients.at(name)[i] - expected[i]));
          scale = std::max(scale, std::abs(expected[i]));
        }
        EXPECT_LE(far, 1e-13 * scale) << name;
      }
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Parts, testing::ValuesIn(cases()),
                         [](const auto& c) { return c.param.name; });

// The naive ops know the two ops of the split cross entropy by their definition alone.
TEST(PartsOfNaiveOps, AgreeWithTheWhole) {
  NaiveOps ops;
  ModelConfig config = reference_llama();
  config.layers = 1;
  const Outcome whole = run(config, host_ops(), 1, false, Recompute::kNo);
  const Outcome split = run(config, ops, 4, true, Recompute::kNo);
  EXPECT_NEAR(split.loss, whole.loss, 1e-12 * whole.loss);
  for (const auto& [name, expected] : whole.gradients) {
    for (std::size_t i = 0; i < expected.size(); ++i)
      ASSERT_NEAR(split.gradients.at(name)[i], expected[i], 1e-11) << name;
  }
}

// Where several parts have the same lines, one of them counts them. The numbers of an update's random bits
// are equal for copies and differ otherwise. All parts' units are equally large.
TEST(Parts, HoldEveryElementAndCountItOnce) {
  for (const Case& c : cases()) {
    for (const int parts : {1, 2, 4}) {
      SCOPED_TRACE(testing::Message() << c.name << ", " << parts << " parts");
      const Model whole(c.config, DType::kF32, host_ops());
      std::map<std::string, std::vector<int>> holders, counters;
      std::map<std::string, std::map<std::int64_t, std::int64_t>> elements, numbers;  // by the other
      for (int part = 0; part < parts; ++part) {
        const Model model(c.config, DType::kF32, host_ops(), 0, {parts, part, false});
        EXPECT_EQ(model.parameter_count(), whole.parameter_count());
        for (std::size_t u = 0; u < model.units().size(); ++u) {
          const Unit& unit = model.units()[u];
          const Model first_part(c.config, DType::kF32, host_ops(), 0, {parts, 0});
          EXPECT_EQ(unit.count, first_part.units()[u].count);
          for (std::size_t i = 0; i < unit.params.size(); ++i) {
            const Param& p = unit.params[i];
            EXPECT_EQ(p.whole_count(), whole.units()[u].params[i].count()) << p.name;
            for (auto* all : {&holders, &counters})
              (*all)[p.name].resize(static_cast<std::size_t>(p.whole_count()));
            for (const Band& band : p.bands) {
              const std::int64_t first = band.line * p.line(), end = first + band.lines * p.line();
              p.for_runs(first, end, [&](std::int64_t at, std::int64_t to, std::int64_t n) {
                for (std::int64_t j = 0; j < n; ++j) {
                  ++holders[p.name][static_cast<std::size_t>(to + j)];
                  counters[p.name][static_cast<std::size_t>(to + j)] += band.counted ? 1 : 0;
                  std::int64_t number = -1;
                  p.for_numbers(at + j, at + j + 1,
                                [&](std::int64_t, std::int64_t own, std::int64_t) { number = own; });
                  const auto [it, fresh] = elements[p.name].try_emplace(number, to + j);
                  EXPECT_EQ(it->second, to + j) << "two elements of " << p.name << " have one number";
                  const auto same = numbers[p.name].try_emplace(to + j, number).first;
                  EXPECT_EQ(same->second, number) << "copies of an element of " << p.name << " have two";
                }
              });
            }
          }
        }
      }
      for (const auto& [name, counts] : counters) {
        EXPECT_TRUE(std::all_of(counts.begin(), counts.end(), [](int n) { return n == 1; })) << name;
        const auto& of = holders.at(name);
        EXPECT_TRUE(std::all_of(of.begin(), of.end(), [](int n) { return n >= 1; })) << name;
      }
      if (HasFailure()) return;
    }
  }
}

// Each query head has the key and value head that it has in the whole model.
TEST(Parts, QueryHeadsKeepTheirKeys) {
  for (const Case& c : cases()) {
    for (const int parts : {1, 2, 4}) {
      for (int part = 0; part < parts; ++part) {
        const TensorShard place{parts, part};
        const ModelConfig here = model::shard_config(c.config, place);
        ASSERT_EQ(here.heads % here.kv_heads, 0);
        for (std::int64_t h = 0; h < here.heads; ++h) {
          EXPECT_EQ(model::kv_head_of(c.config, place, h / (here.heads / here.kv_heads)),
                    (part * here.heads + h) / (c.config.heads / c.config.kv_heads));
        }
      }
    }
  }
}

TEST(Parts, WhatDoesNotDivideIsRefused) {
  ModelConfig c = reference_llama();  // 8 heads, inner width 172
  const Error heads = error_of([&] { validate_parts(c, 3); });
  EXPECT_EQ(heads.where(), "parallel.tensor");
  EXPECT_EQ(heads.message(), "3 parts do not divide the 8 heads of attention");
  EXPECT_EQ(heads.hint(), "heads and inner width are divided by 1, 2, 4");
  EXPECT_EQ(error_of([&] { validate_parts(c, 8); }).message(),
            "8 parts do not divide the 172 elements of the inner width");
  c.vocab_size = 5;
  EXPECT_EQ(error_of([&] { validate_parts(c, 4); }).message(),
            "of 4 parts the last has no token of a vocabulary of 5");
  EXPECT_EQ(error_of([&] { validate_parts(c, 4); }).exit_code(), 2);
}

// <A x, y> = <x, A' y> of what has a backward: gathered rows and summed pieces are each other's; of a sum
// whose result all parts go on with, and of rows that all parts read, one is the identity and the other the
// sum.
TEST(TensorParallelGroup, BackwardsAreTheAdjoints) {
  constexpr int kParts = 4;
  constexpr std::int64_t kPiece = 6;
  std::mutex mutex;
  double gathered[2] = {}, summed[2] = {}, read[2] = {};
  LocalParts(kParts).run([&](int part, TensorParallelGroup& exchange) {
    HostStream s("test", HostStream::Mode::kInline);
    const auto vector = [&](const char* name, std::int64_t n, bool alike = false) {
      std::vector<double> v;
      for (std::int64_t i = 0; i < n; ++i) {
        const auto at = static_cast<std::uint64_t>((alike ? 0 : part * 1000) + i);
        v.push_back(static_cast<double>(reference_hash(name, at) >> 40) * 0x1p-24 - 0.5);
      }
      return v;
    };
    const auto view = [](std::vector<double>& v) {
      return View(v.data(), DType::kF64, 1, static_cast<std::int64_t>(v.size()));
    };
    const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) {
      double sum = 0;
      for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
      return sum;
    };
    // Pieces x of the rows are gathered into all rows, with which every part goes on with its own gradient y.
    std::vector<double> x = vector("x", kPiece), y = vector("y", kParts * kPiece), ax(y.size()),
                        aty(x.size());
    exchange.all_gather(s, view(x), view(ax));
    exchange.reduce_scatter(s, view(y), view(aty));
    exchange.end(s), exchange.end(s);
    // A sum s of all parts' z, whose gradient t is alike on all: it counts once, and is each part's.
    std::vector<double> z = vector("z", kPiece), t = vector("t", kPiece, true), az = z;
    exchange.all_reduce(s, view(az));
    exchange.end(s);
    // Rows r, alike on all, which every part goes on with: their gradient is the sum.
    std::vector<double> r = vector("r", kPiece, true), q = vector("q", kPiece), atq = q;
    exchange.all_reduce(s, view(atq));
    exchange.end(s);
    std::lock_guard lock(mutex);
    gathered[0] += dot(ax, y), gathered[1] += dot(x, aty);
    summed[0] = dot(az, t), summed[1] += dot(z, t);
    read[0] += dot(r, q), read[1] = dot(r, atq);
  });
  for (const double* both : {gathered, summed, read}) EXPECT_NEAR(both[0], both[1], 1e-14);
}

}  // namespace
}  // namespace zg::test
