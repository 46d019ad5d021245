// Embeddings and their gradients, for the kernels of the host and of CUDA: exact, since the order of the sums
// is told. K has the differences between the two.
#pragma once
#include <array>
#include <utility>
#include <vector>

#include "tests/kernels/on_device.hpp"

namespace zg::test {

using Ids = std::vector<std::int32_t>;
// Gaps behind the rows of three matrices.
using Gaps = std::array<std::int64_t, 3>;

inline Ids random_ids(std::int64_t n, std::int64_t vocabulary, std::uint64_t test_case) {
  auto random = generator(test_case);
  Ids ids(static_cast<std::size_t>(n));
  for (auto& id : ids) id = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(vocabulary));
  return ids;
}

// Tokens in sequences of `time`, whose positions count from the first row of their document.
struct TokenPlaces {
  std::int64_t time;
  Ids first_keys = {};  // one for each token, or none
  std::int64_t of(std::int64_t token) const {
    return token % time - (first_keys.empty() ? 0 : first_keys[static_cast<std::size_t>(token)]);
  }
};

// The ids, tables and gradients of some tokens.
template <class K>
struct EmbeddingCase {
  using T = typename K::T;
  using A = typename K::A;
  Ids ids;
  std::int64_t tokens, cols, vocabulary, positions;
  TokenPlaces places;
  Matrix<T> wte, wpe, dout;
  Matrix<A> dwte, dwpe;
  std::int64_t out_gap;

  EmbeddingCase(Ids of, std::int64_t c, std::int64_t v, std::int64_t p, TokenPlaces at, const Gaps& gaps = {})
      : ids(std::move(of)),
        tokens(static_cast<std::int64_t>(ids.size())),
        cols(c),
        vocabulary(v),
        positions(p),
        places(std::move(at)),
        wte(v, c, gaps[0]),
        wpe(p, c, gaps[1]),
        dout(tokens, c, gaps[0]),
        dwte(v, c, gaps[1]),
        dwpe(p, c, gaps[2]),
        out_gap(gaps[2]) {
    auto random = generator(static_cast<std::uint64_t>(tokens + c));
    wte.fill_normal(random), wpe.fill_normal(random);
    dout.fill_normal(random), dwte.fill_normal(random), dwpe.fill_normal(random);
  }

  void expect_rows() {
    for (const bool plain : {false, true}) {
      Matrix<T> out(tokens, cols, out_gap);
      out.fill(NAN);
      OnDevice<T> d_wte(wte), d_wpe(wpe), d_out(out);
      OnDevice<std::int32_t> d_ids(ids), d_first(places.first_keys);
      K::embedding(Extent{tokens, cols},
                   kernels::Embedding<T>{.ids = d_ids.data(),
                                         .vocabulary = vocabulary,
                                         .positions = plain ? 0 : positions,
                                         .rows = places.time,
                                         .first_keys = places.first_keys.empty() ? nullptr : d_first.data(),
                                         .wte = d_wte,
                                         .wpe = plain ? Strided<const T>() : d_wpe,
                                         .out = d_out});
      d_out.fetch();
      out.expect_gaps_intact("out");
      for (std::int64_t r = 0; r < tokens; ++r) {
        const std::int64_t id = ids[static_cast<std::size_t>(r)];
        for (std::int64_t c = 0; c < cols; ++c) {
          const A by_position = plain ? A{0} : static_cast<A>(wpe.at(places.of(r), c));
          const A sum = static_cast<A>(wte.at(id, c)) + by_position;
          ASSERT_EQ(out.get(r, c), static_cast<double>(static_cast<A>(static_cast<T>(sum))));
        }
      }
    }
  }

  // {dwte, dwpe} after the backward, without what is left out. first_id: where the ids begin in their memory.
  std::pair<Matrix<A>, Matrix<A>> run(bool with_wte = true, bool with_wpe = true) const {
    return run_by([](Extent e, const kernels::EmbeddingBackward<T>& args) { K::embedding_backward(e, args); },
                  0, with_wte, with_wpe);
  }
  template <class Kernel>
  std::pair<Matrix<A>, Matrix<A>> run_by(const Kernel& kernel, std::size_t first_id = 0, bool with_wte = true,
                                         bool with_wpe = true) const {
    std::pair<Matrix<A>, Matrix<A>> sums{dwte, dwpe};
    Matrix<T> from = dout;
    Ids shifted(first_id, -1), first = places.first_keys;
    shifted.insert(shifted.end(), ids.begin(), ids.end());
    OnDevice<std::int32_t> d_ids(shifted), d_first(first);
    OnDevice<T> d_dout(from);
    OnDevice<A> d_dwte(sums.first), d_dwpe(sums.second);
    kernels::EmbeddingBackward<T> args{.ids = d_ids.data() + first_id,
                                       .vocabulary = vocabulary,
                                       .positions = with_wpe ? positions : 0,
                                       .rows = places.time,
                                       .first_keys = first.empty() ? nullptr : d_first.data(),
                                       .dout = d_dout,
                                       .dwte = {},
                                       .dwpe = {}};
    if (with_wte) args.dwte = d_dwte;
    if (with_wpe) args.dwpe = d_dwpe;
    kernel(Extent{tokens, cols}, args);
    d_dwte.fetch(), d_dwpe.fetch();
    sums.first.expect_gaps_intact("dwte"), sums.second.expect_gaps_intact("dwpe");
    return sums;
  }

