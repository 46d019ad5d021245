// Kernels of the host at the shapes of a small step, each as a share of a roof that the same rounds measure:
// for what moves memory a copy of as many bytes, for what computes the fastest of our matrix products of
// 256^3, 512^3 and 1024^3 in its type. The roof is what a plain kernel reaches, no limit of the machine: a
// share may pass 1.
//
// take_pages is how fast a host arena gets its memory from the system; its roof is one thread that takes all.
//
//   bench_kernels [--benchmark_filter=REGEX] [--benchmark_repetitions=N]
//
// Names are kernel/type; counters are medians.
#include "bench/micro.hpp"
#include "device/pages.hpp"
#include "ziggurat/base/buffer.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/kernels/visible_keys.hpp"

namespace zg::bench {
namespace {

constexpr std::int64_t kRows = 4096, kWidth = 1024;
constexpr double kElements = static_cast<double>(kRows * kWidth);

// Operands, which live as long as a benchmark runs. Each is filled with the same small numbers.
class Operands {
 public:
  View make(DType t, std::int64_t rows, std::int64_t cols) {
    const auto count = static_cast<std::size_t>(rows * cols);
    buffers_.push_back(std::make_unique<Buffer>(rows * cols * static_cast<std::int64_t>(size_of(t))));
    void* const data = buffers_.back()->data();
    for (std::size_t i = 0; i < count; ++i) {
      const float x = static_cast<float>(i * 2654435761 % 1000) * 1e-3f - 0.5f;
      if (t == DType::kF32) {
        static_cast<float*>(data)[i] = x;
      } else {
        static_cast<bf16*>(data)[i] = bf16(x);
      }
    }
    return {data, t, rows, cols};
  }
  View scratch(std::int64_t bytes) {
    if (bytes == 0) return {};
    buffers_.push_back(std::make_unique<Buffer>(bytes));
    return {buffers_.back()->data(), DType::kU8, 1, bytes};
  }

