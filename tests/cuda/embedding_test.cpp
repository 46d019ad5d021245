// Embeddings and their gradients: exact where the order of the sums is told, else within bounds of sums in
// double.
#include <array>

#include "tests/cuda/harness.hpp"

namespace zg::test {
namespace {

template <class T>
class CudaEmbedding : public testing::Test {};
TYPED_TEST_SUITE(CudaEmbedding, StorageTypes);

using Ids = std::vector<std::int32_t>;
// Gaps behind the rows of three matrices: any of them may keep rows from being read in packs.
using Gaps = std::array<std::int64_t, 3>;
const Gaps kGaps[] = {{0, 0, 0}, {3, 3, 3}, {8, 8, 8}, {1, 0, 0}, {0, 1, 0}, {0, 0, 1}};

Ids random_ids(std::int64_t n, std::int64_t vocabulary, std::uint64_t test_case) {
  auto random = generator(test_case);
  Ids ids(static_cast<std::size_t>(n));
  for (auto& id : ids) id = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(vocabulary));
  return ids;
}

TYPED_TEST(CudaEmbedding, RowsByIdPlusRowsByPosition) {
  using T = TypeParam;
  constexpr std::int64_t kVocabulary = 11, kTime = 5, kTokens = 19;
  for (const std::int64_t cols : {1, 3, 8, 43, 256, 257, 520}) {
    for (const Gaps& gaps : kGaps) {
      SCOPED_TRACE(testing::Message() << cols << " columns, gaps " << testing::PrintToString(gaps));
      auto random = generator(1);
      Ids ids = random_ids(kTokens, kVocabulary, 2);
      ids[3] = kVocabulary - 1, ids[4] = 0;
      Matrix<T> wte(kVocabulary, cols, gaps[0]), wpe(kTime, cols, gaps[1]), out(kTokens, cols, gaps[2]),
          plain(kTokens, cols, gaps[2]);
      wte.fill_normal(random), wpe.fill_normal(random), out.fill(NAN), plain.fill(NAN);
      OnDevice<T> d_wte(wte), d_wpe(wpe), d_out(out), d_plain(plain);
      OnDevice<std::int32_t> d_ids(ids);
      kernels::Embedding<T> args{.ids = d_ids.data(),
                                 .vocabulary = kVocabulary,
                                 .positions = kTime,
                                 .rows = kTime,
                                 .wte = d_wte,
                                 .wpe = d_wpe,
                                 .out = d_out};
      cuda::embedding<T>(launch(), {kTokens, cols}, args);
      args.wpe = {}, args.positions = 0, args.out = d_plain;
      cuda::embedding<T>(launch(), {kTokens, cols}, args);
      d_out.fetch(), d_plain.fetch();
      out.expect_gaps_intact("out"), plain.expect_gaps_intact("plain");
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
}

// The gradients of some tokens, and what they are expected to be.
template <class T>
struct Backward {
  using A = Acc<T>;
  std::int64_t tokens, cols, vocabulary, time;
  Ids ids;
  Matrix<T> dout;
  Matrix<A> dwte, dwpe;

  Backward(Ids of, std::int64_t c, std::int64_t v, std::int64_t t, const Gaps& gaps = {})
      : tokens(static_cast<std::int64_t>(of.size())),
        cols(c),
        vocabulary(v),
        time(t),
        ids(std::move(of)),
        dout(tokens, c, gaps[0]),
        dwte(v, c, gaps[1]),
        dwpe(t + 1, c, gaps[2]) {
    auto random = generator(static_cast<std::uint64_t>(tokens + c));
    dout.fill_normal(random), dwte.fill_normal(random), dwpe.fill_normal(random);
  }

  // {dwte, dwpe} after the backward.
  std::pair<Matrix<A>, Matrix<A>> run(bool deterministic = true, std::size_t first_id = 0) const {
    std::pair<Matrix<A>, Matrix<A>> sums{dwte, dwpe};
    Matrix<T> from = dout;
    Ids shifted(first_id, -1);
    shifted.insert(shifted.end(), ids.begin(), ids.end());
    OnDevice<std::int32_t> d_ids(shifted);
    OnDevice<T> d_dout(from);
    OnDevice<A> d_dwte(sums.first), d_dwpe(sums.second);
    cuda::embedding_backward<T>(launch(deterministic), {tokens, cols},
                                {.ids = d_ids.data() + first_id,
                                 .vocabulary = vocabulary,
                                 .positions = time + 1,
                                 .rows = time,
                                 .dout = d_dout,
                                 .dwte = d_dwte,
                                 .dwpe = d_dwpe});
    d_dwte.fetch(), d_dwpe.fetch();
    sums.first.expect_gaps_intact("dwte"), sums.second.expect_gaps_intact("dwpe");
    return sums;
  }

  // Sums from zero in the order of the tokens, added to the table.
  template <class RowOf>
  Matrix<A> in_order(const Matrix<A>& table, const RowOf& row_of) const {
    Matrix<A> sums(table.rows(), cols), all = table;
    for (std::int64_t r = 0; r < tokens; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) sums.at(row_of(r), c) += static_cast<A>(dout.get(r, c));
    }
    for (std::int64_t r = 0; r < table.rows(); ++r) {
      for (std::int64_t c = 0; c < cols; ++c) all.at(r, c) += sums.at(r, c);
    }
    return all;
  }

  // Within the bound of sums in any order. Of k terms each is rounded k times at most, the table's own too.
  template <class RowOf>
  void expect_near(const Matrix<A>& actual, const Matrix<A>& table, const RowOf& row_of) const {
    Matrix<double> sums = copy_as<double>(table), sizes(table.rows(), cols);
    std::vector<double> terms(static_cast<std::size_t>(table.rows()), 1);
    for (std::int64_t r = 0; r < table.rows(); ++r) {
      for (std::int64_t c = 0; c < cols; ++c) sizes.at(r, c) = std::abs(sums.at(r, c));
    }
    for (std::int64_t r = 0; r < tokens; ++r) {
      terms[static_cast<std::size_t>(row_of(r))] += 1;
      for (std::int64_t c = 0; c < cols; ++c) {
        sums.at(row_of(r), c) += dout.get(r, c), sizes.at(row_of(r), c) += std::abs(dout.get(r, c));
      }
    }
    for (std::int64_t r = 0; r < table.rows(); ++r) {
      for (std::int64_t c = 0; c < cols; ++c) {
        // Twice: for the sums here when A is double.
        const double most =
            2 * unit_roundoff<A>() * terms[static_cast<std::size_t>(r)] * sizes.at(r, c) + least_error<A>();
        ASSERT_NEAR(actual.get(r, c), sums.at(r, c), most) << r << ", " << c;
      }
    }
  }
  auto by_id() const {
    return [this](std::int64_t r) { return std::int64_t{ids[static_cast<std::size_t>(r)]}; };
  }
  auto by_position() const {
    return [this](std::int64_t r) { return r % time; };
  }
};

// Ids of 32 tokens at most are added in the order of their tokens; positions always.
TYPED_TEST(CudaEmbedding, BackwardAddsInTokenOrder) {
  using T = TypeParam;
  for (const std::int64_t cols : {1, 3, 43, 256, 600}) {
    for (const Gaps& gaps : kGaps) {
      SCOPED_TRACE(testing::Message() << cols << " columns, gaps " << testing::PrintToString(gaps));
      const Backward<T> b(random_ids(3 * 13, 10, 3), cols, 23, 13, gaps);
      const auto [dwte, dwpe] = b.run();
      ASSERT_TRUE(dwte.same_bits(b.in_order(b.dwte, b.by_id())));
      ASSERT_TRUE(dwpe.same_bits(b.in_order(b.dwpe, b.by_position())));
    }
  }
}

// Wide rows are cut into pieces, of several tiles each.
TYPED_TEST(CudaEmbedding, BackwardOfWideRows) {
  using T = TypeParam;
  const Backward<T> b(random_ids(9, 5, 4), 2600, 5, 4);
  const auto [dwte, dwpe] = b.run();
  EXPECT_TRUE(dwte.same_bits(b.in_order(b.dwte, b.by_id())));
  EXPECT_TRUE(dwpe.same_bits(b.in_order(b.dwpe, b.by_position())));
}

// Positions that restart in documents: forward, and the gradients of the table in the order of the tokens.
TYPED_TEST(CudaEmbedding, PositionsRestartInDocuments) {
  using T = TypeParam;
  using A = Acc<T>;
  constexpr std::int64_t kVocabulary = 11, kTime = 50, kTokens = 100, kPositions = 30;
  std::vector<std::int32_t> first(kTokens);
  for (std::int32_t r = 0; r < kTokens; ++r) {
    const std::int32_t t = r % kTime;
    first[static_cast<std::size_t>(r)] = r < kTime ? (t < 30 ? 0 : t < 31 ? 30 : 31) : t / 7 * 7;
  }
  for (const std::int64_t cols : {1, 43, 256, 520}) {
    for (const Gaps& gaps : kGaps) {
      auto random = generator(4);
      Ids ids = random_ids(kTokens, kVocabulary, 2);
      Matrix<T> wte(kVocabulary, cols, gaps[0]), wpe(kPositions, cols, gaps[1]), out(kTokens, cols, gaps[2]);
      Matrix<T> dout(kTokens, cols, gaps[0]);
      Matrix<A> dwpe(kPositions, cols, gaps[2]);
      wte.fill_normal(random), wpe.fill_normal(random), dout.fill_normal(random), dwpe.fill_normal(random);
      Matrix<A> sums(kPositions, cols), table = dwpe;
      OnDevice<T> d_wte(wte), d_wpe(wpe), d_out(out), d_dout(dout);
      OnDevice<A> d_dwpe(dwpe);
      OnDevice<std::int32_t> d_ids(ids), d_first(first);
      cuda::embedding<T>(launch(), {kTokens, cols},
                         {.ids = d_ids.data(),
                          .vocabulary = kVocabulary,
                          .positions = kPositions,
                          .rows = kTime,
                          .first_keys = d_first.data(),
                          .wte = d_wte,
                          .wpe = d_wpe,
                          .out = d_out});
      cuda::embedding_backward<T>(launch(), {kTokens, cols},
                                  {.ids = d_ids.data(),
                                   .vocabulary = kVocabulary,
                                   .positions = kPositions,
                                   .rows = kTime,
                                   .first_keys = d_first.data(),
                                   .dout = d_dout,
                                   .dwte = {},
                                   .dwpe = d_dwpe});
      d_out.fetch(), d_dwpe.fetch();
      for (std::int64_t r = 0; r < kTokens; ++r) {
        const auto n = static_cast<std::size_t>(r);
        const std::int64_t place = r % kTime - first[n];
        for (std::int64_t c = 0; c < cols; ++c) {
          const auto sum = static_cast<A>(wte.at(ids[n], c)) + static_cast<A>(wpe.at(place, c));
          ASSERT_EQ(out.get(r, c), static_cast<double>(static_cast<A>(static_cast<T>(sum))));
          sums.at(place, c) += static_cast<A>(dout.at(r, c));
        }
      }
      for (std::int64_t p = 0; p < kPositions; ++p) {
        for (std::int64_t c = 0; c < cols; ++c) table.at(p, c) += sums.at(p, c);
      }
      ASSERT_TRUE(dwpe.same_bits(table));
      out.expect_gaps_intact("out");
    }
  }
}

// Ids with few, with many and with so many tokens that a list of them is full several times.
template <class T>
Backward<T> frequent_ids(std::int64_t tokens) {
  Ids ids = random_ids(tokens, 40, 5);
  auto random = generator(6);
  for (auto& id : ids) {
    const std::uint64_t kind = random() % 16;
    id = kind < 10 ? 7 : kind < 12 ? 1031 : id;  // both in one share, of 1024 or fewer
  }
  return Backward<T>(std::move(ids), 43, 1100, 100);
}

TYPED_TEST(CudaEmbedding, BackwardOfFrequentIds) {
  using T = TypeParam;
  for (const std::int64_t tokens : {70, 500, 3000}) {
    const Backward<T> b = frequent_ids<T>(tokens);
    const auto first = b.run();
    b.expect_near(first.first, b.dwte, b.by_id());
    b.expect_near(first.second, b.dwpe, b.by_position());
    if (testing::Test::HasFatalFailure() || tokens > 100) continue;
    for_each_order([&] {
      const auto again = b.run();
      ASSERT_TRUE(again.first.same_bits(first.first));
      ASSERT_TRUE(again.second.same_bits(first.second));
    });
    // Nor do the addresses matter.
    ASSERT_TRUE(b.run(true, 1).first.same_bits(first.first));
  }
}

TEST(CudaEmbeddingFloat, FrequentIdsInAnyOrderOfThreads) {
  const Backward<bf16> b = frequent_ids<bf16>(3000);
  const auto first = b.run();
  for_each_order([&] { ASSERT_TRUE(b.run().first.same_bits(first.first)); });
}

// All of one share. One warp has much to look for before it finds the id with many tokens, the others have
// long done what is theirs.
TEST(CudaEmbeddingFloat, ManyTokensFoundLast) {
  Ids ids;
  for (std::int32_t i = 0; i < 1007; ++i) ids.push_back(7 + 1024 * (i % 8 == 7 ? 60 + i / 8 : i % 32));
  ids.insert(ids.end(), 60, 7 + 1024 * 50);
  const Backward<float> b(std::move(ids), 1, 1024 * 190, 2000);
  const auto sums = b.run();
  b.expect_near(sums.first, b.dwte, b.by_id());
}

// On a GPU as many tokens and ids as a large batch has.
TEST(CudaEmbeddingFloat, ManyTokens) {
  const std::int64_t tokens = is_gpu() ? 50000 : 1000, vocabulary = is_gpu() ? 60000 : 300;
  Ids ids = random_ids(tokens, vocabulary, 9);
  for (std::size_t i = 0; i < ids.size(); i += 20) ids[i] = 11;
  const Backward<bf16> b(std::move(ids), 264, vocabulary, 1000);
  const auto sums = b.run();
  b.expect_near(sums.first, b.dwte, b.by_id());
  b.expect_near(sums.second, b.dwpe, b.by_position());
}

TYPED_TEST(CudaEmbedding, BackwardInAnyOrder) {
  using T = TypeParam;
  const Backward<T> b = frequent_ids<T>(500);
  const auto sums = b.run(false);
  b.expect_near(sums.first, b.dwte, b.by_id());
  b.expect_near(sums.second, b.dwpe, b.by_position());
}

TYPED_TEST(CudaEmbedding, EitherGradientMayBeLeftOut) {
  using T = TypeParam;
  using A = Acc<T>;
  for (const bool deterministic : {true, false}) {
    Backward<T> b(random_ids(30, 7, 8), 43, 7, 10);
    const auto both = b.run(deterministic);
    for (const bool only_wte : {true, false}) {
      Matrix<A> sums = only_wte ? b.dwte : b.dwpe;
      OnDevice<std::int32_t> d_ids(b.ids);
      OnDevice<T> d_dout(b.dout);
      OnDevice<A> d_sums(sums);
      kernels::EmbeddingBackward<T> args{.ids = d_ids.data(),
                                         .vocabulary = 7,
                                         .positions = only_wte ? 0 : 11,
                                         .rows = 10,
                                         .dout = d_dout,
                                         .dwte = {},
                                         .dwpe = {}};
      (only_wte ? args.dwte : args.dwpe) = d_sums;
      cuda::embedding_backward<T>(launch(deterministic), {30, 43}, args);
      d_sums.fetch();
      ASSERT_TRUE(is_gpu() && !deterministic ? true : sums.same_bits(only_wte ? both.first : both.second));
    }
  }
}

}  // namespace
}  // namespace zg::test
