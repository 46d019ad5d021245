// The device's op set against the same ops in plain fp64 loops, through views with gaps, for every storage
// type. (The kernels' own tests hold them to tighter bounds.)
#include "ziggurat/device/ops.hpp"

#include "tests/suites/ops_operands.hpp"
#include "ziggurat/kernels/rope.hpp"

namespace zg::test {
namespace {

template <class T>
class DeviceOps : public testing::Test {};
TYPED_TEST_SUITE(DeviceOps, StorageTypes);

constexpr std::int64_t kRows = 6, kWidth = 13;

TYPED_TEST(DeviceOps, Gemm) {
  for (const Trans ta : {Trans::kNo, Trans::kYes}) {
    for (const Trans tb : {Trans::kNo, Trans::kYes}) {
      for (const int mode : {0, 1, 2}) {
        Operands<TypeParam> o;
        const auto a = ta == Trans::kYes ? o.t(9, kRows) : o.t(kRows, 9);
        const auto b = tb == Trans::kYes ? o.t(kWidth, 9) : o.t(9, kWidth);
        const auto c = mode == 2 ? o.a(kRows, kWidth) : o.t(kRows, kWidth);
        const auto bias = o.t_dense(kWidth);
        o.run([&](Ops& ops, Stream& s, auto pick) {
          ops.gemm(s, pick(a), pick(b), pick(c),
                   {.a = ta, .b = tb, .accumulate = mode == 2, .bias = mode == 1 ? pick(bias) : View()});
        });
      }
    }
  }
}

// What is worked into a product, or follows it.
TYPED_TEST(DeviceOps, GemmEpilogues) {
  for (const Trans tb : {Trans::kNo, Trans::kYes}) {
    for (const bool with_bias : {false, true}) {
      Operands<TypeParam> o;
      const auto a = o.t(kRows, 9), b = tb == Trans::kYes ? o.t(kWidth, 9) : o.t(9, kWidth);
      const auto bias = o.t_dense(kWidth), addend = o.t(kRows, kWidth), inner = o.t(kRows, kWidth),
                 other = o.t(kRows, kWidth);
      const auto sum = o.t(kRows, kWidth), act = o.t(kRows, kWidth), dx = o.t(kRows, kWidth);
      o.run([&](Ops& ops, Stream& s, auto pick) {
        const View added = with_bias ? pick(bias) : View();
        ops.gemm(s, pick(a), pick(b), pick(sum), {.b = tb, .bias = added, .addend = pick(addend)});
        ops.gemm(s, pick(a), pick(b), pick(act), {.b = tb, .bias = added, .gelu_input = pick(inner)});
        if (!with_bias) ops.gemm(s, pick(a), pick(b), pick(dx), {.b = tb, .gelu_backward = pick(other)});
      });
    }
  }
}

// The gradients of a linear layer's weight and bias, overwritten or added to.
TYPED_TEST(DeviceOps, GemmWithABiasGradient) {
  constexpr std::int64_t kOut = 10;
  for (const bool accumulate : {false, true}) {
    Operands<TypeParam> o;
    const auto dy = o.t(kRows, kOut), x = o.t(kRows, kWidth);
    const auto dw = o.a(kOut, kWidth), db = o.a_dense(1, kOut);
    const auto scratch = o.scratch(o.device().ops().row_groups(), kWidth);
    o.run([&](Ops& ops, Stream& s, auto pick) {
      ops.gemm(
          s, pick(dy), pick(x), pick(dw),
          {.a = Trans::kYes, .accumulate = accumulate, .bias_gradient = pick(db), .scratch = pick(scratch)});
    });
  }
}

TYPED_TEST(DeviceOps, LayerNorm) {
  Operands<TypeParam> o;
  const auto x = o.t(kRows, kWidth, 1), y = o.t(kRows, kWidth), dy = o.t(kRows, kWidth),
             dx = o.t(kRows, kWidth);
  const auto w = o.t_dense(kWidth, 1), b = o.t_dense(kWidth);
  const auto stats = o.a(kRows, 2), dw = o.a_dense(1, kWidth), db = o.a_dense(1, kWidth);
  const auto scratch = o.scratch(o.device().ops().row_groups(), 2 * kWidth);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.layernorm(
        s, {.x = pick(x), .w = pick(w), .b = pick(b), .eps = 1e-5, .y = pick(y), .stats = pick(stats)});
    ops.layernorm_backward(s, {.dy = pick(dy),
                               .x = pick(x),
                               .w = pick(w),
                               .stats = pick(stats),
                               .dx = pick(dx),
                               .dw = pick(dw),
                               .db = pick(db),
                               .scratch = pick(scratch)});
  });
}

