// The op set on the host: checks shapes when an op is submitted, then enqueues the kernel on the stream.
#include "kernels/host/elementwise.hpp"
#include "kernels/host/matrix.hpp"
#include "kernels/host/update.hpp"
#include "ziggurat/device/ops.hpp"

namespace zg {
namespace {

using host::Extent;
using host::Strided;

static_assert(Ops::kNormPartials == host::kRowGroups);

HostStream& on_host(Stream& stream) {
  return static_cast<HostStream&>(stream);
}

DType acc_of(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

// A view must be what the op says it is.
void expect(const View& v, const char* name, DType dtype, std::int64_t rows, std::int64_t cols) {
  ZG_ASSERT(v.dtype == dtype && v.rows == rows && v.cols == cols, "{} is {} [{}, {}], expected {} [{}, {}]",
            name, name_of(v.dtype), v.rows, v.cols, name_of(dtype), rows, cols);
  ZG_ASSERT(v.data != nullptr || v.count() == 0, "{} is null", name);
  ZG_ASSERT(v.ld >= v.cols || v.rows <= 1, "{}: rows of {} elements, {} apart", name, v.cols, v.ld);
}

// Calls f with a value of the storage type.
template <class F>
void with_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kF32:
      return f(float{});
    case DType::kBF16:
      return f(bf16{});
    case DType::kF16:
      return f(fp16{});
    case DType::kF64:
      return f(double{});
    default:
      ZG_ASSERT(false, "no kernel for {}", name_of(dtype));
  }
}

template <class T>
Strided<T> strided(const View& v) {
  return v.data == nullptr ? Strided<T>() : Strided<T>(v.as<T>(), v.ld);
}

Extent extent_of(const View& v) {
  return {v.rows, v.cols};
}

void expect_dense(const View& v, const char* name, std::int64_t count) {
  ZG_ASSERT(v.count() == count && (v.rows <= 1 || v.ld == v.cols),
            "{} is [{}, {}] with rows {} apart, expected {} in one piece", name, v.rows, v.cols, v.ld, count);
  ZG_ASSERT(v.data != nullptr || count == 0, "{} is null", name);
}

void expect_dense(const View& v, const char* name, DType dtype, std::int64_t count) {
  ZG_ASSERT(v.dtype == dtype, "{} is {}, expected {}", name, name_of(v.dtype), name_of(dtype));
  expect_dense(v, name, count);
}

class HostOps final : public Ops {
 public:
  void gemm(Stream& s, View a, View b, View c, const GemmOptions& options) override {
    const std::int64_t m = c.rows, n = c.cols;
    const bool ta = options.a == Trans::kYes, tb = options.b == Trans::kYes;
    const std::int64_t k = ta ? a.rows : a.cols;
    expect(a, "a", a.dtype, ta ? k : m, ta ? m : k);
    expect(b, "b", a.dtype, tb ? n : k, tb ? k : n);
    expect(c, "c", c.dtype, m, n);
    if (options.bias) {
      expect(options.bias, "bias", a.dtype, 1, n);
      ZG_ASSERT(!options.accumulate, "a bias would be added once more with every accumulation");
    }
    const host::GemmShape shape{.m = m,
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
      const In* bias = options.bias ? options.bias.as<In>() : nullptr;
      on_host(s).enqueue("gemm", [shape, pa = a.as<In>(), pb = b.as<In>(), pc = c.as<Out>(), bias] {
        host::gemm<In, Out>(shape, pa, pb, pc, bias);
      });
    };
    if (a.dtype == DType::kBF16 && c.dtype == DType::kBF16) return submit(bf16{}, bf16{});
    if (a.dtype == DType::kBF16 && c.dtype == DType::kF32) return submit(bf16{}, float{});
    if (a.dtype == DType::kF16 && c.dtype == DType::kF16) return submit(fp16{}, fp16{});
    if (a.dtype == DType::kF16 && c.dtype == DType::kF32) return submit(fp16{}, float{});
    if (a.dtype == DType::kF32 && c.dtype == DType::kF32) return submit(float{}, float{});
    if (a.dtype == DType::kF64 && c.dtype == DType::kF64) return submit(double{}, double{});
    ZG_ASSERT(false, "no product of {} into {}", name_of(a.dtype), name_of(c.dtype));
  }

