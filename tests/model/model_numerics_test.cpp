// Properties of the numbers: agreement with the naive ops, accumulation, chunks of logits, recomputation,
// ignored targets, causality.
#include <gtest/gtest.h>

#include <cmath>

#include "model/head.hpp"
#include "support/model_runner.hpp"
#include "support/naive_ops.hpp"
#include "support/reference.hpp"

namespace zg::test {
namespace {

ModelConfig small(ModelConfig c) {
  c.layers = 2;
  return c;
}

Batch first_batch(BatchShape shape) {
  Batch b = reference_batches()[0];
  b.shape = shape;
  b.ids.resize(static_cast<std::size_t>(shape.rows()));
  b.targets.resize(b.ids.size());
  return b;
}

struct Numerics : testing::TestWithParam<Arch> {
  ModelConfig config() const {
    return small(GetParam() == Arch::kGpt2 ? reference_gpt2() : reference_llama());
  }
  ModelRunner runner(DType t) {
    ModelRunner r(config(), t, host_ops(), stream);
    r.fill(reference_weight);
    return r;
  }
  HostStream stream{"test", HostStream::Mode::kInline};
};

double largest(const View& x) {
  double most = 0;
  for (std::int64_t c = 0; c < x.cols; ++c) most = std::max(most, std::abs(load(x, 0, c)));
  return most;
}

// Largest |a - b| over largest |b|, of flat tensors.
double difference(const View& a, const View& b) {
  double most = 0;
  for (std::int64_t c = 0; c < a.cols; ++c) most = std::max(most, std::abs(load(a, 0, c) - load(b, 0, c)));
  return most / largest(b);
}

// The same formulae in another order of summation: sums of up to 688 terms, a few of them after each other,
// whose roundings add up to at most some hundred eps (2.2e-16) of the largest element.
constexpr double kFp64 = 500 * 2.2e-16;

TEST_P(Numerics, AgreeWithTheNaiveOps) {
  NaiveOps naive_ops;
  ModelRunner naive(config(), DType::kF64, naive_ops, stream), fast = runner(DType::kF64);
  naive.fill(reference_weight);
  const Batch batch = first_batch({3, 5});
  const double expected = naive.forward_backward(batch);
  EXPECT_NEAR(fast.forward_backward(batch), expected, kFp64 * expected);
  for (std::size_t u = 0; u < fast.units().size(); ++u) {
    EXPECT_LT(difference(fast.grads(u), naive.grads(u)), kFp64) << fast.units()[u].name;
  }
  const std::vector<double> a = fast.logits(batch), b = naive.logits(batch);
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], kFp64 * 4) << i;
}

TEST_P(Numerics, GradientsAreAddedTo) {
  ModelRunner once = runner(DType::kF64), twice = runner(DType::kF64);
  const Batch batch = first_batch({2, 7});
  once.forward_backward(batch);
  twice.forward_backward(batch);
  twice.forward_backward(batch);
  for (std::size_t u = 0; u < once.units().size(); ++u) {
    View expected = once.grads(u);
    for (std::int64_t c = 0; c < expected.cols; ++c) store(expected, 0, c, 2 * load(expected, 0, c));
    EXPECT_LT(difference(twice.grads(u), expected), kFp64) << once.units()[u].name;
  }
}

// Whatever the memory held, gaps between parameters included. Chunks of logits after the first add.
TEST_P(Numerics, OverwrittenGradientsHaveTheBitsOfThoseAddedToZero) {
  const Batch batch = first_batch({5, 29});
  for (const DType t : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(name_of(t));
    ModelRunner added(config(), t, host_ops(), stream, 1), overwritten(config(), t, host_ops(), stream, 1);
    added.fill(reference_weight);
    overwritten.fill(reference_weight);
    overwritten.poison_grads();
    const double loss = added.forward_backward(batch);
    EXPECT_EQ(overwritten.forward_backward(batch, Recompute::kNo, 1, Gradients::kOverwrite), loss);
    for (std::size_t u = 0; u < added.units().size(); ++u) {
      const View a = added.grads(u), b = overwritten.grads(u);
      ASSERT_EQ(std::memcmp(a.data, b.data, static_cast<std::size_t>(a.cols) * size_of(a.dtype)), 0)
          << added.units()[u].name;
    }
  }
}

class CountsZeroes : public NaiveOps {
 public:
  void zero(Stream& s, View x) override {
    zeroed += x.count();
    NaiveOps::zero(s, x);
  }
  std::int64_t zeroed = 0;
};