TYPED_TEST(DeviceOps, RmsNorm) {
  Operands<TypeParam> o;
  const auto x = o.t(kRows, kWidth, 1), y = o.t(kRows, kWidth), dy = o.t(kRows, kWidth),
             dx = o.t(kRows, kWidth);
  const auto w = o.t_dense(kWidth, 1);
  const auto stats = o.a(kRows, 1), dw = o.a_dense(1, kWidth);
  const auto scratch = o.scratch(o.device().ops().row_groups(), kWidth);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.rmsnorm(s, {.x = pick(x), .w = pick(w), .eps = 1e-5, .y = pick(y), .stats = pick(stats)});
    ops.rmsnorm_backward(s, {.dy = pick(dy),
                             .x = pick(x),
                             .w = pick(w),
                             .stats = pick(stats),
                             .dx = pick(dx),
                             .dw = pick(dw),
                             .scratch = pick(scratch)});
  });
}

TYPED_TEST(DeviceOps, RmsNormWithOnePlusWeight) {
  Operands<TypeParam> o;
  const auto x = o.t(kRows, kWidth, 1), y = o.t(kRows, kWidth), dy = o.t(kRows, kWidth),
             dx = o.t(kRows, kWidth);
  const auto w = o.t_dense(kWidth, 0);
  const auto stats = o.a(kRows, 1), dw = o.a_dense(1, kWidth);
  const auto scratch = o.scratch(o.device().ops().row_groups(), kWidth);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.rmsnorm(s, {.x = pick(x),
                    .w = pick(w),
                    .eps = 1e-5,
                    .y = pick(y),
                    .stats = pick(stats),
                    .weight = NormWeight::kPlusOne});
    ops.rmsnorm_backward(s, {.dy = pick(dy),
                             .x = pick(x),
                             .w = pick(w),
                             .stats = pick(stats),
                             .dx = pick(dx),
                             .dw = pick(dw),
                             .scratch = pick(scratch),
                             .weight = NormWeight::kPlusOne});
  });
}

TYPED_TEST(DeviceOps, HeadRmsNorm) {
  for (const NormWeight weight : {NormWeight::kPlain, NormWeight::kPlusOne}) {
    Operands<TypeParam> o;
    const auto x = o.t(kRows, 4 * 8, 1), y = o.t(kRows, 4 * 8), dy = o.t(kRows, 4 * 8),
               dx = o.t(kRows, 4 * 8);
    const auto w = o.t_dense(8, weight == NormWeight::kPlain ? 1 : 0);
    const auto stats = o.a(kRows, 3), dw = o.a_dense(1, 8);
    const auto scratch = o.scratch(o.device().ops().row_groups(), 11);
    o.run([&](Ops& ops, Stream& s, auto pick) {
      ops.head_rmsnorm(s, {.x = pick(x),
                           .w = pick(w),
                           .eps = 1e-5,
                           .heads = 3,
                           .head_size = 8,
                           .y = pick(y),
                           .stats = pick(stats),
                           .weight = weight});
      ops.head_rmsnorm_backward(s, {.dy = pick(dy),
                                    .x = pick(x),
                                    .w = pick(w),
                                    .stats = pick(stats),
                                    .heads = 3,
                                    .head_size = 8,
                                    .dx = pick(dx),
                                    .dw = pick(dw),
                                    .scratch = pick(scratch),
                                    .weight = weight});
      ops.head_rmsnorm_backward(s, {.dy = pick(dy),
                                    .x = pick(x),
                                    .w = pick(w),
                                    .stats = pick(stats),
                                    .heads = 3,
                                    .head_size = 8,
                                    .dx = pick(dy),
                                    .dw = pick(dw),
                                    .scratch = pick(scratch),
                                    .weight = weight});
    });
  }
}

