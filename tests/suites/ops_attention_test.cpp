// The device's attention, whole and in blocks of keys, against the same ops in plain fp64 loops.
#include "tests/suites/ops_operands.hpp"
#include "ziggurat/device/ops.hpp"

namespace zg::test {
namespace {

template <class T>
class DeviceAttention : public testing::Test {};
TYPED_TEST_SUITE(DeviceAttention, StorageTypes);

TYPED_TEST(DeviceAttention, Attention) {
  for (const std::int64_t kv_heads : {1, 2, 4}) {
    const AttentionShape shape{.batch = 2, .time = 7, .heads = 4, .kv_heads = kv_heads, .head_size = 8};
    Operands<TypeParam> o;
    const std::int64_t tokens = 14, width = (4 + 2 * kv_heads) * 8;
    const auto qkv = o.t(tokens, width), out = o.t(tokens, 32), d_o = o.t(tokens, 32),
               dqkv = o.t(tokens, width);
    const auto lse = o.a_dense(8, 7);
    const auto scratch = o.byte_scratch(o.device().ops().attention_scratch_bytes(dtype_of<TypeParam>, shape));
    o.run([&](Ops& ops, Stream& s, auto pick) {
      ops.attention(
          s, {.qkv = pick(qkv), .shape = shape, .o = pick(out), .lse = pick(lse), .scratch = pick(scratch)});
      ops.attention_backward(s, {.qkv = pick(qkv),
                                 .o = pick(out),
                                 .lse = pick(lse),
                                 .d_o = pick(d_o),
                                 .shape = shape,
                                 .dqkv = pick(dqkv),
                                 .scratch = pick(scratch)});
    });
  }
}

// Values of another size than queries and keys; whole, with sinks, and in blocks.
TYPED_TEST(DeviceAttention, ValuesOfAnotherSize) {
  AttentionShape shape{.batch = 2, .time = 7, .heads = 4, .kv_heads = 2, .head_size = 8, .value_size = 6};
  shape.rule.sinks = true;
  AttentionBlock block{.batch = 2, .queries = 7, .keys = 7, .query_step = 7, .key_step = 7};
  block.heads = 4, block.kv_heads = 2, block.head_size = 8, block.value_size = 6, block.causal = true;
  Operands<TypeParam> o;
  const auto qkv = o.t(14, 60), out = o.t(14, 24), d_o = o.t(14, 24), dqkv = o.t(14, 60), sinks = o.t(1, 4);
  const auto lse = o.a_dense(8, 7), d_sinks = o.a_dense(1, 4);
  const auto q = o.t(14, 32), kv = o.t(14, 28);
  const auto sum = o.a(14, 24), block_lse = o.a(8, 7), dq = o.a(14, 32), dkv = o.a(14, 28);
  const auto scratch = o.byte_scratch(o.device().ops().attention_scratch_bytes(dtype_of<TypeParam>, shape));
  const auto block_scratch =
      o.byte_scratch(o.device().ops().attention_block_scratch_bytes(dtype_of<TypeParam>, block));
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.attention(s, {.qkv = pick(qkv),
                      .shape = shape,
                      .o = pick(out),
                      .lse = pick(lse),
                      .scratch = pick(scratch),
                      .sinks = pick(sinks)});
    ops.attention_backward(s, {.qkv = pick(qkv),
                               .o = pick(out),
                               .lse = pick(lse),
                               .d_o = pick(d_o),
                               .shape = shape,
                               .dqkv = pick(dqkv),
                               .scratch = pick(scratch)});
    ops.attention_sinks_backward(s, {.o = pick(out),
                                     .lse = pick(lse),
                                     .d_o = pick(d_o),
                                     .shape = shape,
                                     .sinks = pick(sinks),
                                     .d_sinks = pick(d_sinks)});
    ops.attention_block(
        s, {.q = pick(q), .kv = pick(kv), .block = block, .o = pick(sum), .lse = pick(block_lse)});
    ops.attention_block_backward(s, {.q = pick(q),
                                     .kv = pick(kv),
                                     .o = pick(out),
                                     .lse = pick(block_lse),
                                     .d_o = pick(d_o),
                                     .block = block,
                                     .dq = pick(dq),
                                     .dkv = pick(dkv),
                                     .scratch = pick(block_scratch)});
  });
}