  void layernorm(Stream& s, View x, View w, View b, double eps, View y, View stats) override {
    const DType t = x.dtype;
    expect(x, "x", t, x.rows, x.cols);
    expect(w, "w", t, 1, x.cols);
    expect(b, "b", t, 1, x.cols);
    expect(y, "y", t, x.rows, x.cols);
    expect(stats, "stats", acc_of(t), x.rows, 2);
    with_type(t, [&](auto type) {
      using T = decltype(type);
      const host::LayerNorm<T> args{.x = strided<T>(x),
                                    .w = w.as<T>(),
                                    .b = b.as<T>(),
                                    .eps = eps,
                                    .y = strided<T>(y),
                                    .stats = strided<host::Acc<T>>(stats)};
      on_host(s).enqueue("layernorm", [extent = extent_of(x), args] { host::layernorm<T>(extent, args); });
    });
  }

  void layernorm_backward(Stream& s, View dy, View x, View w, View stats, View dx, View dw, View db,
                          View scratch) override {
    const DType t = x.dtype, a = acc_of(t);
    expect(x, "x", t, x.rows, x.cols);
    expect(dy, "dy", t, x.rows, x.cols);
    expect(w, "w", t, 1, x.cols);
    expect(stats, "stats", a, x.rows, 2);
    expect(dx, "dx", t, x.rows, x.cols);
    expect(dw, "dw", a, 1, x.cols);
    expect(db, "db", a, 1, x.cols);
    expect(scratch, "scratch", a, kNormPartials, 2 * x.cols);
    with_type(t, [&](auto type) {
      using T = decltype(type);
      using A = host::Acc<T>;
      const host::LayerNormBackward<T> args{.dy = strided<T>(dy),
                                            .x = strided<T>(x),
                                            .w = w.as<T>(),
                                            .stats = strided<A>(stats),
                                            .dx = strided<T>(dx),
                                            .dw = dw.as<A>(),
                                            .db = db.as<A>(),
                                            .scratch = strided<A>(scratch)};
      on_host(s).enqueue("layernorm_backward",
                         [extent = extent_of(x), args] { host::layernorm_backward<T>(extent, args); });
    });
  }

  void rmsnorm(Stream& s, View x, View w, double eps, View y, View stats) override {
    const DType t = x.dtype;
    expect(x, "x", t, x.rows, x.cols);
    expect(w, "w", t, 1, x.cols);
    expect(y, "y", t, x.rows, x.cols);
    expect(stats, "stats", acc_of(t), x.rows, 1);
    with_type(t, [&](auto type) {
      using T = decltype(type);
      const host::RmsNorm<T> args{.x = strided<T>(x),
                                  .w = w.as<T>(),
                                  .eps = eps,
                                  .y = strided<T>(y),
                                  .stats = strided<host::Acc<T>>(stats)};
      on_host(s).enqueue("rmsnorm", [extent = extent_of(x), args] { host::rmsnorm<T>(extent, args); });
    });
  }

  void rmsnorm_backward(Stream& s, View dy, View x, View w, View stats, View dx, View dw,
                        View scratch) override {
    const DType t = x.dtype, a = acc_of(t);
    expect(x, "x", t, x.rows, x.cols);
    expect(dy, "dy", t, x.rows, x.cols);
    expect(w, "w", t, 1, x.cols);
    expect(stats, "stats", a, x.rows, 1);
    expect(dx, "dx", t, x.rows, x.cols);
    expect(dw, "dw", a, 1, x.cols);
    // The scratch of a LayerNorm serves as well.
    ZG_ASSERT_GE(scratch.cols, x.cols);
    expect(scratch, "scratch", a, kNormPartials, scratch.cols);
    with_type(t, [&](auto type) {
      using T = decltype(type);
      using A = host::Acc<T>;
      const host::RmsNormBackward<T> args{.dy = strided<T>(dy),
                                          .x = strided<T>(x),
                                          .w = w.as<T>(),
                                          .stats = strided<A>(stats),
                                          .dx = strided<T>(dx),
                                          .dw = dw.as<A>(),
                                          .scratch = strided<A>(scratch)};
      on_host(s).enqueue("rmsnorm_backward",
                         [extent = extent_of(x), args] { host::rmsnorm_backward<T>(extent, args); });
    });
  }

