// The ops whose roof is memory, at the shapes of a step.
#include <fmt/format.h>

#include "bench/gpu_kernels.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/kernels/rope.hpp"
#include "ziggurat/optim/state.hpp"

namespace zg::bench {
namespace {

constexpr double kEps = 1e-5;

// Cases of one type at the shapes of one model.
class OpCases {
 public:
  OpCases(Ops& ops, DType t, const Shapes& m)
      : at_{&ops, t, t == DType::kF64 ? DType::kF64 : DType::kF32, m} {}

  std::vector<Case> all() {
    norms();
    activations();
    if (at_.m.llama) {
      rotations();
    } else {
      add("bias_backward", at_.m.rows(), 3 * at_.m.width, [=, at = at_](Takes& take) -> Work {
        const std::int64_t wide = 3 * at.m.width;
        const View dy = take.in(at.t, at.m.rows(), wide), db = take.inout(at.a, 1, wide),
                   scratch = take.scratch(at.a, at.ops->row_groups(), wide);
        return [=](Stream& s) { at.ops->bias_backward(s, dy, db, scratch); };
      });
    }
    add("add", at_.m.rows(), at_.m.width, [=, at = at_](Takes& take) -> Work {
      const View a = take.in(at.t, at.m.rows(), at.m.width), b = take.in(at.t, at.m.rows(), at.m.width),
                 out = take.out(at.t, at.m.rows(), at.m.width);
      return [=](Stream& s) { at.ops->add(s, a, b, out); };
    });
    add("dropout", at_.m.rows(), at_.m.width, [=, at = at_](Takes& take) -> Work {
      const View x = take.in(at.t, at.m.rows(), at.m.width), y = take.out(at.t, at.m.rows(), at.m.width);
      const Dropout rule{.rate = 0.1, .key = {{1, 2}}};
      return [=](Stream& s) { at.ops->dropout(s, x, rule, y); };
    });
    embeddings();
    loss();
    conversions();
    if (at_.m.llama && at_.t == DType::kBF16) coded_matrices();
    return std::move(cases_);
  }

 private:
  void add(const std::string& op, std::int64_t rows, std::int64_t cols, std::function<Work(Takes&)> make) {
    cases_.push_back({.section = "ops",
                      .op = op,
                      .dtype = name_of(at_.t),
                      .shape = fmt::format("{} [{}, {}]", at_.m.name, rows, cols),
                      .make = std::move(make)});
  }

  void norms() {
    const std::int64_t stats_columns = at_.m.llama ? 1 : 2;
    add(at_.m.llama ? "rmsnorm" : "layernorm", at_.m.rows(), at_.m.width, [=, at = at_](Takes& take) -> Work {
      const View x = take.in(at.t, at.m.rows(), at.m.width), w = take.in(at.t, 1, at.m.width),
                 b = take.in(at.t, 1, at.m.width), y = take.out(at.t, at.m.rows(), at.m.width),
                 stats = take.out(at.a, at.m.rows(), stats_columns);
      return [=](Stream& s) {
        if (at.m.llama) {
          at.ops->rmsnorm(s, {.x = x, .w = w, .eps = kEps, .y = y, .stats = stats});
        } else {
          at.ops->layernorm(s, {.x = x, .w = w, .b = b, .eps = kEps, .y = y, .stats = stats});
        }
      };
    });
    add(at_.m.llama ? "rmsnorm_backward" : "layernorm_backward", at_.m.rows(), at_.m.width,
        [=, at = at_](Takes& take) -> Work {
          const View dy = take.in(at.t, at.m.rows(), at.m.width), x = take.in(at.t, at.m.rows(), at.m.width),
                     w = take.in(at.t, 1, at.m.width), stats = take.in(at.a, at.m.rows(), stats_columns),
                     dx = take.inout(at.t, at.m.rows(), at.m.width), dw = take.inout(at.a, 1, at.m.width),
                     db = take.inout(at.a, 1, at.m.width),
                     scratch = take.scratch(at.a, at.ops->row_groups(), 2 * at.m.width);
          return [=](Stream& s) {
            if (at.m.llama) {
              at.ops->rmsnorm_backward(
                  s, {.dy = dy, .x = x, .w = w, .stats = stats, .dx = dx, .dw = dw, .scratch = scratch});
            } else {
              at.ops->layernorm_backward(s, {.dy = dy,
                                             .x = x,
                                             .w = w,
                                             .stats = stats,
                                             .dx = dx,
                                             .dw = dw,
                                             .db = db,
                                             .scratch = scratch});
            }
          };
        });
  }