// Norms and embeddings add to their gradients; all others are products, or come with one.
TEST_P(Numerics, OverwritingClearsWhatNoProductWrites) {
  CountsZeroes ops;
  ModelRunner r(config(), DType::kF64, ops, stream);
  r.fill(reference_weight);
  r.poison_grads();
  const Batch batch = first_batch({2, 7});
  r.forward_backward(batch, Recompute::kNo, 1, Gradients::kOverwrite);
  std::int64_t expected = batch.shape.rows() * config().width;  // the head's dx
  for (const Unit& unit : r.units()) {
    expected += unit.count;
    for (const Param& p : unit.params) {
      const bool added = p.name.find("ln_") != std::string::npos ||
                         p.name.find("norm") != std::string::npos || p.name == "wpe.weight" ||
                         p.name == "model.embed_tokens.weight";
      if (!added) expected -= p.count();
    }
  }
  EXPECT_EQ(ops.zeroed, expected);
}

// Recomputed activations are the same bits, and so is all that follows from them, for any type.
TEST_P(Numerics, RecomputationChangesNoBit) {
  const Batch batch = first_batch({2, 13});
  for (const DType t : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(name_of(t));
    ModelRunner kept = runner(t), recomputed = runner(t);
    const double loss = kept.forward_backward(batch);
    EXPECT_EQ(recomputed.forward_backward(batch, Recompute::kYes), loss);
    EXPECT_EQ(kept.loss(batch), loss);
    for (std::size_t u = 0; u < kept.units().size(); ++u) {
      const View a = kept.grads(u), b = recomputed.grads(u);
      ASSERT_EQ(std::memcmp(a.data, b.data, static_cast<std::size_t>(a.cols) * size_of(a.dtype)), 0)
          << kept.units()[u].name;
    }
  }
}

TEST_P(Numerics, BlockForwardTwiceGivesTheSameBits) {
  const Batch batch = first_batch({2, 13});
  for (const DType t : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    ModelRunner r = runner(t);
    const Bytes x = r.forward(batch);
    const std::int64_t row_bytes =
        batch.shape.rows() * config().width * static_cast<std::int64_t>(size_of(t));
    Bytes out1(row_bytes), out2(row_bytes), workspace(r.model().block_workspace_bytes(batch.shape));
    const std::int64_t saved_bytes = r.model().saved_bytes(batch.shape);
    Bytes saved1(saved_bytes), saved2(saved_bytes), saved3(saved_bytes);
    const auto run = [&](View out, const Bytes& saved) {
      workspace.poison();
      r.model().run(stream, out ? ModelCall::kBlock : ModelCall::kBlockAgain,
                    {.shape = batch.shape,
                     .layer = 0,
                     .weights = r.weights(1),
                     .input = r.rows(x, batch),
                     .output = out,
                     .saved = saved.data(),
                     .workspace = workspace.data()});
    };
    run(r.rows(out1, batch), saved1);
    run(r.rows(out2, batch), saved2);
    run(View{}, saved3);
    stream.synchronize();
    EXPECT_TRUE(out1 == out2) << name_of(t);
    EXPECT_TRUE(saved1 == saved2) << name_of(t);
    EXPECT_TRUE(saved1 == saved3) << name_of(t);
  }
}

TEST_P(Numerics, WithoutValidTargetsNothingIsLearned) {
  ModelRunner r = runner(DType::kF32);
  Batch batch = first_batch({2, 7});
  batch.targets.assign(batch.targets.size(), -100);
  EXPECT_EQ(r.forward_backward(batch), 0.0);
  for (std::size_t u = 0; u < r.units().size(); ++u) EXPECT_EQ(largest(r.grads(u)), 0.0) << r.units()[u].name;
}

// A token changes the logits from its own position on, in its own sequence, and nothing else.
TEST_P(Numerics, CausalAndSequencesApart) {
  ModelRunner r = runner(DType::kF64);
  Batch batch = first_batch({2, 11});
  const std::vector<double> before = r.logits(batch);
  batch.ids[4] = (batch.ids[4] + 1) % 257;
  const std::vector<double> after = r.logits(batch);
  for (std::size_t row = 0; row < 22; ++row) {
    double most = 0;
    for (std::size_t c = 0; c < 257; ++c)
      most = std::max(most, std::abs(after[row * 257 + c] - before[row * 257 + c]));
    if (row >= 4 && row < 11) {
      EXPECT_GT(most, 1e-6) << row;
    } else {
      EXPECT_EQ(most, 0.0) << row;
    }
  }
}

