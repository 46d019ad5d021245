// Windows, scales, caps and documents of attention on the device: on tensor cores in one pass and in two, and
// without.
#include "tests/kernels/attention_rules.hpp"

#include "tests/cuda/harness.hpp"

namespace zg::test {
namespace {

struct DeviceAttention {
  bool deterministic = true;

  template <class T>
  void forward(AttentionRun<T>& x) const {
    OnDevice<T> qkv(x.qkv), o(x.o);
    OnDevice<Acc<T>> lse(x.lse);
    OnDevice<std::int32_t> first(x.first_keys);
    OnDevice<T> sinks(x.sinks);
    cuda::attention<T>(launch(deterministic), x.shape,
                       {.qkv = {qkv.data(), x.qkv.ld()},
                        .o = {o.data(), x.o.ld()},
                        .lse = lse.data(),
                        .first_keys = x.documents() == nullptr ? nullptr : first.data(),
                        .sinks = x.shape.rule.sinks ? sinks.data() : nullptr});
    o.fetch(), lse.fetch();
  }
  template <class T>
  void backward(AttentionRun<T>& x) const {
    std::vector<unsigned char> scratch(
        static_cast<std::size_t>(cuda::attention_scratch_bytes(dtype_of<T>, x.shape, deterministic)), 0xff);
    OnDevice<T> qkv(x.qkv), o(x.o), d_o(x.d_o), dqkv(x.dqkv);
    OnDevice<Acc<T>> lse(x.lse);
    OnDevice<unsigned char> on_scratch(scratch);
    OnDevice<std::int32_t> first(x.first_keys);
    cuda::attention_backward<T>(launch(deterministic), x.shape,
                                {.qkv = {qkv.data(), x.qkv.ld()},
                                 .o = {o.data(), x.o.ld()},
                                 .lse = lse.data(),
                                 .d_o = {d_o.data(), x.d_o.ld()},
                                 .dqkv = {dqkv.data(), x.dqkv.ld()},
                                 .scratch = on_scratch.data(),
                                 .first_keys = x.documents() == nullptr ? nullptr : first.data()});
    dqkv.fetch();
    if (!x.shape.rule.sinks) return;
    OnDevice<T> sinks(x.sinks);
    OnDevice<Acc<T>> d_sinks(x.d_sinks);
    kernels::AttentionSinksBackward<T> args = x.sinks_backward();
    args.o.data = o.data(), args.d_o.data = d_o.data(), args.lse.data = lse.data();
    args.sinks = sinks.data(), args.d_sinks = d_sinks.data();
    cuda::attention_sinks_backward<T>(launch(deterministic), args);
    d_sinks.fetch();
  }
};

AttentionShape shape_of(std::int64_t batch, std::int64_t time, std::int64_t heads, std::int64_t kv_heads,
                        std::int64_t head_size) {
  return {.batch = batch, .time = time, .heads = heads, .kv_heads = kv_heads, .head_size = head_size};
}

template <class T>
class CudaAttentionRules : public testing::Test {};
TYPED_TEST_SUITE(CudaAttentionRules, StorageTypes);
using Halves = testing::Types<bf16, fp16>;
template <class T>
class TensorAttentionRules : public testing::Test {};
TYPED_TEST_SUITE(TensorAttentionRules, Halves);

// All four padded head sizes, tiles whole and begun. The kernels for wide heads have each rule in one of the
// two ways.
TYPED_TEST(TensorAttentionRules, AreTheSoftmaxOfWhatTheyLeave) {
  bool one_pass = false;
  for (const RuleCase& x : kRuleCases) {
    for (const bool deterministic : {true, false})
      compare_rule<TypeParam>(shape_of(1, 200, 2, 1, 64), x, DeviceAttention{deterministic});
    one_pass = !one_pass;
    compare_rule<TypeParam>(shape_of(2, 7, 2, 1, 40), x, DeviceAttention{one_pass});
    compare_rule<TypeParam>(shape_of(1, 140, 1, 1, 96), x, DeviceAttention{one_pass}, 5);
    compare_rule<TypeParam>(shape_of(1, 150, 1, 1, 128), x, DeviceAttention{!one_pass});
    compare_rule<TypeParam>(shape_of(1, 150, 2, 1, 256), x, DeviceAttention{one_pass});
  }
}

// Without tensor cores: several pieces and blocks of a head.
TYPED_TEST(CudaAttentionRules, AnyHeadSizeIsTheSoftmaxOfWhatTheyLeave) {
  for (const RuleCase& x : kRuleCases) {
    compare_rule<TypeParam>(shape_of(2, 70, 2, 1, 22), x, DeviceAttention());
    compare_rule<TypeParam>(shape_of(1, 90, 1, 1, 131), x, DeviceAttention(), 5);
  }
}

TEST(CudaAttentionRulesInFp64, APackIsItsDocuments) {
  for (const AttentionRule& rule : {AttentionRule(), AttentionRule{.window = 9, .softcap = 4}})
    expect_pack_is_its_documents(DeviceAttention(), {40, 1, 1, 64, 30}, rule);
}

TEST(CudaAttentionRulesInFp64, BackwardIsTheDerivative) {
  for (const RuleCase& x : {RuleCase{{.window = 3}, {2, 4}}, RuleCase{{.softcap = 2}, {}}})
    expect_derivative(DeviceAttention(), x);
}

// A block has 128 queries and goes through tiles of keys, or 128 keys and goes through tiles of 64 queries,
// or of 32 with heads of 256.
TEST(TensorAttentionTiles, HiddenOnesAreNotComputed) {
  const TileSizes of_keys{64, 128};
  for (const RuleCase& x :
       {RuleCase{{.window = 1}, {}}, RuleCase{{.window = 65}, {}}, RuleCase{{.window = 130}, {}},
        RuleCase{{}, {63, 70, 200}}, RuleCase{{.window = 100}, {130, 1, 190}}})
    expect_computed_tiles<bf16>(x, 330, 64, DeviceAttention(), {128, 64}, {128, 64}, of_keys);
  for (const RuleCase& x : {RuleCase{{.window = 65}, {}}, RuleCase{{}, {63, 70, 200}}}) {
    expect_computed_tiles<bf16>(x, 270, 64, DeviceAttention{false}, {128, 64}, of_keys, of_keys);
    expect_computed_tiles<bf16>(x, 270, 128, DeviceAttention(), {128, 64}, {128, 32}, of_keys);
    expect_computed_tiles<bf16>(x, 270, 256, DeviceAttention(), {128, 32}, {128, 16}, {32, 128});
  }
}
template <class T>
class PlainAttentionTiles : public testing::Test {};
using Wholes = testing::Types<float, double>;
TYPED_TEST_SUITE(PlainAttentionTiles, Wholes);
TYPED_TEST(PlainAttentionTiles, HiddenOnesAreNotComputed) {
  constexpr std::int64_t kTile = sizeof(TypeParam) == 8 ? 32 : 64;
  constexpr TileSizes kTiles{kTile, kTile};
  for (const RuleCase& x : {RuleCase{{.window = 1}, {}}, RuleCase{{.window = 65}, {}},
                            RuleCase{{}, {63, 20, 70}}, RuleCase{{.window = 50}, {130, 1, 40}}})
    expect_computed_tiles<TypeParam>(x, 200, 22, DeviceAttention(), kTiles, kTiles, kTiles);
}

TYPED_TEST(CudaAttentionRules, BitsDoNotDependOnOrder) {
  for (const std::int64_t size : {64, 43}) {
    AttentionShape shape = shape_of(1, 140, 2, 1, size);
    shape.rule = {.window = 90, .softcap = 4};
    AttentionRun<TypeParam> first(shape, first_keys_of(1, 140, {70, 1, 50}));
    DeviceAttention().forward(first), DeviceAttention().backward(first);
    for_each_order([&] {
      AttentionRun<TypeParam> again(shape, first.first_keys);
      DeviceAttention().forward(again), DeviceAttention().backward(again);
      EXPECT_TRUE(first.o.same_bits(again.o));
      EXPECT_TRUE(first.dqkv.same_bits(again.dqkv));
    });
  }
}

}  // namespace
}  // namespace zg::test