  void activations() {
    const std::int64_t n = at_.m.rows(), inner = at_.m.inner;
    if (at_.m.llama) {
      add("swiglu", n, inner, [=, at = at_](Takes& take) -> Work {
        const View gate_up = take.in(at.t, n, 2 * inner), y = take.out(at.t, n, inner);
        return [=](Stream& s) { at.ops->swiglu(s, gate_up, y); };
      });
      add("swiglu_backward", n, inner, [=, at = at_](Takes& take) -> Work {
        const View gate_up = take.in(at.t, n, 2 * inner), dy = take.in(at.t, n, inner),
                   d = take.out(at.t, n, 2 * inner);
        return [=](Stream& s) { at.ops->swiglu_backward(s, gate_up, dy, d); };
      });
      return;
    }
    add("gelu", n, inner, [=, at = at_](Takes& take) -> Work {
      const View x = take.in(at.t, n, inner), y = take.out(at.t, n, inner);
      return [=](Stream& s) { at.ops->gelu(s, x, y); };
    });
    add("gelu_backward", n, inner, [=, at = at_](Takes& take) -> Work {
      const View x = take.in(at.t, n, inner), dy = take.in(at.t, n, inner), dx = take.out(at.t, n, inner);
      return [=](Stream& s) { at.ops->gelu_backward(s, x, dy, dx); };
    });
  }

  void rotations() {
    const std::int64_t columns = 3 * at_.m.heads * at_.m.head_size;
    add("rope", at_.m.rows(), 2 * at_.m.heads * at_.m.head_size, [=, at = at_](Takes& take) -> Work {
      // q and k of rows that hold q, k and v.
      const View x = take.uncounted(Content::kUpdated, at.t, at.m.rows(), columns);
      take.count(2.0 * static_cast<double>(at.m.rows() * 2 * at.m.heads * at.m.head_size) *
                 static_cast<double>(size_of(at.t)));
      const RopeTable table = rope_table(10000, at.m.head_size / 2);
      return [=](Stream& s) {
        at.ops->rope(s, {.x = x,
                         .positions = at.m.time,
                         .heads = 2 * at.m.heads,
                         .head_size = at.m.head_size,
                         .table = table,
                         .inverse = false});
      };
    });
  }

  void embeddings() {
    const std::int64_t n = at_.m.rows(), c = at_.m.width, v = at_.m.vocabulary;
    const double row = static_cast<double>(c) * static_cast<double>(size_of(at_.t));
    add("embedding", n, c, [=, at = at_](Takes& take) -> Work {
      const View ids = take.ids(n, v), wte = take.uncounted(Content::kNumbers, at.t, v, c),
                 wpe = at.m.llama ? View{} : take.in(at.t, at.m.time, c), out = take.out(at.t, n, c);
      take.count(static_cast<double>(n) * row);  // as many rows of the table as there are tokens
      return [=](Stream& s) {
        at.ops->embedding(s, {.ids = ids, .wte = wte, .wpe = wpe, .positions = at.m.time, .out = out});
      };
    });
    add("embedding_backward", n, c, [=, at = at_](Takes& take) -> Work {
      const View ids = take.ids(n, v), dout = take.in(at.t, n, c),
                 dwte = take.uncounted(Content::kUpdated, at.a, v, c),
                 dwpe = at.m.llama ? View{} : take.inout(at.a, at.m.time, c);
      // Each row that a token names is read and written once.
      const double named =
          static_cast<double>(std::min(n, v)) * static_cast<double>(c) * static_cast<double>(size_of(at.a));
      take.count(2 * named);
      return [=](Stream& s) {
        at.ops->embedding_backward(
            s, {.ids = ids, .dout = dout, .positions = at.m.time, .dwte = dwte, .dwpe = dwpe});
      };
    });
  }