// The relative error of one parameter's gradient, which is times `scale` in `rounded`.
double gradient_error(const ModelRunner& rounded, const ModelRunner& exact, std::size_t unit, const Param& p,
                      double scale = 1) {
  double error = 0, norm = 0;
  for (std::int64_t i = 0; i < p.count(); ++i) {
    const double e = load(exact.grads(unit), 0, p.offset + i);
    error += std::pow(load(rounded.grads(unit), 0, p.offset + i) / scale - e, 2);
    norm += e * e;
  }
  return std::sqrt(error / norm);
}

// `ulp`: of a number in [1, 2).
void expect_near_fp64(ModelRunner& rounded, ModelRunner& exact, double scale, double ulp) {
  const Batch batch = reference_batches()[0];
  const double loss = exact.forward_backward(batch);
  // A logit (at most 3.2) is off by a few roundings of a quarter ulp of itself, in either direction: 2.5 ulp
  // for each of 61.
  EXPECT_NEAR(rounded.forward_backward(batch, Recompute::kNo, scale), loss, 2.5 * ulp * 61);
  for (std::size_t u = 0; u < exact.units().size(); ++u) {
    for (const Param& p : exact.units()[u].params) {
      // Around 15 rounded tensors a block, forward and backward, each with a relative error of a quarter ulp:
      // the square root of 60 of them is 2 ulp, and sums that cancel (biases, norms) make a few times that.
      EXPECT_LT(gradient_error(rounded, exact, u, p, scale), 8 * ulp) << p.name;
    }
  }
}

TEST_P(Numerics, Bf16StaysNearFp64) {
  ModelRunner exact = runner(DType::kF64), rounded = runner(DType::kBF16);
  expect_near_fp64(rounded, exact, 1, 0x1p-7);
}

// The scale keeps gradients from the subnormals of fp16, whose steps are larger.
TEST_P(Numerics, Fp16StaysNearFp64) {
  ModelRunner exact = runner(DType::kF64), rounded = runner(DType::kF16);
  expect_near_fp64(rounded, exact, 0x1p10, 0x1p-10);
}

// A loss scale of a power of two changes no rounding where nothing underflows.
TEST_P(Numerics, TheLossScaleIsAFactorOfEveryGradient) {
  const Batch batch = first_batch({2, 13});
  for (const DType t : {DType::kF64, DType::kF32, DType::kBF16}) {
    SCOPED_TRACE(name_of(t));
    ModelRunner plain = runner(t), scaled = runner(t);
    const double loss = plain.forward_backward(batch);
    EXPECT_EQ(scaled.forward_backward(batch, Recompute::kNo, 4096), loss);
    for (std::size_t u = 0; u < plain.units().size(); ++u) {
      const View a = plain.grads(u), b = scaled.grads(u);
      for (std::int64_t c = 0; c < a.cols; ++c) ASSERT_EQ(load(b, 0, c), 4096 * load(a, 0, c)) << c;
    }
  }
}

// What finish_gradient() says of all gradients, as fp16.
double fp16_norm(const ModelRunner& runner, Stream& stream) {
  double sum = 0;
  for (std::size_t u = 0; u < runner.units().size(); ++u) {
    const View grads = runner.grads(u);
    std::vector<fp16> out(static_cast<std::size_t>(grads.cols));
    double part = 0, partials[Ops::kSumPartials];
    host_ops().finish_gradient(stream, grads, View(out.data(), DType::kF16, 1, grads.cols),
                               View(&part, DType::kF64, 1, 1),
                               View(partials, DType::kF64, 1, Ops::kSumPartials));
    stream.synchronize();
    sum += part;
  }
  return std::sqrt(sum);
}

