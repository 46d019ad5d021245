// The fused Adam pass against the roof of the memory it streams through: loops that read and write the same
// bytes of the same arrays and compute nothing, with plain stores, with streaming stores, and with the weight
// alone streamed.
//
//   bench_adam [--params 100000000] [--repeats 15] [--threads N]
//
// Verifies, then times all of them in turns. Prints one JSON line: medians in ns per parameter, their median
// absolute deviations, and the share of the roof (the fastest loop).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/adam.cpp"
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on
#include <hwy/cache_control.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/host/adam.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/device.hpp"

#ifndef ZG_BENCH_ADAM
#define ZG_BENCH_ADAM
namespace zg::bench {
// Arrays as integers, so that nothing is computed: the lowest bit of each float flips, the weight gets the
// gradient's bits.
struct Bytes {
  const std::uint16_t* grad;
  std::uint32_t* master;
  std::uint32_t* m;
  std::uint32_t* v;
  std::uint16_t* weight;
};
}  // namespace zg::bench
#endif

HWY_BEFORE_NAMESPACE();
namespace zg::bench::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

// Whole vectors only; n is a multiple of them, the arrays are aligned.
void plain(std::int64_t n, const Bytes& b) {
  const hn::ScalableTag<std::uint32_t> d;
  const hn::Rebind<std::uint16_t, decltype(d)> half;
  const auto one = hn::Set(d, 1u);
  for (std::int64_t i = 0; i < n; i += static_cast<std::int64_t>(hn::Lanes(d))) {
    const auto g = hn::Load(half, b.grad + i);
    hn::Store(hn::Xor(hn::Load(d, b.master + i), one), d, b.master + i);
    hn::Store(hn::Xor(hn::Load(d, b.m + i), one), d, b.m + i);
    hn::Store(hn::Xor(hn::Load(d, b.v + i), one), d, b.v + i);
    hn::Store(g, half, b.weight + i);
  }
}

void streaming(std::int64_t n, const Bytes& b) {
  const hn::ScalableTag<std::uint32_t> d;
  const hn::Rebind<std::uint16_t, decltype(d)> half;
  const auto one = hn::Set(d, 1u);
  for (std::int64_t i = 0; i < n; i += static_cast<std::int64_t>(hn::Lanes(d))) {
    const auto g = hn::Load(half, b.grad + i);
    hn::Stream(hn::Xor(hn::Load(d, b.master + i), one), d, b.master + i);
    hn::Stream(hn::Xor(hn::Load(d, b.m + i), one), d, b.m + i);
    hn::Stream(hn::Xor(hn::Load(d, b.v + i), one), d, b.v + i);
    hn::Stream(g, half, b.weight + i);
  }
  hwy::FlushStream();
}

// Streams what is only written, the weight.
void mixed(std::int64_t n, const Bytes& b) {
  const hn::ScalableTag<std::uint32_t> d;
  const hn::Rebind<std::uint16_t, decltype(d)> half;
  const auto one = hn::Set(d, 1u);
  for (std::int64_t i = 0; i < n; i += static_cast<std::int64_t>(hn::Lanes(d))) {
    const auto g = hn::Load(half, b.grad + i);
    hn::Store(hn::Xor(hn::Load(d, b.master + i), one), d, b.master + i);
    hn::Store(hn::Xor(hn::Load(d, b.m + i), one), d, b.m + i);
    hn::Store(hn::Xor(hn::Load(d, b.v + i), one), d, b.v + i);
    hn::Stream(g, half, b.weight + i);
  }
  hwy::FlushStream();
}

}  // namespace
}  // namespace zg::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::bench {
namespace {
HWY_EXPORT(plain);
HWY_EXPORT(streaming);
HWY_EXPORT(mixed);

constexpr std::int64_t kChunk = 64 * 1024;
constexpr AdamParams kParams{.lr = 1e-3, .weight_decay = 0.1, .step = 10, .grad_scale = 0.5};

struct Options {
  std::int64_t params = 100'000'000, repeats = 15, threads = 0;
};

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i];
    std::int64_t* value = key == "--params"    ? &o.params
                          : key == "--repeats" ? &o.repeats
                          : key == "--threads" ? &o.threads
                                               : nullptr;
    if (value == nullptr) throw Error(Errc::kUsage, key, "no such option", "--params, --repeats, --threads");
    *value = std::strtoll(argv[i + 1], nullptr, 10);
    if (*value < 1) throw Error(Errc::kUsage, key, "must be a number above 0");
  }
  if (argc % 2 == 0) throw Error(Errc::kUsage, argv[argc - 1], "a value is missing");
  o.params = round_up(o.params, kChunk);
  return o;
}

std::string cpu_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

