// Matrix products on the host. oneDNN primitives run single-threaded inside our own parallel loop over a
// fixed grid of tiles of C, so that neither the bits nor the number of threads depend on OpenMP.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "kernels/host/gemm_tiles.hpp"
#include "kernels/host/gemv.hpp"
#include "kernels/host/growing_buffer.hpp"
#include "kernels/host/matrix.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/units.hpp"

extern "C" void omp_set_num_threads(int threads);

namespace zg::host {
namespace {

using DnnlType = dnnl::memory::data_type;

template <class T>
constexpr DnnlType dnnl_type() {
  return std::is_same_v<T, bf16> ? DnnlType::bf16 : DnnlType::f32;
}

// ---- the grid

struct Grid {
  std::int64_t tile_m = 0, tile_n = 0;
};

// Depends on the sizes alone, never on the number of threads. For every tile of C a primitive packs the rows
// of A and columns of B that it needs again. So for a given number of tiles the grid with the least packing
// is chosen; it minimises m * (columns of tiles) + n * (rows of tiles).
Grid choose_grid(std::int64_t m, std::int64_t n, std::int64_t k) {
  // Up to kUsual tiles if each is large enough for a task; up to kMost if packing costs next to nothing in
  // each.
  constexpr std::int64_t kUsual = 8, kMost = 64;
  constexpr double kLeast = 1 << 20;  // multiply-adds of a tile that is large enough for a task
  constexpr double kAmple = 2e9;      // multiply-adds of a tile for which packing is negligible
  const double work = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  std::int64_t tiles = 1;
  while (tiles < kMost && work >= static_cast<double>(2 * tiles) * (tiles < kUsual ? kLeast : kAmple))
    tiles *= 2;
  std::int64_t best = 1;
  for (std::int64_t rows = 2; rows <= tiles; rows *= 2) {
    if (m * (tiles / rows) + n * rows <= m * (tiles / best) + n * best) best = rows;
  }
  const auto part = [](std::int64_t size, std::int64_t parts, std::int64_t unit) {
    return std::min(size, round_up((size + parts - 1) / parts, unit));
  };
  return {part(m, best, 32), part(n, tiles / best, 64)};
}

// ---- primitives

struct Problem {
  DnnlType in = DnnlType::f32, out = DnnlType::f32;
  GemmShape shape;
  bool bias = false;

  using Key = std::array<std::int64_t, 12>;
  Key key() const {
    return {shape.m,
            shape.n,
            shape.k,
            shape.lda,
            shape.ldb,
            shape.ldc,
            static_cast<std::int64_t>(shape.ta),
            static_cast<std::int64_t>(shape.tb),
            shape.accumulate,
            bias,
            static_cast<std::int64_t>(in),
            static_cast<std::int64_t>(out)};
  }
};

const dnnl::engine& cpu_engine() {
  // Never destroyed: threads of oneTBB, which hold primitives of this engine, may outlive the statics of this
  // file.
  static const dnnl::engine* engine = new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *engine;
}

// A primitive with its memory objects, whose addresses are set for each execution. Used only by the thread
// that created it.
struct Entry {
  std::uint64_t last_use = 0;
  dnnl::matmul primitive;
  dnnl::memory a, b, c, bias, scratchpad;
  std::size_t scratchpad_bytes = 0;
  std::unordered_map<int, dnnl::memory> arguments;
  bool supported = false;  // false: oneDNN has only its slow reference implementation on this CPU
  bool has_run = false;    // oneDNN generates some of the code at a product's first run
};

dnnl::memory::desc matrix_desc(std::int64_t rows, std::int64_t cols, DnnlType type, Trans trans,
                               std::int64_t ld) {
  return trans == Trans::kNo ? dnnl::memory::desc({rows, cols}, type, dnnl::memory::dims{ld, 1})
                             : dnnl::memory::desc({rows, cols}, type, dnnl::memory::dims{1, ld});
}

dnnl::matmul::primitive_desc describe(const Problem& problem) {
  const GemmShape& s = problem.shape;
  const auto a = matrix_desc(s.m, s.k, problem.in, s.ta, s.lda);
  const auto b = matrix_desc(s.k, s.n, problem.in, s.tb, s.ldb);
  const auto c = matrix_desc(s.m, s.n, problem.out, Trans::kNo, s.ldc);
  const dnnl::memory::desc bias({1, s.n}, problem.in, dnnl::memory::dims{s.n, 1});
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (s.accumulate) {
    dnnl::post_ops after;
    after.append_sum(1.0f);
    attributes.set_post_ops(after);
  }
  constexpr bool kAllowEmpty = true;
#if DNNL_VERSION_MAJOR >= 3
  if (problem.bias) return {cpu_engine(), a, b, bias, c, attributes, kAllowEmpty};
  return {cpu_engine(), a, b, c, attributes, kAllowEmpty};
#else
  const auto what = problem.bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c);
  return {what, attributes, cpu_engine(), kAllowEmpty};
#endif
}

// oneDNN generates code for a product, and some versions dereference a null pointer if they get no memory for
// it. This throws an error before, if address space runs out or generated code is forbidden.
void expect_memory_for_code() {
  constexpr std::size_t kBytes = 16 << 20;  // for the code and its generator
  void* const memory =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(Errc::kMemory, "matrix products", "there is no memory for their code: " + errno_text(errno),
                "raise the limit on address space (ulimit -v), lower the budgets, or free memory");
  }
  const int error = mprotect(memory, 4096, PROT_READ | PROT_EXEC) == 0 ? 0 : errno;
  (void)munmap(memory, kBytes);
  if (error == 0) return;
  throw Error(Errc::kUsage, "matrix products", "their code may not be made executable: " + errno_text(error),
              "oneDNN makes it while the program runs: allow that (MemoryDenyWriteExecute=no of a service, "
              "SELinux's execmem)");
}

