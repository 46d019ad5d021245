// Context parallelism: ranks that have parts of the same sequences together compute what one rank computes
// that has the sequences whole, and nothing but their number changes a bit.
#include <fmt/core.h>

#include "engine/ranks_distance.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kTime = 24;  // chunks of 3 with four ranks

// Odd sizes, whose heads four ranks can share.
ModelConfig model_of(bool llama) {
  ModelConfig c = reference_llama();
  if (!llama) {
    c = reference_gpt2();
    c.width = 176, c.heads = c.kv_heads = 8, c.head_size = 22, c.inner = 172, c.layers = 5;
  }
  return c;
}

TinySetup setup_of(bool llama, DType dtype) {
  TinySetup s;
  s.model = model_of(llama);
  s.dtype = dtype;
  s.layout.micro_batch = {2, kTime};
  s.layout.micro_batches = 4;
  s.layout.state_segment_bytes = 300000;
  return s;
}

RanksWay in_parts(int ranks, int shards, bool keep_weights, int context,
                  ContextMethod method = ContextMethod::kRing) {
  RanksWay way{ranks, shards, keep_weights};
  way.context = context, way.method = method;
  return way;
}
std::string text_of(const RanksWay& w) {
  return fmt::format("{} ranks, {} shards, weights kept {}, context {} {}", w.ranks, w.shards, w.keep_weights,
                     w.context, w.method == ContextMethod::kRing ? "ring" : "ulysses");
}

// Both methods, with one and two data ranks, ZeRO 0 and 3.
std::vector<RanksWay> ways() {
  std::vector<RanksWay> all;
  for (const ContextMethod method : {ContextMethod::kRing, ContextMethod::kUlysses}) {
    for (const auto& [context, data] : {std::pair(2, 1), std::pair(2, 2), std::pair(4, 1)}) {
      const int ranks = context * data;
      all.push_back(in_parts(ranks, 1, false, context, method));
      all.push_back(in_parts(ranks, ranks, false, context, method));
    }
  }
  return all;
}

// A step of SGD with rate 1 is the gradient, of whatever size; AdamW's is not, so it comes with clipping,
// whose norm must be that of all ranks.
TEST(ContextParallel, InFp64IsOneRank) {
  for (const bool llama : {false, true}) {
    for (const bool sgd : {true, false}) {
      TinySetup setup = setup_of(llama, DType::kF64);
      setup.layout.micro_batch.sequences = 1, setup.layout.micro_batches = 2, setup.eval_micro_batches = 2;
      if (sgd) setup = with_sgd(setup);
      const RanksOutcome one = train_on_ranks(setup, {}, 2);
      for (const RanksWay& way : ways()) {
        if (!sgd && way.ranks == way.context) continue;
        SCOPED_TRACE(text_of(way) + (llama ? ", llama" : ", gpt2") + (sgd ? ", sgd" : ", adamw"));
        const RanksOutcome many = train_on_ranks(setup, way, 2);
        expect_near(many.losses, one.losses, 1e-11, "losses");
        expect_near(many.norms, one.norms, 1e-11, "norms");
        expect_near(many.evals, one.evals, 1e-11, "evals");
        expect_near(as_doubles(many.weights), as_doubles(one.weights), 1e-11);
        if (HasFailure()) return;
      }
    }
  }
}

// AdamW's first moment after a step is the clipped gradient times a constant.
TEST(ContextParallel, InFp32IsOneRank) {
  for (const bool llama : {false, true}) {
    const TinySetup setup = setup_of(llama, DType::kF32);
    const RanksOutcome one = train_on_ranks(setup, {}, 2, Look::kInside);
    for (const RanksWay& way : ways()) {
      SCOPED_TRACE(text_of(way) + (llama ? ", llama" : ", gpt2"));
      const RanksOutcome many = train_on_ranks(setup, way, 2, Look::kInside);
      EXPECT_NEAR(many.losses[0], one.losses[0], 1e-6 * one.losses[0]);
      expect_near(many.losses, one.losses, 1.8e-5, "losses");  // AdamW magnifies; see ranks_matrix_test.cpp
      expect_near(many.norms, one.norms, 8e-5, "norms");
      for (const auto& [name, values] : one.first_gradients)
        EXPECT_LE(relative_to_largest(many.first_gradients.at(name), values), 1e-5) << name;
      for (const auto& [name, weights] : one.first_weights)
        EXPECT_TRUE(same_bits(weights, many.first_weights.at(name)));
      if (HasFailure()) return;
    }
  }
}