// The arrays, from the arena that a run takes its memory from.
class Arrays {
 public:
  explicit Arrays(std::int64_t n) : n_(n), arena_(make_host_arena("bench", 16 * n + 8 * 4096)) {
    adam.grad = static_cast<bf16*>(take(2 * n));
    adam.master = static_cast<float*>(take(4 * n));
    adam.m = static_cast<float*>(take(4 * n));
    adam.v = static_cast<float*>(take(4 * n));
    adam.weight = static_cast<bf16*>(take(2 * n));
    bf16* grad = const_cast<bf16*>(adam.grad);
    parallel_for(n, kChunk, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const float x = static_cast<float>((i * 2654435761) % 1000) * 1e-3f - 0.5f;
        grad[i] = bf16(x), adam.master[i] = 0.1f * x, adam.m[i] = 0.01f * x,
        adam.v[i] = 1e-4f * x * x + 1e-6f;
        adam.weight[i] = bf16(0);
      }
    });
  }
  ~Arrays() {
    for (const auto& [data, bytes] : taken_) arena_->release(data, bytes);
  }
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;

  Bytes bytes(std::int64_t begin) const {
    return {reinterpret_cast<const std::uint16_t*>(adam.grad + begin),
            reinterpret_cast<std::uint32_t*>(adam.master + begin),
            reinterpret_cast<std::uint32_t*>(adam.m + begin),
            reinterpret_cast<std::uint32_t*>(adam.v + begin),
            reinterpret_cast<std::uint16_t*>(adam.weight + begin)};
  }
  host::AdamArrays<bf16, float, bf16> adam;

 private:
  void* take(std::int64_t bytes) {
    void* data = arena_->allocate(bytes);
    if (data == nullptr) throw Error(Errc::kMemory, "bench_adam", format_bytes(bytes) + " cannot be had");
    taken_.push_back({data, bytes});
    return data;
  }
  std::int64_t n_;
  std::unique_ptr<Arena> arena_;
  std::vector<std::pair<void*, std::int64_t>> taken_;
};

// One pass against the definition in adam.hpp, bit for bit.
void verify(Arrays& arrays) {
  constexpr std::int64_t kCount = 1000;
  const auto& a = arrays.adam;
  const std::vector<float> master(a.master, a.master + kCount), m(a.m, a.m + kCount), v(a.v, a.v + kCount);
  host::adam<bf16, float, bf16>(kCount, a, kParams);
  const host::AdamConstants<float> c(kParams);
  for (std::int64_t i = 0; i < kCount; ++i) {
    const std::size_t k = static_cast<std::size_t>(i);
    const float g = static_cast<float>(a.grad[i]) * c.grad_scale;
    const float m1 = c.beta1 * m[k] + c.one_minus_beta1 * g;
    const float v1 = c.beta2 * v[k] + (c.one_minus_beta2 * g) * g;
    const float w =
        c.decay * master[k] - (c.step_size * m1) / (std::sqrt(v1) * c.inv_sqrt_correction2 + c.eps);
    ZG_ASSERT(a.m[i] == m1 && a.v[i] == v1 && a.master[i] == w && a.weight[i] == bf16(w), "element {}", i);
  }
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Series {
  std::vector<double> ns;
  template <class F>
  void time(std::int64_t n, const F& f) {
    const auto begin = Clock::now();
    f();
    ns.push_back(seconds_between(begin, Clock::now()) * 1e9 / static_cast<double>(n));
  }
  double middle() const { return median(ns); }
  double deviation() const {
    std::vector<double> distances;
    for (const double x : ns) distances.push_back(std::abs(x - middle()));
    return median(distances);
  }
};

void run(const Options& o) {
  if (o.threads > 0) set_parallelism(static_cast<int>(o.threads));
  Arrays arrays(o.params);
  verify(arrays);
  const auto stream_through = [&](auto kernel) {
    parallel_for(o.params, kChunk,
                 [&](std::int64_t begin, std::int64_t end) { kernel(end - begin, arrays.bytes(begin)); });
  };
  Series adam, plain_loop, streaming_loop, mixed_loop;
  for (std::int64_t r = 0; r < o.repeats + 1; ++r) {
    adam.time(o.params, [&] { host::adam<bf16, float, bf16>(o.params, arrays.adam, kParams); });
    plain_loop.time(o.params, [&] { stream_through(HWY_DYNAMIC_DISPATCH(plain)); });
    streaming_loop.time(o.params, [&] { stream_through(HWY_DYNAMIC_DISPATCH(streaming)); });
    mixed_loop.time(o.params, [&] { stream_through(HWY_DYNAMIC_DISPATCH(mixed)); });
    if (r == 0)
      adam.ns.clear(), plain_loop.ns.clear(), streaming_loop.ns.clear(), mixed_loop.ns.clear();  // warm-up
  }
  const double roof = std::min({plain_loop.middle(), streaming_loop.middle(), mixed_loop.middle()});
  constexpr double kBytes = 28;  // bf16 gradient and weight once, three fp32 read and written
  const nlohmann::json line = {{"bench", "adam"},
                               {"params", o.params},
                               {"repeats", o.repeats},
                               {"threads", parallelism()},
                               {"cpu", cpu_name()},
                               {"bytes_per_param", kBytes},
                               {"adam_ns", adam.middle()},
                               {"adam_mad_ns", adam.deviation()},
                               {"adam_gb_per_s", kBytes / adam.middle()},
                               {"roof_ns", roof},
                               {"roof_gb_per_s", kBytes / roof},
                               {"plain_ns", plain_loop.middle()},
                               {"plain_mad_ns", plain_loop.deviation()},
                               {"streaming_ns", streaming_loop.middle()},
                               {"streaming_mad_ns", streaming_loop.deviation()},
                               {"mixed_ns", mixed_loop.middle()},
                               {"mixed_mad_ns", mixed_loop.deviation()},
                               {"share_of_roof", roof / adam.middle()}};
  std::printf("%s\n", line.dump().c_str());
}

}  // namespace
}  // namespace zg::bench

int main(int argc, char** argv) {
  try {
    zg::bench::run(zg::bench::parse(argc, argv));
    return 0;
  } catch (const zg::Error& e) {
    std::fprintf(stderr, "bench_adam: %s\n", e.what());
    return e.exit_code();
  }
}
#endif  // HWY_ONCE