  void gelu(Stream& s, View x, View y) override {
    expect(x, "x", x.dtype, x.rows, x.cols);
    expect(y, "y", x.dtype, x.rows, x.cols);
    with_type(x.dtype, [&](auto type) {
      using T = decltype(type);
      on_host(s).enqueue("gelu", [x, y] { host::gelu<T>(extent_of(x), strided<T>(x), strided<T>(y)); });
    });
  }

  void gelu_backward(Stream& s, View x, View dy, View dx) override {
    expect(x, "x", x.dtype, x.rows, x.cols);
    expect(dy, "dy", x.dtype, x.rows, x.cols);
    expect(dx, "dx", x.dtype, x.rows, x.cols);
    with_type(x.dtype, [&](auto type) {
      using T = decltype(type);
      on_host(s).enqueue("gelu_backward", [x, dy, dx] {
        host::gelu_backward<T>(extent_of(x), strided<T>(x), strided<T>(dy), strided<T>(dx));
      });
    });
  }

  void swiglu(Stream& s, View gate_up, View y) override {
    expect(y, "y", y.dtype, y.rows, y.cols);
    expect(gate_up, "gate_up", y.dtype, y.rows, 2 * y.cols);
    with_type(y.dtype, [&](auto type) {
      using T = decltype(type);
      on_host(s).enqueue("swiglu",
                         [gate_up, y] { host::swiglu<T>(extent_of(y), strided<T>(gate_up), strided<T>(y)); });
    });
  }

  void swiglu_backward(Stream& s, View gate_up, View dy, View d_gate_up) override {
    expect(dy, "dy", dy.dtype, dy.rows, dy.cols);
    expect(gate_up, "gate_up", dy.dtype, dy.rows, 2 * dy.cols);
    expect(d_gate_up, "d_gate_up", dy.dtype, dy.rows, 2 * dy.cols);
    with_type(dy.dtype, [&](auto type) {
      using T = decltype(type);
      on_host(s).enqueue("swiglu_backward", [gate_up, dy, d_gate_up] {
        host::swiglu_backward<T>(extent_of(dy), strided<T>(gate_up), strided<T>(dy), strided<T>(d_gate_up));
      });
    });
  }

  void rope(Stream& s, View x, std::int64_t time, std::int64_t heads, std::int64_t head_size, double theta,
            bool inverse) override {
    expect(x, "x", x.dtype, x.rows, x.cols);
    ZG_ASSERT_GE(time, 1);
    ZG_ASSERT_LE(heads * head_size, x.cols);
    ZG_ASSERT_EQ(head_size % 2, 0);
    with_type(x.dtype, [&](auto type) {
      using T = decltype(type);
      on_host(s).enqueue("rope", [x, time, heads, head_size, theta, inverse] {
        host::rope<T>(x.as<T>(), x.ld, x.rows, time, heads, head_size, theta, inverse);
      });
    });
  }

  void attention(Stream& s, View qkv, const AttentionShape& shape, View o, View lse) override {
    expect_attention(qkv, shape, o, lse);
    with_type(qkv.dtype, [&](auto type) {
      using T = decltype(type);
      on_host(s).enqueue("attention", [qkv, shape, o, lse] {
        host::attention<T>(shape, qkv.as<T>(), qkv.ld, o.as<T>(), o.ld, lse.as<host::Acc<T>>());
      });
    });
  }

  void attention_backward(Stream& s, View qkv, View o, View lse, View d_o, const AttentionShape& shape,
                          View dqkv) override {
    expect_attention(qkv, shape, o, lse);
    expect(d_o, "d_o", o.dtype, o.rows, o.cols);
    expect(dqkv, "dqkv", qkv.dtype, qkv.rows, qkv.cols);
    with_type(qkv.dtype, [&](auto type) {
      using T = decltype(type);
      on_host(s).enqueue("attention_backward", [qkv, o, lse, d_o, shape, dqkv] {
        host::attention_backward<T>(shape, qkv.as<T>(), qkv.ld, o.as<T>(), o.ld, lse.as<host::Acc<T>>(),
                                    d_o.as<T>(), d_o.ld, dqkv.as<T>(), dqkv.ld);
      });
    });
  }

