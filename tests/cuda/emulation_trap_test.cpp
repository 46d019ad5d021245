// Numbers from data that would become addresses outside of a table end the kernel. (A GPU's context would end
// with it: on the emulation alone.)
#include "tests/cuda/harness.hpp"

namespace zg::test {
namespace {

class CudaTrapDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  Matrix<float> table_ = Matrix<float>(7, 3), rows_ = Matrix<float>(4, 3);
};

TEST_F(CudaTrapDeathTest, IdOutsideTheVocabulary) {
  for (const std::int32_t bad : {7, -1, 1 << 30}) {
    std::vector<std::int32_t> ids = {0, 6, bad, 1};
    kernels::Embedding<float> forward{.ids = ids.data(),
                                      .vocabulary = 7,
                                      .positions = 0,
                                      .rows = 4,
                                      .wte = table_,
                                      .wpe = {},
                                      .out = rows_};
    EXPECT_DEATH(cuda::embedding<float>(launch(), {4, 3}, forward), "trapped");
    kernels::EmbeddingBackward<float> backward{.ids = ids.data(),
                                               .vocabulary = 7,
                                               .positions = 0,
                                               .rows = 4,
                                               .dout = rows_,
                                               .dwte = table_,
                                               .dwpe = {}};
    for (const bool deterministic : {true, false}) {
      EXPECT_DEATH(cuda::embedding_backward<float>(launch(deterministic), {4, 3}, backward), "trapped");
    }
  }
}

TEST_F(CudaTrapDeathTest, PositionOutsideTheTable) {
  std::vector<std::int32_t> ids = {0, 6, 2, 1};
  kernels::Embedding<float> forward{.ids = ids.data(),
                                    .vocabulary = 7,
                                    .positions = 3,
                                    .rows = 4,
                                    .wte = table_,
                                    .wpe = table_,
                                    .out = rows_};
  EXPECT_DEATH(cuda::embedding<float>(launch(), {4, 3}, forward), "trapped");
  kernels::EmbeddingBackward<float> backward{.ids = ids.data(),
                                             .vocabulary = 7,
                                             .positions = 3,
                                             .rows = 4,
                                             .dout = rows_,
                                             .dwte = {},
                                             .dwpe = table_};
  EXPECT_DEATH(cuda::embedding_backward<float>(launch(), {4, 3}, backward), "trapped");
}

TEST_F(CudaTrapDeathTest, TargetOutsideTheVocabulary) {
  std::vector<std::int32_t> targets = {0, 2, 3, 1};
  std::vector<double> scratch(cuda::kSumPartials);
  double loss = 0;
  kernels::CrossEntropy<float> args{.logits = rows_,
                                    .targets = targets.data(),
                                    .loss_sum = &loss,
                                    .dlogits = {},
                                    .scratch = scratch.data()};
  EXPECT_DEATH(cuda::cross_entropy<float>(launch(), {4, 3}, args), "trapped");
}

}  // namespace
}  // namespace zg::test
