// Epochs: every sequence once, in an order of each epoch's own, whoever asks for which part of a batch.
#include <algorithm>
#include <numeric>
#include <set>

#include "data/data_support.hpp"
#include "data/shuffle.hpp"
#include "ziggurat/data/dataset.hpp"

namespace zg {
namespace {

using namespace zg::test;
using Ids = std::vector<std::int32_t>;

TEST(Shuffle, IsAPermutation) {
  for (const std::int64_t n : {1, 2, 3, 4, 5, 7, 16, 17, 100, 255, 256, 257, 1000, 4097}) {
    std::set<Ids> orders;
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
      const Shuffle shuffle(NamedRandom(seed, "epoch"), n);
      Ids order;
      for (std::int64_t i = 0; i < n; ++i) order.push_back(static_cast<std::int32_t>(shuffle.at(i)));
      orders.insert(order);
      std::sort(order.begin(), order.end());
      for (std::int64_t i = 0; i < n; ++i) ASSERT_EQ(order[static_cast<std::size_t>(i)], i) << n;
    }
    EXPECT_GE(orders.size(), n < 4 ? 1u : 7u) << n;
  }
}

// Over many orders of seven numbers, each number is about equally often in each place.
TEST(Shuffle, PutsNumbersAnywhere) {
  int counts[7][7] = {};
  for (std::uint64_t seed = 0; seed < 7000; ++seed) {
    const Shuffle shuffle(NamedRandom(seed, "epoch"), 7);
    for (std::int64_t i = 0; i < 7; ++i) ++counts[i][shuffle.at(i)];
  }
  for (const auto& row : counts) {
    for (const int count : row) EXPECT_NEAR(count, 1000, 160);  // five standard deviations
  }
}

struct Epochs : ::testing::Test {
  TempDir dir_;
  static constexpr std::int64_t kSeqLen = 5;

  DataConfig config(std::int64_t tokens, std::int64_t step_sequences) {
    Ids all(static_cast<std::size_t>(tokens));
    std::iota(all.begin(), all.end(), 0);
    DataConfig c = Settings{.train = write_tokens(dir_ / "t.bin", all),
                            .validation_share = 0,
                            .token_dtype = DType::kI32,
                            .seq_len = kSeqLen};
    c.order = Order::kEpochs, c.step_sequences = step_sequences;
    return c;
  }
  static Ids firsts(const DataSet& data, std::uint64_t seed, std::int64_t step, std::int64_t first,
                    std::int64_t sequences) {
    Batch batch;
    data.train_batch(seed, step, first, sequences, batch);
    Ids of;
    for (std::size_t i = 0; i < batch.ids.size(); i += kSeqLen) of.push_back(batch.ids[i]);
    return of;
  }
};

TEST_F(Epochs, GiveEachWindowOnce) {
  constexpr std::int64_t kBatch = 4, kWindows = 13;  // of 68 tokens: two are left
  const DataSet data(config(68, kBatch), dir_ / "cache", 0);
  for (const std::uint64_t seed : {1, 2}) {
    Ids drawn;
    for (std::int64_t step = 0; step < kWindows; ++step) {
      const Ids whole = firsts(data, seed, step, 0, kBatch);
      drawn.insert(drawn.end(), whole.begin(), whole.end());
      // Whoever has which part of the batch.
      for (std::int64_t i = 0; i < kBatch; ++i)
        EXPECT_EQ(firsts(data, seed, step, i, 1).front(), whole[static_cast<std::size_t>(i)]);
    }
    std::set<Ids> orders;
    for (int epoch = 0; epoch < 4; ++epoch) {
      Ids order(drawn.begin() + epoch * kWindows, drawn.begin() + (epoch + 1) * kWindows);
      orders.insert(order);
      std::sort(order.begin(), order.end());
      for (std::size_t i = 0; i < order.size(); ++i)
        EXPECT_EQ(order[i], static_cast<std::int32_t>(i) * static_cast<std::int32_t>(kSeqLen));
    }
    EXPECT_EQ(orders.size(), 4u) << "each epoch has an order of its own";
  }
  EXPECT_NE(firsts(data, 1, 0, 0, 13), firsts(data, 2, 0, 0, 13));
}

TEST_F(Epochs, GiveEachDocumentOnce) {
  DataConfig c = config(60, 2);
  const std::vector<std::int64_t> starts = {0, 3, 5, 9, 14, 16, 19, 22, 27, 31, 36, 40, 44, 47, 50, 55, 60};
  write_tokens(dir_ / "t.docs", starts);
  write_file(
      dir_ / "t.json",
      R"({"format": "ziggurat tokens", "version": 1, "dtype": "uint32", "tokens": 60, "mask": false})");
  c.packing = Packing::kDocuments;
  const DataSet data(c, dir_ / "cache", 0);
  // As many steps as show every document at last, and not one of them twice before.
  std::multiset<std::int32_t> begun;
  for (std::int64_t step = 0; begun.size() < 16; ++step) {
    ASSERT_LT(step, 20);
    for (std::int64_t s = 0; s < 2 && begun.size() < 16; ++s) {
      Batch batch;
      data.train_batch(3, step, s, 1, batch);
      for (std::int32_t t = 0; t < kSeqLen; ++t) {
        const auto i = static_cast<std::size_t>(t);
        const bool padding = batch.ids[i] == 0 && batch.targets[i] < 0;
        if (batch.first_keys[i] == t && !padding) begun.insert(batch.ids[i]);
      }
    }
  }
  for (std::size_t d = 0; d + 1 < starts.size(); ++d)
    EXPECT_EQ(begun.count(static_cast<std::int32_t>(starts[d])), 1u) << "document " << d;
}

TEST_F(Epochs, AreOfOneSource) {
  DataConfig c = config(60, 2);
  c.blend = {{.paths = {c.train}}, {.paths = {c.train}}}, c.train.clear();
  const std::string found = refusal([&] { (void)DataSet(c, dir_ / "cache", 0); });
  EXPECT_HAS(found, "data.order");
  EXPECT_HAS(found, "several sources");
}

}  // namespace
}  // namespace zg