 private:
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

// What a benchmark makes of its operands: the kernel, and its work in bytes or floating-point operations.
struct Kernel {
  std::function<void()> run;
  double work;
};
using Make = std::function<Kernel(Operands&, HostStream&, DType)>;

// Half of the bytes are read, half written.
RoofLoop copy_loop(Operands& operands, double bytes) {
  const auto half = static_cast<std::int64_t>(bytes / 2);
  const View from = operands.make(DType::kF32, 1, half / 4), to = operands.make(DType::kF32, 1, half / 4);
  return {"copy", bytes, [from, to, half] {
            parallel_for(half, 1 << 18, [&](std::int64_t begin, std::int64_t end) {
              std::memcpy(static_cast<char*>(to.data) + begin, static_cast<char*>(from.data) + begin,
                          static_cast<std::size_t>(end - begin));
            });
          }};
}

std::vector<RoofLoop> product_loops(Operands& operands, HostStream& stream, DType t) {
  std::vector<RoofLoop> loops;
  for (const std::int64_t n : {256, 512, 1024}) {
    const View a = operands.make(t, n, n), b = operands.make(t, n, n), c = operands.make(t, n, n);
    loops.push_back({fmt::format("product_{}", n), 2.0 * static_cast<double>(n * n * n),
                     [&stream, a, b, c] { host_ops().gemm(stream, a, b, c, {}); }});
  }
  return loops;
}

void add(const std::string& name, bool computes, const Make& make,
         const std::vector<DType>& types = {DType::kF32, DType::kBF16}) {
  for (const DType t : types) {
    const auto body = [=](benchmark::State& state) {
      HostStream stream("bench", HostStream::Mode::kInline);
      Operands operands;
      const Kernel kernel = make(operands, stream, t);
      const auto roof = computes ? product_loops(operands, stream, t)
                                 : std::vector<RoofLoop>{copy_loop(operands, kernel.work)};
      against_roof(state, kernel.work, kernel.run, roof);
    };
    benchmark::RegisterBenchmark(fmt::format("{}/{}", name, name_of(t)).c_str(), body)->UseManualTime();
  }
}

void add_memory_bound() {
  const auto bytes = [](DType t, double operands) {
    return operands * kElements * static_cast<double>(size_of(t));
  };
  const auto full = [](Operands& o, DType t) { return o.make(t, kRows, kWidth); };
  add("add", false, [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View a = full(o, t), b = full(o, t), y = full(o, t);
    return {[=, &s] { host_ops().add(s, a, b, y); }, bytes(t, 3)};
  });
  add("gelu", false, [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View x = full(o, t), y = full(o, t);
    return {[=, &s] { host_ops().gelu(s, x, y); }, bytes(t, 2)};
  });
  add("layernorm", false, [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View x = full(o, t), y = full(o, t), w = o.make(t, 1, kWidth), b = o.make(t, 1, kWidth),
               stats = o.make(DType::kF32, kRows, 2);
    return {
        [=, &s] { host_ops().layernorm(s, {.x = x, .w = w, .b = b, .eps = 1e-5, .y = y, .stats = stats}); },
        bytes(t, 2)};
  });
  add("rmsnorm", false, [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View x = full(o, t), y = full(o, t), w = o.make(t, 1, kWidth),
               stats = o.make(DType::kF32, kRows, 1);
    return {[=, &s] { host_ops().rmsnorm(s, {.x = x, .w = w, .eps = 1e-5, .y = y, .stats = stats}); },
            bytes(t, 2)};
  });
}

// Coded matrices: what is read of codes and scales, and the elements that are written.
void add_decode() {
  constexpr std::int64_t kSide = 4096;
  const std::pair<const char*, CodeFormat> formats[] = {
      {"decode_nf4", {WeightCode::kNf4, CodeScale::kF32, 1, 64}},
      {"decode_fp8", {WeightCode::kFp8, CodeScale::kF32, 128, 128}},
      {"decode_mxfp4", {WeightCode::kMxfp4, CodeScale::kPower, 1, 32}},
      {"decode_int4", {WeightCode::kInt4, CodeScale::kBF16, 1, 128}}};
  for (const auto& [name, f] : formats) {
    add(name, false, [f = f](Operands& o, HostStream& s, DType t) -> Kernel {
      const std::int64_t blocks = f.blocks(kSide, kSide);
      const View out = o.make(t, kSide, kSide), codes = o.scratch(f.code_bytes(kSide, kSide));
      const DType type = scale_type(f.scale);
      const View scales = type == DType::kU8 ? o.scratch(blocks) : o.make(type, 1, blocks);
      for (std::int64_t i = 0; i < codes.cols; ++i)
        codes.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(i * 37);
      for (std::int64_t i = 0; i < blocks && type == DType::kU8; ++i)
        scales.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(110 + i % 16);
      const auto bytes = codes.cols + blocks * static_cast<std::int64_t>(size_of(type)) +
                         kSide * kSide * static_cast<std::int64_t>(size_of(t));
      return {[=, &s] { host_ops().decode(s, {.format = f, .codes = codes, .scales = scales, .out = out}); },
              static_cast<double>(bytes)};
    });
  }
}

// Mixtures of experts: rows of an expert, whose tokens are neighbours of none, and routing.
void add_experts() {
  // Every third of the tokens, each with two choices: slots of so many rows.
  const auto slots = [](Operands& o) -> View {
    auto* const order = static_cast<std::int32_t*>(o.scratch(4 * kRows).data);
    for (std::int64_t r = 0; r < kRows; ++r) order[r] = static_cast<std::int32_t>(6 * r + r % 2);
    return {order, DType::kI32, 1, kRows};
  };
  const auto bytes = [](DType t, double operands, double sums) {
    return kElements * (operands * static_cast<double>(size_of(t)) + 4 * sums);
  };
  add("gather_rows", false, [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View x = o.make(t, 3 * kRows, kWidth), y = o.make(t, kRows, kWidth), order = slots(o);
    return {[=, &s] { host_ops().gather_rows(s, {.x = x, .order = order, .per_token = 2, .y = y}); },
            bytes(t, 2, 0)};
  });
  add("add_rows", false, [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View x = o.make(t, kRows, kWidth), sum = o.make(DType::kF32, 3 * kRows, kWidth), order = slots(o);
    return {[=, &s] { host_ops().add_rows(s, {.x = x, .order = order, .per_token = 2, .sum = sum}); },
            bytes(t, 1, 2)};
  });
  add("swiglu", false, [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View gate_up = o.make(t, kRows, 2 * kWidth), y = o.make(t, kRows, kWidth);
    return {[=, &s] { host_ops().swiglu(s, gate_up, y); }, bytes(t, 3, 0)};
  });
  add("swiglu_backward", false, [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View gate_up = o.make(t, kRows, 2 * kWidth), dy = o.make(t, kRows, kWidth),
               d = o.make(t, kRows, 2 * kWidth);
    return {[=, &s] { host_ops().swiglu_backward(s, gate_up, dy, d); }, bytes(t, 5, 0)};
  });
  add("expert_gate", false, [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View gate_up = o.make(t, kRows, 2 * kWidth), y = o.make(t, kRows, kWidth), order = slots(o),
               weights = o.make(DType::kF32, 3 * kRows, 2);
    return {[=, &s] {
              host_ops().expert_gate(s, {.gate_up = gate_up, .order = order, .weights = weights, .y = y});
            },
            bytes(t, 3, 0)};
  });
  add("expert_gate_backward", false, [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View gate_up = o.make(t, kRows, 2 * kWidth), dy = o.make(t, kRows, kWidth), order = slots(o),
               y = o.make(t, kRows, kWidth), d = o.make(t, kRows, 2 * kWidth),
               weights = o.make(DType::kF32, 3 * kRows, 2), d_weights = o.make(DType::kF32, 3 * kRows, 2);
    return {[=, &s] {
              host_ops().expert_gate_backward(s, {.gate_up = gate_up,
                                                  .order = order,
                                                  .weights = weights,
                                                  .dy = dy,
                                                  .y = y,
                                                  .d_gate_up = d,
                                                  .d_weights = d_weights});
            },
            bytes(t, 6, 0)};
  });
  // 8192 tokens to 8 of 128 experts; its work is to read the logits.
  constexpr std::int64_t kTokens = 8192, kExperts = 128, kChoices = 8;
  constexpr RouterRule rule{.per_token = kChoices, .renormalize = true};
  const auto route = [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View logits = o.make(t, kTokens, kExperts), weights = o.make(t, kTokens, kChoices),
               chosen(o.scratch(4 * kTokens * kChoices).data, DType::kI32, kTokens, kChoices);
    return {[=, &s] {
              host_ops().route(s, {.logits = logits, .rule = rule, .chosen = chosen, .weights = weights});
            },
            4.0 * kTokens * kExperts};
  };
  add("route", false, route, {DType::kF32});
  const auto sort = [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View logits = o.make(t, kTokens, kExperts), weights = o.make(t, kTokens, kChoices),
               chosen(o.scratch(4 * kTokens * kChoices).data, DType::kI32, kTokens, kChoices),
               starts(o.scratch(4 * (kExperts + 1)).data, DType::kI32, 1, kExperts + 1),
               order(o.scratch(4 * kTokens * kChoices).data, DType::kI32, 1, kTokens * kChoices);
    const std::int64_t groups = host_ops().row_groups();
    const View counts(o.scratch(4 * groups * kExperts).data, DType::kI32, groups, kExperts);
    host_ops().route(s, {.logits = logits, .rule = rule, .chosen = chosen, .weights = weights});
    return {[=, &s] {
              host_ops().sort_slots(s,
                                    {.chosen = chosen, .starts = starts, .order = order, .scratch = counts});
            },
            8.0 * kTokens * kChoices};
  };
  add("sort_slots", false, sort, {DType::kF32});
}

void add_compute_bound() {
  add("gemm", true, [](Operands& o, HostStream& s, DType t) -> Kernel {
    constexpr std::int64_t m = 1024, n = 3072, k = 768;
    const View a = o.make(t, m, k), b = o.make(t, k, n), c = o.make(t, m, n);
    return {[=, &s] { host_ops().gemm(s, a, b, c, {}); }, 2.0 * m * n * k};
  });
  // Gradients of a weight [m, n], of k rows: in a dense layer, and in an expert with few rows.
  const auto add_gradient = [](const char* name, std::int64_t m, std::int64_t n, std::int64_t k) {
    add(name, true, [=](Operands& o, HostStream& s, DType t) -> Kernel {
      const View a = o.make(t, k, m), b = o.make(t, k, n), c = o.make(DType::kF32, m, n);
      const GemmOptions options{.a = Trans::kYes, .accumulate = true};
      return {[=, &s] { host_ops().gemm(s, a, b, c, options); },
              2.0 * static_cast<double>(m) * static_cast<double>(n * k)};
    });
  };
  add_gradient("gemm_gradient", 3072, 768, 1024);
  add_gradient("gemm_gradient_expert", 1024, 512, 128);
  // Causal: half of the products.
  constexpr AttentionShape shape{.batch = 1, .time = 1024, .heads = 12, .kv_heads = 12, .head_size = 64};
  constexpr std::int64_t c = 12 * 64;
  constexpr double flops = 2.0 * 12 * 1024 * 1024 * 64;
  add("attention", true, [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View qkv = o.make(t, 1024, 3 * c), out = o.make(t, 1024, c), lse = o.make(DType::kF32, 12, 1024),
               scratch = o.scratch(host_ops().attention_scratch_bytes(t, shape));
    return {[=, &s] {
              host_ops().attention(s, {.qkv = qkv, .shape = shape, .o = out, .lse = lse, .scratch = scratch});
            },
            flops};
  });
  add("attention_backward", true, [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View qkv = o.make(t, 1024, 3 * c), out = o.make(t, 1024, c), lse = o.make(DType::kF32, 12, 1024),
               d_out = o.make(t, 1024, c), d_qkv = o.make(t, 1024, 3 * c),
               scratch = o.scratch(host_ops().attention_scratch_bytes(t, shape));
    host_ops().attention(s, {.qkv = qkv, .shape = shape, .o = out, .lse = lse, .scratch = scratch});
    return {[=, &s] {
              host_ops().attention_backward(s, {.qkv = qkv,
                                                .o = out,
                                                .lse = lse,
                                                .d_o = d_out,
                                                .shape = shape,
                                                .dqkv = d_qkv,
                                                .scratch = scratch});
            },
            2.5 * flops};
  });
}

// A sequence of 4096 tokens, packed with documents of `document` tokens. Work is that of the keys that
// queries attend to: where what a window or documents hide costs nothing, a share is as large as without
// them.
void add_rules(const std::string& name, std::int64_t window, std::int64_t document) {
  constexpr std::int64_t kTime = 4096, kHeads = 4, kSize = 64, kC = kHeads * kSize;
  AttentionShape shape{.batch = 1, .time = kTime, .heads = kHeads, .kv_heads = kHeads, .head_size = kSize};
  shape.rule.window = window;
  shape.documents = document < kTime;
  const auto documents = [=](Operands& o) -> View {
    if (!shape.documents) return {};
    auto* const first = static_cast<std::int32_t*>(o.scratch(4 * kTime).data);
    for (std::int64_t t = 0; t < kTime; ++t) first[t] = static_cast<std::int32_t>(t / document * document);
    return {first, DType::kI32, 1, kTime};
  };
  const auto flops = [=](const View& first_keys) {
    const VisibleKeys keys{window, first_keys ? first_keys.as<std::int32_t>() : nullptr};
    std::int64_t pairs = 0;
    for (std::int64_t t = 0; t < kTime; ++t) pairs += t + 1 - keys.first(t);
    return 4.0 * static_cast<double>(pairs * kHeads * kSize);
  };
  add("attention_" + name, true, [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View qkv = o.make(t, kTime, 3 * kC), out = o.make(t, kTime, kC),
               lse = o.make(DType::kF32, kHeads, kTime), first = documents(o);
    return {[=, &s] {
              host_ops().attention(s,
                                   {.qkv = qkv, .shape = shape, .o = out, .lse = lse, .first_keys = first});
            },
            flops(first)};
  });
  add("attention_backward_" + name, true, [=](Operands& o, HostStream& s, DType t) -> Kernel {
    const View qkv = o.make(t, kTime, 3 * kC), out = o.make(t, kTime, kC),
               lse = o.make(DType::kF32, kHeads, kTime), d_out = o.make(t, kTime, kC),
               d_qkv = o.make(t, kTime, 3 * kC), first = documents(o);
    host_ops().attention(s, {.qkv = qkv, .shape = shape, .o = out, .lse = lse, .first_keys = first});
    return {[=, &s] {
              host_ops().attention_backward(s, {.qkv = qkv,
                                                .o = out,
                                                .lse = lse,
                                                .d_o = d_out,
                                                .shape = shape,
                                                .dqkv = d_qkv,
                                                .first_keys = first});
            },
            2.5 * flops(first)};
  });
}

// Taken at once by all threads, beside taken by one: pieces of this size are one thread's.
void add_pages() {
  constexpr std::int64_t kBytes = 1 << 30, kPiece = 32 << 20;
  for (const bool huge : {false, true}) {
    const auto body = [huge](benchmark::State& state) {
      const std::int64_t begin = pages::reserve(kBytes);
      if (begin == 0) return state.SkipWithError("the system refuses to reserve 1 GiB of addresses");
      pages::allow_huge(begin, kBytes, huge);
      // The first time, a virtual machine's host may have to give the memory first.
      int error = pages::take(begin, kBytes);
      pages::give_back(begin, kBytes, false);
      std::vector<double> all, one;
      for (auto _ : state) {
        for (const std::int64_t at_once : {kBytes, kPiece}) {
          const auto start = Clock::now();
          for (std::int64_t at = 0; at < kBytes && error == 0; at += at_once)
            error = pages::take(begin + at, at_once);
          (at_once == kBytes ? all : one).push_back(seconds_between(start, Clock::now()));
          pages::give_back(begin, kBytes, false);
        }
        state.SetIterationTime(all.back());
      }
      if (error != 0) state.SkipWithError("the system refuses 1 GiB of pages");
      state.SetLabel("one thread");
      state.counters["median_ns"] = 1e9 * median(all);
      state.counters["mad_ns"] = 1e9 * mad(all);
      state.counters["giga_per_s"] = 1e-9 * kBytes / median(all);
      state.counters["roof_giga_per_s"] = 1e-9 * kBytes / median(one);
      state.counters["share_of_roof"] = median(one) / median(all);
      pages::unreserve(begin, kBytes);
    };
    benchmark::RegisterBenchmark(huge ? "take_pages/2MiB" : "take_pages/4KiB", body)->UseManualTime();
  }
}

void run() {
  add_memory_bound();
  add_decode();
  add_experts();
  add_compute_bound();
  add_rules("4096", 0, 4096);
  add_rules("4096_window_512", 512, 4096);
  add_rules("4096_documents_8", 0, 512);
  add_pages();
  run_registered();
}

}  // namespace
}  // namespace zg::bench

int main(int argc, char** argv) {
  CLI::App app("Kernels of the host as shares of roofs of the same run");
  return zg::bench::micro_main(argc, argv, app, zg::bench::run);
}
