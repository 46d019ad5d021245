#include <algorithm>
#include <cstring>
#include <vector>

#include "ziggurat/base/trace.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/plan/plan.hpp"

namespace zg {
namespace {

// Seconds of the fastest of several runs.
template <class Work>
double best_of(int runs, Work&& work) {
  double best = 1e30;
  for (int i = 0; i < runs; ++i) {
    const auto begin = Clock::now();
    work();
    best = std::min(best, seconds_between(begin, Clock::now()));
  }
  return best;
}

}  // namespace

Roofs measure_roofs(DType dtype) {
  Roofs roofs;
  HostStream now("roofs", HostStream::Mode::kInline);
  // The product of a 1024-wide block's inner layer: large enough to be limited by arithmetic alone.
  constexpr std::int64_t kM = 2048, kN = 2048, kK = 1024;
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t shrink = dtype == DType::kF64 ? 4 : 1;  // slow, and only for tests
  const std::int64_t m = kM / shrink, n = kN / shrink, k = kK / shrink;
  std::vector<char> a(static_cast<std::size_t>(m * k * element)),
      b(static_cast<std::size_t>(n * k * element)), c(static_cast<std::size_t>(m * n * element));
  GemmOptions options;
  options.b = Trans::kYes;
  const double product = best_of(6, [&] {
    host_ops().gemm(now, View(a.data(), dtype, m, k), View(b.data(), dtype, n, k),
                    View(c.data(), dtype, m, n), options);
  });
  roofs.flops = 2.0 * static_cast<double>(m * n * k) / product;
  std::vector<char> from(8 * kMiB, 1), to(8 * kMiB);
  const double copy = best_of(4, [&] { std::memcpy(to.data(), from.data(), from.size()); });
  roofs.host_to_device = roofs.device_to_host = static_cast<double>(from.size()) / copy;
  return roofs;
}

}  // namespace zg