TYPED_TEST(DeviceOps, Activations) {
  Operands<TypeParam> o;
  const auto x = o.t(kRows, kWidth), y = o.t(kRows, kWidth), dy = o.t(kRows, kWidth);
  const auto gate_up = o.t(kRows, 2 * kWidth), z = o.t(kRows, kWidth), dz = o.t(kRows, kWidth);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.gelu(s, pick(x), pick(y));
    ops.gelu_backward(s, pick(x), pick(dy), pick(dy));
    ops.swiglu(s, pick(gate_up), pick(z));
    ops.swiglu_backward(s, pick(gate_up), pick(dz), pick(gate_up));
    ops.scale(s, pick(x), 0.75, pick(x));
  });
}

TYPED_TEST(DeviceOps, GeluGated) {
  Operands<TypeParam> o;
  const auto gate_up = o.t(kRows, 2 * kWidth), z = o.t(kRows, kWidth), dz = o.t(kRows, kWidth);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.swiglu(s, pick(gate_up), pick(z), Gate::kGeluTanh);
    ops.swiglu_backward(s, pick(gate_up), pick(dz), pick(gate_up), Gate::kGeluTanh);
  });
}

TYPED_TEST(DeviceOps, Rope) {
  Operands<TypeParam> o;
  const auto x = o.t(kRows, 3 * 8), back = o.t(kRows, 3 * 8);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.rope(s, {.x = pick(x),
                 .positions = 3,
                 .heads = 2,
                 .head_size = 8,
                 .table = rope_table(10000, 4),
                 .inverse = false});
    ops.rope(s, {.x = pick(back),
                 .positions = 3,
                 .heads = 2,
                 .head_size = 8,
                 .table = rope_table(10000, 4),
                 .inverse = true});
  });
}

// Pairs side by side, in the last columns of heads.
TYPED_TEST(DeviceOps, RopeOfInterleavedPairs) {
  Operands<TypeParam> o;
  RopeTable table = rope_table(10000, 3);
  table.first_column = 2, table.interleaved = true;
  const auto x = o.t(kRows, 3 * 8);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.rope(s, {.x = pick(x), .positions = 3, .heads = 2, .head_size = 8, .table = table, .inverse = true});
  });
}

// Rows that are two stretches of longer sequences.
TYPED_TEST(DeviceOps, RowsOfTwoStretches) {
  Operands<TypeParam> o;
  const RowPositions positions(2, 3, 7);  // 3 and 8 of each sequence
  const auto x = o.t(kRows, 2 * 8);
  const auto ids = o.ids({4, 0, 4, 2, 2, 4});
  const auto wte = o.t(5, kWidth), wpe = o.t(9, kWidth), out = o.t(kRows, kWidth);
  const auto dout = o.t(kRows, kWidth), dwte = o.a(5, kWidth), dwpe = o.a(9, kWidth);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.rope(s, {.x = pick(x),
                 .positions = positions,
                 .heads = 2,
                 .head_size = 8,
                 .table = rope_table(10000, 4),
                 .inverse = false});
    ops.embedding(
        s, {.ids = pick(ids), .wte = pick(wte), .wpe = pick(wpe), .positions = positions, .out = pick(out)});
    ops.embedding_backward(s, {.ids = pick(ids),
                               .dout = pick(dout),
                               .positions = positions,
                               .dwte = pick(dwte),
                               .dwpe = pick(dwpe)});
  });
}

// Where documents begin, positions do.
TYPED_TEST(DeviceOps, PositionsInDocuments) {
  Operands<TypeParam> o;
  RopeTable table = rope_table(10000, 3);
  table.amplitude = 1.2;
  const auto x = o.t(kRows, 2 * 8), dx = o.t(kRows, 2 * 8);
  const auto ids = o.ids({4, 0, 4, 2, 2, 4}), first = o.ids({0, 1, 1, 0, 0, 2});
  const auto wte = o.t(5, kWidth), wpe = o.t(2, kWidth), out = o.t(kRows, kWidth);
  const auto dout = o.t(kRows, kWidth), dwte = o.a(5, kWidth), dwpe = o.a(2, kWidth);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.rope(s, {.x = pick(x),
                 .positions = 3,
                 .heads = 2,
                 .head_size = 8,
                 .table = table,
                 .inverse = false,
                 .first_keys = pick(first)});
    ops.rope(s, {.x = pick(dx),
                 .positions = 3,
                 .heads = 2,
                 .head_size = 8,
                 .table = table,
                 .inverse = true,
                 .first_keys = pick(first)});
    ops.embedding(s, {.ids = pick(ids),
                      .wte = pick(wte),
                      .wpe = pick(wpe),
                      .positions = 3,
                      .out = pick(out),
                      .first_keys = pick(first)});
    ops.embedding_backward(s, {.ids = pick(ids),
                               .dout = pick(dout),
                               .positions = 3,
                               .dwte = pick(dwte),
                               .dwpe = pick(dwpe),
                               .first_keys = pick(first)});
  });
}

