#include "tests/kernels/support.hpp"

namespace zg::test {
namespace {

template <class T>
class Embedding : public testing::Test {};
TYPED_TEST_SUITE(Embedding, StorageTypes);

std::vector<std::int32_t> random_ids(std::int64_t n, std::int64_t vocabulary) {
  auto random = generator(static_cast<std::uint64_t>(n));
  std::vector<std::int32_t> ids(static_cast<std::size_t>(n));
  for (auto& id : ids) id = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(vocabulary));
  return ids;
}

TYPED_TEST(Embedding, RowsByIdPlusRowsByPosition) {
  using T = TypeParam;
  constexpr std::int64_t kVocabulary = 11, kTime = 5, kTokens = 15;
  for (const std::int64_t cols : kWidths) {
    auto random = generator(1);
    auto ids = random_ids(kTokens, kVocabulary);
    Matrix<T> wte(kVocabulary, cols, 3), wpe(kTime + 2, cols, 1), out(kTokens, cols, 2),
        plain(kTokens, cols, 2);
    wte.fill_normal(random), wpe.fill_normal(random);
    host::Embedding<T> args{.ids = ids.data(),
                            .vocabulary = kVocabulary,
                            .positions = kTime + 2,
                            .rows = kTime,
                            .wte = wte,
                            .wpe = wpe,
                            .out = out};
    host::embedding<T>({kTokens, cols}, args);
    args.wpe = {}, args.out = plain;
    host::embedding<T>({kTokens, cols}, args);
    out.expect_gaps_intact("out"), plain.expect_gaps_intact("out");
    for (std::int64_t r = 0; r < kTokens; ++r) {
      const std::int64_t id = ids[static_cast<std::size_t>(r)];
      for (std::int64_t c = 0; c < cols; ++c) {
        const auto sum = static_cast<Acc<T>>(wte.at(id, c)) + static_cast<Acc<T>>(wpe.at(r % kTime, c));
        ASSERT_EQ(out.get(r, c), static_cast<double>(static_cast<Acc<T>>(static_cast<T>(sum))));
        ASSERT_EQ(plain.get(r, c), wte.get(id, c));
      }
    }
  }
}

// In order of the tokens, so bit for bit what the plain loop gives.
TYPED_TEST(Embedding, BackwardAddsInTokenOrder) {
  using T = TypeParam;
  using A = Acc<T>;
  constexpr std::int64_t kVocabulary = 19, kTime = 9, kTokens = 4 * kTime;
  for_each_thread_count([](int) {
    for (const std::int64_t cols : {1, 3, 43, 257, 600}) {
      auto random = generator(2);
      auto ids = random_ids(kTokens, kVocabulary);
      Matrix<T> dout(kTokens, cols, 3);
      Matrix<A> dwte(kVocabulary, cols, 2), dwpe(kTime + 1, cols, 1);
      dout.fill_normal(random), dwte.fill_normal(random), dwpe.fill_normal(random);
      Matrix<A> by_id = dwte, by_position = dwpe;
      for (std::int64_t r = 0; r < kTokens; ++r) {
        for (std::int64_t c = 0; c < cols; ++c) {
          by_id.at(ids[static_cast<std::size_t>(r)], c) += static_cast<A>(dout.at(r, c));
          by_position.at(r % kTime, c) += static_cast<A>(dout.at(r, c));
        }
      }
      host::EmbeddingBackward<T> args{.ids = ids.data(),
                                      .vocabulary = kVocabulary,
                                      .positions = kTime + 1,
                                      .rows = kTime,
                                      .dout = dout,
                                      .dwte = dwte,
                                      .dwpe = dwpe};
      host::embedding_backward<T>({kTokens, cols}, args);
      ASSERT_TRUE(dwte.same_bits(by_id));
      ASSERT_TRUE(dwpe.same_bits(by_position));
    }
  });
}

// For each row the first row of its document, in two sequences of 9.
const std::int32_t kFirstKeys[18] = {0, 0, 0, 3, 4, 4, 4, 4, 4, 0, 1, 1, 1, 1, 1, 1, 7, 7};

TYPED_TEST(Embedding, PositionsRestartInDocuments) {
  using T = TypeParam;
  using A = Acc<T>;
  constexpr std::int64_t kVocabulary = 11, kTime = 9, kTokens = 18, kPositions = 7;
  for_each_thread_count([](int) {
    for (const std::int64_t cols : {1, 43, 257}) {
      auto random = generator(4);
      auto ids = random_ids(kTokens, kVocabulary);
      Matrix<T> wte(kVocabulary, cols, 3), wpe(kPositions, cols, 1), out(kTokens, cols, 2),
          dout(kTokens, cols);
      Matrix<A> dwpe(kPositions, cols, 1);
      wte.fill_normal(random), wpe.fill_normal(random), dout.fill_normal(random), dwpe.fill_normal(random);
      Matrix<A> sums = dwpe;
      host::embedding<T>({kTokens, cols}, {.ids = ids.data(),
                                           .vocabulary = kVocabulary,
                                           .positions = kPositions,
                                           .rows = kTime,
                                           .first_keys = kFirstKeys,
                                           .wte = wte,
                                           .wpe = wpe,
                                           .out = out});
      host::embedding_backward<T>({kTokens, cols}, {.ids = ids.data(),
                                                    .vocabulary = kVocabulary,
                                                    .positions = kPositions,
                                                    .rows = kTime,
                                                    .first_keys = kFirstKeys,
                                                    .dout = dout,
                                                    .dwte = {},
                                                    .dwpe = dwpe});
      for (std::int64_t r = 0; r < kTokens; ++r) {
        const std::int64_t id = ids[static_cast<std::size_t>(r)], place = r % kTime - kFirstKeys[r];
        for (std::int64_t c = 0; c < cols; ++c) {
          const auto sum = static_cast<A>(wte.at(id, c)) + static_cast<A>(wpe.at(place, c));
          ASSERT_EQ(out.get(r, c), static_cast<double>(static_cast<A>(static_cast<T>(sum))));
          sums.at(place, c) += static_cast<A>(dout.at(r, c));  // in order of the tokens
        }
      }
      out.expect_gaps_intact("out");
      ASSERT_TRUE(dwpe.same_bits(sums));
    }
  });
}

TEST(EmbeddingDeathTest, PositionInADocumentOutsideTheTable) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  std::vector<std::int32_t> ids(9, 0), first = {0, 0, 0, 3, 3, 3, 3, 3, 3};
  Matrix<float> wte(7, 3), wpe(5, 3), out(9, 3);
  EXPECT_DEATH(host::embedding<float>({9, 3}, {.ids = ids.data(),
                                               .vocabulary = 7,
                                               .positions = 5,
                                               .rows = 9,
                                               .first_keys = first.data(),
                                               .wte = wte,
                                               .wpe = wpe,
                                               .out = out}),
               "token 8 is at position 5 of its document, of 5");
}

TEST(EmbeddingDeathTest, IdOutsideTheVocabulary) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  std::int32_t id = 7;
  Matrix<float> wte(7, 3), out(1, 3);
  EXPECT_DEATH(
      host::embedding<float>(
          {1, 3},
          {.ids = &id, .vocabulary = 7, .positions = 0, .rows = 1, .wte = wte, .wpe = {}, .out = out}),
      "id 7, vocabulary 7");
}

}  // namespace
}  // namespace zg::test