  void loss() {
    const std::int64_t v = at_.m.vocabulary, ld = round_up(v, 64);
    const auto each = static_cast<std::int64_t>(size_of(at_.t) + size_of(at_.a));
    const std::int64_t n =
        std::min(at_.m.rows(), std::max<std::int64_t>(64, at_.ops->logits_bytes() / (ld * each) / 64 * 64));
    add("cross_entropy", n, v, [=, at = at_](Takes& take) -> Work {
      const View wide = take.uncounted(Content::kNumbers, at.a, n, ld),
                 d_wide = take.uncounted(Content::kAnything, at.t, n, ld), targets = take.ids(n, v),
                 sum = take.zeroed(DType::kF64, 1, 1),
                 scratch = take.scratch(DType::kF64, 1, Ops::kSumPartials);
      take.count(static_cast<double>(n * v * each));
      const View logits = wide.col_range(0, v), dlogits = d_wide.col_range(0, v);
      return [=](Stream& s) {
        at.ops->cross_entropy(s, {.logits = logits,
                                  .targets = targets,
                                  .loss_sum = sum,
                                  .dlogits = dlogits,
                                  .scratch = scratch,
                                  .scale = 1});
      };
    });
  }

  void conversions() {
    // A block's parameters.
    const std::int64_t width = at_.m.width,
                       rows = at_.m.llama ? 4 * width + 3 * at_.m.inner : 4 * width + 2 * at_.m.inner;
    const DType other = at_.t == DType::kF32 ? DType::kBF16 : DType::kF32;
    add(fmt::format("cast to {}", name_of(other)), rows, width, [=, at = at_](Takes& take) -> Work {
      const View in = take.in(at.t, rows, width), out = take.out(other, rows, width);
      return [=](Stream& s) { at.ops->cast(s, in, out); };
    });
    add("finish_gradient", 1, rows * width, [=, at = at_](Takes& take) -> Work {
      const View in = take.in(at.a, 1, rows * width), out = take.out(at.t, 1, rows * width),
                 norm = take.zeroed(DType::kF64, 1, 1),
                 scratch = take.scratch(DType::kF64, 1, Ops::kSumPartials);
      return [=](Stream& s) { at.ops->finish_gradient(s, in, out, norm, scratch); };
    });
    if (at_.t != DType::kF32) return;
    add("zero", 1, rows * width, [=, at = at_](Takes& take) -> Work {
      const View x = take.out(at.t, 1, rows * width);
      return [=](Stream& s) { at.ops->zero(s, x); };
    });
  }

  // Codes are bytes as they come: all have levels.
  void coded_matrices() {
    const std::int64_t rows = at_.m.inner, cols = at_.m.width;
    const std::pair<const char*, CodeFormat> formats[] = {
        {"decode NF4", {WeightCode::kNf4, CodeScale::kF32, 1, 64}},
        {"decode FP8", {WeightCode::kFp8, CodeScale::kF32, 128, 128}},
        {"decode INT4", {WeightCode::kInt4, CodeScale::kBF16, 1, 128}}};
    for (const auto& [name, f] : formats) {
      add(name, rows, cols, [=, f = f, at = at_](Takes& take) -> Work {
        const std::int64_t bytes = f.code_bytes(rows, cols);
        take.count(static_cast<double>(bytes));
        const View codes = take.uncounted(Content::kAnything, DType::kU8, 1, bytes),
                   scales = take.in(scale_type(f.scale), 1, f.blocks(rows, cols)),
                   out = take.out(at.t, rows, cols);
        return [=](Stream& s) {
          at.ops->decode(s, {.format = f, .codes = codes, .scales = scales, .out = out});
        };
      });
    }
  }