// In packs and not.
TYPED_TEST(DeviceAttention, KeysAndValuesOfLatents) {
  for (const LatentHeads& heads : {LatentHeads{3, 5, 2, 7}, LatentHeads{4, 16, 8, 24}}) {
    Operands<TypeParam> o;
    const auto joint = o.t(6, heads.joint_columns()), shared = o.t(6, heads.shared),
               kv = o.t(6, heads.kv_columns());
    const auto dkv = o.t(6, heads.kv_columns()), d_joint = o.t(6, heads.joint_columns()),
               d_shared = o.t(6, heads.shared);
    o.run([&](Ops& ops, Stream& s, auto pick) {
      ops.expand_kv(s, {.heads = heads, .joint = pick(joint), .shared = pick(shared), .kv = pick(kv)});
      ops.expand_kv_backward(
          s, {.heads = heads, .dkv = pick(dkv), .d_joint = pick(d_joint), .d_shared = pick(d_shared)});
    });
  }
}

TYPED_TEST(DeviceAttention, AttentionByARule) {
  for (const bool with_documents : {false, true}) {
    AttentionShape shape{.batch = 2, .time = 7, .heads = 4, .kv_heads = 2, .head_size = 8};
    shape.rule = {.window = 3, .scale = 0.3, .softcap = 2}, shape.documents = with_documents;
    Operands<TypeParam> o;
    const auto qkv = o.t(14, 64), out = o.t(14, 32), d_o = o.t(14, 32), dqkv = o.t(14, 64);
    const auto lse = o.a_dense(8, 7);
    const auto first = o.ids({0, 0, 0, 0, 4, 4, 6, 0, 1, 1, 1, 1, 1, 1});
    const auto scratch = o.byte_scratch(o.device().ops().attention_scratch_bytes(dtype_of<TypeParam>, shape));
    o.run([&](Ops& ops, Stream& s, auto pick) {
      const View documents = with_documents ? pick(first) : View();
      ops.attention(s, {.qkv = pick(qkv),
                        .shape = shape,
                        .o = pick(out),
                        .lse = pick(lse),
                        .scratch = pick(scratch),
                        .first_keys = documents});
      ops.attention_backward(s, {.qkv = pick(qkv),
                                 .o = pick(out),
                                 .lse = pick(lse),
                                 .d_o = pick(d_o),
                                 .shape = shape,
                                 .dqkv = pick(dqkv),
                                 .scratch = pick(scratch),
                                 .first_keys = documents});
    });
  }
}

TYPED_TEST(DeviceAttention, AttentionWithSinks) {
  AttentionShape shape{.batch = 2, .time = 7, .heads = 4, .kv_heads = 2, .head_size = 8};
  shape.rule = {.window = 3, .sinks = true};
  Operands<TypeParam> o;
  const auto qkv = o.t(14, 64), out = o.t(14, 32), d_o = o.t(14, 32), dqkv = o.t(14, 64), sinks = o.t(1, 4);
  const auto lse = o.a_dense(8, 7), d_sinks = o.a_dense(1, 4);
  const auto scratch = o.byte_scratch(o.device().ops().attention_scratch_bytes(dtype_of<TypeParam>, shape));
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.attention(s, {.qkv = pick(qkv),
                      .shape = shape,
                      .o = pick(out),
                      .lse = pick(lse),
                      .scratch = pick(scratch),
                      .sinks = pick(sinks)});
    ops.attention_backward(s, {.qkv = pick(qkv),
                               .o = pick(out),
                               .lse = pick(lse),
                               .d_o = pick(d_o),
                               .shape = shape,
                               .dqkv = pick(dqkv),
                               .scratch = pick(scratch)});
    ops.attention_sinks_backward(s, {.o = pick(out),
                                     .lse = pick(lse),
                                     .d_o = pick(d_o),
                                     .shape = shape,
                                     .sinks = pick(sinks),
                                     .d_sinks = pick(d_sinks)});
  });
}