// An output matrix of 2^-18 and a final norm of 2^-8 make all gradients below them, but no activation,
// smaller than what fp16 has numbers for: the loss scale brings them back. Too large a scale shows in the
// norm.
TEST_P(Numerics, TheLossScaleRecoversWhatUnderflows) {
  ModelConfig c = config();
  c.tied = false;
  const auto tiny = [](const Param& p, std::int64_t row, std::int64_t column) {
    const double value =
        static_cast<double>(static_cast<float>(fp16(static_cast<float>(reference_weight(p, row, column)))));
    if (p.name.ends_with("lm_head.weight")) return value < 0 ? -0x1p-18 : 0x1p-18;
    if (p.name == "ln_f.weight" || p.name == "model.norm.weight") return 0x1p-8;
    return value;
  };
  const auto make = [&](DType t) {
    ModelRunner r(c, t, host_ops(), stream);
    r.fill(tiny);
    return r;
  };
  const Batch batch = reference_batches()[0];
  ModelRunner exact = make(DType::kF64), lost = make(DType::kF16), scaled = make(DType::kF16),
              overflowed = make(DType::kF16);
  constexpr double kScale = 0x1p15;
  exact.forward_backward(batch);
  lost.forward_backward(batch);
  scaled.forward_backward(batch, Recompute::kNo, kScale);
  overflowed.forward_backward(batch, Recompute::kNo, 4 * kScale);
  for (std::size_t u = 0; u < exact.head(); ++u) {
    for (const Param& p : exact.units()[u].params) {
      EXPECT_GT(gradient_error(lost, exact, u, p), 0.9) << p.name;
      // As in expect_near_fp64().
      EXPECT_LT(gradient_error(scaled, exact, u, p, kScale), 8 * 0x1p-10) << p.name;
    }
  }
  EXPECT_TRUE(std::isfinite(fp16_norm(scaled, stream)));
  EXPECT_FALSE(std::isfinite(fp16_norm(overflowed, stream)));
}

INSTANTIATE_TEST_SUITE_P(Model, Numerics, testing::Values(Arch::kGpt2, Arch::kLlama), [](const auto& one) {
  return std::string(one.param == Arch::kGpt2 ? "gpt2" : "llama");
});

// A vocabulary so large that the logits come in chunks of 64, 64 and 22 rows: the same as three batches.
TEST(Head, ChunksAddUpToTheWhole) {
  ModelConfig c = reference_gpt2();
  c.vocab_size = 30011;
  c.context = 150;
  c.width = 8;
  c.heads = c.kv_heads = 2;
  c.head_size = 4;
  c.inner = 32;
  ASSERT_EQ(model::head_chunk_rows(c, DType::kF64, 150, host_ops(), {host_ops().logits_bytes()}), 64);
  ASSERT_EQ(model::head_chunk_rows(c, DType::kF64, 22, host_ops(), {host_ops().logits_bytes()}), 22);
  HostStream stream("test", HostStream::Mode::kInline);
  ModelRunner whole(c, DType::kF64, host_ops(), stream), parts(c, DType::kF64, host_ops(), stream);
  whole.fill(reference_weight);
  parts.fill(reference_weight);

  std::vector<double> x(150 * 8), dx(x.size()), dx_parts(x.size());
  std::vector<std::int32_t> targets(150);
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = static_cast<double>(reference_hash("x", i) >> 40) * 0x1p-24 - 0.5;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    targets[i] = i % 7 == 0 ? -1 : static_cast<std::int32_t>(reference_hash("targets", i) % 30011);
  }
  const auto run = [&](ModelRunner& r, std::int64_t first, std::int64_t n, std::vector<double>& d) {
    double sum = 0;
    const BatchShape shape{1, n};
    const Bytes workspace(r.model().head_workspace_bytes(shape));
    r.model().run(stream, ModelCall::kHeadLossAndGradient,
                  {.shape = shape,
                   .weights = r.weights(r.head()),
                   .grads = r.grads(r.head()),
                   .input = View(x.data() + first * 8, DType::kF64, n, 8),
                   .activation_gradient = View(d.data() + first * 8, DType::kF64, n, 8),
                   .workspace = workspace.data(),
                   .table = r.weights(0),
                   .table_grads = r.grads(0),
                   .targets = View(targets.data() + first, DType::kI32, 1, n),
                   .loss_sum = View(&sum, DType::kF64, 1, 1)});
    stream.synchronize();
    return sum;
  };
  const double loss = run(whole, 0, 150, dx);
  double loss_parts = 0;
  for (const std::int64_t first : {0, 64, 128}) {
    loss_parts += run(parts, first, std::min<std::int64_t>(64, 150 - first), dx_parts);
  }
  EXPECT_NEAR(loss, loss_parts, 1e-14 * loss);
  EXPECT_LT(difference(whole.grads(0), parts.grads(0)), kFp64);
  EXPECT_LT(difference(whole.grads(whole.head()), parts.grads(parts.head())), kFp64);
  const View a(dx.data(), DType::kF64, 1, 1200), b(dx_parts.data(), DType::kF64, 1, 1200);
  EXPECT_LT(difference(a, b), kFp64);
}