std::unique_ptr<Entry> make_entry(const Problem& problem) {
  expect_memory_for_code();
  auto entry = std::make_unique<Entry>();
  const dnnl::matmul::primitive_desc pd = describe(problem);
  // Versions of oneDNN differ in how they test for an empty descriptor; get(true) works with all.
  if (pd.get(true) == nullptr) return entry;
  if (problem.in == DnnlType::bf16 && std::strncmp(pd.impl_info_str(), "ref", 3) == 0) return entry;
  entry->supported = true;
  entry->primitive = dnnl::matmul(pd);
  const auto unbound = [&](const dnnl::memory::desc& desc) {
    return dnnl::memory(desc, cpu_engine(), nullptr);
  };
  entry->a = unbound(pd.src_desc());
  entry->b = unbound(pd.weights_desc());
  entry->c = unbound(pd.dst_desc());
  entry->arguments = {{DNNL_ARG_SRC, entry->a}, {DNNL_ARG_WEIGHTS, entry->b}, {DNNL_ARG_DST, entry->c}};
  if (problem.bias) {
    entry->bias = unbound(pd.bias_desc());
    entry->arguments.emplace(DNNL_ARG_BIAS, entry->bias);
  }
  entry->scratchpad_bytes = pd.scratchpad_desc().get_size();
  if (entry->scratchpad_bytes > 0) {
    entry->scratchpad = unbound(pd.scratchpad_desc());
    entry->arguments.emplace(DNNL_ARG_SCRATCHPAD, entry->scratchpad);
  }
  return entry;
}

// A thread's primitives and buffers. oneDNN shares the generated code between threads by its own cache.
class ThreadState {
 public:
  // oneDNN asks OpenMP how many threads the calling thread may use. With one, libgomp never creates threads.
  ThreadState() : stream_(cpu_engine()) { omp_set_num_threads(1); }

  // False if oneDNN has no fast implementation of the product; C is unchanged then.
  bool run(const Problem& problem, const void* a, const void* b, void* c, const void* bias) {
    Entry& entry = find(problem);
    if (!entry.supported) return false;
    entry.a.set_data_handle(const_cast<void*>(a));
    entry.b.set_data_handle(const_cast<void*>(b));
    entry.c.set_data_handle(c);
    if (problem.bias) entry.bias.set_data_handle(const_cast<void*>(bias));
    if (entry.scratchpad_bytes > 0) {
      entry.scratchpad.set_data_handle(
          scratchpad_.at_least(static_cast<std::int64_t>(entry.scratchpad_bytes)));
    }
    if (!entry.has_run) expect_memory_for_code();
    entry.has_run = true;
    entry.primitive.execute(stream_, entry.arguments);
    stream_.wait();
    return true;
  }

  GrowingBuffer<float> converted_a, converted_b, converted_c;

