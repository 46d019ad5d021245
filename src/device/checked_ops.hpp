// Implements Ops over a backend. An op's operands are checked when it is submitted, by the same rules for
// every device, and passed to the backend as typed raw pointers.
//
// A backend has a member function for each op, a template over the storage types. It takes the stream and
// then the operands of the kernel (kernels/host/elementwise.hpp, kernels/cuda/kernels.hpp).
#pragma once
#include "device/checked_operands.hpp"
#include "device/checked_router_ops.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/kernels/arguments.hpp"
#include "ziggurat/kernels/fp8_weights.hpp"

// Expands op(name) for every op that is one kernel of the same name, with the same operands, on every device.
// clang-format off
#define ZG_FOR_PLAIN_OPS(op)                                                         \
  op(layernorm) op(layernorm_backward) op(rmsnorm) op(rmsnorm_backward)              \
  op(head_rmsnorm) op(head_rmsnorm_backward) op(bias_backward)                       \
  op(gelu) op(gelu_backward) op(swiglu) op(swiglu_backward) op(add) op(scale)        \
  op(dropout) op(quantize) op(dequantize) op(decode) op(rope) op(embedding) op(embedding_backward) \
  op(expand_kv) op(expand_kv_backward)                                               \
  op(cross_entropy) op(softmax_part) op(cross_entropy_part)                          \
  op(attention_block) op(attention_block_backward) op(attention_sinks_backward) ZG_FOR_ROUTER_OPS(op)
// clang-format on

namespace zg {

using namespace kernels;

// The epilogue in GemmOptions as typed pointers; null: that step is absent.
template <class In>
struct Epilogue {
  const In* bias = nullptr;
  Strided<const In> addend, gelu_backward;
  Strided<In> gelu_input;
  Acc<In>* bias_gradient = nullptr;
  Strided<Acc<In>> scratch;
};

namespace checked {

template <class Backend>
class CheckedOps : public CheckedRouterOps<Backend> {
 public:
  using CheckedRouterOps<Backend>::CheckedRouterOps;

  std::int64_t row_groups() const override { return Backend::kRowGroups; }
  std::int64_t logits_bytes() const override { return Backend::kLogitsBytes; }
  bool pads_logits() const override { return Backend::kPadsLogits; }

  void gemm(Stream& s, View a, View b, View c, const GemmOptions& options) override {
    const std::int64_t m = c.rows, n = c.cols;
    const bool ta = options.a == Trans::kYes, tb = options.b == Trans::kYes;
    const std::int64_t k = ta ? a.rows : a.cols;
    expect(a, "a", a.dtype, ta ? k : m, ta ? m : k);
    expect(b, "b", a.dtype, tb ? n : k, tb ? k : n);
    expect(c, "c", c.dtype, m, n);
    for (const View& v : {a, b, c}) expect_leading_dimension(v);
    check_epilogue(options, a.dtype, c);
    check_bias_gradient(options, a.dtype, c, Backend::kRowGroups);
    const GemmShape shape{.m = m,
                          .n = n,
                          .k = k,
                          .ta = options.a,
                          .tb = options.b,
                          .lda = a.ld,
                          .ldb = b.ld,
                          .ldc = c.ld,
                          .accumulate = options.accumulate};
    const auto submit = [&](auto in, auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      const Epilogue<In> epilogue{.bias = options.bias ? options.bias.as<In>() : nullptr,
                                  .addend = strided<In>(options.addend),
                                  .gelu_backward = strided<In>(options.gelu_backward),
                                  .gelu_input = strided<In>(options.gelu_input),
                                  .bias_gradient = strided<Acc<In>>(options.bias_gradient).data,
                                  .scratch = strided<Acc<In>>(options.scratch)};
      backend_.template gemm<In, Out>(s, shape, a.as<In>(), b.as<In>(), c.as<Out>(), epilogue);
    };
    if (a.dtype == DType::kBF16 && c.dtype == DType::kBF16) return submit(bf16{}, bf16{});
    if (a.dtype == DType::kBF16 && c.dtype == DType::kF32) return submit(bf16{}, float{});
    if (a.dtype == DType::kF16 && c.dtype == DType::kF16) return submit(fp16{}, fp16{});
    if (a.dtype == DType::kF16 && c.dtype == DType::kF32) return submit(fp16{}, float{});
    if (a.dtype == DType::kF32 && c.dtype == DType::kF32) return submit(float{}, float{});
    if (a.dtype == DType::kF64 && c.dtype == DType::kF64) return submit(double{}, double{});
    ZG_ASSERT(false, "no product of {} into {}", name_of(a.dtype), name_of(c.dtype));
  }