// A call names the operand that it lacks or that does not fit, and leaves alone what its kind does not take.
TEST(CallOperandsDeathTest, AreNamedWhereTheyAreMissingOrDoNotFit) {
  HostStream s("test", HostStream::Mode::kInline);
  ModelRunner r(reference_gpt2(), DType::kF64, host_ops(), s);
  r.fill(reference_weight);
  const Model& model = r.model();
  const BatchShape shape{1, 3};
  const Bytes x(model.checkpoint_bytes(shape)), out(x.size()), saved(model.saved_bytes(shape)),
      workspace(model.block_workspace_bytes(shape));
  const auto rows = [&](const Bytes& b) { return View(b.data(), DType::kF64, 3, model.config().width); };
  std::memset(x.data(), 0, static_cast<std::size_t>(x.size()));
  const UnitCall good{.shape = shape,
                      .layer = 0,
                      .weights = r.weights(1),
                      .input = rows(x),
                      .output = rows(out),
                      .saved = saved.data(),
                      .workspace = workspace.data()};
  model.run(s, ModelCall::kBlock, good);
  const Bytes before(saved.size());
  std::memcpy(before.data(), saved.data(), static_cast<std::size_t>(saved.size()));
  UnitCall call = good;
  call.output = View(out.data(), DType::kF32, 1, 1);  // kBlockAgain has no output
  model.run(s, ModelCall::kBlockAgain, call);
  EXPECT_TRUE(saved == before);
  EXPECT_DEATH(model.run(s, ModelCall::kBlock, call), "block: 1 x 1 of f32, not 3 x ");
  call = good, call.weights = {};
  EXPECT_DEATH(model.run(s, ModelCall::kBlock, call), "block: the operand weights is missing");
  call = good, call.saved = nullptr;
  EXPECT_DEATH(model.run(s, ModelCall::kBlock, call), "block: the operand saved is missing");
  call = good, call.weights = r.weights(0);
  EXPECT_DEATH(model.run(s, ModelCall::kBlock, call), "block: block.0 has .* elements of f64, given 1 x ");
  EXPECT_DEATH(model.run(s, ModelCall::kBlockBackward, good), "the operand grads is missing");
  call = good, call.output = good.input;
  EXPECT_DEATH(model.run(s, ModelCall::kBlock, call), "assertion failed");
  call = good, call.layer = -1;
  EXPECT_DEATH(model.run(s, ModelCall::kBlock, call), "layer -1 of ");
}

// Products as a GPU wants them: rows of all operands are multiples of 16 bytes.
struct PaddedOps final : NaiveOps {
  bool pads_logits() const override { return true; }
  void gemm(Stream& s, View a, View b, View c, const GemmOptions& o) override {
    for (const View& x : {a, b, c}) {
      const auto size = static_cast<std::int64_t>(size_of(x.dtype));
      EXPECT_EQ(x.cols * size % 16, 0) << x.cols << " columns";
      EXPECT_EQ(x.ld * size % 16, 0);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(x.data) % 16, 0u);
    }
    ++products;
    NaiveOps::gemm(s, a, b, c, o);
  }
  int products = 0;
};

struct Vocabulary {
  int tokens = 0;
  BlockTiling blocks = BlockTiling::kWhole;
};