 private:
  // A training step of a dense model needs about 40; in a mixture of experts each count of rows needs some.
  static constexpr std::size_t kEntries = 1024;

  Entry& find(const Problem& problem) {
    auto found = entries_.find(problem.key());
    if (found == entries_.end()) {
      if (entries_.size() >= kEntries) {
        entries_.erase(std::min_element(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
          return a.second->last_use < b.second->last_use;
        }));
      }
      found = entries_.emplace(problem.key(), make_entry(problem)).first;
    }
    found->second->last_use = ++uses_;
    return *found->second;
  }

  dnnl::stream stream_;
  std::map<Problem::Key, std::unique_ptr<Entry>> entries_;
  std::uint64_t uses_ = 0;
  GrowingBuffer<std::byte> scratchpad_;
};

ThreadState& this_thread() {
  static thread_local ThreadState state;
  return state;
}

// ---- tiles

template <class T>
const T* element(const T* x, std::int64_t ld, Trans trans, std::int64_t row, std::int64_t col) {
  return trans == Trans::kNo ? x + row * ld + col : x + col * ld + row;
}

// The tile of C for widened operands. It is nearly square, because both operands are converted again for
// every tile.
constexpr Grid kWidenedTile = {256, 512};
// The length of the inner dimension that is widened at a time.
constexpr std::int64_t kWidenedDepth = 512;
static_assert(kWidenedBytes == static_cast<std::int64_t>(sizeof(float)) *
                                   (kWidenedDepth * (kWidenedTile.tile_m + kWidenedTile.tile_n) +
                                    kWidenedTile.tile_m * kWidenedTile.tile_n));

// Widens blocks of the operands to fp32 and multiplies these.
template <class In, class Out>
void widened_tile(const GemmShape& s, const In* a, const In* b, Out* c, const In* bias) {
  ThreadState& state = this_thread();
  const std::int64_t depth = std::min(s.k, kWidenedDepth);
  float* fa = state.converted_a.at_least(s.m * depth);
  float* fb = state.converted_b.at_least(s.n * depth);
  float* fc = state.converted_c.at_least(s.m * s.n);
  for (std::int64_t p = 0; p < s.k; p += depth) {
    const std::int64_t block = std::min(depth, s.k - p);
    // A as rows of op(A), B as it is stored: oneDNN multiplies a transposed A at half the speed.
    const In* const from_a = element(a, s.lda, s.ta, 0, p);
    s.ta == Trans::kNo ? widen(from_a, s.lda, s.m, block, fa)
                       : widen_transposed(from_a, s.lda, block, s.m, fa);
    const In* const from_b = element(b, s.ldb, s.tb, p, 0);
    s.tb == Trans::kNo ? widen(from_b, s.ldb, block, s.n, fb) : widen(from_b, s.ldb, s.n, block, fb);
    Problem product{.in = DnnlType::f32, .out = DnnlType::f32, .shape = s};
    product.shape.k = block;
    product.shape.ta = Trans::kNo;
    product.shape.lda = block;
    product.shape.ldb = s.tb == Trans::kNo ? s.n : block;
    product.shape.ldc = s.n;
    product.shape.accumulate = p > 0;
    ZG_ASSERT(state.run(product, fa, fb, fc, nullptr), "oneDNN has no fp32 product");
  }
  write_result<In, Out>({.rows = s.m,
                         .cols = s.n,
                         .product = fc,
                         .bias = bias,
                         .accumulate = s.accumulate,
                         .c = c,
                         .ldc = s.ldc});
}

// A product of types that oneDNN does not multiply fast on this CPU.
template <class In, class Out>
void widened_product(const GemmShape& s, const In* a, const In* b, Out* c, const In* bias) {
  for (std::int64_t i = 0; i < s.m; i += kWidenedTile.tile_m) {
    for (std::int64_t j = 0; j < s.n; j += kWidenedTile.tile_n) {
      GemmShape tile = s;
      tile.m = std::min(kWidenedTile.tile_m, s.m - i);
      tile.n = std::min(kWidenedTile.tile_n, s.n - j);
      widened_tile(tile, element(a, s.lda, s.ta, i, 0), element(b, s.ldb, s.tb, 0, j), c + i * s.ldc + j,
                   bias ? bias + j : nullptr);
    }
  }
}

