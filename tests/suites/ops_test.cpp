// The device's op set against the same ops in plain fp64 loops, through views with gaps, for every storage
// type. (The kernels' own tests hold them to tighter bounds.)
#include "ziggurat/device/ops.hpp"

#include <deque>

#include "tests/kernels/support.hpp"
#include "tests/support/naive_ops.hpp"
#include "tests/support/test_device.hpp"
#include "ziggurat/kernels/rope.hpp"

namespace zg::test {
namespace {

// An operand twice: as the device gets it, and in double for the reference. Both hold the same numbers at
// first.
struct Operand {
  View device, naive;
};

template <class T>
class Operands {
 public:
  using A = Acc<T>;

  Operand t(std::int64_t rows, std::int64_t cols, double mean = 0) {
    return make<T>(t_, rows, cols, mean, 3);
  }
  Operand a(std::int64_t rows, std::int64_t cols, double mean = 0) {
    return make<A>(a_, rows, cols, mean, 2);
  }
  // In one piece, as vectors and optimizer states are.
  Operand t_dense(std::int64_t cols, double mean = 0) { return make<T>(t_, 1, cols, mean, 0); }
  Operand a_dense(std::int64_t rows, std::int64_t cols, double mean = 0) {
    return make<A>(a_, rows, cols, mean, 0);
  }
  Operand number() { return make<double>(numbers_, 1, 1, 0, 0); }
  // Compared with nothing: what is left in scratch is no result.
  Operand scratch(std::int64_t rows, std::int64_t cols) { return poisoned(scratch_, rows, cols, 2); }
  Operand sum_scratch() { return poisoned(sum_scratch_, 1, Ops::kSumPartials, 0); }
  // In whole bytes; null for none.
  Operand byte_scratch(std::int64_t bytes) {
    if (bytes == 0) return {};
    const Operand floats = poisoned(byte_scratch_, 1, (bytes + 3) / 4, 0);
    return {View(floats.device.data, DType::kU8, 1, bytes), {}};
  }
  Device& device() { return *device_; }
  Operand ids(std::initializer_list<std::int32_t> values) {
    ids_.emplace_back(values);
    std::vector<std::int32_t>& ids = ids_.back();
    const auto n = static_cast<std::int64_t>(ids.size());
    return {View(on_device(ids.data(), 4 * n), DType::kI32, 1, n), View(ids.data(), DType::kI32, 1, n)};
  }

  // Codes of so many values; those of NaiveOps are doubles.
  Operand codes(std::int64_t values, int bits) {
    const std::int64_t bytes = kernels::quantized_bytes(values, bits);
    const Operand floats = poisoned(byte_scratch_, 1, (bytes + 3) / 4, 0);
    codes_.emplace_back(1, values + values / kQuantBlock + 1);
    return {View(floats.device.data, DType::kU8, 1, bytes), view(codes_.back())};
  }

  // Runs `op` on both, then compares all operands, inputs too.
  template <class Op>
  void run(const Op& op) {
    for (const Piece& p : pieces_) device_->copy_to_device(*stream_, p.device, p.host, p.bytes);
    op(device_->ops(), *stream_, [](const Operand& o) { return o.device; });
    for (const Piece& p : pieces_) device_->copy_to_host(*stream_, p.host, p.device, p.bytes);
    stream_->synchronize();
    NaiveOps naive;
    op(naive, *stream_, [](const Operand& o) { return o.naive; });
    compare(t_), compare(a_), compare(numbers_);
  }
  ~Operands() {
    for (const Piece& p : pieces_) device_->arena().release(p.device, p.bytes);
  }