TYPED_TEST(DeviceOps, AddAndBias) {
  Operands<TypeParam> o;
  const auto a = o.t(kRows, kWidth), b = o.t(kRows, kWidth), out = o.t(kRows, kWidth),
             dy = o.t(kRows, kWidth);
  const auto db = o.a_dense(1, kWidth);
  const auto scratch = o.scratch(o.device().ops().row_groups(), kWidth);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.add(s, pick(a), pick(b), pick(out));
    ops.add(s, pick(a), pick(b), pick(a));
    ops.bias_backward(s, pick(dy), pick(db), pick(scratch));
  });
}

TYPED_TEST(DeviceOps, Dropout) {
  Operands<TypeParam> o;
  const auto x = o.t(kRows, kWidth), y = o.t(kRows, kWidth), in_place = o.t(kRows, kWidth),
             all = o.t(kRows, kWidth), gathered = o.t(kRows, kWidth);
  const auto slots = o.ids({4, 0, 17, 2, 22, 9});
  const Dropout some{.rate = 0.3, .key = {{1, 2}}, .step = 7, .positions = {4, 6, 20}, .first_row = 2};
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.dropout(s, pick(x), some, pick(y));
    ops.dropout(s, pick(in_place), some, pick(in_place));
    ops.dropout(s, pick(x), {}, pick(all));
    Dropout by_slot = some;
    by_slot.slots = pick(slots).template as<std::int32_t>(), by_slot.per_token = 3;
    ops.dropout(s, pick(x), by_slot, pick(gathered));
  });
}

TYPED_TEST(DeviceOps, Embedding) {
  Operands<TypeParam> o;
  const auto ids = o.ids({4, 0, 4, 2, 2, 4});
  const auto wte = o.t(5, kWidth), wpe = o.t(4, kWidth), out = o.t(kRows, kWidth), plain = o.t(kRows, kWidth);
  const auto dout = o.t(kRows, kWidth), dwte = o.a(5, kWidth), dwpe = o.a(4, kWidth), alone = o.a(5, kWidth);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.embedding(s,
                  {.ids = pick(ids), .wte = pick(wte), .wpe = pick(wpe), .positions = 3, .out = pick(out)});
    ops.embedding(s, {.ids = pick(ids), .wte = pick(wte), .positions = 3, .out = pick(plain)});
    ops.embedding_backward(
        s, {.ids = pick(ids), .dout = pick(dout), .positions = 3, .dwte = pick(dwte), .dwpe = pick(dwpe)});
    ops.embedding_backward(s, {.ids = pick(ids), .dout = pick(dout), .positions = 3, .dwte = pick(alone)});
  });
}

// Rows 3 to 7 of a table of 11; other tokens' rows are zeros, and have no gradient.
TYPED_TEST(DeviceOps, EmbeddingOfAPart) {
  Operands<TypeParam> o;
  const auto ids = o.ids({10, 0, 4, 3, 7, 8});
  const auto wte = o.t(5, kWidth), wpe = o.t(4, kWidth), out = o.t(kRows, kWidth), plain = o.t(kRows, kWidth);
  const auto dout = o.t(kRows, kWidth), dwte = o.a(5, kWidth), dwpe = o.a(4, kWidth), alone = o.a(5, kWidth);
  const VocabShard part{.first = 3, .whole = 11};
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.embedding(s, {.ids = pick(ids),
                      .wte = pick(wte),
                      .wpe = pick(wpe),
                      .positions = 3,
                      .out = pick(out),
                      .part = part});
    ops.embedding(s, {.ids = pick(ids), .wte = pick(wte), .positions = 3, .out = pick(plain), .part = part});
    ops.embedding_backward(s, {.ids = pick(ids),
                               .dout = pick(dout),
                               .positions = 3,
                               .dwte = pick(dwte),
                               .dwpe = pick(dwpe),
                               .part = part});
    ops.embedding_backward(
        s, {.ids = pick(ids), .dout = pick(dout), .positions = 3, .dwte = pick(alone), .part = part});
  });
}