  void layernorm(Stream& s, const LayerNormArgs& args) override {
    const View& x = args.x;
    const DType t = x.dtype;
    expect(x, "x", t, x.rows, x.cols);
    expect(args.w, "w", t, 1, x.cols);
    expect(args.b, "b", t, 1, x.cols);
    expect(args.y, "y", t, x.rows, x.cols);
    expect(args.stats, "stats", acc_of(t), x.rows, 2);
    with_type(t, [&]<class T>() {
      backend_.template layernorm<T>(s, extent_of(x),
                                     LayerNorm<T>{.x = strided<T>(x),
                                                  .w = args.w.as<T>(),
                                                  .b = args.b.as<T>(),
                                                  .eps = args.eps,
                                                  .y = strided<T>(args.y),
                                                  .stats = strided<Acc<T>>(args.stats)});
    });
  }

  void layernorm_backward(Stream& s, const LayerNormBackwardArgs& args) override {
    const View& x = args.x;
    const DType t = x.dtype, a = acc_of(t);
    expect(x, "x", t, x.rows, x.cols);
    expect(args.dy, "dy", t, x.rows, x.cols);
    expect(args.dx, "dx", t, x.rows, x.cols);
    expect(args.w, "w", t, 1, x.cols);
    expect(args.stats, "stats", a, x.rows, 2);
    expect(args.dw, "dw", a, 1, x.cols);
    expect(args.db, "db", a, 1, x.cols);
    expect(args.scratch, "scratch", a, row_groups(), 2 * x.cols);
    with_type(t, [&]<class T>() {
      using A = Acc<T>;
      backend_.template layernorm_backward<T>(s, extent_of(x),
                                              LayerNormBackward<T>{.dy = strided<T>(args.dy),
                                                                   .x = strided<T>(x),
                                                                   .w = args.w.as<T>(),
                                                                   .stats = strided<A>(args.stats),
                                                                   .dx = strided<T>(args.dx),
                                                                   .dw = args.dw.as<A>(),
                                                                   .db = args.db.as<A>(),
                                                                   .scratch = strided<A>(args.scratch)});
    });
  }

  void rmsnorm(Stream& s, const RmsNormArgs& args) override {
    const View& x = args.x;
    const DType t = x.dtype;
    expect(x, "x", t, x.rows, x.cols);
    expect(args.w, "w", t, 1, x.cols);
    expect(args.y, "y", t, x.rows, x.cols);
    expect(args.stats, "stats", acc_of(t), x.rows, 1);
    with_type(t, [&]<class T>() {
      backend_.template rmsnorm<T>(s, extent_of(x),
                                   RmsNorm<T>{.x = strided<T>(x),
                                              .w = args.w.as<T>(),
                                              .eps = args.eps,
                                              .y = strided<T>(args.y),
                                              .stats = strided<Acc<T>>(args.stats),
                                              .weight = args.weight});
    });
  }