// The padding adds zeros to the end of sums, so it changes no bit; parameters and their gradients have no
// part in it, and the gaps that it uses stay zero. Of 65 tokens in tiles, one of Llama's tiles has no token.
TEST_P(Numerics, APaddedVocabularyChangesNothing) {
  for (const auto& [tied, vocabulary] : {std::pair{true, Vocabulary{257}},
                                         {false, Vocabulary{257}},
                                         {true, Vocabulary{257, BlockTiling::kInTiles}},
                                         {true, Vocabulary{65, BlockTiling::kInTiles}},
                                         {false, Vocabulary{65, BlockTiling::kInTiles}}}) {
    ModelConfig c = config();
    c.tied = tied;
    c.vocab_size = vocabulary.tokens;
    ASSERT_EQ(c.vocab_size % 2, 1);
    NaiveOps plain_ops;
    PaddedOps padded_ops;
    ModelRunner plain(c, DType::kF64, plain_ops, stream, 0, {}, nullptr, vocabulary.blocks),
        padded(c, DType::kF64, padded_ops, stream, 0, {}, nullptr, vocabulary.blocks);
    plain.fill(reference_weight);
    padded.fill(reference_weight);
    EXPECT_EQ(plain.model().parameter_count(), padded.model().parameter_count());
    Batch batch = first_batch({3, 5});
    for (std::vector<std::int32_t>* tokens : {&batch.ids, &batch.targets}) {
      for (std::int32_t& token : *tokens) token = token < 0 ? token : token % vocabulary.tokens;
    }
    EXPECT_EQ(plain.loss(batch), padded.loss(batch));
    EXPECT_EQ(plain.forward_backward(batch), padded.forward_backward(batch));
    EXPECT_GT(padded_ops.products, 0);
    for (std::size_t u = 0; u < plain.units().size(); ++u) {
      View gaps = padded.grads(u);
      for (std::size_t i = 0; i < plain.units()[u].params.size(); ++i) {
        const Param &p = plain.units()[u].params[i], &q = padded.units()[u].params[i];
        ASSERT_EQ(p.name, q.name);
        const View a = plain.grad(u, p), b = padded.grad(u, q);
        ASSERT_EQ(a.count(), b.count());
        for (std::int64_t r = 0; r < a.rows; ++r) {
          for (std::int64_t k = 0; k < a.cols; ++k) {
            ASSERT_EQ(load(a, r, k), load(b, r, k)) << p.name;
            store(b, r, k, 0);
          }
        }
      }
      EXPECT_EQ(largest(gaps), 0) << plain.units()[u].name;
    }
  }
}

struct SomeSizes final : OpSizes {
  SomeSizes(bool pads, std::int64_t groups, std::int64_t logits)
      : pads_(pads), groups_(groups), logits_(logits) {}
  std::int64_t row_groups() const override { return groups_; }
  std::int64_t attention_scratch_bytes(DType, const AttentionShape&) const override { return 0; }
  std::int64_t logits_bytes() const override { return logits_; }
  bool pads_logits() const override { return pads_; }

 private:
  const bool pads_;
  const std::int64_t groups_, logits_;
};

// GPT-2 has 50304 columns of 6 bytes, so 2 GiB hold 7104 rows. Where products want to be large, no chunk is a
// small rest.
TEST(Head, ChunksOfAGpuAreEquallyLarge) {
  const ModelConfig c;
  const SomeSizes host(false, 1, std::int64_t{2} << 30), gpu(true, 1, std::int64_t{2} << 30);
  const auto chunk = [&](const OpSizes& sizes, std::int64_t rows) {
    return model::head_chunk_rows(c, DType::kBF16, rows, sizes, {sizes.logits_bytes()});
  };
  EXPECT_EQ(chunk(host, 8192), 7104);
  EXPECT_EQ(chunk(gpu, 8192), 4096);
  EXPECT_EQ(chunk(gpu, 7104), 7104);
  EXPECT_EQ(chunk(gpu, 7105), 3584);
  EXPECT_EQ(chunk(gpu, 16384), 5504);
  EXPECT_EQ(chunk(gpu, 100), 100);
  EXPECT_EQ(chunk(gpu, 1), 1);
}

// A plan for a device that is not there has the tensors and the memory of a run on it.
TEST(Head, ThePaddingIsPlanned) {
  PaddedOps ops;
  const SomeSizes sizes(true, ops.row_groups(), ops.logits_bytes());
  for (const ModelConfig& c : {reference_gpt2(), reference_llama()}) {
    const Model run(c, DType::kF64, ops), planned(c, DType::kF64, sizes), plain(c, DType::kF64, host_ops());
    EXPECT_EQ(run.head_workspace_bytes({2, 7}), planned.head_workspace_bytes({2, 7}));
    std::int64_t padded = 0;
    for (std::size_t u = 0; u < run.units().size(); ++u) {
      EXPECT_EQ(run.units()[u].count, planned.units()[u].count);
      padded += run.units()[u].count - plain.units()[u].count;
    }
    // 257 tokens, 320 rows.
    EXPECT_GT(padded, (320 - 257) * c.width - kParamAlign);
    EXPECT_LT(padded, (320 - 257) * c.width + kParamAlign);
  }
}

}  // namespace
}  // namespace zg::test