// Whether transposed_product() multiplies a tile with a transposed A faster than oneDNN alone. oneDNN copies
// the operands of large tiles. It reads the operands of small tiles where they lie, which took up to 2.3
// times as long for a transposed A (oneDNN 2.6, AVX2). A tile is small from 1/m + 1/n = 0.00196 on with
// AVX-512, and from 0.0038 on with AVX2. The copy costs next to nothing between the two.
bool transposes(const GemmShape& s) {
  return s.ta == Trans::kYes && s.n >= 64 && s.m * s.n < 512 * (s.m + s.n);
}

// Blocks of op(A) of this size are copied at a time.
constexpr std::int64_t kTransposedRows = 512, kTransposedDepth = 1024;
static_assert(kTransposedRows * kTransposedDepth * sizeof(float) <= kWidenedBytes);

void transposed_product(const GemmShape& s, const float* a, const float* b, float* c, const float* bias) {
  ThreadState& state = this_thread();
  for (std::int64_t i = 0; i < s.m; i += kTransposedRows) {
    GemmShape block = s;
    block.m = std::min(kTransposedRows, s.m - i);
    block.ta = Trans::kNo;
    for (std::int64_t p = 0; p < s.k; p += kTransposedDepth) {
      block.k = block.lda = std::min(kTransposedDepth, s.k - p);
      block.accumulate = s.accumulate || p > 0;
      float* const rows = state.converted_a.at_least(block.m * block.k);
      widen_transposed(element(a, s.lda, s.ta, i, p), s.lda, block.k, block.m, rows);
      const float* const add = p == 0 ? bias : nullptr;
      const Problem problem{
          .in = DnnlType::f32, .out = DnnlType::f32, .shape = block, .bias = add != nullptr};
      ZG_ASSERT(state.run(problem, rows, element(b, s.ldb, s.tb, p, 0), c + i * s.ldc, add),
                "oneDNN has no fp32 product");
    }
  }
}

template <class In, class Out>
void product_tile(const GemmShape& s, const In* a, const In* b, Out* c, const In* bias) {
  if constexpr (std::is_same_v<In, fp16>) {
    widened_product(s, a, b, c, bias);
  } else {
    if constexpr (std::is_same_v<In, float>) {
      if (transposes(s)) return transposed_product(s, a, b, c, bias);
    }
    const Problem problem{
        .in = dnnl_type<In>(), .out = dnnl_type<Out>(), .shape = s, .bias = bias != nullptr};
    if constexpr (std::is_same_v<In, bf16>) {
      if (has_native_bf16() && this_thread().run(problem, a, b, c, bias)) return;
      widened_product(s, a, b, c, bias);
    } else {
      ZG_ASSERT(this_thread().run(problem, a, b, c, bias), "oneDNN has no fp32 product");
    }
  }
}

// double, for tests. Blocks of op(B) are copied, so that the inner loop runs along rows.
template <>
void product_tile<double, double>(const GemmShape& s, const double* a, const double* b, double* c,
                                  const double* bias) {
  constexpr std::int64_t kBlock = 128;
  std::vector<double> block_b(static_cast<std::size_t>(std::min(kBlock, s.k) * s.n));
  for (std::int64_t i = 0; i < s.m; ++i) {
    for (std::int64_t j = 0; j < s.n; ++j) {
      double& out = c[i * s.ldc + j];
      out = (s.accumulate ? out : 0.0) + (bias ? bias[j] : 0.0);
    }
  }
  for (std::int64_t p0 = 0; p0 < s.k; p0 += kBlock) {
    const std::int64_t p1 = std::min(s.k, p0 + kBlock);
    for (std::int64_t p = p0; p < p1; ++p) {
      for (std::int64_t j = 0; j < s.n; ++j) block_b[(p - p0) * s.n + j] = *element(b, s.ldb, s.tb, p, j);
    }
    for (std::int64_t i = 0; i < s.m; ++i) {
      for (std::int64_t p = p0; p < p1; ++p) {
        const double factor = *element(a, s.lda, s.ta, i, p);
        const double* row = block_b.data() + (p - p0) * s.n;
        for (std::int64_t j = 0; j < s.n; ++j) c[i * s.ldc + j] += factor * row[j];
      }
    }
  }
}