// More queries of a key/value head than ranks, three key/value heads, and a tied head, on three ranks.
TEST(ContextParallel, ARingTakesAnyHeads) {
  TinySetup setup = with_sgd(setup_of(true, DType::kF64));
  setup.layout.micro_batches = 1, setup.model.layers = 2, setup.eval_micro_batches = 1;
  setup.model.heads = 6, setup.model.kv_heads = 3, setup.model.tied = true;
  const RanksOutcome one = train_on_ranks(setup, {}, 2);
  for (const int context : {2, 3, 4}) {
    SCOPED_TRACE(context);
    const RanksOutcome many = train_on_ranks(setup, in_parts(context, context, false, context), 2);
    expect_near(many.losses, one.losses, 1e-11, "losses");
    expect_near(as_doubles(many.weights), as_doubles(one.weights), 1e-11);
  }
}

// In 16 bits the first loss differs by what a rounding to bf16 makes of it, and steps that overflow are
// skipped by all ranks.
TEST(ContextParallel, In16Bits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    TinySetup setup = setup_of(true, dtype);
    if (dtype == DType::kF16) {
      setup.clip = 0;
      setup.rule = [](std::int64_t step, UpdateRule& rule) { rule.loss_scale = step == 1 ? 1e300 : 64; };
    }
    const RanksOutcome one = train_on_ranks(setup, {}, 3);
    for (const ContextMethod method : {ContextMethod::kRing, ContextMethod::kUlysses}) {
      const RanksOutcome many = train_on_ranks(setup, in_parts(4, 4, false, 2, method), 3);
      EXPECT_EQ(many.skipped, one.skipped);
      EXPECT_NEAR(many.losses[0], one.losses[0], 0x1p-8 * one.losses[0]);
      EXPECT_NEAR(many.losses[2], one.losses[2], 0x1p-6 * one.losses[2]);
    }
  }
}

// What changes no bit: how state is sharded, where it is, what is kept for the backward, when and where
// updates run.
TEST(ContextParallel, NothingElseChangesABit) {
  for (const ContextMethod method : {ContextMethod::kRing, ContextMethod::kUlysses}) {
    for (const bool llama : {false, true}) {
      TinySetup setup = setup_of(llama, DType::kF32);
      const RanksOutcome plain = train_on_ranks(setup, in_parts(4, 1, false, 2, method), 3);
      const auto expect_same = [&](const TinySetup& s, const RanksWay& way, const char* what) {
        SCOPED_TRACE(fmt::format("{}: {}", what, text_of(way)));
        const RanksOutcome other = train_on_ranks(s, way, 3);
        EXPECT_TRUE(same_bits(other.losses, plain.losses));
        EXPECT_TRUE(same_bits(other.norms, plain.norms));
        for (const auto& [name, weights] : plain.weights)
          EXPECT_TRUE(same_bits(weights, other.weights.at(name))) << name;
        for (const auto& [name, m] : plain.moments) EXPECT_TRUE(same_bits(m, other.moments.at(name))) << name;
      };
      expect_same(setup, in_parts(4, 4, true, 2, method), "ZeRO 1");
      expect_same(setup, in_parts(4, 4, false, 2, method), "ZeRO 3");
      expect_same(setup, in_parts(4, 2, false, 2, method), "hybrid");
      TinySetup other = setup;
      other.room = Room::kSmallest;
      expect_same(other, in_parts(4, 1, false, 2, method), "host memory");
      other.layout.drives = 1;
      expect_same(other, in_parts(4, 4, false, 2, method), "NVMe");
      other.layout.recompute = false;
      expect_same(other, in_parts(4, 4, false, 2, method), "NVMe, all is kept");
      other = setup;
      other.layout.recompute = false;
      expect_same(other, in_parts(4, 1, false, 2, method), "all is kept");
      other.timing = UpdateTiming::kSeparate, other.layout.device_updates = kAllUnits;
      expect_same(other, in_parts(4, 4, false, 2, method), "updates in a phase of their own, on the device");
      if (HasFailure()) return;
    }
  }
}