  void rmsnorm_backward(Stream& s, const RmsNormBackwardArgs& args) override {
    const View& x = args.x;
    const DType t = x.dtype, a = acc_of(t);
    expect(x, "x", t, x.rows, x.cols);
    expect(args.dy, "dy", t, x.rows, x.cols);
    expect(args.dx, "dx", t, x.rows, x.cols);
    expect(args.w, "w", t, 1, x.cols);
    expect(args.stats, "stats", a, x.rows, 1);
    expect(args.dw, "dw", a, 1, x.cols);
    expect_row_scratch(args.scratch, a, row_groups(), x.cols);
    with_type(t, [&]<class T>() {
      using A = Acc<T>;
      backend_.template rmsnorm_backward<T>(s, extent_of(x),
                                            RmsNormBackward<T>{.dy = strided<T>(args.dy),
                                                               .x = strided<T>(x),
                                                               .w = args.w.as<T>(),
                                                               .stats = strided<A>(args.stats),
                                                               .dx = strided<T>(args.dx),
                                                               .dw = args.dw.as<A>(),
                                                               .scratch = strided<A>(args.scratch),
                                                               .weight = args.weight});
    });
  }

  void head_rmsnorm(Stream& s, const HeadRmsNormArgs& args) override {
    const std::int64_t rows = args.x.rows;
    const DType t = args.x.dtype;
    for (const View& v : {args.x, args.y}) expect_heads(v, t, rows, args.heads, args.head_size);
    expect(args.w, "w", t, 1, args.head_size);
    expect(args.stats, "stats", acc_of(t), rows, args.heads);
    with_type(t, [&]<class T>() {
      backend_.template head_rmsnorm<T>(s, rows,
                                        HeadRmsNorm<T>{.heads = args.heads,
                                                       .head_size = args.head_size,
                                                       .x = strided<T>(args.x),
                                                       .w = args.w.as<T>(),
                                                       .eps = args.eps,
                                                       .y = strided<T>(args.y),
                                                       .stats = strided<Acc<T>>(args.stats),
                                                       .weight = args.weight});
    });
  }

  void head_rmsnorm_backward(Stream& s, const HeadRmsNormBackwardArgs& args) override {
    const std::int64_t rows = args.x.rows;
    const DType t = args.x.dtype, a = acc_of(t);
    for (const View& v : {args.x, args.dy, args.dx}) expect_heads(v, t, rows, args.heads, args.head_size);
    expect(args.w, "w", t, 1, args.head_size);
    expect(args.stats, "stats", a, rows, args.heads);
    expect(args.dw, "dw", a, 1, args.head_size);
    expect_row_scratch(args.scratch, a, row_groups(), args.head_size);
    with_type(t, [&]<class T>() {
      using A = Acc<T>;
      backend_.template head_rmsnorm_backward<T>(s, rows,
                                                 HeadRmsNormBackward<T>{.heads = args.heads,
                                                                        .head_size = args.head_size,
                                                                        .dy = strided<T>(args.dy),
                                                                        .x = strided<T>(args.x),
                                                                        .w = args.w.as<T>(),
                                                                        .stats = strided<A>(args.stats),
                                                                        .dx = strided<T>(args.dx),
                                                                        .dw = args.dw.as<A>(),
                                                                        .scratch = strided<A>(args.scratch),
                                                                        .weight = args.weight});
    });
  }

  void gelu(Stream& s, View x, View y) override {
    expect(x, "x", x.dtype, x.rows, x.cols);
    expect(y, "y", x.dtype, x.rows, x.cols);
    with_type(x.dtype,
              [&]<class T>() { backend_.template gelu<T>(s, extent_of(x), strided<T>(x), strided<T>(y)); });
  }

  void gelu_backward(Stream& s, View x, View dy, View dx) override {
    expect(x, "x", x.dtype, x.rows, x.cols);
    expect(dy, "dy", x.dtype, x.rows, x.cols);
    expect(dx, "dx", x.dtype, x.rows, x.cols);
    with_type(x.dtype, [&]<class T>() {
      backend_.template gelu_backward<T>(s, extent_of(x), strided<T>(x), strided<T>(dy), strided<T>(dx));
    });
  }

  void swiglu(Stream& s, View gate_up, View y, Gate activation) override {
    expect(y, "y", y.dtype, y.rows, y.cols);
    expect_halves(gate_up, activation, y);
    with_type(y.dtype, [&]<class T>() {
      backend_.template swiglu<T>(s, extent_of(y), strided<T>(gate_up), strided<T>(y), activation);
    });
  }