  // Sums in the order of the tokens, which begin with what is in the table, or are added to it.
  template <class RowOf>
  Matrix<A> in_order(const Matrix<A>& table, const RowOf& row_of) const {
    Matrix<A> sums = K::kSumsBeginWithTheTable ? table : Matrix<A>(table.rows(), cols), all = table;
    for (std::int64_t r = 0; r < tokens; ++r) {
      for (std::int64_t c = 0; c < cols; ++c) sums.at(row_of(r), c) += static_cast<A>(dout.at(r, c));
    }
    if (K::kSumsBeginWithTheTable) return sums;
    for (std::int64_t r = 0; r < table.rows(); ++r) {
      for (std::int64_t c = 0; c < cols; ++c) all.at(r, c) += sums.at(r, c);
    }
    return all;
  }
  void expect_in_order() const {
    const auto [by_ids, by_positions] = run();
    ASSERT_TRUE(by_ids.same_bits(in_order(dwte, by_id())));
    ASSERT_TRUE(by_positions.same_bits(in_order(dwpe, by_position())));
  }

  // Expects sums within the bound for any order. A sum of k terms rounds each of them k times at most.
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
    return [this](std::int64_t r) { return places.of(r); };
  }
};

template <class K>
class Embedding : public testing::Test {};
TYPED_TEST_SUITE_P(Embedding);

TYPED_TEST_P(Embedding, RowsByIdPlusRowsByPosition) {
  Ids ids = random_ids(19, 11, 2);
  ids[3] = 10, ids[4] = 0;
  for (const std::int64_t cols : {1, 3, 8, 43, 172, 256, 257, 520}) {
    for (const Gaps& gaps : TypeParam::gaps()) {
      SCOPED_TRACE(testing::Message() << cols << " columns, gaps " << testing::PrintToString(gaps));
      EmbeddingCase<TypeParam>(ids, cols, 11, 7, {5}, gaps).expect_rows();
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// CUDA adds ids of 32 tokens at most in the order of their tokens, and positions always.
TYPED_TEST_P(Embedding, BackwardAddsInTokenOrder) {
  TypeParam::for_each_split([] {
    for (const std::int64_t cols : {1, 3, 43, 256, 257, 600}) {
      for (const Gaps& gaps : TypeParam::gaps()) {
        SCOPED_TRACE(testing::Message() << cols << " columns, gaps " << testing::PrintToString(gaps));
        EmbeddingCase<TypeParam>(random_ids(3 * 13, 10, 3), cols, 23, 14, {13}, gaps).expect_in_order();
        if (testing::Test::HasFatalFailure()) return;
      }
    }
    // Wide rows are cut into pieces, of several tiles each.
    EmbeddingCase<TypeParam>(random_ids(9, 5, 4), 2600, 5, 5, {4}).expect_in_order();
  });
}

// Forward, and the gradients of the table in the order of the tokens.
TYPED_TEST_P(Embedding, PositionsRestartInDocuments) {
  TokenPlaces small{9, {0, 0, 0, 3, 4, 4, 4, 4, 4, 0, 1, 1, 1, 1, 1, 1, 7, 7}}, large{50};
  for (std::int32_t r = 0; r < 100; ++r) {
    const std::int32_t t = r % 50;
    large.first_keys.push_back(r < 50 ? (t < 30 ? 0 : t < 31 ? 30 : 31) : t / 7 * 7);
  }
  TypeParam::for_each_split([&] {
    for (const std::int64_t cols : {1, 43, 256, 257, 520}) {
      for (const Gaps& gaps : TypeParam::gaps()) {
        for (const auto& [places, positions] : {std::pair(small, 7), std::pair(large, 30)}) {
          const auto tokens = static_cast<std::int64_t>(places.first_keys.size());
          EmbeddingCase<TypeParam> t(random_ids(tokens, 11, 2), cols, 11, positions, places, gaps);
          t.expect_rows();
          ASSERT_TRUE(t.run(false, true).second.same_bits(t.in_order(t.dwpe, t.by_position())));
        }
      }
    }
  });
}

TYPED_TEST_P(Embedding, EitherGradientMayBeLeftOut) {
  const EmbeddingCase<TypeParam> t(random_ids(30, 7, 8), 43, 7, 11, {10});
  const auto both = t.run(), of_ids = t.run(true, false), of_positions = t.run(false, true);
  EXPECT_TRUE(of_ids.first.same_bits(both.first) && of_ids.second.same_bits(t.dwpe));
  EXPECT_TRUE(of_positions.first.same_bits(t.dwte) && of_positions.second.same_bits(both.second));
}

REGISTER_TYPED_TEST_SUITE_P(Embedding, RowsByIdPlusRowsByPosition, BackwardAddsInTokenOrder,
                            PositionsRestartInDocuments, EitherGradientMayBeLeftOut);

}  // namespace zg::test