  void add(Stream& s, View a, View b, View out) override {
    expect(a, "a", a.dtype, a.rows, a.cols);
    expect(b, "b", a.dtype, a.rows, a.cols);
    expect(out, "out", a.dtype, a.rows, a.cols);
    with_type(a.dtype, [&](auto type) {
      using T = decltype(type);
      on_host(s).enqueue(
          "add", [a, b, out] { host::add<T>(extent_of(a), strided<T>(a), strided<T>(b), strided<T>(out)); });
    });
  }

  void bias_backward(Stream& s, View dy, View db, View scratch) override {
    const DType a = acc_of(dy.dtype);
    expect(dy, "dy", dy.dtype, dy.rows, dy.cols);
    expect(db, "db", a, 1, dy.cols);
    ZG_ASSERT_GE(scratch.cols, dy.cols);
    expect(scratch, "scratch", a, kNormPartials, scratch.cols);
    with_type(dy.dtype, [&](auto type) {
      using T = decltype(type);
      using A = host::Acc<T>;
      on_host(s).enqueue("bias_backward", [dy, db, scratch] {
        host::bias_backward<T>(extent_of(dy), strided<T>(dy), db.as<A>(), strided<A>(scratch));
      });
    });
  }

  void embedding(Stream& s, View ids, View wte, View wpe, std::int64_t time, View out) override {
    const DType t = out.dtype;
    ZG_ASSERT_GE(time, 1);
    expect(ids, "ids", DType::kI32, 1, out.rows);
    expect(wte, "wte", t, wte.rows, out.cols);
    if (wpe) expect(wpe, "wpe", t, wpe.rows, out.cols);
    expect(out, "out", t, out.rows, out.cols);
    with_type(t, [&](auto type) {
      using T = decltype(type);
      const host::Embedding<T> args{.ids = ids.as<std::int32_t>(),
                                    .vocabulary = wte.rows,
                                    .positions = wpe.rows,
                                    .time = time,
                                    .wte = strided<T>(wte),
                                    .wpe = strided<T>(wpe),
                                    .out = strided<T>(out)};
      on_host(s).enqueue("embedding", [extent = extent_of(out), args] { host::embedding<T>(extent, args); });
    });
  }

  void embedding_backward(Stream& s, View ids, View dout, std::int64_t time, View dwte, View dwpe) override {
    const DType a = acc_of(dout.dtype);
    ZG_ASSERT_GE(time, 1);
    expect(ids, "ids", DType::kI32, 1, dout.rows);
    expect(dout, "dout", dout.dtype, dout.rows, dout.cols);
    expect(dwte, "dwte", a, dwte.rows, dout.cols);
    if (dwpe) expect(dwpe, "dwpe", a, dwpe.rows, dout.cols);
    with_type(dout.dtype, [&](auto type) {
      using T = decltype(type);
      using A = host::Acc<T>;
      const host::EmbeddingBackward<T> args{.ids = ids.as<std::int32_t>(),
                                            .vocabulary = dwte.rows,
                                            .positions = dwpe.rows,
                                            .time = time,
                                            .dout = strided<T>(dout),
                                            .dwte = strided<A>(dwte),
                                            .dwpe = strided<A>(dwpe)};
      on_host(s).enqueue("embedding_backward",
                         [extent = extent_of(dout), args] { host::embedding_backward<T>(extent, args); });
    });
  }