  void swiglu_backward(Stream& s, View gate_up, View dy, View d_gate_up, Gate activation) override {
    expect(dy, "dy", dy.dtype, dy.rows, dy.cols);
    expect_halves(gate_up, activation, dy);
    expect(d_gate_up, "d_gate_up", dy.dtype, dy.rows, 2 * dy.cols);
    with_type(dy.dtype, [&]<class T>() {
      backend_.template swiglu_backward<T>(s, extent_of(dy), strided<T>(gate_up), strided<T>(dy),
                                           strided<T>(d_gate_up), activation);
    });
  }

  void rope(Stream& s, const RopeArgs& args) override {
    const View& x = args.x;
    expect(x, "x", x.dtype, x.rows, x.cols);
    ZG_ASSERT_GE(args.positions.time, 1);
    ZG_ASSERT_LE(args.heads * args.head_size, x.cols);
    expect_rope_table(args.table, args.head_size);
    const std::int32_t* const first = expect_first_keys(args.first_keys, x.rows);
    with_type(x.dtype, [&]<class T>() {
      backend_.template rope<T>(s, x.rows,
                                Rotation<T>{.x = {x.as<T>(), x.ld},
                                            .positions = args.positions,
                                            .heads = args.heads,
                                            .head_size = args.head_size,
                                            .table = args.table,
                                            .inverse = args.inverse,
                                            .first_keys = first});
    });
  }

  void expand_kv(Stream& s, const ExpandKvArgs& args) override {
    expect_latent_heads(args.heads, args.joint, args.shared, args.kv);
    with_type(args.kv.dtype, [&]<class T>() {
      backend_.template expand_kv<T>(s, args.kv.rows,
                                     ExpandKv<T>{.heads = args.heads,
                                                 .joint = strided<T>(args.joint),
                                                 .shared = strided<T>(args.shared),
                                                 .kv = strided<T>(args.kv)});
    });
  }

  void expand_kv_backward(Stream& s, const ExpandKvBackwardArgs& args) override {
    expect_latent_heads(args.heads, args.d_joint, args.d_shared, args.dkv);
    with_type(args.dkv.dtype, [&]<class T>() {
      backend_.template expand_kv_backward<T>(s, args.dkv.rows,
                                              ExpandKvBackward<T>{.heads = args.heads,
                                                                  .dkv = strided<T>(args.dkv),
                                                                  .d_joint = strided<T>(args.d_joint),
                                                                  .d_shared = strided<T>(args.d_shared)});
    });
  }

  void attention(Stream& s, const AttentionArgs& args) override {
    const DType t = args.qkv.dtype;
    const std::int32_t* const first = expect_first_keys(args.first_keys, args.shape.batch * args.shape.time);
    const AttentionShape shape = with_documents(args.shape, first);
    expect_attention(args.qkv, shape, args.o, args.lse);
    expect_scratch(args.scratch, attention_scratch_bytes(t, shape));
    expect_sinks(args.sinks, shape.rule.sinks, t, shape.heads);
    with_type(t, [&]<class T>() {
      backend_.template attention<T>(s, shape,
                                     CausalAttention<T>{.qkv = strided<T>(args.qkv),
                                                        .o = strided<T>(args.o),
                                                        .lse = args.lse.as<Acc<T>>(),
                                                        .scratch = args.scratch.data,
                                                        .first_keys = first,
                                                        .sinks = strided<T>(args.sinks).data});
    });
  }

  void attention_backward(Stream& s, const AttentionBackwardArgs& args) override {
    const DType t = args.qkv.dtype;
    const std::int32_t* const first = expect_first_keys(args.first_keys, args.shape.batch * args.shape.time);
    const AttentionShape shape = with_documents(args.shape, first);
    expect_attention(args.qkv, shape, args.o, args.lse);
    expect_scratch(args.scratch, attention_scratch_bytes(t, shape));
    expect(args.d_o, "d_o", args.o.dtype, args.o.rows, args.o.cols);
    expect(args.dqkv, "dqkv", t, args.qkv.rows, args.qkv.cols);
    with_type(t, [&]<class T>() {
      backend_.template attention_backward<T>(s, shape,
                                              CausalAttentionBackward<T>{.qkv = strided<T>(args.qkv),
                                                                         .o = strided<T>(args.o),
                                                                         .lse = args.lse.as<Acc<T>>(),
                                                                         .d_o = strided<T>(args.d_o),
                                                                         .dqkv = strided<T>(args.dqkv),
                                                                         .scratch = args.scratch.data,
                                                                         .first_keys = first});
    });
  }

