// Embeddings of the host.
#include "tests/kernels/embedding_cases.hpp"
#include "tests/kernels/host_kernels.hpp"

namespace zg::test {
namespace {

template <class T>
struct HostEmbedding : Host<T> {
  static std::vector<Gaps> gaps() { return {{0, 0, 0}, {3, 1, 2}}; }
  static constexpr bool kSumsBeginWithTheTable = true;
  static void for_each_split(const std::function<void()>& body) { HostKernels::for_each_order(body); }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Host, Embedding, ForStorageTypes<HostEmbedding>);

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
