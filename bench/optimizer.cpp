// The fused optimizers against the roof of the memory that they stream through: loops that read and write the
// same bytes of the same arrays in the same order and compute next to nothing, plain, with prefetches, with
// streaming stores, and with streaming stores of what is only written; each over rows of 64 and of 256
// elements. The fastest of them is the roof.
//
//   bench_optimizer [--params 100000000] [--repeats 15] [--threads N] [--benchmark_filter=REGEX]
//
// For each format: verifies one step against the formulae in fp64, then times kernel and loops in turns.
// Counters: medians, their median absolute deviation, bytes and ns per parameter, and the share of the roof.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/optimizer.cpp"
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on
#include <hwy/cache_control.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench/micro.hpp"
#include "kernels/host/update.hpp"
#include "kernels/host/update_int8.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/device.hpp"

#ifndef ZG_BENCH_OPTIMIZER
#define ZG_BENCH_OPTIMIZER
namespace zg::bench {
// An array as bytes, from some element on.
struct Traffic {
  char* data;
  std::int64_t bytes_per_64;  // elements
  bool read, write;
};
enum class Stores { kPlain, kStreamed, kStreamedIfOnlyWritten };
using Loop = std::uint64_t (*)(std::int64_t n, const std::vector<Traffic>& arrays);
struct NamedLoop {
  const char* name;
  Loop loop;
};
}  // namespace zg::bench
#endif

HWY_BEFORE_NAMESPACE();
namespace zg::bench::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// The lowest bit of each 64 flips in what is read and written; what is only written gets zeros. Returns
// something that depends on all that is only read. n: a multiple of kRow; rows are whole vectors, aligned.
template <Stores kStores, bool kPrefetch, std::int64_t kRow>
std::uint64_t loop(std::int64_t n, const std::vector<Traffic>& arrays) {
  const hn::ScalableTag<std::uint64_t> d;
  const std::int64_t step = static_cast<std::int64_t>(8 * hn::Lanes(d));
  constexpr std::int64_t kAhead = 1024;
  const auto one = hn::Set(d, std::uint64_t{1});
  auto seen = hn::Zero(d);
  for (std::int64_t row = 0; row < n / kRow; ++row) {
    for (const Traffic& t : arrays) {
      const std::int64_t bytes = t.bytes_per_64 * (kRow / 64);
      char* const begin = t.data + row * bytes;
      for (std::int64_t i = 0; i < bytes; i += step) {
        std::uint64_t* const at = reinterpret_cast<std::uint64_t*>(begin + i);
        if (kPrefetch && i % 64 == 0) hwy::Prefetch(begin + i + kAhead);
        if (!t.write) {
          seen = hn::Xor(seen, hn::Load(d, at));
          continue;
        }
        const auto value = t.read ? hn::Xor(hn::Load(d, at), one) : hn::Zero(d);
        if (kStores == Stores::kStreamed || (kStores == Stores::kStreamedIfOnlyWritten && !t.read)) {
          hn::Stream(value, d, at);
        } else {
          hn::Store(value, d, at);
        }
      }
    }
  }
  if (kStores != Stores::kPlain) hwy::FlushStream();
  return hn::GetLane(seen);
}