  std::int64_t attention_scratch_bytes(DType dtype, const AttentionShape& shape) const override {
    return backend_.attention_scratch_bytes(dtype, shape);
  }

  void attention_sinks_backward(Stream& s, const AttentionSinksBackwardArgs& args) override {
    const AttentionShape& shape = args.shape;
    const DType t = args.o.dtype, a = acc_of(t);
    expect(args.o, "o", t, shape.batch * shape.time, shape.result_columns());
    expect(args.d_o, "d_o", t, args.o.rows, args.o.cols);
    expect(args.lse, "lse", a, shape.batch * shape.heads, shape.time);
    expect(args.sinks, "sinks", t, 1, shape.heads);
    expect(args.d_sinks, "d_sinks", a, 1, shape.heads);
    with_type(t, [&]<class T>() {
      backend_.template attention_sinks_backward<T>(
          s, AttentionSinksBackward<T>{.batch = shape.batch,
                                       .time = shape.time,
                                       .heads = shape.heads,
                                       .value_size = shape.values(),
                                       .o = strided<T>(args.o),
                                       .d_o = strided<T>(args.d_o),
                                       .lse = strided<Acc<T>>(args.lse),
                                       .sinks = args.sinks.as<T>(),
                                       .d_sinks = args.d_sinks.as<Acc<T>>()});
    });
  }

  void attention_block(Stream& s, const AttentionBlockArgs& args) override {
    const AttentionBlock& block = args.block;
    const View& q = args.q;
    expect_block(q, args.kv, block, args.lse, args.first_keys);
    expect(args.o, "o", acc_of(q.dtype), q.rows, block.result_columns());
    expect_sinks(args.sinks, block.rule.sinks && !block.merge, q.dtype, block.heads);
    const std::int32_t* const first = expect_first_keys(args.first_keys, block.query_rows());
    with_type(q.dtype, [&]<class T>() {
      using A = Acc<T>;
      backend_.template attention_block<T>(s, block,
                                           BlockAttention<T>{.q = strided<T>(q),
                                                             .kv = strided<T>(args.kv),
                                                             .o = strided<A>(args.o),
                                                             .lse = strided<A>(args.lse),
                                                             .first_keys = first,
                                                             .sinks = strided<T>(args.sinks).data});
    });
  }

  void attention_block_backward(Stream& s, const AttentionBlockBackwardArgs& args) override {
    const AttentionBlock& block = args.block;
    const View& q = args.q;
    const DType a = acc_of(q.dtype);
    expect_block(q, args.kv, block, args.lse, args.first_keys);
    const std::int32_t* const first = expect_first_keys(args.first_keys, block.query_rows());
    expect(args.o, "o", q.dtype, q.rows, block.result_columns());
    expect(args.d_o, "d_o", q.dtype, q.rows, block.result_columns());
    expect(args.dq, "dq", a, q.rows, q.cols);
    expect(args.dkv, "dkv", a, args.kv.rows, args.kv.cols);
    expect_scratch(args.scratch, attention_block_scratch_bytes(q.dtype, block));
    with_type(q.dtype, [&]<class T>() {
      using A = Acc<T>;
      backend_.template attention_block_backward<T>(s, block,
                                                    BlockAttentionBackward<T>{.q = strided<T>(q),
                                                                              .kv = strided<T>(args.kv),
                                                                              .o = strided<T>(args.o),
                                                                              .d_o = strided<T>(args.d_o),
                                                                              .lse = strided<A>(args.lse),
                                                                              .dq = strided<A>(args.dq),
                                                                              .dkv = strided<A>(args.dkv),
                                                                              .scratch = args.scratch.data,
                                                                              .first_keys = first});
    });
  }

