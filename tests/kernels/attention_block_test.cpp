// Blocks of attention on the host: together they are the whole attention.
#include "tests/kernels/attention_block_ring.hpp"

#include "kernels/host/matrix.hpp"

namespace zg::test {
namespace {

template <class T>
struct HostBlocks {
  using A = Acc<T>;
  static const std::int32_t* documents(const RingPart<T>& p, std::int64_t first) {
    return p.first_keys.empty() ? nullptr : p.first_keys.data() + first;
  }
  void forward(const AttentionBlock& b, RingPart<T>& p, Matrix<T>& kv, std::int64_t first, Matrix<T>* sinks) {
    host::attention_block<T>(b, {.q = rows_from(p.q, first),
                                 .kv = kv,
                                 .o = rows_from(p.o, first),
                                 .lse = {p.lse.data() + first, p.lse.ld()},
                                 .first_keys = documents(p, first),
                                 .sinks = sinks == nullptr ? nullptr : sinks->data()});
  }
  void backward(const AttentionBlock& b, RingPart<T>& p, Matrix<T>& kv, Matrix<A>& dkv, std::int64_t first) {
    host::attention_block_backward<T>(b, {.q = rows_from(p.q, first),
                                          .kv = kv,
                                          .o = rows_from(p.o_rounded, first),
                                          .d_o = rows_from(p.d_o, first),
                                          .lse = {p.lse.data() + first, p.lse.ld()},
                                          .dq = rows_from(p.dq, first),
                                          .dkv = dkv,
                                          .first_keys = documents(p, first)});
  }
};

template <class T>
class AttentionBlocks : public testing::Test {};
TYPED_TEST_SUITE(AttentionBlocks, StorageTypes);

TYPED_TEST(AttentionBlocks, AreTheWholeAttention) {
  for_each_target([] {
    compare_ring<TypeParam>(ring_shape(2, 4, 3, 3, 22), 1, 0, HostBlocks<TypeParam>());
    compare_ring<TypeParam>(ring_shape(2, 4, 3, 1, 22), 2, 3, HostBlocks<TypeParam>());
    compare_ring<TypeParam>(ring_shape(2, 42, 4, 2, 43), 3, 5, HostBlocks<TypeParam>());
    compare_ring<TypeParam>(ring_shape(1, 136, 2, 2, 64), 4, 1, HostBlocks<TypeParam>());
    compare_ring<TypeParam>(ring_shape(2, 42, 4, 2, 43, {.sinks = true}, 22), 3, 5, HostBlocks<TypeParam>());
    compare_ring<TypeParam>(ring_shape(1, 136, 2, 1, 16, {}, 40), 2, 1, HostBlocks<TypeParam>());
  });
  // Chunks of more than a tile, and not of whole tiles.
  compare_ring<TypeParam>(ring_shape(1, 4 * 70, 2, 1, 16), 2, 0, HostBlocks<TypeParam>());
  compare_ring<TypeParam>(ring_shape(1, 6 * 131, 1, 1, 8), 3, 2, HostBlocks<TypeParam>());
}

TYPED_TEST(AttentionBlocks, HaveTheirScaleAndCap) {
  const AttentionRule scaled{.scale = 0.4}, capped{.softcap = 2}, both{.scale = 0.3, .softcap = 5};
  compare_ring<TypeParam>(ring_shape(2, 42, 4, 2, 43, scaled), 3, 5, HostBlocks<TypeParam>());
  compare_ring<TypeParam>(ring_shape(1, 136, 2, 1, 16, capped), 2, 1, HostBlocks<TypeParam>());
  compare_ring<TypeParam>(ring_shape(1, 136, 2, 1, 16, both), 2, 1, HostBlocks<TypeParam>());
}

TYPED_TEST(AttentionBlocks, SeeWhatWindowsAndDocumentsLeave) {
  for_each_target([] {
    compare_ring<TypeParam>(ring_shape(2, 42, 2, 1, 22, {.window = 9, .sinks = true}), 3, 5,
                            HostBlocks<TypeParam>(), {5, 1, 9, 30});
  });
  compare_rings_by_rules<TypeParam>(22, HostBlocks<TypeParam>());
}

// Scores of some thousands, of which the block that is merged has all the weight, or none.
TYPED_TEST(AttentionBlocks, MergesDoNotOverflow) {
  using T = TypeParam;
  const AttentionBlock b{1, 1, 1, 1, 1, 1, 1, 1, false, true};
  for (const double score : {-5000.0, 0.0, 5000.0}) {
    Matrix<T> q(1, 1), kv(1, 2);
    Matrix<Acc<T>> o(1, 1), lse(1, 1);
    q.set(0, 0, 1), kv.set(0, 0, score), kv.set(0, 1, 3), o.set(0, 0, 1), lse.set(0, 0, 0);
    host::attention_block<T>(b, {.q = q, .kv = kv, .o = o, .lse = lse});
    EXPECT_NEAR(o.get(0, 0), score < 0 ? 1 : score > 0 ? 3 : 2, 1e-6);
    EXPECT_NEAR(lse.get(0, 0), score < 0 ? 0 : score > 0 ? kv.get(0, 0) : std::log(2), 1e-2);
  }
}

TYPED_TEST(AttentionBlocks, BitsDoNotDependOnThreads) {
  using T = TypeParam;
  AttentionBlock b{2, 300, 200, 300, 200, 4, 2, 22, false, true};
  Matrix<T> q(600, 88), kv(400, 88), d_o(600, 88), rounded(600, 88);
  auto random = generator(9);
  for (Matrix<T>* m : {&q, &kv, &d_o, &rounded}) m->fill_normal(random);
  std::vector<Matrix<Acc<T>>> first;
  for_each_thread_count([&](int) {
    Matrix<Acc<T>> o(600, 88), lse(8, 300), dq(600, 88), dkv(400, 88);
    host::attention_block<T>(b, {.q = q, .kv = kv, .o = o, .lse = lse});
    host::attention_block_backward<T>(b, {q, kv, rounded, d_o, lse, dq, dkv});
    if (first.empty()) first = {o, lse, dq, dkv};
    EXPECT_TRUE(first[0].same_bits(o) && first[1].same_bits(lse) && first[2].same_bits(dq) &&
                first[3].same_bits(dkv));
  });
}

}  // namespace
}  // namespace zg::test