  struct At {
    Ops* ops;
    DType t, a;  // of operands and of sums
    Shapes m;
  };
  const At at_;
  std::vector<Case> cases_;
};

struct Format {
  const char* name;
  StateFormat state;
};

std::vector<Format> formats() {
  using Kind = OptimizerKind;
  using Master = MasterFormat;
  using Moments = MomentFormat;
  const auto make = [](Kind kind, Master master, Moments moments, int count) {
    return StateFormat{.kind = kind, .master = master, .moments = moments, .moment_count = count};
  };
  return {{"AdamW fp32", make(Kind::kAdam, Master::kFull, Moments::kFull, 2)},
          {"AdamW split", make(Kind::kAdam, Master::kSplit, Moments::kFull, 2)},
          {"AdamW fp32, moments bf16", make(Kind::kAdam, Master::kFull, Moments::kBf16, 2)},
          {"AdamW split, moments bf16", make(Kind::kAdam, Master::kSplit, Moments::kBf16, 2)},
          {"AdamW fp32, moments int8", make(Kind::kAdam, Master::kFull, Moments::kInt8, 2)},
          {"AdamW split, moments int8", make(Kind::kAdam, Master::kSplit, Moments::kInt8, 2)},
          {"Lion fp32", make(Kind::kLion, Master::kFull, Moments::kFull, 1)},
          {"Lion split, moments bf16", make(Kind::kLion, Master::kSplit, Moments::kBf16, 1)},
          {"Lion split, moments int8", make(Kind::kLion, Master::kSplit, Moments::kInt8, 1)},
          {"SGD fp32, momentum", make(Kind::kSgd, Master::kFull, Moments::kFull, 1)},
          {"SGD fp32", make(Kind::kSgd, Master::kFull, Moments::kFull, 0)}};
}

}  // namespace

std::vector<Case> op_cases(Device& device, const Options& options, DType dtype) {
  std::vector<Case> cases;
  for (const Shapes& m : shapes(options)) {
    OpCases made(device.ops(), dtype, m);
    for (Case& c : made.all()) cases.push_back(std::move(c));
  }
  return cases;
}

std::vector<Case> update_cases(Device& device, const Options& options) {
  const std::int64_t n = options.tiny ? 64 * kQuantBlock : std::int64_t{64} << 20;
  std::vector<Case> cases;
  for (const Format& f : formats()) {
    cases.push_back({.section = "ops",
                     .op = "update",
                     .dtype = "bf16",
                     .shape = fmt::format("{} [{}]", f.name, n),
                     .make = [n, format = f.state, &ops = device.ops()](Takes& take) -> Work {
                       const StateLayout layout(format);
                       const View block = take.uncounted(Content::kZero, DType::kU8, 1, layout.bytes(n));
                       take.count(2 * layout.bytes_per_element() * static_cast<double>(n));
                       const View grad = take.in(DType::kBF16, 1, n);
                       const bool split = format.master == MasterFormat::kSplit;
                       const View weight =
                           split ? take.zeroed(DType::kBF16, 1, n) : take.out(DType::kBF16, 1, n);
                       // No address yet when the sizes are learnt.
                       const OptimizerState state =
                           block.data == nullptr ? OptimizerState{} : layout.part(block.data, n, 0, n);
                       const UpdateParams params{.lr = 1e-3,
                                                 .weight_decay = 0.1,
                                                 .momentum = 0.9,
                                                 .step = 10,
                                                 .grad_scale = 0.5,
                                                 .random = {{1, 2}}};
                       return [=, &ops](Stream& s) { ops.update(s, grad, weight, state, format, params); };
                     }});
  }
  return cases;
}

}  // namespace zg::bench