std::vector<NamedLoop> loops() {
  return {{"plain_64", loop<Stores::kPlain, false, 64>},
          {"plain_256", loop<Stores::kPlain, false, 256>},
          {"prefetching_64", loop<Stores::kPlain, true, 64>},
          {"prefetching_256", loop<Stores::kPlain, true, 256>},
          {"streaming_64", loop<Stores::kStreamed, false, 64>},
          {"streaming_256", loop<Stores::kStreamed, false, 256>},
          {"mixed_64", loop<Stores::kStreamedIfOnlyWritten, false, 64>},
          {"mixed_256", loop<Stores::kStreamedIfOnlyWritten, false, 256>}};
}

}  // namespace
}  // namespace zg::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::bench {
namespace {
HWY_EXPORT(loops);

constexpr std::int64_t kChunk = 64 * 1024;

struct Options {
  std::int64_t params = 100'000'000;
  int repeats = 15, threads = 0;
};

struct Format {
  const char* name;
  StateFormat state;
};

std::vector<Format> formats() {
  const auto adam = [](MasterFormat master, MomentFormat moments) {
    return StateFormat{.kind = OptimizerKind::kAdam, .master = master, .moments = moments, .moment_count = 2};
  };
  const StateFormat lion{.kind = OptimizerKind::kLion, .moment_count = 1};
  const StateFormat sgd{.kind = OptimizerKind::kSgd, .moment_count = 1};
  return {{"adamw_fp32", adam(MasterFormat::kFull, MomentFormat::kFull)},
          {"adamw_split", adam(MasterFormat::kSplit, MomentFormat::kFull)},
          {"adamw_split_bf16", adam(MasterFormat::kSplit, MomentFormat::kBf16)},
          {"adamw_split_int8", adam(MasterFormat::kSplit, MomentFormat::kInt8)},
          {"lion_fp32", lion},
          {"sgd_fp32", sgd}};
}

constexpr UpdateParams kParams{
    .lr = 1e-3, .weight_decay = 0.1, .momentum = 0.9, .step = 10, .grad_scale = 0.5, .random = {{1, 2}}};

// A format's arrays, from the arena that a run takes its memory from, with numbers in them.
class Arrays {
 public:
  Arrays(std::int64_t n, const StateFormat& f)
      : n_(n), format_(f), arena_(make_host_arena("bench", 17 * n + 64 * 4096)) {
    const bool split = f.master == MasterFormat::kSplit;
    const std::int64_t moment = f.moments == MomentFormat::kFull   ? 4
                                : f.moments == MomentFormat::kBf16 ? 2
                                                                   : 1;
    arrays_.grad_type = arrays_.weight_type = DType::kBF16;
    arrays_.grad = take(2, {.read = true, .write = false});
    arrays_.weight = take(2, {.read = split, .write = true});
    arrays_.master = take(split ? 2 : 4, {.read = true, .write = true});
    for (int k = 0; k < f.moment_count; ++k) arrays_.moment[k] = take(moment, {.read = true, .write = true});
    if (f.moments == MomentFormat::kInt8) {
      for (int k = 0; k < f.moment_count; ++k) arrays_.scale[k] = static_cast<float*>(scales());
    }
    bf16* const grad = static_cast<bf16*>(const_cast<void*>(arrays_.grad));
    parallel_for(n, kChunk, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const float x = static_cast<float>((i * 2654435761) % 1000) * 1e-3f - 0.5f;
        grad[i] = bf16(x);
        static_cast<bf16*>(arrays_.weight)[i] = bf16(0.1f * x);
        if (!split) static_cast<float*>(arrays_.master)[i] = 0.1f * x;
      }
    });
    // Moments that are not zero, in any format.
    host::update(n, arrays_, f, kParams);
  }
  ~Arrays() {
    for (const auto& [data, bytes] : taken_) arena_->release(data, bytes);
  }
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;

  const host::UpdateArrays& arrays() const { return arrays_; }
  const StateFormat& format() const { return format_; }
  double bytes_per_param() const {
    double bytes =
        format_.moments == MomentFormat::kInt8 ? 2.0 * format_.moment_count * sizeof(float) / kQuantBlock : 0;
    for (const Traffic& t : traffic_) bytes += static_cast<double>(t.bytes_per_64 * (t.read + t.write)) / 64;
    return bytes;
  }
  std::vector<Traffic> traffic(std::int64_t begin) const {
    std::vector<Traffic> from = traffic_;
    for (Traffic& t : from) t.data += begin / 64 * t.bytes_per_64;
    return from;
  }
  // Scales of a chunk, as the rows of one array.
  std::vector<Traffic> scales(std::int64_t begin) const {
    std::vector<Traffic> from;
    for (float* scale : arrays_.scale) {
      if (scale != nullptr)
        from.push_back({reinterpret_cast<char*>(scale + begin / kQuantBlock), 64, true, true});
    }
    return from;
  }

  double master(std::int64_t i) const {
    if (format_.master == MasterFormat::kFull)
      return static_cast<double>(static_cast<float*>(arrays_.master)[i]);
    const std::uint32_t low = static_cast<std::uint16_t*>(arrays_.master)[i];
    const std::uint32_t high = static_cast<bf16*>(arrays_.weight)[i].bits - (low >= 0x8000u ? 1u : 0u);
    return static_cast<double>(std::bit_cast<float>(high << 16 | low));
  }
  double moment(int k, std::int64_t i) const {
    const void* const from = arrays_.moment[k];
    if (from == nullptr) return 0;
    if (format_.moments == MomentFormat::kFull)
      return static_cast<double>(static_cast<const float*>(from)[i]);
    if (format_.moments == MomentFormat::kBf16)
      return static_cast<double>(static_cast<float>(static_cast<const bf16*>(from)[i]));
    return static_cast<double>(
        host::int8::decode(k, static_cast<const std::uint8_t*>(from)[i], arrays_.scale[k][i / kQuantBlock]));
  }
  double grad(std::int64_t i) const {
    return static_cast<double>(static_cast<float>(static_cast<const bf16*>(arrays_.grad)[i]));
  }
  double weight(std::int64_t i) const {
    return static_cast<double>(static_cast<float>(static_cast<bf16*>(arrays_.weight)[i]));
  }

 private:
  struct Use {
    bool read, write;
  };
  void* allocate(std::int64_t bytes) {
    void* data = arena_->allocate(bytes);
    if (data == nullptr)
      throw Error(Errc::kMemory, "bench_optimizer", format_bytes(bytes) + " cannot be had");
    taken_.push_back({data, bytes});
    std::memset(data, 0, static_cast<std::size_t>(bytes));
    return data;
  }
  void* take(std::int64_t bytes_each, Use use) {
    void* const data = allocate(n_ * bytes_each);
    traffic_.push_back({static_cast<char*>(data), 64 * bytes_each, use.read, use.write});
    return data;
  }
  void* scales() { return allocate(n_ / kQuantBlock * std::int64_t{sizeof(float)}); }

  std::int64_t n_;
  StateFormat format_;
  std::unique_ptr<Arena> arena_;
  std::vector<std::pair<void*, std::int64_t>> taken_;
  std::vector<Traffic> traffic_;
  host::UpdateArrays arrays_;
};