// By hand. Of c ranks with n tokens each and a block's keys and values of K bytes in T and G bytes in sums, a
// ring passes K (c - 1) in a forward, and K (c - 1) + G c in a backward. Ulysses sends (c - 1) / c of q, k, v
// and of the result in each of the two. A recomputed forward exchanges again; so does an evaluation.
TEST(ContextBytes, AreTheClosedForms) {
  for (const bool llama : {false, true}) {
    for (const bool recompute : {true, false}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        for (const RanksWay& way : ways()) {
          TinySetup setup = setup_of(llama, dtype);
          setup.layout.recompute = recompute;
          const ModelConfig& m = setup.model;
          const std::int64_t c = way.context, n = 2 * kTime / c,
                             t = static_cast<std::int64_t>(size_of(dtype));
          const std::int64_t q = m.heads * m.head_size, kv = 2 * m.kv_heads * m.head_size;
          const std::int64_t blocks = m.layers * 4 / (way.ranks / c), forwards = recompute ? 2 : 1;
          const bool ring = way.method == ContextMethod::kRing;
          const std::int64_t forward = ring ? (c - 1) * n * kv * t : (c - 1) * n * (2 * q + kv) * t / c;
          const std::int64_t backward = ring ? forward + c * n * kv * 4 : forward;
          const std::int64_t bytes = blocks * (forwards * forward + backward);
          std::vector<CommTraffics> planned;
          for (int rank = 0; rank < way.ranks; ++rank) {
            LayoutOptions o = setup.layout;
            o.micro_batch.time /= c, o.micro_batches /= way.ranks / c, o.gradient = dtype;
            o.sharding = {way.ranks, rank, way.shards, way.keep_weights};
            o.parts.context = way.context, o.parts.context_method = way.method;
            const Model model(setup.model, dtype, host_ops());
            const Layout layout(model, o);
            const CommTraffic of =
                comm_per_step(layout, StepPrograms(layout, setup.timing))[CommAxis::kContext];
            SCOPED_TRACE(text_of(way));
            EXPECT_EQ(of.sent, bytes);
            EXPECT_EQ(of.received, bytes);
            const std::int64_t sequences = 2;
            EXPECT_EQ(of.calls, ring ? blocks * 2 * (forwards * (c - 1) + 2 * c - 1)
                                     : blocks * sequences * 2 * (forwards + 1));
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

// The time that ranks exchange parts is counted, and those whose sequences are whole exchange nothing there.
TEST(ContextSeconds, AreOfTheAxis) {
  auto ranks = make_local_ranks(2, {.timeout_seconds = 60});
  for (const int context : {1, 2}) {
    std::vector<std::thread> threads;
    for (auto& rank : ranks) {
      threads.emplace_back([&, comm = rank.get()] {
        TinySetup s = setup_of(true, DType::kF32);
        s.layout.sharding = {2, comm->rank(), 1, false};
        s.layout.parts.context = context;
        s.comm = comm;
        TinyRun run(s);
        run.initialize();
        const StepResult r = run.step(Then::kPause);
        EXPECT_EQ(r.comm_seconds[CommAxis::kContext] > 0, context == 2);
        EXPECT_EQ(r.comm[CommAxis::kContext].calls > 0, context == 2);
        EXPECT_EQ(run.engine().meeting(CommAxis::kContext).calls > 0, context == 2);
        EXPECT_FALSE(run.engine().meeting(CommAxis::kContext).inside);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

// A sequence for which a device has no room is trained by several: what a rank keeps, and the least memory
// that it can do with, are divided by their number. A ring has two parts of keys and values in its workspace,
// with their gradients; Ulysses keeps the result of attention twice.
TEST(ContextMemory, IsDividedByTheRanks) {
  struct Bytes {
    std::int64_t saved, device;
  };
  const auto bytes_of = [](int context, ContextMethod method) {
    TinySetup s = setup_of(true, DType::kF32);
    s.model.context = 4096;
    LayoutOptions o = s.layout;
    o.recompute = false, o.gradient = s.dtype, o.micro_batches = 1;
    o.micro_batch = {1, s.model.context / context};
    o.sharding.ranks = context;
    o.parts.context = context, o.parts.context_method = method;
    const Model model(s.model, s.dtype, host_ops(), 1 << 20);
    const Layout layout(model, o);
    const auto least = smallest_budgets(layout, StepPrograms(layout, s.timing), 0, false);
    return Bytes{model.saved_bytes(layout.options.micro_batch), least->device + layout.workspace_charge()};
  };
  const Bytes one = bytes_of(1, ContextMethod::kRing);
  for (const ContextMethod method : {ContextMethod::kRing, ContextMethod::kUlysses}) {
    const bool ring = method == ContextMethod::kRing;
    const Bytes many = bytes_of(4, method);
    EXPECT_LT(static_cast<double>(many.saved), static_cast<double>(one.saved) * (ring ? 0.26 : 0.31));
    EXPECT_LT(static_cast<double>(many.device), static_cast<double>(one.device) * 0.45) << one.device;
  }
}

TEST(Agreement, KnowsOfParts) {
  TinySetup setup = setup_of(true, DType::kF32);
  const auto lines = [&](int context, ContextMethod method) {
    LayoutOptions o = setup.layout;
    o.micro_batch.time /= context;
    o.sharding.ranks = 4, o.parts.context = context, o.parts.context_method = method;
    const Model model(setup.model, setup.dtype, host_ops());
    const Layout layout(model, o);
    return agreement_of(layout, StepPrograms(layout, setup.timing));
  };
  const auto ring = lines(2, ContextMethod::kRing), ulysses = lines(2, ContextMethod::kUlysses);
  EXPECT_EQ(std::count(ring.begin(), ring.end(), "sequences in 2 parts, by a ring"), 1);
  EXPECT_EQ(std::count(ulysses.begin(), ulysses.end(), "sequences in 2 parts, by ulysses"), 1);
  EXPECT_NE(ring, lines(1, ContextMethod::kRing));
  EXPECT_TRUE(std::any_of(ring.begin(), ring.end(), [](const std::string& line) {
    return line.find("backward of unit 3") != std::string::npos;
  }));
}

}  // namespace
}  // namespace zg::test