// Tiles of a table, one after the other, are the whole table.
TYPED_TEST(DeviceOps, EmbeddingInTiles) {
  Operands<TypeParam> o;
  const auto ids = o.ids({10, 0, 4, 3, 7, 8});
  const auto wte = o.t(11, kWidth), wpe = o.t(4, kWidth), out = o.t(kRows, kWidth), some = o.t(kRows, kWidth);
  const auto dout = o.t(kRows, kWidth), dwte = o.a(11, kWidth), dwpe = o.a(4, kWidth);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    const auto each = [&](View table, auto f) {
      for (std::int64_t first = 0; first < 11; first += 4)
        f(table.row_range(first, std::min<std::int64_t>(4, 11 - first)), VocabShard{first, 11, first > 0});
    };
    each(pick(wte), [&](View rows, const VocabShard& part) {
      ops.embedding(
          s,
          {.ids = pick(ids), .wte = rows, .wpe = pick(wpe), .positions = 3, .out = pick(out), .part = part});
      if (part.only)
        ops.embedding(s, {.ids = pick(ids), .wte = rows, .positions = 3, .out = pick(some), .part = part});
    });
    each(pick(dwte), [&](View rows, const VocabShard& part) {
      ops.embedding_backward(s, {.ids = pick(ids),
                                 .dout = pick(dout),
                                 .positions = 3,
                                 .dwte = rows,
                                 .dwpe = part.only ? View() : pick(dwpe),
                                 .part = part});
    });
  });
}

TYPED_TEST(DeviceOps, CrossEntropy) {
  Operands<TypeParam> o;
  const auto logits = o.a(kRows, kWidth), loss = o.number(), only_loss = o.number();
  const auto targets = o.ids({4, 0, -1, 12, 2, -100});
  const auto scratch = o.sum_scratch();
  const auto dlogits = o.t(kRows, kWidth), scaled = o.t(kRows, kWidth);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.cross_entropy(s, {.logits = pick(logits),
                          .targets = pick(targets),
                          .loss_sum = pick(loss),
                          .dlogits = pick(dlogits),
                          .scratch = pick(scratch)});
    ops.cross_entropy(s, {.logits = pick(logits),
                          .targets = pick(targets),
                          .loss_sum = pick(loss),
                          .dlogits = pick(scaled),
                          .scratch = pick(scratch),
                          .scale = 64.0});
    ops.cross_entropy(s, {.logits = pick(logits),
                          .targets = pick(targets),
                          .loss_sum = pick(only_loss),
                          .scratch = pick(scratch)});
  });
}

TYPED_TEST(DeviceOps, CappedCrossEntropy) {
  Operands<TypeParam> o;
  const auto left = o.a(kRows, kWidth), right = o.a(kRows, kWidth), loss = o.number(), sum = o.number();
  const auto targets = o.ids({4, 0, -1, static_cast<int>(kWidth) + 2, 2, -100});
  const auto local = o.ids({4, 0, -1, 12, 2, -100});
  const auto scratch = o.sum_scratch();
  const auto numbers = o.a_dense(6, kRows);
  const auto d_left = o.t(kRows, kWidth), d_right = o.t(kRows, kWidth), d_whole = o.t(kRows, kWidth);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    const View all = pick(numbers);
    ops.cross_entropy(s, {.logits = pick(left),
                          .targets = pick(local),
                          .loss_sum = pick(sum),
                          .dlogits = pick(d_whole),
                          .scratch = pick(scratch),
                          .scale = 1,
                          .softcap = 0.5});
    ops.softmax_part(s, {.logits = pick(left),
                         .targets = pick(targets),
                         .first = 0,
                         .numbers = all.row_range(0, 3),
                         .softcap = 0.5});
    ops.softmax_part(s, {.logits = pick(right),
                         .targets = pick(targets),
                         .first = kWidth,
                         .numbers = all.row_range(3, 3),
                         .softcap = 0.5});
    ops.cross_entropy_part(s, {.local = {.logits = pick(left),
                                         .targets = pick(targets),
                                         .loss_sum = pick(loss),
                                         .dlogits = pick(d_left),
                                         .scratch = pick(scratch),
                                         .scale = 64.0,
                                         .softcap = 0.5},
                               .first = 0,
                               .numbers = all});
    ops.cross_entropy_part(s, {.local = {.logits = pick(right),
                                         .targets = pick(targets),
                                         .loss_sum = pick(loss),
                                         .dlogits = pick(d_right),
                                         .scratch = pick(scratch),
                                         .scale = 1.0,
                                         .softcap = 0.5},
                               .first = kWidth,
                               .numbers = all});
  });
}

