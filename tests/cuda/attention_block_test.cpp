// Blocks of attention on the device: together they are the whole attention.
#include <optional>

#include "tests/cuda/harness.hpp"
#include "tests/kernels/attention_block_ring.hpp"

namespace zg::test {
namespace {

template <class T>
struct DeviceBlocks {
  using A = Acc<T>;
  template <class X>
  static Strided<X> from(OnDevice<X>& x, const Matrix<X>& m, std::int64_t row) {
    return {x.data() + row * m.ld(), m.ld()};
  }
  void forward(const AttentionBlock& b, RingPart<T>& p, Matrix<T>& kv, std::int64_t first, Matrix<T>* sinks) {
    OnDevice<T> q(p.q), on_kv(kv);
    OnDevice<std::int32_t> documents(p.first_keys);
    std::optional<OnDevice<T>> of_heads;
    if (sinks != nullptr) of_heads.emplace(*sinks);
    OnDevice<A> o(p.o), lse(p.lse);
    cuda::attention_block<T>(launch(), b,
                             {.q = from(q, p.q, first),
                              .kv = on_kv,
                              .o = from(o, p.o, first),
                              .lse = {lse.data() + first, p.lse.ld()},
                              .first_keys = p.first_keys.empty() ? nullptr : documents.data() + first,
                              .sinks = of_heads ? of_heads->data() : nullptr});
    o.fetch(), lse.fetch();
  }
  void backward(const AttentionBlock& b, RingPart<T>& p, Matrix<T>& kv, Matrix<A>& dkv, std::int64_t first) {
    std::vector<unsigned char> scratch(
        static_cast<std::size_t>(cuda::attention_block_scratch_bytes(dtype_of<T>, b)), 0xff);  // NaNs
    OnDevice<T> q(p.q), on_kv(kv), o(p.o_rounded), d_o(p.d_o);
    OnDevice<A> lse(p.lse), dq(p.dq), on_dkv(dkv);
    OnDevice<unsigned char> on_scratch(scratch);
    OnDevice<std::int32_t> documents(p.first_keys);
    cuda::attention_block_backward<T>(
        launch(), b,
        {.q = from(q, p.q, first),
         .kv = on_kv,
         .o = from(o, p.o_rounded, first),
         .d_o = from(d_o, p.d_o, first),
         .lse = {lse.data() + first, p.lse.ld()},
         .dq = from(dq, p.dq, first),
         .dkv = on_dkv,
         .scratch = on_scratch.data(),
         .first_keys = p.first_keys.empty() ? nullptr : documents.data() + first});
    dq.fetch(), on_dkv.fetch();
  }
};

template <class T>
class CudaAttentionBlocks : public testing::Test {};
TYPED_TEST_SUITE(CudaAttentionBlocks, StorageTypes);

// Heads of one and several pieces and parts, chunks of whole tiles and not.
TYPED_TEST(CudaAttentionBlocks, AreTheWholeAttention) {
  compare_ring<TypeParam>(ring_shape(2, 4, 3, 1, 22), 1, 0, DeviceBlocks<TypeParam>());
  compare_ring<TypeParam>(ring_shape(2, 12, 2, 2, 43), 2, 3, DeviceBlocks<TypeParam>());
  compare_ring<TypeParam>(ring_shape(1, 42, 4, 2, 80), 3, 8, DeviceBlocks<TypeParam>());
  compare_ring<TypeParam>(ring_shape(1, 20, 2, 1, 150), 2, 1, DeviceBlocks<TypeParam>());
  compare_ring<TypeParam>(ring_shape(1, 4 * 70, 1, 1, 16), 2, 0, DeviceBlocks<TypeParam>());
  compare_ring<TypeParam>(ring_shape(2, 12, 4, 2, 43, {.sinks = true}, 22), 2, 3, DeviceBlocks<TypeParam>());
  compare_ring<TypeParam>(ring_shape(1, 20, 2, 1, 22, {}, 150), 2, 1, DeviceBlocks<TypeParam>());
  compare_ring<TypeParam>(ring_shape(1, 20, 2, 1, 192, {}, 128), 2, 0, DeviceBlocks<TypeParam>());
}

TYPED_TEST(CudaAttentionBlocks, HaveTheirScaleAndCap) {
  const AttentionRule capped{.softcap = 2}, both{.scale = 0.3, .softcap = 5};
  compare_ring<TypeParam>(ring_shape(1, 42, 2, 1, 43, capped), 3, 5, DeviceBlocks<TypeParam>());
  compare_ring<TypeParam>(ring_shape(1, 136, 2, 1, 16, both), 2, 1, DeviceBlocks<TypeParam>());
}

TYPED_TEST(CudaAttentionBlocks, SeeWhatWindowsAndDocumentsLeave) {
  compare_rings_by_rules<TypeParam>(22, DeviceBlocks<TypeParam>());
}

TYPED_TEST(CudaAttentionBlocks, NothingOfNothing) {
  using T = TypeParam;
  Matrix<T> q(1, 8), kv(1, 16);
  Matrix<Acc<T>> o(1, 8), lse(1, 1);
  o.fill(3), lse.fill(5);
  OnDevice<T> on_q(q), on_kv(kv);
  OnDevice<Acc<T>> on_o(o), on_lse(lse);
  for (const AttentionBlock& b :
       {AttentionBlock{0, 1, 1, 1, 1, 1, 1, 8}, AttentionBlock{1, 0, 1, 1, 1, 1, 1, 8},
        AttentionBlock{1, 1, 0, 1, 1, 1, 1, 8, false, true}})
    cuda::attention_block<T>(launch(), b, {.q = on_q, .kv = on_kv, .o = on_o, .lse = on_lse});
  on_o.fetch(), on_lse.fetch();
  EXPECT_EQ(o.get(0, 0), 3);
  EXPECT_EQ(lse.get(0, 0), 5);
}

}  // namespace
}  // namespace zg::test