// A causal block, and one of all keys that is merged with it; of sequences with rows between them.
TYPED_TEST(DeviceAttention, AttentionBlocks) {
  for (const std::int64_t kv_heads : {1, 2, 4}) {
    AttentionBlock own{.batch = 2, .queries = 5, .keys = 5, .query_step = 7, .key_step = 6};
    own.heads = 4, own.kv_heads = kv_heads, own.head_size = 8, own.causal = true;
    AttentionBlock other = own;
    other.keys = 3, other.key_step = 4, other.causal = false, other.merge = true;
    Operands<TypeParam> o;
    const auto q = o.t(12, 32), o_t = o.t(12, 32), d_o = o.t(12, 32);
    const auto kv = o.t(11, 2 * kv_heads * 8), more = o.t(7, 2 * kv_heads * 8);
    const auto sum = o.a(12, 32), lse = o.a(8, 5), dq = o.a(12, 32), dkv = o.a(11, 2 * kv_heads * 8),
               dmore = o.a(7, 2 * kv_heads * 8);
    const auto scratch =
        o.byte_scratch(o.device().ops().attention_block_scratch_bytes(dtype_of<TypeParam>, own));
    o.run([&](Ops& ops, Stream& s, auto pick) {
      ops.attention_block(s, {.q = pick(q), .kv = pick(kv), .block = own, .o = pick(sum), .lse = pick(lse)});
      ops.attention_block(s,
                          {.q = pick(q), .kv = pick(more), .block = other, .o = pick(sum), .lse = pick(lse)});
      for (const auto& [block, k, dk] : {std::tuple(own, kv, dkv), std::tuple(other, more, dmore)}) {
        ops.attention_block_backward(s, {.q = pick(q),
                                         .kv = pick(k),
                                         .o = pick(o_t),
                                         .lse = pick(lse),
                                         .d_o = pick(d_o),
                                         .block = block,
                                         .dq = pick(dq),
                                         .dkv = pick(dk),
                                         .scratch = pick(scratch)});
      }
    });
  }
}

// Rows of two stretches, with a window, documents and sinks; the second block's keys come after its queries.
TYPED_TEST(DeviceAttention, AttentionBlocksByARule) {
  AttentionBlock own{.batch = 2, .queries = 6, .keys = 6, .query_step = 6, .key_step = 6};
  own.heads = 4, own.kv_heads = 2, own.head_size = 8, own.causal = true;
  own.rule = {.window = 6, .sinks = true};
  own.query_positions = own.key_positions = RowPositions(6, 3, 6);
  AttentionBlock other = own;
  other.keys = 3, other.key_positions = 3, other.causal = false, other.merge = true;
  Operands<TypeParam> o;
  const auto q = o.t(12, 32), o_t = o.t(12, 32), d_o = o.t(12, 32), sinks = o.t(1, 4);
  const auto kv = o.t(12, 32), more = o.t(9, 32);
  const auto sum = o.a(12, 32), lse = o.a(8, 6), dq = o.a(12, 32), dkv = o.a(12, 32), dmore = o.a(9, 32);
  const auto first = o.ids({0, 0, 0, 9, 9, 9, 2, 2, 2, 2, 2, 11});
  const auto scratch =
      o.byte_scratch(o.device().ops().attention_block_scratch_bytes(dtype_of<TypeParam>, own));
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.attention_block(s, {.q = pick(q),
                            .kv = pick(kv),
                            .block = own,
                            .o = pick(sum),
                            .lse = pick(lse),
                            .first_keys = pick(first),
                            .sinks = pick(sinks)});
    ops.attention_block(s, {.q = pick(q),
                            .kv = pick(more),
                            .block = other,
                            .o = pick(sum),
                            .lse = pick(lse),
                            .first_keys = pick(first)});
    for (const auto& [block, k, dk] : {std::tuple(own, kv, dkv), std::tuple(other, more, dmore)}) {
      ops.attention_block_backward(s, {.q = pick(q),
                                       .kv = pick(k),
                                       .o = pick(o_t),
                                       .lse = pick(lse),
                                       .d_o = pick(d_o),
                                       .block = block,
                                       .dq = pick(dq),
                                       .dkv = pick(dk),
                                       .scratch = pick(scratch),
                                       .first_keys = pick(first)});
    }
  });
}

}  // namespace
}  // namespace zg::test