  std::int64_t attention_block_scratch_bytes(DType dtype, const AttentionBlock& block) const override {
    return backend_.attention_block_scratch_bytes(dtype, block);
  }

  void add(Stream& s, View a, View b, View out) override {
    expect(a, "a", a.dtype, a.rows, a.cols);
    expect(b, "b", a.dtype, a.rows, a.cols);
    expect(out, "out", a.dtype, a.rows, a.cols);
    with_type(a.dtype, [&]<class T>() {
      backend_.template add<T>(s, extent_of(a), strided<T>(a), strided<T>(b), strided<T>(out));
    });
  }

  void scale(Stream& s, View x, double factor, View y) override {
    expect(x, "x", x.dtype, x.rows, x.cols);
    expect(y, "y", x.dtype, x.rows, x.cols);
    with_type(x.dtype, [&]<class T>() {
      backend_.template scale<T>(s, extent_of(x), strided<T>(x), static_cast<Acc<T>>(factor), strided<T>(y));
    });
  }

  void dropout(Stream& s, View x, const Dropout& dropout, View y) override {
    expect(x, "x", x.dtype, x.rows, x.cols);
    expect(y, "y", x.dtype, x.rows, x.cols);
    ZG_ASSERT(dropout.rate >= 0 && dropout.rate < 1, "a dropout of {}", dropout.rate);
    ZG_ASSERT(dropout.positions.time >= 1 && dropout.first_row >= 0 && dropout.first_sequence >= 0,
              "dropout of row {} of sequences of {}, the first of which is {}", dropout.first_row,
              dropout.positions.time, dropout.first_sequence);
    ZG_ASSERT(dropout.step >= 0 && dropout.step >> 32 == 0, "dropout of step {}", dropout.step);
    ZG_ASSERT_LE(0, dropout.first_column);
    ZG_ASSERT_LE(1, dropout.per_token);
    with_type(x.dtype, [&]<class T>() {
      backend_.template dropout<T>(s, extent_of(x), strided<T>(x), dropout, strided<T>(y));
    });
  }

  void bias_backward(Stream& s, View dy, View db, View scratch) override {
    const DType a = acc_of(dy.dtype);
    expect(dy, "dy", dy.dtype, dy.rows, dy.cols);
    expect(db, "db", a, 1, dy.cols);
    expect_row_scratch(scratch, a, row_groups(), dy.cols);
    with_type(dy.dtype, [&]<class T>() {
      using A = Acc<T>;
      backend_.template bias_backward<T>(s, extent_of(dy), strided<T>(dy), db.as<A>(), strided<A>(scratch));
    });
  }

  void embedding(Stream& s, const EmbeddingArgs& args) override {
    const View &out = args.out, &wte = args.wte, &wpe = args.wpe;
    const DType t = out.dtype;
    const std::int32_t* const first = expect_first_keys(args.first_keys, out.rows);
    ZG_ASSERT_GE(args.positions.time, 1);
    expect_part(args.part, wte.rows);
    expect(args.ids, "ids", DType::kI32, 1, out.rows);
    expect(wte, "wte", t, wte.rows, out.cols);
    if (wpe) expect(wpe, "wpe", t, wpe.rows, out.cols);
    expect(out, "out", t, out.rows, out.cols);
    with_type(t, [&]<class T>() {
      backend_.template embedding<T>(s, extent_of(out),
                                     Embedding<T>{.ids = args.ids.as<std::int32_t>(),
                                                  .vocabulary = wte.rows,
                                                  .positions = wpe.rows,
                                                  .rows = args.positions,
                                                  .first_keys = first,
                                                  .wte = strided<T>(wte),
                                                  .wpe = strided<T>(wpe),
                                                  .out = strided<T>(out),
                                                  .part = args.part});
    });
  }

