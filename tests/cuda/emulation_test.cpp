// The emulation of CUDA on the host: what it runs is right, and what breaks CUDA's rules is found.
#include "kernels/cuda/emulation/emulation.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <vector>

#include "kernels/cuda/launch.hpp"

namespace zg::test {
namespace {

using cuda::Launch;
using cuda::Shape;

void block_sums(const int* x, int* out, int n) {
  int sum = 0;
  for (unsigned i = threadIdx.x + blockIdx.x * blockDim.x; i < static_cast<unsigned>(n);
       i += blockDim.x * gridDim.x)
    sum += x[i];
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  __shared__ int of_warp[32];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  out[blockIdx.x] = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) out[blockIdx.x] += of_warp[w];
}

TEST(Emulation, SumsOverWarpsAndBlocks) {
  std::vector<int> x(1001), out(7);
  std::iota(x.begin(), x.end(), 0);
  cuda::launch("block_sums", block_sums, Launch{}, Shape{7, 96}, x.data(), out.data(), 1001);
  EXPECT_EQ(std::accumulate(out.begin(), out.end(), 0), 1000 * 1001 / 2);
}

void neighbours(int* out) {
  const int i = static_cast<int>(threadIdx.x);
  out[4 * i] = __shfl_sync(0xffffffffu, i, 5);
  out[4 * i + 1] = __shfl_down_sync(0xffffffffu, i, 3);
  out[4 * i + 2] = __shfl_up_sync(0xffffffffu, i, 2);
  out[4 * i + 3] = static_cast<int>(__ballot_sync(0xffffffffu, i % 3 == 0));
}

TEST(Emulation, ShufflesGiveWhatTheOtherLaneGave) {
  std::vector<int> out(256);
  cuda::launch("neighbours", neighbours, Launch{}, Shape{1, 64}, out.data());
  for (int i = 0; i < 64; ++i) {
    const auto at = static_cast<std::size_t>(4 * i);
    EXPECT_EQ(out[at], i / 32 * 32 + 5);
    EXPECT_EQ(out[at + 1], i % 32 < 29 ? i + 3 : i);
    EXPECT_EQ(out[at + 2], i % 32 >= 2 ? i - 2 : i);
    unsigned bits = 0;
    for (int l = 0; l < 32; ++l) bits |= (i / 32 * 32 + l) % 3 == 0 ? 1u << l : 0u;
    EXPECT_EQ(static_cast<unsigned>(out[at + 3]), bits);
  }
}

// Reads what a neighbour writes, with and without the barrier between.
void turn(int* out, int with_barrier) {
  int* const shared = cuda::dynamic_shared<int>();
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (with_barrier != 0) __syncthreads();
  out[threadIdx.x] = shared[(threadIdx.x + 1) % blockDim.x];
}

TEST(Emulation, AMissingBarrierShows) {
  std::set<std::vector<int>> results[2];
  for (const int with_barrier : {0, 1}) {
    for (std::uint64_t seed = 1; seed < 6; ++seed) {
      emulation::set_seed(seed);
      std::vector<int> out(64);
      cuda::launch("turn", turn, Launch{}, Shape{1, 64, 64 * sizeof(int)}, out.data(), with_barrier);
      results[with_barrier].insert(out);
    }
  }
  EXPECT_GT(results[0].size(), 1u) << "without the barrier all orders gave the same";
  EXPECT_EQ(results[1].size(), 1u);
}

// Each warp in turn writes a value for all, into `buffers` buffers by turns, with one barrier a turn. With
// one buffer, a warp that is ahead overwrites what another has yet to read.
void one_after_another(int* out, int buffers) {
  int* const shared = cuda::dynamic_shared<int>();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int sum = 0;
  for (int turn = 0; turn < 6; ++turn) {
    if (threadIdx.x % 32 == 0 && turn % 4 == warp) shared[turn % buffers] = 1 << turn;
    __syncthreads();
    __syncwarp();
    sum += shared[turn % buffers];
  }
  out[threadIdx.x] = sum;
}

TEST(Emulation, AWarpMayBeALoopAhead) {
  std::set<std::vector<int>> results[2];
  for (const int buffers : {1, 2}) {
    for (std::uint64_t seed = 1; seed < 6; ++seed) {
      emulation::set_seed(seed);
      std::vector<int> out(128);
      cuda::launch("one_after_another", one_after_another, Launch{}, Shape{1, 128, 2 * sizeof(int)},
                   out.data(), buffers);
      results[buffers - 1].insert(out);
    }
  }
  EXPECT_GT(results[0].size(), 1u) << "with one buffer all orders gave the same";
  EXPECT_EQ(results[1].size(), 1u);
}

void half_a_barrier() {
  if (threadIdx.x < 32) __syncthreads();
}
void left_out() {
  if (threadIdx.x % 2 == 0) __syncwarp();
}
void other_mask() {
  __syncwarp(threadIdx.x < 16 ? 0xffffffffu : 0xffff0000u);
}

TEST(EmulationDeathTest, BrokenRulesEndTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(cuda::launch("half_a_barrier", half_a_barrier, Launch{}, Shape{1, 64}),
               "waits at a barrier for ever");
  EXPECT_DEATH(cuda::launch("left_out", left_out, Launch{}, Shape{1, 32}), "which has ended");
  EXPECT_DEATH(cuda::launch("other_mask", other_mask, Launch{}, Shape{1, 32}), "came to another collective");
  EXPECT_DEATH(cuda::launch("block_sums", half_a_barrier, Launch{}, Shape{1, 2048}),
               "blocks of 2048 threads");
  EXPECT_DEATH(cuda::launch("block_sums", half_a_barrier, Launch{}, Shape{1, 32, 1 << 20}), "shared memory");
}

}  // namespace
}  // namespace zg::test