// One step of the first elements against the formulae in fp64. In fp32 a moment is off by three roundings of
// terms no larger than it was or its gradient, a change of the master by ten of its own; the master by two
// more. What is kept in bf16 may then be a step away (2^-7), in 8 bits a code (1/8, and for small first
// moments 2^-15 of the block's largest).
void verify(const Arrays& a) {
  constexpr std::int64_t kCount = 1024;
  struct Element {
    double grad, master, m, v;
  };
  std::vector<Element> before;
  for (std::int64_t i = 0; i < kCount; ++i)
    before.push_back({a.grad(i), a.master(i), a.moment(0, i), a.moment(1, i)});
  const UpdateParams& p = kParams;
  host::update(kCount, a.arrays(), a.format(), p);
  constexpr double u = 0x1p-24;
  const MomentFormat kept = a.format().moments;
  const double relative = kept == MomentFormat::kFull ? 4 * u : kept == MomentFormat::kBf16 ? 0x1p-7 : 0.126;
  for (std::int64_t i = 0; i < kCount; ++i) {
    auto [g, master, m, v] = before[static_cast<std::size_t>(i)];
    const double was = std::abs(m) + std::abs(g);
    g *= p.grad_scale;
    double change = 0;
    switch (a.format().kind) {
      case OptimizerKind::kAdam:
        m = p.beta1 * m + (1 - p.beta1) * g, v = p.beta2 * v + (1 - p.beta2) * g * g;
        change = p.lr * (m / (1 - std::pow(p.beta1, p.step))) /
                 (std::sqrt(v / (1 - std::pow(p.beta2, p.step))) + p.eps);
        master *= 1 - p.lr * p.weight_decay;
        break;
      case OptimizerKind::kSgd:
        m = p.momentum * m + (g + p.weight_decay * master);
        change = p.lr * m;
        break;
      case OptimizerKind::kLion: {
        const double direction = p.beta1 * m + (1 - p.beta1) * g;
        m = p.beta2 * m + (1 - p.beta2) * g;
        change = direction > 0 ? p.lr : direction < 0 ? -p.lr : 0;
        master *= 1 - p.lr * p.weight_decay;
        break;
      }
    }
    master -= change;
    const double largest = kept == MomentFormat::kInt8 ? 0x1p-15 : 0;  // first moments are below one
    ZG_ASSERT(std::abs(a.moment(0, i) - m) <= relative * std::abs(m) + 4 * u * was + largest,
              "first moment {}", i);
    ZG_ASSERT(std::abs(a.moment(1, i) - v) <= relative * v + 0x1p-30 * largest, "second moment {}", i);
    ZG_ASSERT(
        std::abs(a.master(i) - master) <= 2 * u * std::abs(master) + 10 * u * (std::abs(change) + p.lr * was),
        "master {}", i);
    ZG_ASSERT(std::abs(a.weight(i) - a.master(i)) <= 0x1p-8 * std::abs(a.master(i)), "weight {}", i);
  }
}