TYPED_TEST(DeviceOps, CrossEntropyInParts) {
  Operands<TypeParam> o;
  const auto left = o.a(kRows, kWidth), right = o.a(kRows, kWidth), loss = o.number(), only_loss = o.number();
  const auto targets = o.ids({4, 0, -1, static_cast<int>(kWidth) + 2, 2, -100});
  const auto scratch = o.sum_scratch();
  const auto numbers = o.a_dense(6, kRows);
  const auto d_left = o.t(kRows, kWidth), d_right = o.t(kRows, kWidth);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    const View all = pick(numbers);
    ops.softmax_part(
        s, {.logits = pick(left), .targets = pick(targets), .first = 0, .numbers = all.row_range(0, 3)});
    ops.softmax_part(
        s,
        {.logits = pick(right), .targets = pick(targets), .first = kWidth, .numbers = all.row_range(3, 3)});
    ops.cross_entropy_part(s, {.local = {.logits = pick(left),
                                         .targets = pick(targets),
                                         .loss_sum = pick(loss),
                                         .dlogits = pick(d_left),
                                         .scratch = pick(scratch),
                                         .scale = 64.0},
                               .first = 0,
                               .numbers = all});
    ops.cross_entropy_part(s, {.local = {.logits = pick(right),
                                         .targets = pick(targets),
                                         .loss_sum = pick(only_loss),
                                         .dlogits = pick(d_right),
                                         .scratch = pick(scratch)},
                               .first = kWidth,
                               .numbers = all});
    ops.cross_entropy_part(s, {.local = {.logits = pick(right),
                                         .targets = pick(targets),
                                         .loss_sum = pick(only_loss),
                                         .scratch = pick(scratch)},
                               .first = kWidth,
                               .numbers = all});
  });
}

TYPED_TEST(DeviceOps, ZeroAndCast) {
  Operands<TypeParam> o;
  const auto zeroed = o.t(kRows, kWidth), a = o.a(kRows, kWidth), t = o.t(kRows, kWidth),
             back = o.a(kRows, kWidth), row = o.t(1, kWidth), rows = o.a(kRows, kWidth);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.zero(s, pick(zeroed));
    ops.cast(s, pick(a), pick(t));
    ops.cast(s, pick(t), pick(back));
    const View one = pick(row);
    ops.cast(s, View(one.data, one.dtype, kRows, kWidth, 0), pick(rows));  // the same row again and again
  });
}

TYPED_TEST(DeviceOps, QuantizeAndDequantize) {
  constexpr std::int64_t kValues = 2 * kQuantBlock + 37;
  for (const int bits : {8, 4}) {
    Operands<TypeParam> o;
    const auto values = o.t_dense(kValues), back = o.t_dense(kValues), sum = o.t_dense(kValues);
    const auto codes = o.codes(kValues, bits);
    o.run([&](Ops& ops, Stream& s, auto pick) {
      ops.quantize(s, pick(values), bits, pick(codes));
      ops.dequantize(s, pick(codes), bits, false, pick(back));
      ops.dequantize(s, pick(codes), bits, true, pick(sum));
    });
  }
}

TYPED_TEST(DeviceOps, FinishGradientAndUpdate) {
  for (const bool decoupled : {true, false}) {
    Operands<TypeParam> o;
    const auto accumulator = o.a_dense(1, 37), m = o.a_dense(1, 37), v = o.a_dense(1, 37, 4),
               norm = o.number();
    const auto master = o.a_dense(1, 37), grad = o.t_dense(37), weight = o.t_dense(37);
    const auto scratch = o.sum_scratch();
    o.run([&](Ops& ops, Stream& s, auto pick) {
      ops.finish_gradient(s, pick(accumulator), pick(grad), pick(norm), pick(scratch));
      const View masters = pick(master);
      ops.update(s, pick(grad), pick(weight), {.master = masters, .moment = {pick(m), pick(v)}, .scale = {}},
                 {.full = masters.dtype},
                 {.lr = 0.01, .weight_decay = 0.1, .decoupled = decoupled, .step = 2, .grad_scale = 0.5});
    });
  }
}

}  // namespace
}  // namespace zg::test
