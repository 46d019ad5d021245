// Matrix products and attention, at the shapes of a step; and what memory and products can do at most.
#include <fmt/format.h>

#include "bench/gpu_kernels.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::bench {
namespace {

enum class Extra { kNone, kBias, kBiasAddend, kAddend, kBiasGelu, kGeluBackward, kAccumulate, kBiasGradient };

struct Product {
  std::string name;
  std::int64_t m, n, k;
  Trans a = Trans::kNo, b = Trans::kNo;
  Extra extra = Extra::kNone;
  bool wide = false;    // into f32
  std::int64_t ld = 0;  // of the logits or their gradient, whose rows begin at whole cache lines; 0: dense
};

const char* name_of(Extra e) {
  constexpr const char* kNames[] = {"", " +bias", " +bias +x", " +x", " +bias gelu", " gelu'", " +=", " db"};
  return kNames[static_cast<int>(e)];
}

Work make_product(Ops& ops, DType t, const Product& p, Takes& take) {
  const bool logits_out = p.ld > 0 && p.b == Trans::kYes, logits_in = p.ld > 0 && !logits_out;
  const std::int64_t a_rows = p.a == Trans::kYes ? p.k : p.m, a_cols = p.a == Trans::kYes ? p.m : p.k;
  const View a = take.in(t, a_rows, logits_in ? p.ld : a_cols).col_range(0, a_cols);
  const View b = p.b == Trans::kYes ? take.in(t, p.n, p.k) : take.in(t, p.k, p.n);
  const View c = take.inout(p.wide ? DType::kF32 : t, p.m, logits_out ? p.ld : p.n).col_range(0, p.n);
  GemmOptions o;
  o.a = p.a;
  o.b = p.b;
  o.accumulate = p.extra == Extra::kAccumulate;
  const bool bias = p.extra == Extra::kBias || p.extra == Extra::kBiasAddend || p.extra == Extra::kBiasGelu;
  if (bias) o.bias = take.in(t, 1, p.n);
  if (p.extra == Extra::kBiasAddend || p.extra == Extra::kAddend) o.addend = take.in(t, p.m, p.n);
  if (p.extra == Extra::kBiasGelu) o.gelu_input = take.out(t, p.m, p.n);
  if (p.extra == Extra::kGeluBackward) o.gelu_backward = take.in(t, p.m, p.n);
  if (p.extra == Extra::kBiasGradient) {
    o.bias_gradient = take.out(c.dtype, 1, p.m);
    o.scratch = take.scratch(c.dtype, ops.row_groups(), p.m);
  }
  return [=, &ops](Stream& s) { ops.gemm(s, a, b, c, o); };
}

// The products of a block and of the head, forward and backward: y = x W^T, dx = dy W, dW += dy^T x.
std::vector<Product> products_of(const Shapes& s, Ops& ops) {
  const std::int64_t n = s.rows(), c = s.width, q = s.heads * s.head_size, i = s.inner;
  const std::int64_t up = s.llama ? 2 * i : i;
  const Extra bias = s.llama ? Extra::kNone : Extra::kBias,
              residual = s.llama ? Extra::kAddend : Extra::kBiasAddend;
  const auto forward = [&](const char* name, std::int64_t out, std::int64_t in, Extra e) {
    return Product{.name = name, .m = n, .n = out, .k = in, .b = Trans::kYes, .extra = e};
  };
  const std::int64_t ld = round_up(s.vocabulary, 64), v = ops.pads_logits() ? ld : s.vocabulary;
  const std::int64_t chunk = std::min(n, std::max<std::int64_t>(64, ops.logits_bytes() / (ld * 6) / 64 * 64));
  return {
      forward("qkv", 3 * q, c, bias),
      forward("attention out", c, q, residual),
      forward(s.llama ? "gate, up" : "up", up, c, s.llama ? Extra::kNone : Extra::kBiasGelu),
      forward("down", c, i, residual),
      {.name = "up dx", .m = n, .n = c, .k = up},
      {.name = "down dx", .m = n, .n = i, .k = c, .extra = s.llama ? Extra::kNone : Extra::kGeluBackward},
      {.name = "up dw", .m = up, .n = c, .k = n, .a = Trans::kYes, .extra = Extra::kAccumulate, .wide = true},
      {.name = "up dw",
       .m = up,
       .n = c,
       .k = n,
       .a = Trans::kYes,
       .extra = s.llama ? Extra::kNone : Extra::kBiasGradient,
       .wide = true},
      {.name = "qkv dw",
       .m = 3 * q,
       .n = c,
       .k = n,
       .a = Trans::kYes,
       .extra = Extra::kAccumulate,
       .wide = true},
      {.name = "logits", .m = chunk, .n = v, .k = c, .b = Trans::kYes, .wide = true, .ld = ld},
      {.name = "logits dx", .m = chunk, .n = c, .k = v, .ld = ld},
      {.name = "logits dw",
       .m = v,
       .n = c,
       .k = chunk,
       .a = Trans::kYes,
       .extra = Extra::kAccumulate,
       .wide = true,
       .ld = ld}};
}

Case product_case(Device& device, DType t, const std::string& op, const std::string& shape,
                  const Product& p) {
  return {.section = "products",
          .op = op,
          .dtype = zg::name_of(t),
          .shape = shape,
          .flops = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k),
          .product = t,
          .make = [t, p, &ops = device.ops()](Takes& take) { return make_product(ops, t, p, take); }};
}

}  // namespace

