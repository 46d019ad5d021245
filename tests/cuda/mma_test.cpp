// The instructions of kernels/cuda/mma.hpp against the layouts of the PTX ISA (9.7.14.5.8, "Matrix Fragments
// for mma.m16n8k16 with floating point type", and ldmatrix), which are written out here a second time,
// element by element as the document has them.
#include "tests/cuda/kernels/mma_probe.hpp"

#include <numeric>

#include "tests/cuda/harness.hpp"

namespace zg::test {
namespace {

struct At {
  int row, col;
};
// "row = groupID for ai where 0 <= i < 2 || 4 <= i < 6, groupID + 8 otherwise; col = (threadID_in_group * 2)
// + (i & 0x1) for ai where i < 4, ... + 8 for ai where i >= 4".
At of_a(int lane, int i) {
  const int group = lane >> 2, in_group = lane % 4;
  return {(0 <= i && i < 2) || (4 <= i && i < 6) ? group : group + 8,
          i < 4 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8};
}
// "row = (threadID_in_group * 2) + (i & 0x1) for bi where i < 2, ... + 8 for bi where i >= 2; col = groupID".
At of_b(int lane, int i) {
  const int group = lane >> 2, in_group = lane % 4;
  return {i < 2 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8, group};
}
// "row = groupID for ci where i < 2, groupID + 8 for ci where i >= 2; col = (threadID_in_group * 2) + (i &
// 0x1)".
At of_d(int lane, int i) {
  const int group = lane >> 2, in_group = lane % 4;
  return {i < 2 ? group : group + 8, in_group * 2 + (i & 1)};
}

// Puts element i of a fragment into its register, low half first.
template <class T>
void put(std::vector<unsigned>& registers, int lane, int per_lane, int i, T x) {
  registers[static_cast<std::size_t>(lane * per_lane + i / 2)] |= static_cast<unsigned>(x.bits)
                                                                  << (i % 2 * 16);
}

template <class T>
class Mma : public testing::Test {};
using Halves = testing::Types<bf16, fp16>;
TYPED_TEST_SUITE(Mma, Halves);

// Whole numbers up to 7: all sums are exact, in any order.
TYPED_TEST(Mma, IsTheProductOfTheDocumentedMatrices) {
  using T = TypeParam;
  auto random = generator(1);
  std::uniform_int_distribution<int> whole(-7, 7);
  for_each_order([&] {
    Matrix<T> a(16, 16), b(16, 8);
    Matrix<float> d(16, 8);
    for (int r = 0; r < 16; ++r) {
      for (int c = 0; c < 16; ++c) a.set(r, c, whole(random));
      for (int c = 0; c < 8; ++c) b.set(r, c, whole(random)), d.set(r, c, whole(random));
    }
    std::vector<unsigned> ra(32 * 4), rb(32 * 2);
    std::vector<float> rd(32 * 4);
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 8; ++i) put(ra, lane, 4, i, a.at(of_a(lane, i).row, of_a(lane, i).col));
      for (int i = 0; i < 4; ++i) {
        put(rb, lane, 2, i, b.at(of_b(lane, i).row, of_b(lane, i).col));
        rd[static_cast<std::size_t>(4 * lane + i)] = d.at(of_d(lane, i).row, of_d(lane, i).col);
      }
    }
    OnDevice<unsigned> on_a(ra), on_b(rb);
    OnDevice<float> on_d(rd);
    probe_mma<T>(launch(), on_a.data(), on_b.data(), on_d.data());
    on_d.fetch();
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const At at = of_d(lane, i);
        double sum = d.get(at.row, at.col);
        for (int k = 0; k < 16; ++k) sum += a.get(at.row, k) * b.get(k, at.col);
        ASSERT_EQ(static_cast<double>(rd[static_cast<std::size_t>(4 * lane + i)]), sum)
            << "lane " << lane << ", d" << i;
      }
    }
  });
}

// "Addresses addr0 - addr7 correspond to the rows of the first matrix" and are those of threads 0 - 7, and so
// on; "a group of four threads loads an entire row": thread 4 r + c / 2 has element c of row r, .trans: of
// column r.
TEST(Ldmatrix, LanesHaveTheDocumentedElements) {
  std::vector<std::uint16_t> memory(4096);
  std::iota(memory.begin(), memory.end(), std::uint16_t{0});
  auto random = generator(2);
  std::vector<std::int32_t> offsets(32);
  for (const bool transposed : {false, true}) {
    for_each_order([&] {
      for (std::int32_t& offset : offsets) offset = static_cast<std::int32_t>(random() % 512 * 8);
      std::vector<unsigned> to(32 * 4, 0xdeadbeef);
      OnDevice<std::uint16_t> on_memory(memory);
      OnDevice<std::int32_t> on_offsets(offsets);
      OnDevice<unsigned> on_to(to);
      probe_ldmatrix(launch(), transposed, on_memory.data(), static_cast<std::int64_t>(memory.size()),
                     on_offsets.data(), on_to.data());
      on_to.fetch();
      for (int matrix = 0; matrix < 4; ++matrix) {
        for (int row = 0; row < 8; ++row) {
          for (int col = 0; col < 8; ++col) {
            // Elements are their places in memory.
            const int element = offsets[static_cast<std::size_t>(8 * matrix + row)] + col;
            const int line = transposed ? col : row, in_line = transposed ? row : col;
            const unsigned has = to[static_cast<std::size_t>(4 * (4 * line + in_line / 2) + matrix)];
            ASSERT_EQ(static_cast<int>(has >> (in_line % 2 * 16) & 0xffffu), element)
                << "matrix " << matrix << ", row " << row << ", column " << col << ", transposed "
                << transposed;
          }
        }
      }
    });
  }
}

TEST(CpAsync, BringsPiecesAndZeros) {
  constexpr std::int64_t kRounds = 9, kRound = 16 * kProbeThreads;
  std::vector<unsigned char> in(kRounds * kRound), out(in.size());
  auto random = generator(3);
  for (unsigned char& byte : in) byte = static_cast<unsigned char>(random());
  std::vector<std::int32_t> there = {1, 1, 0, 1, 0, 0, 1, 1, 1};
  OnDevice<unsigned char> on_in(in), on_out(out);
  OnDevice<std::int32_t> on_there(there);
  for_each_order([&] {
    std::fill(out.begin(), out.end(), static_cast<unsigned char>(0xab));
    on_out.refill();
    probe_cp_async(launch(), on_in.data(), on_there.data(), kRounds, on_out.data());
    on_out.fetch();
    for (std::int64_t at = 0; at < kRounds * kRound; ++at) {
      const std::int64_t round = at / kRound, from = round * kRound + (at % kRound + 16) % kRound;
      const int expected =
          there[static_cast<std::size_t>(round)] != 0 ? in[static_cast<std::size_t>(from)] : 0;
      ASSERT_EQ(static_cast<int>(out[static_cast<std::size_t>(at)]), expected) << "byte " << at;
    }
  });
}

}  // namespace
}  // namespace zg::test