 private:
  template <class X>
  struct Twin {
    Matrix<X> device;
    Matrix<double> naive;
  };
  struct Piece {
    void *host, *device;
    std::int64_t bytes;
  };
  void* on_device(void* host, std::int64_t bytes) {
    void* const device = device_->arena().allocate(bytes);
    ZG_ASSERT(device != nullptr);
    pieces_.push_back({host, device, bytes});
    return device;
  }
  // Gaps included, so that they can be seen to be intact.
  template <class X>
  View device_view(Matrix<X>& m) {
    const std::int64_t bytes = m.rows() * m.ld() * static_cast<std::int64_t>(sizeof(X));
    return {on_device(m.data(), bytes), dtype_of<X>, m.rows(), m.cols(), m.ld()};
  }
  template <class X>
  static View view(Matrix<X>& m) {
    return {m.data(), dtype_of<X>, m.rows(), m.cols(), m.ld()};
  }
  template <class X>
  Operand poisoned(std::deque<Matrix<X>>& list, std::int64_t rows, std::int64_t cols, std::int64_t gap) {
    list.emplace_back(rows, cols, gap);
    list.back().fill(std::numeric_limits<double>::quiet_NaN());
    return {device_view(list.back()), {}};
  }
  template <class X>
  Operand make(std::deque<Twin<X>>& list, std::int64_t rows, std::int64_t cols, double mean,
               std::int64_t gap) {
    list.emplace_back(Twin<X>{Matrix<X>(rows, cols, gap), {}});
    Twin<X>& twin = list.back();
    twin.device.fill_normal(random_, mean, 0.5);
    twin.naive = copy_as<double>(twin.device);
    return {device_view(twin.device), view(twin.naive)};
  }
  template <class X>
  void compare(std::deque<Twin<X>>& list) {
    for (std::size_t i = 0; i < list.size(); ++i) {
      SCOPED_TRACE(testing::Message() << name_of(dtype_of<X>) << " operand " << i);
      list[i].device.expect_gaps_intact("operand");
      for (std::int64_t r = 0; r < list[i].device.rows(); ++r) {
        for (std::int64_t c = 0; c < list[i].device.cols(); ++c) {
          // Sums have at most 64 terms below 8, in A; what T stores between two steps (probabilities, o, an
          // updated weight) is rounded up to four times.
          const double expected = list[i].naive.get(r, c);
          const double allowed =
              64 * 8 * unit_roundoff<A>() + 4 * unit_roundoff<T>() * (std::abs(expected) + 1);
          ASSERT_NEAR(list[i].device.get(r, c), expected, allowed) << r << ", " << c;
        }
      }
    }
  }

  std::unique_ptr<Device> device_ = make_test_device(256 << 20);
  std::unique_ptr<Stream> stream_ = device_->make_stream("ops test");
  std::vector<Piece> pieces_;
  std::mt19937_64 random_ = generator(1);
  std::deque<Twin<T>> t_;
  std::deque<Twin<A>> a_;
  std::deque<Twin<double>> numbers_;
  std::deque<Matrix<double>> codes_;
  std::deque<Matrix<A>> scratch_;
  std::deque<Matrix<double>> sum_scratch_;
  std::deque<Matrix<float>> byte_scratch_;
  std::deque<std::vector<std::int32_t>> ids_;
};

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

TYPED_TEST(DeviceOps, Attention) {
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

TYPED_TEST(DeviceOps, AttentionByARule) {
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

TYPED_TEST(DeviceOps, AttentionWithSinks) {
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

// A causal block, and one of all keys that is merged with it; of sequences with rows between them.
TYPED_TEST(DeviceOps, AttentionBlocks) {
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
TYPED_TEST(DeviceOps, AttentionBlocksByARule) {
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
             all = o.t(kRows, kWidth);
  const Dropout some{.rate = 0.3, .key = {{1, 2}}, .step = 7, .positions = {4, 6, 20}, .first_row = 2};
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.dropout(s, pick(x), some, pick(y));
    ops.dropout(s, pick(in_place), some, pick(in_place));
    ops.dropout(s, pick(x), {}, pick(all));
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
  const TablePart part{.first = 3, .whole = 11};
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
        f(table.row_range(first, std::min<std::int64_t>(4, 11 - first)), TablePart{first, 11, first > 0});
    };
    each(pick(wte), [&](View rows, const TablePart& part) {
      ops.embedding(
          s,
          {.ids = pick(ids), .wte = rows, .wpe = pick(wpe), .positions = 3, .out = pick(out), .part = part});
      if (part.only)
        ops.embedding(s, {.ids = pick(ids), .wte = rows, .positions = 3, .out = pick(some), .part = part});
    });
    each(pick(dwte), [&](View rows, const TablePart& part) {
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
             back = o.a(kRows, kWidth);
  o.run([&](Ops& ops, Stream& s, auto pick) {
    ops.zero(s, pick(zeroed));
    ops.cast(s, pick(a), pick(t));
    ops.cast(s, pick(t), pick(back));
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