// oneDNN crashes if it gets no memory for the first kernels that it makes. So they are made, by a small
// product, before the threads of the first loop take address space for their stacks and heaps.
template <class In, class Out>
void make_first_kernels() {
  if constexpr (!std::is_same_v<In, double>) {
    static const bool made = [] {
      constexpr std::int64_t kSize = 32;
      const std::vector<In> operand(kSize * kSize);
      std::vector<Out> product(operand.size());
      const GemmShape shape{.m = kSize, .n = kSize, .k = kSize, .lda = kSize, .ldb = kSize, .ldc = kSize};
      product_tile<In, Out>(shape, operand.data(), operand.data(), product.data(), nullptr);
      return true;
    }();
    (void)made;
  }
}

template <class In>
Grid grid_of(const GemmShape& s) {
  if constexpr (std::is_same_v<In, double>) return {32, 128};
  if constexpr (std::is_same_v<In, fp16>) return kWidenedTile;
  if constexpr (std::is_same_v<In, bf16>) {
    if (!has_native_bf16()) return kWidenedTile;
  }
  return choose_grid(s.m, s.n, s.k);
}

}  // namespace

template <class In, class Out>
void gemm(const GemmShape& s, const In* a, const In* b, Out* c, const In* bias) {
  if (s.m == 0 || s.n == 0) return;
  ZG_ASSERT_GE(s.k, 1);
  ZG_ASSERT_GE(s.lda, s.ta == Trans::kNo ? s.k : s.m);
  ZG_ASSERT_GE(s.ldb, s.tb == Trans::kNo ? s.n : s.k);
  ZG_ASSERT_GE(s.ldc, s.n);
  if constexpr (std::is_same_v<In, float>) {
    // oneDNN packs the matrix first, which takes longer than to multiply it by one row.
    if (s.m == 1 && s.ta == Trans::kNo && s.tb == Trans::kYes)
      return multiply_row({.n = s.n,
                           .k = s.k,
                           .ld = s.ldb,
                           .x = a,
                           .w = b,
                           .bias = bias,
                           .accumulate = s.accumulate,
                           .y = c});
  }
  make_first_kernels<In, Out>();
  const Grid grid = grid_of<In>(s);
  const std::int64_t rows = (s.m + grid.tile_m - 1) / grid.tile_m,
                     cols = (s.n + grid.tile_n - 1) / grid.tile_n;
  parallel_for(rows * cols, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t i = t / cols * grid.tile_m, j = t % cols * grid.tile_n;
      GemmShape tile = s;
      tile.m = std::min(grid.tile_m, s.m - i);
      tile.n = std::min(grid.tile_n, s.n - j);
      product_tile(tile, element(a, s.lda, s.ta, i, 0), element(b, s.ldb, s.tb, 0, j), c + i * s.ldc + j,
                   bias ? bias + j : nullptr);
    }
  });
}

template void gemm(const GemmShape&, const bf16*, const bf16*, bf16*, const bf16*);
template void gemm(const GemmShape&, const bf16*, const bf16*, float*, const bf16*);
template void gemm(const GemmShape&, const fp16*, const fp16*, fp16*, const fp16*);
template void gemm(const GemmShape&, const fp16*, const fp16*, float*, const fp16*);
template void gemm(const GemmShape&, const float*, const float*, float*, const float*);
template void gemm(const GemmShape&, const double*, const double*, double*, const double*);

namespace {

const char* find_bf16() {
#if defined(__x86_64__)
  // The instruction set that oneDNN will use: the CPU's features, restricted by ONEDNN_MAX_CPU_ISA.
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto has = [&](dnnl::cpu_isa wanted) {
    return (isa & static_cast<unsigned>(wanted)) == static_cast<unsigned>(wanted);
  };
  if (has(dnnl::cpu_isa::avx512_core_amx)) return "AMX";
  if (has(dnnl::cpu_isa::avx512_core_bf16)) return "AVX512_BF16";
  return "none: neither AVX512_BF16 nor AMX";
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16, which older headers lack
  return (getauxval(AT_HWCAP2) & kBf16) != 0 ? "Arm BF16" : "none: no Arm BF16 extension";
#else
  return "none: unknown kind of CPU";
#endif
}

}  // namespace

const char* bf16_description() {
  static const char* const description = find_bf16();
  return description;
}

bool has_native_bf16() {
  static const bool native = std::strncmp(bf16_description(), "none", 4) != 0;
  return native;
}

}  // namespace zg::host