  void embedding_backward(Stream& s, const EmbeddingBackwardArgs& args) override {
    const View &dout = args.dout, &dwte = args.dwte, &dwpe = args.dwpe;
    const DType a = acc_of(dout.dtype);
    const std::int32_t* const first = expect_first_keys(args.first_keys, dout.rows);
    ZG_ASSERT_GE(args.positions.time, 1);
    expect_part(args.part, dwte.rows);
    expect(args.ids, "ids", DType::kI32, 1, dout.rows);
    expect(dout, "dout", dout.dtype, dout.rows, dout.cols);
    expect(dwte, "dwte", a, dwte.rows, dout.cols);
    if (dwpe) expect(dwpe, "dwpe", a, dwpe.rows, dout.cols);
    with_type(dout.dtype, [&]<class T>() {
      using A = Acc<T>;
      backend_.template embedding_backward<T>(s, extent_of(dout),
                                              EmbeddingBackward<T>{.ids = args.ids.as<std::int32_t>(),
                                                                   .vocabulary = dwte.rows,
                                                                   .positions = dwpe.rows,
                                                                   .rows = args.positions,
                                                                   .first_keys = first,
                                                                   .dout = strided<T>(dout),
                                                                   .dwte = strided<A>(dwte),
                                                                   .dwpe = strided<A>(dwpe),
                                                                   .part = args.part});
    });
  }

  void cross_entropy(Stream& s, const CrossEntropyArgs& args) override {
    with_loss(args, [&]<class T>(const CrossEntropy<T>& typed) {
      backend_.template cross_entropy<T>(s, extent_of(args.logits), typed);
    });
  }

  void softmax_part(Stream& s, const SoftmaxPartArgs& args) override {
    const View &logits = args.logits, &numbers = args.numbers;
    expect(logits, "logits", logits.dtype, logits.rows, logits.cols);
    expect(args.targets, "targets", DType::kI32, 1, logits.rows);
    expect(numbers, "numbers", logits.dtype, 3, logits.rows);
    expect_dense(numbers, "numbers", numbers.count());
    const auto submit = [&]<class T>() {
      backend_.template softmax_part<T>(s, extent_of(logits),
                                        SoftmaxPart<T>{.logits = strided<T>(logits),
                                                       .targets = args.targets.as<std::int32_t>(),
                                                       .first = args.first,
                                                       .numbers = numbers.as<T>(),
                                                       .softcap = args.softcap});
    };
    if (logits.dtype == DType::kF64) return submit.template operator()<double>();
    ZG_ASSERT_EQ(logits.dtype, DType::kF32);
    submit.template operator()<float>();
  }

  void cross_entropy_part(Stream& s, const CrossEntropyPartArgs& args) override {
    const View &logits = args.local.logits, &numbers = args.numbers;
    ZG_ASSERT(numbers.rows > 0 && numbers.rows % 3 == 0, "{} rows of numbers", numbers.rows);
    expect(numbers, "numbers", logits.dtype, numbers.rows, logits.rows);
    expect_dense(numbers, "numbers", numbers.count());
    with_loss(args.local, [&]<class T>(const CrossEntropy<T>& local) {
      backend_.template cross_entropy_part<T>(s, extent_of(logits),
                                              CrossEntropyPart<T>{.local = local,
                                                                  .first = args.first,
                                                                  .numbers = numbers.as<Acc<T>>(),
                                                                  .parts = numbers.rows / 3});
    });
  }

  void zero(Stream& s, View x) override {
    expect(x, "x", x.dtype, x.rows, x.cols);
    const auto size = static_cast<std::int64_t>(size_of(x.dtype));
    backend_.zero(s, {x.rows, x.cols * size}, {static_cast<char*>(x.data), x.ld * size});
  }

  void cast(Stream& s, View in, View out) override {
    if (in.ld != 0) expect(in, "in", in.dtype, in.rows, in.cols);
    expect(out, "out", out.dtype, in.rows, in.cols);
    with_type(in.dtype, [&]<class In>() {
      with_type(out.dtype, [&]<class Out>() {
        backend_.template cast<In, Out>(s, extent_of(in), strided<In>(in), strided<Out>(out));
      });
    });
  }

