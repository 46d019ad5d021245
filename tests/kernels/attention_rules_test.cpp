// Windows, scales, caps and documents of attention on the host.
#include "tests/kernels/attention_rules.hpp"

#include "kernels/host/matrix.hpp"

namespace zg::test {
namespace {

struct HostAttention {
  template <class T>
  void forward(AttentionRun<T>& x) const {
    host::attention<T>(x.shape, {.qkv = {x.qkv.data(), x.qkv.ld()},
                                 .o = {x.o.data(), x.o.ld()},
                                 .lse = x.lse.data(),
                                 .first_keys = x.documents(),
                                 .sinks = x.shape.rule.sinks ? x.sinks.data() : nullptr});
  }
  template <class T>
  void backward(AttentionRun<T>& x) const {
    host::attention_backward<T>(x.shape, {.qkv = {x.qkv.data(), x.qkv.ld()},
                                          .o = {x.o.data(), x.o.ld()},
                                          .lse = x.lse.data(),
                                          .d_o = {x.d_o.data(), x.d_o.ld()},
                                          .dqkv = {x.dqkv.data(), x.dqkv.ld()},
                                          .first_keys = x.documents()});
    if (x.shape.rule.sinks) host::attention_sinks_backward<T>(x.sinks_backward());
  }
};

AttentionShape shape_of(std::int64_t batch, std::int64_t time, std::int64_t heads, std::int64_t kv_heads,
                        std::int64_t head_size) {
  return {.batch = batch, .time = time, .heads = heads, .kv_heads = kv_heads, .head_size = head_size};
}

template <class T>
class AttentionRules : public testing::Test {};
TYPED_TEST_SUITE(AttentionRules, StorageTypes);

TYPED_TEST(AttentionRules, AreTheSoftmaxOfWhatTheyLeave) {
  for (const RuleCase& x : kRuleCases) {
    compare_rule<TypeParam>(shape_of(2, 7, 2, 1, 43), x, HostAttention(), 5);
    compare_rule<TypeParam>(shape_of(2, 65, 6, 2, 22), x, HostAttention());
    compare_rule<TypeParam>(shape_of(1, 300, 2, 1, 64), x, HostAttention());
  }
}

TYPED_TEST(AttentionRules, OnEveryInstructionSet) {
  for_each_target([] {
    for (const RuleCase& x : kRuleCases)
      compare_rule<TypeParam>(shape_of(2, 131, 2, 1, 22), x, HostAttention());
  });
}

TEST(AttentionRulesInFp64, BackwardIsTheDerivative) {
  for (const RuleCase& x : kRuleCases) expect_derivative(HostAttention(), x);
  for (const RuleCase& x : {RuleCase{{.window = 3}, {2, 4}}, RuleCase{{.window = 2, .softcap = 2}, {3, 1}}})
    expect_derivative(HostAttention(), x);
}

TEST(AttentionRulesInFp64, APackIsItsDocuments) {
  for (const AttentionRule& rule : {AttentionRule(), AttentionRule{.window = 9},
                                    AttentionRule{.window = 70, .scale = 0.3, .softcap = 4}}) {
    expect_pack_is_its_documents(HostAttention(), {40, 1, 1, 64, 77, 3, 100}, rule);
    expect_pack_is_its_documents(HostAttention(), {100, 77, 1, 3, 64, 1, 40}, rule);
  }
}

// In tiles of 64 queries and 64 keys, forward and backward.
TYPED_TEST(AttentionRules, HiddenTilesAreNotComputed) {
  if constexpr (std::is_same_v<TypeParam, double>) {
    GTEST_SKIP() << "fp64 has no tiles";
  } else {
    constexpr TileSizes kTiles{64, 64};
    for (const RuleCase& x :
         {RuleCase{{.window = 1}, {}}, RuleCase{{.window = 65}, {}}, RuleCase{{.window = 66}, {}},
          RuleCase{{.window = 128}, {}}, RuleCase{{}, {64}}, RuleCase{{}, {63, 70, 200}}, RuleCase{{}, {1}},
          RuleCase{{.window = 100}, {130, 1, 260}}, RuleCase{{}, {}}})
      expect_computed_tiles<TypeParam>(x, 500, 16, HostAttention(), kTiles, kTiles, kTiles);
  }
}

// A window and documents that hide nothing.
TYPED_TEST(AttentionRules, WhatHidesNothingChangesNoBit) {
  using T = TypeParam;
  const AttentionShape shape = shape_of(2, 333, 4, 2, 22);
  AttentionRun<T> plain(shape, {}), window = plain, documents(shape, first_keys_of(2, 333, {333}));
  window.shape.rule.window = 333;
  for (AttentionRun<T>* run : {&plain, &window, &documents})
    HostAttention().forward(*run), HostAttention().backward(*run);
  for (AttentionRun<T>* run : {&window, &documents}) {
    EXPECT_TRUE(run->o.same_bits(plain.o));
    EXPECT_TRUE(run->dqkv.same_bits(plain.dqkv));
    EXPECT_EQ(run->lse, plain.lse);
  }
}

TYPED_TEST(AttentionRules, BitsDoNotDependOnThreads) {
  using T = TypeParam;
  AttentionShape shape = shape_of(2, 600, 4, 2, 22);
  shape.rule = {.window = 200, .softcap = 4};
  AttentionRun<T> first(shape, first_keys_of(2, 600, {300, 1, 50}));
  HostAttention().forward(first), HostAttention().backward(first);
  for_each_thread_count([&](int) {
    AttentionRun<T> again(shape, first.first_keys);
    HostAttention().forward(again), HostAttention().backward(again);
    EXPECT_TRUE(first.o.same_bits(again.o));
    EXPECT_TRUE(first.dqkv.same_bits(again.dqkv));
  });
}

// A sink far above all scores takes everything, and one far below nothing.
TYPED_TEST(AttentionRules, ExtremeSinks) {
  using T = TypeParam;
  AttentionShape shape = shape_of(1, 70, 2, 1, 16);
  AttentionRun<T> plain(shape, {});
  HostAttention().forward(plain);
  shape.rule.sinks = true;
  AttentionRun<T> run(shape, {});
  run.sinks.set(0, 0, 3000), run.sinks.set(0, 1, -3000);
  HostAttention().forward(run), HostAttention().backward(run);
  for (std::int64_t r = 0; r < 70; ++r) {
    for (std::int64_t c = 0; c < 16; ++c) {
      ASSERT_LE(std::abs(run.o.get(r, c)), 1e-30);
      ASSERT_EQ(run.o.get(r, 16 + c), plain.o.get(r, 16 + c));
    }
    EXPECT_NEAR(static_cast<double>(run.lse[static_cast<std::size_t>(r)]), run.sinks.get(0, 0), 1e-3);
  }
  for (const std::int64_t h : {0, 1}) EXPECT_LE(std::abs(run.d_sinks.get(0, h)), 1e-25);
}

// Scores of some thousands are the cap, of either sign.
TYPED_TEST(AttentionRules, LargeScoresAreTheCap) {
  using T = TypeParam;
  AttentionShape shape = shape_of(1, 100, 1, 1, 64);
  shape.rule.softcap = 30;
  AttentionRun<T> run(shape, {});
  for (std::int64_t r = 0; r < run.qkv.rows(); ++r) {
    for (std::int64_t c = 0; c < 128; ++c) run.qkv.set(r, c, run.qkv.get(r, c) * 30);
  }
  HostAttention().forward(run), HostAttention().backward(run);
  for (const Acc<T> lse : run.lse) ASSERT_LE(std::abs(lse), 30 + std::log(100));
  for (std::int64_t r = 0; r < run.dqkv.rows(); ++r) {
    for (std::int64_t c = 0; c < run.dqkv.cols(); ++c) ASSERT_TRUE(std::isfinite(run.dqkv.get(r, c)));
  }
}

// Against every pair of a query and a key.
TEST(VisibleKeys, AreStretchesOfTiles) {
  auto random = generator(5);
  for (int trial = 0; trial < 300; ++trial) {
    const auto below = [&](std::uint64_t n) { return static_cast<std::int64_t>(random() % n); };
    const std::int64_t time = 1 + below(200), tile = std::int64_t{1} << below(7);
    std::vector<std::int64_t> lengths;
    for (std::int64_t n = below(4); n > 0; --n) lengths.push_back(1 + below(90));
    const auto first_keys = first_keys_of(1, time, lengths);
    const VisibleKeys keys{below(3) == 0 ? 0 : 1 + below(150), lengths.empty() ? nullptr : first_keys.data()};
    const auto sees = [&](std::int64_t q, std::int64_t k) {
      return k <= q && (keys.window == 0 || q - keys.window < k) &&
             (lengths.empty() || k >= first_keys[static_cast<std::size_t>(q)]);
    };
    const auto any = [&](std::int64_t q0, std::int64_t q1, std::int64_t k0, std::int64_t k1) {
      for (std::int64_t q = q0; q < std::min(q1, time); ++q) {
        for (std::int64_t k = k0; k < std::min(k1, time); ++k) {
          if (sees(q, k)) return true;
        }
      }
      return false;
    };
    SCOPED_TRACE(fmt::format("T {} tile {} window {} documents of {}", time, tile, keys.window,
                             testing::PrintToString(lengths)));
    for (std::int64_t q = 0; q < time; ++q) {
      for (std::int64_t k = 0; k < time; ++k) ASSERT_EQ(sees(q, k), keys.first(q) <= k && k <= q);
    }
    for (std::int64_t at = 0; at < time; at += tile) {
      // The tiles of keys that a tile of queries needs, and the tiles of queries that a tile of keys does.
      const std::int64_t begin = keys.first(at) / tile * tile, end = keys.end_of_queries(at + tile, time);
      for (std::int64_t other = 0; other < time; other += tile) {
        ASSERT_EQ(other >= begin && other <= at, any(at, at + tile, other, other + tile))
            << at << ", " << other;
        ASSERT_EQ(other >= at && other < end, any(other, other + tile, at, at + tile)) << at << ", " << other;
      }
    }
  }
}

// Blocks of two stretches of a sequence, against every pair of a query and a key.
TEST(VisibleBlockKeys, AreThoseOfTheirPositions) {
  auto random = generator(6);
  const auto below = [&](std::uint64_t n) { return static_cast<std::int64_t>(random() % n); };
  for (int trial = 0; trial < 500; ++trial) {
    const auto stretches = [&] {
      const std::int64_t time = 1 + below(60), early = below(100);
      return RowPositions(time, early, early + below(3) * below(80));
    };
    const RowPositions queries = stretches(), keys = stretches();
    std::vector<std::int32_t> first_keys;
    std::int64_t begin = 0;
    for (std::int64_t q = 0; q < queries.time; ++q) {
      if (below(4) == 0) begin += below(queries.at(q) - begin + 1);
      first_keys.push_back(static_cast<std::int32_t>(begin));
    }
    const VisibleBlockKeys visible{below(3) == 0 ? 0 : 1 + below(90),
                                   below(2) == 0 ? nullptr : first_keys.data(), queries, keys};
    const auto sees = [&](std::int64_t q, std::int64_t k) {
      const std::int64_t at = queries.of(q), key = keys.of(k);
      return (visible.window == 0 || at - visible.window < key) &&
             (visible.first_keys == nullptr || key >= first_keys[static_cast<std::size_t>(q)]);
    };
    for (std::int64_t q = 0; q < queries.time; ++q) {
      for (std::int64_t k = 0; k < keys.time; ++k) ASSERT_EQ(sees(q, k), visible.first(q) <= k);
      ASSERT_LE(visible.first(q), keys.time);
    }
    for (std::int64_t end = 1; end <= keys.time; ++end) {
      const std::int64_t found = visible.end_of_queries(end, queries.time);
      for (std::int64_t q = 0; q < queries.time; ++q) ASSERT_EQ(q < found, sees(q, end - 1));
    }
  }
}

TEST(AttentionRulesDeathTest, DocumentsThatDecreaseOrLieAhead) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  AttentionRun<float> run(shape_of(1, 4, 1, 1, 8), {0, 0, 2, 1});
  EXPECT_DEATH(HostAttention().forward(run), "row 3 of a sequence sees rows from 1 on, after 2");
  run.first_keys = {0, 2, 2, 2};
  EXPECT_DEATH(HostAttention().backward(run), "row 1 of a sequence sees rows from 2 on, after 0");
}

}  // namespace
}  // namespace zg::test