std::vector<Case> roof_cases(Device& device, const Options& options) {
  std::vector<Case> cases;
  Ops& ops = device.ops();
  // The roof of memory: the fastest of what reads and writes in the simplest ways.
  const std::int64_t rows = options.tiny ? 256 : 64 * 1024, columns = 4096;
  const auto memory = [&](const char* op, DType t, std::function<Work(Takes&)> make) {
    cases.push_back({.section = "roofs",
                     .op = op,
                     .dtype = zg::name_of(t),
                     .shape = fmt::format("[{}, {}]", rows, columns),
                     .make = std::move(make)});
  };
  for (const DType t : {DType::kF32, DType::kBF16}) {
    memory("add", t, [=, &ops](Takes& take) -> Work {
      const View a = take.in(t, rows, columns), b = take.in(t, rows, columns),
                 out = take.out(t, rows, columns);
      return [=, &ops](Stream& s) { ops.add(s, a, b, out); };
    });
    memory("copy", t, [=, &ops](Takes& take) -> Work {
      const View a = take.in(t, rows, columns), out = take.out(t, rows, columns);
      return [=, &ops](Stream& s) { ops.cast(s, a, out); };
    });
  }
  // The roofs of products: square ones.
  for (const DType t : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const std::int64_t n :
         options.tiny ? std::vector<std::int64_t>{256} : std::vector<std::int64_t>{4096, 8192}) {
      cases.push_back(product_case(device, t, "product", fmt::format("{}^3", n),
                                   {.name = "", .m = n, .n = n, .k = n, .b = Trans::kYes}));
      cases.back().section = "roofs";
    }
  }
  return cases;
}

std::vector<Case> product_cases(Device& device, const Options& options, DType dtype) {
  std::vector<Case> cases;
  for (const Shapes& m : shapes(options)) {
    for (const Product& p : products_of(m, device.ops())) {
      cases.push_back(product_case(device, dtype, "gemm " + p.name + name_of(p.extra),
                                   fmt::format("{} {} x {} x {}", m.name, p.m, p.n, p.k), p));
    }
  }
  return cases;
}

std::vector<Case> attention_cases(Device& device, const Options& options, DType dtype) {
  std::vector<Case> cases;
  Ops& ops = device.ops();
  for (const Shapes& m : shapes(options)) {
    const AttentionShape shape{.batch = m.sequences,
                               .time = m.time,
                               .heads = m.heads,
                               .kv_heads = m.heads,
                               .head_size = m.head_size};
    const std::int64_t q = m.heads * m.head_size;
    // Two products forward, half of each masked away. Five backward, of which one is the forward's; ours
    // computes two of them twice, seven in all, where sums must be deterministic.
    const double forward = 2.0 * static_cast<double>(m.rows() * m.time) * static_cast<double>(q);
    const auto add = [&](const char* op, double flops, std::function<Work(Takes&)> make) {
      cases.push_back({.section = "attention",
                       .op = op,
                       .dtype = zg::name_of(dtype),
                       .shape = fmt::format("{} {} x {}, {} heads of {}", m.name, m.sequences, m.time,
                                            m.heads, m.head_size),
                       .flops = flops,
                       .product = dtype,
                       .make = std::move(make)});
    };
    const auto operands = [=, &ops](Takes& take) {
      struct {
        View qkv, o, lse, scratch;
      } v{take.in(dtype, m.rows(), 3 * q), take.inout(dtype, m.rows(), q),
          take.inout(dtype == DType::kF64 ? DType::kF64 : DType::kF32, m.sequences * m.heads, m.time),
          take.scratch(DType::kU8, 1, std::max<std::int64_t>(1, ops.attention_scratch_bytes(dtype, shape)))};
      return v;
    };
    add("attention", forward, [=, &ops](Takes& take) -> Work {
      const auto v = operands(take);
      return [=, &ops](Stream& s) {
        ops.attention(s, {.qkv = v.qkv, .shape = shape, .o = v.o, .lse = v.lse, .scratch = v.scratch});
      };
    });
    // Its operands o and lse are the forward's, which takes the same places.
    const bool twice = options.deterministic && options.attention != "cudnn";
    add("attention_backward", (twice ? 3.5 : 2.5) * forward, [=, &ops](Takes& take) -> Work {
      const auto v = operands(take);
      const View d_o = take.in(dtype, m.rows(), q), dqkv = take.out(dtype, m.rows(), 3 * q);
      return [=, &ops](Stream& s) {
        ops.attention_backward(s, {.qkv = v.qkv,
                                   .o = v.o,
                                   .lse = v.lse,
                                   .d_o = d_o,
                                   .shape = shape,
                                   .dqkv = dqkv,
                                   .scratch = v.scratch});
      };
    });
  }
  return cases;
}

}  // namespace zg::bench