  void quantize(Stream& s, View values, int bits, View codes) override {
    expect_quantized(values, bits, codes);
    with_type(values.dtype, [&]<class T>() {
      backend_.template quantize<T>(s, values.count(), static_cast<const T*>(values.as<T>()), bits,
                                    codes.as<std::uint8_t>());
    });
  }
  void dequantize(Stream& s, View codes, int bits, bool add, View values) override {
    expect_quantized(values, bits, codes);
    with_type(values.dtype, [&]<class T>() {
      backend_.template dequantize<T>(s, values.count(),
                                      static_cast<const std::uint8_t*>(codes.as<std::uint8_t>()), bits, add,
                                      values.as<T>());
    });
  }

  void encode_fp8(Stream& s, View in, View codes, View scales) override {
    const std::int64_t n = in.count();
    expect_dense(in, "in", DType::kF32, n);
    expect_dense(codes, "codes", DType::kU8, n);
    expect_dense(scales, "scales", DType::kF32, kFp8Weights.blocks(1, n));
    if (n == 0) return;
    backend_.encode_fp8(s, n, static_cast<const float*>(in.as<float>()), codes.as<std::uint8_t>(),
                        scales.as<float>());
  }
  void decode(Stream& s, const DecodeArgs& args) override {
    expect_coded(args);
    const View& out = args.out;
    if (out.count() == 0) return;
    const CodedMatrix matrix = coded_matrix(args);
    with_type(out.dtype, [&]<class T>() { backend_.template decode<T>(s, matrix, out.as<T>()); });
  }

  void finish_gradient(Stream& s, View accumulator, View out, View norm_sq, View scratch) override {
    const std::int64_t n = accumulator.count();
    expect_dense(accumulator, "accumulator", n);
    expect_dense(out, "out", n);
    expect(norm_sq, "norm_sq", DType::kF64, 1, 1);
    expect(scratch, "scratch", DType::kF64, 1, Ops::kSumPartials);
    const auto submit = [&](auto from, auto to) {
      using In = decltype(from);
      using Out = decltype(to);
      backend_.template finish_gradient<In, Out>(s, n, accumulator.as<In>(), out.as<Out>(),
                                                 norm_sq.as<double>(), scratch.as<double>());
    };
    if (accumulator.dtype == DType::kF32 && out.dtype == DType::kBF16) return submit(float{}, bf16{});
    if (accumulator.dtype == DType::kF32 && out.dtype == DType::kF16) return submit(float{}, fp16{});
    if (accumulator.dtype == DType::kF32 && out.dtype == DType::kF32) return submit(float{}, float{});
    if (accumulator.dtype == DType::kF64 && out.dtype == DType::kF64) return submit(double{}, double{});
    ZG_ASSERT(false, "no gradient from {} to {}", name_of(accumulator.dtype), name_of(out.dtype));
  }

  void update(Stream& s, View grad, View weight, const OptimizerState& state, const StateFormat& format,
              const UpdateParams& params) override {
    const std::int64_t n = weight.count();
    for (const View& x : {grad, weight}) expect_dense(x, "an operand of update", n);
    expect_dense(state.master, "the master", stored_master_type(format), n);
    UpdateArrays arrays{.grad = grad.data,
                        .grad_type = grad.dtype,
                        .weight = weight.data,
                        .weight_type = weight.dtype,
                        .master = state.master.data};
    for (int i = 0; i < format.moment_count; ++i) {
      expect_dense(state.moment[i], "a moment", stored_moment_type(format), n);
      arrays.moment[i] = state.moment[i].data;
      if (format.moments != MomentFormat::kInt8) continue;
      expect_dense(state.scale[i], "the scales of a moment", DType::kF32,
                   (n + kQuantBlock - 1) / kQuantBlock);
      arrays.scale[i] = state.scale[i].as<float>();
    }
    backend_.update(s, n, arrays, format, params);
  }

 private:
  using CheckedRouterOps<Backend>::backend_;
};

}  // namespace checked
}  // namespace zg