// The loops change the numbers that they pass over, and every run of a kernel begins with what the last one
// left. That costs no time: no operation here is slower for some numbers than for others, subnormals aside,
// and the loops flip only low bits of 64-bit words, which make no normal number subnormal.
void measure(benchmark::State& state, const StateFormat& format, std::int64_t n) {
  const Arrays arrays(n, format);
  verify(arrays);
  const double bytes = arrays.bytes_per_param() * static_cast<double>(n);
  std::vector<RoofLoop> roof;
  for (const auto& [name, loop] : HWY_DYNAMIC_DISPATCH(loops)()) {
    roof.push_back({name, bytes, [&arrays, n, loop = loop] {
                      parallel_for(n, kChunk, [&](std::int64_t begin, std::int64_t end) {
                        std::uint64_t seen = loop(end - begin, arrays.traffic(begin));
                        // A row of 64 or 256 elements of the first loop is 64 or 256 bytes of scales.
                        const std::vector<Traffic> scales = arrays.scales(begin);
                        if (!scales.empty()) seen ^= loop((end - begin) / 64, scales);
                        benchmark::DoNotOptimize(seen);
                      });
                    }});
  }
  UpdateParams p = kParams;
  const auto update = [&] {
    ++p.step;
    host::update(n, arrays.arrays(), format, p);
  };
  against_roof(state, bytes, update, roof);
  state.counters["bytes_per_param"] = arrays.bytes_per_param();
  state.counters["ns_per_param"] = state.counters["median_ns"] / static_cast<double>(n);
}

void run(const Options& o) {
  if (o.threads > 0) set_parallelism(o.threads);
  const std::int64_t n = round_up(o.params, kChunk);
  for (const Format& format : formats()) {
    const auto body = [state_format = format.state, n](benchmark::State& s) { measure(s, state_format, n); };
    benchmark::RegisterBenchmark(format.name, body)->UseManualTime()->Iterations(o.repeats);
  }
  run_registered();
}

}  // namespace
}  // namespace zg::bench

int main(int argc, char** argv) {
  zg::bench::Options o;
  CLI::App app("Optimizer kernels against the roof of the memory that they stream through");
  app.add_option("--params", o.params, "parameters, rounded up to a multiple of 65536")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--repeats", o.repeats, "timed rounds")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--threads", o.threads, "0: one for each core")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  return zg::bench::micro_main(argc, argv, app, [&] { zg::bench::run(o); });
}
#endif  // HWY_ONCE
