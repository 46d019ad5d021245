// The emulation of asynchronous copies finds the mistakes that they invite.
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "kernels/cuda/mma.hpp"

namespace zg::test {
namespace {

enum class Mistake { kNone, kNoWait, kLateWait, kNoBarrier, kOverwrite };

// Two pieces of every thread, one after the other, through one stage; what comes out is the neighbour's.
void pass(const int* in, int* out, Mistake mistake) {
  int* const shared = cuda::dynamic_shared<int>();
  const int thread = static_cast<int>(threadIdx.x), count = static_cast<int>(blockDim.x);
  for (int piece = 0; piece < 2; ++piece) {
    if (piece > 0 && mistake != Mistake::kOverwrite) __syncthreads();
    cuda::cp_async_16(shared + 4 * thread, in + 4 * (piece * count + thread), true);
    cuda::cp_async_commit();
    if (mistake == Mistake::kLateWait) {
      cuda::cp_async_wait<1>();
    } else if (mistake != Mistake::kNoWait) {
      cuda::cp_async_wait<0>();
    }
    if (mistake != Mistake::kNoBarrier) __syncthreads();
    out[piece * count + thread] = shared[4 * ((thread + 1) % count)];
  }
}

std::size_t results_of(Mistake mistake) {
  std::set<std::vector<int>> results;
  std::vector<int> in(4 * 2 * 32);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<int>(i);
  void* aligned = nullptr;
  EXPECT_EQ(posix_memalign(&aligned, 16, in.size() * sizeof(int)), 0);
  std::memcpy(aligned, in.data(), in.size() * sizeof(int));
  for (std::uint64_t seed = 1; seed < 9; ++seed) {
    emulation::set_seed(seed);
    std::vector<int> out(2 * 32);
    cuda::launch("pass", pass, cuda::Launch{}, cuda::Shape{1, 32, 32 * 16}, static_cast<const int*>(aligned),
                 out.data(), mistake);
    results.insert(out);
  }
  std::free(aligned);
  return results.size();
}

TEST(EmulatedCopies, MistakesShow) {
  EXPECT_EQ(results_of(Mistake::kNone), 1u);
  for (const Mistake mistake :
       {Mistake::kNoWait, Mistake::kLateWait, Mistake::kNoBarrier, Mistake::kOverwrite})
    EXPECT_GT(results_of(mistake), 1u) << "mistake " << static_cast<int>(mistake) << " did not show";
}

void misaligned_copy(const int* in) {
  cuda::cp_async_16(cuda::dynamic_shared<int>(), in + 1, true);
}
void misaligned_row() {
  unsigned registers[4];
  cuda::ldmatrix_x4(registers, cuda::dynamic_shared<int>() + 1);
}

TEST(EmulatedCopiesDeathTest, AddressesAreAligned) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  alignas(16) static const int in[8] = {};
  EXPECT_DEATH(cuda::launch("misaligned_copy", misaligned_copy, cuda::Launch{}, cuda::Shape{1, 32, 64},
                            static_cast<const int*>(in)),
               "cp.async are aligned");
  EXPECT_DEATH(cuda::launch("misaligned_row", misaligned_row, cuda::Launch{}, cuda::Shape{1, 32, 64}),
               "ldmatrix is aligned");
}

}  // namespace
}  // namespace zg::test