  void cross_entropy(Stream& s, View logits, View targets, View loss_sum, View dlogits,
                     double scale) override {
    const DType t = dlogits ? dlogits.dtype : logits.dtype;
    expect(logits, "logits", acc_of(t), logits.rows, logits.cols);
    expect(targets, "targets", DType::kI32, 1, logits.rows);
    expect(loss_sum, "loss_sum", DType::kF64, 1, 1);
    if (dlogits) expect(dlogits, "dlogits", t, logits.rows, logits.cols);
    with_type(t, [&](auto type) {
      using T = decltype(type);
      const host::CrossEntropy<T> args{.logits = strided<host::Acc<T>>(logits),
                                       .targets = targets.as<std::int32_t>(),
                                       .loss_sum = loss_sum.as<double>(),
                                       .dlogits = strided<T>(dlogits),
                                       .scale = scale};
      on_host(s).enqueue("cross_entropy",
                         [extent = extent_of(logits), args] { host::cross_entropy<T>(extent, args); });
    });
  }

  void zero(Stream& s, View x) override {
    expect(x, "x", x.dtype, x.rows, x.cols);
    const std::int64_t size = static_cast<std::int64_t>(size_of(x.dtype));
    on_host(s).enqueue("zero", [x, size] {
      host::zero({x.rows, x.cols * size}, {static_cast<char*>(x.data), x.ld * size});
    });
  }

  void cast(Stream& s, View in, View out) override {
    expect(in, "in", in.dtype, in.rows, in.cols);
    expect(out, "out", out.dtype, in.rows, in.cols);
    with_type(in.dtype, [&](auto from) {
      with_type(out.dtype, [&](auto to) {
        using In = decltype(from);
        using Out = decltype(to);
        on_host(s).enqueue(
            "cast", [in, out] { host::cast<In, Out>(extent_of(in), strided<In>(in), strided<Out>(out)); });
      });
    });
  }

  void finish_gradient(Stream& s, View accumulator, View out, View norm_sq) override {
    const std::int64_t n = accumulator.count();
    expect_dense(accumulator, "accumulator", n);
    expect_dense(out, "out", n);
    expect(norm_sq, "norm_sq", DType::kF64, 1, 1);
    const auto submit = [&](auto from, auto to) {
      using In = decltype(from);
      using Out = decltype(to);
      on_host(s).enqueue("finish_gradient", [n, accumulator, out, norm_sq] {
        *norm_sq.as<double>() += host::finish_gradient<In, Out>(n, accumulator.as<In>(), out.as<Out>());
      });
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
    const bool split = format.master == MasterFormat::kSplit;
    expect_dense(state.master, "the master", split ? DType::kU16 : format.full, n);
    const DType moment = format.moments == MomentFormat::kInt8   ? DType::kU8
                         : format.moments == MomentFormat::kBf16 ? DType::kBF16
                                                                 : format.full;
    host::UpdateArrays arrays{.grad = grad.data,
                              .grad_type = grad.dtype,
                              .weight = weight.data,
                              .weight_type = weight.dtype,
                              .master = state.master.data};
    for (int i = 0; i < format.moment_count; ++i) {
      expect_dense(state.moment[i], "a moment", moment, n);
      arrays.moment[i] = state.moment[i].data;
      if (format.moments != MomentFormat::kInt8) continue;
      expect_dense(state.scale[i], "the scales of a moment", DType::kF32,
                   (n + kQuantBlock - 1) / kQuantBlock);
      arrays.scale[i] = state.scale[i].as<float>();
    }
    on_host(s).enqueue("update", [n, arrays, format, params] { host::update(n, arrays, format, params); });
  }

 private:
  static void expect_attention(const View& qkv, const AttentionShape& shape, const View& o, const View& lse) {
    const std::int64_t tokens = shape.batch * shape.time;
    ZG_ASSERT_GE(shape.kv_heads, 1);
    ZG_ASSERT_EQ(shape.heads % shape.kv_heads, 0);
    expect(qkv, "qkv", qkv.dtype, tokens, (shape.heads + 2 * shape.kv_heads) * shape.head_size);
    expect(o, "o", qkv.dtype, tokens, shape.heads * shape.head_size);
    expect(lse, "lse", acc_of(qkv.dtype), shape.batch * shape.heads, shape.time);
    expect_dense(lse, "lse", lse.count());
  }
};

}  // namespace

Ops& host_ops() {
  static HostOps ops;  // no state
  return ops;
}

}  // namespace zg
