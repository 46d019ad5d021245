// Embeddings of CUDA. Gradients of ids that have many tokens are within bounds of sums in double.
#include "tests/cuda/cuda_kernels.hpp"
#include "tests/kernels/embedding_cases.hpp"

namespace zg::test {
namespace {

template <class T>
struct CudaEmbeddingOf : Cuda<T> {
  // Any of them may keep rows from being read in packs.
  static std::vector<Gaps> gaps() {
    return {{0, 0, 0}, {3, 3, 3}, {8, 8, 8}, {1, 0, 0}, {0, 1, 0}, {0, 0, 1}};
  }
  static constexpr bool kSumsBeginWithTheTable = false;
  static void for_each_split(const std::function<void()>& body) { body(); }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, Embedding, ForStorageTypes<CudaEmbeddingOf>);

template <class T>
auto kernel_of(bool deterministic) {
  return [=](Extent extent, const kernels::EmbeddingBackward<T>& args) {
    cuda::embedding_backward<T>(launch(deterministic), extent, args);
  };
}

template <class T>
class CudaEmbedding : public testing::Test {};
TYPED_TEST_SUITE(CudaEmbedding, StorageTypes);

// Ids with few, with many and with so many tokens that a list of them is full several times.
template <class T>
EmbeddingCase<CudaEmbeddingOf<T>> frequent_ids(std::int64_t tokens) {
  Ids ids = random_ids(tokens, 40, 5);
  auto random = generator(6);
  for (auto& id : ids) {
    const std::uint64_t kind = random() % 16;
    id = kind < 10 ? 7 : kind < 12 ? 1031 : id;  // both in one share, of 1024 or fewer
  }
  return {std::move(ids), 43, 1100, 101, {100}};
}

TYPED_TEST(CudaEmbedding, BackwardOfFrequentIds) {
  using T = TypeParam;
  for (const std::int64_t tokens : {70, 500, 3000}) {
    const auto b = frequent_ids<T>(tokens);
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
    ASSERT_TRUE(b.run_by(kernel_of<T>(true), 1).first.same_bits(first.first));
  }
}

TEST(CudaEmbeddingFloat, FrequentIdsInAnyOrderOfThreads) {
  const auto b = frequent_ids<bf16>(3000);
  const auto first = b.run();
  for_each_order([&] { ASSERT_TRUE(b.run().first.same_bits(first.first)); });
}

// All of one share. One warp has much to look for before it finds the id with many tokens, the others have
// long done what is theirs.
TEST(CudaEmbeddingFloat, ManyTokensFoundLast) {
  Ids ids;
  for (std::int32_t i = 0; i < 1007; ++i) ids.push_back(7 + 1024 * (i % 8 == 7 ? 60 + i / 8 : i % 32));
  ids.insert(ids.end(), 60, 7 + 1024 * 50);
  const EmbeddingCase<CudaEmbeddingOf<float>> b(std::move(ids), 1, 1024 * 190, 2001, {2000});
  const auto sums = b.run();
  b.expect_near(sums.first, b.dwte, b.by_id());
}

// On a GPU as many tokens and ids as a large batch has.
TEST(CudaEmbeddingFloat, ManyTokens) {
  const std::int64_t tokens = is_gpu() ? 50000 : 1000, vocabulary = is_gpu() ? 60000 : 300;
  Ids ids = random_ids(tokens, vocabulary, 9);
  for (std::size_t i = 0; i < ids.size(); i += 20) ids[i] = 11;
  const EmbeddingCase<CudaEmbeddingOf<bf16>> b(std::move(ids), 264, vocabulary, 1001, {1000});
  const auto sums = b.run();
  b.expect_near(sums.first, b.dwte, b.by_id());
  b.expect_near(sums.second, b.dwpe, b.by_position());
}

TYPED_TEST(CudaEmbedding, BackwardInAnyOrder) {
  using T = TypeParam;
  const auto b = frequent_ids<T>(500);
  const auto sums = b.run_by(kernel_of<T>(false));
  b.expect_near(sums.first, b.dwte, b.by_id());
  b.expect_near(sums.second, b.dwpe, b.by_position());
}

TYPED_TEST(CudaEmbedding, EitherGradientMayBeLeftOutInAnyOrder) {
  using T = TypeParam;
  const EmbeddingCase<CudaEmbeddingOf<T>> b(random_ids(30, 7, 8), 43, 7, 11, {10});
  const auto both = b.run_by(kernel_of<T>(false));
  for (const bool only_wte : {true, false}) {
    const auto [dwte, dwpe] = b.run_by(kernel_of<T>(false), 0, only_wte, !only_wte);
    EXPECT_TRUE(only_wte ? dwpe.same_bits(b.dwpe) : dwte.same_bits(b.dwte));
    ASSERT_TRUE(is_gpu() || (only_wte ? dwte.same_bits(both.first) : dwpe.same_bits(both.second)));
  }
}

}  // namespace
}  // namespace zg::test
