#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "ziggurat/base/trace.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/memory.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/plan/plan.hpp"

namespace zg {
namespace {

// The time of the fastest of several runs, in seconds.
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

// The time of one call of `work`, which enqueues on `stream`, in seconds, from the fastest of several runs.
// Each run makes enough calls that the costs of a launch and of the final wait do not matter.
template <class Work>
double seconds_per_call(Stream& stream, Work&& work) {
  constexpr double kRun = 0.02;
  constexpr int kMostCalls = 100;
  const auto run = [&](int calls) {
    const auto begin = Clock::now();
    for (int i = 0; i < calls; ++i) work();
    stream.synchronize();
    return seconds_between(begin, Clock::now()) / calls;
  };
  run(1);  // warm-up: code is loaded, libraries choose algorithms
  const int calls = std::clamp(static_cast<int>(kRun / std::max(1e-6, run(1))), 1, kMostCalls);
  double best = 1e30;
  for (int i = 0; i < 4; ++i) best = std::min(best, run(calls));
  return best;
}

// Memory of an arena, which the destructor gives back.
class Loan {
 public:
  explicit Loan(Arena& arena) : arena_(arena) {}
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  ~Loan() { give_back(); }
  void* try_take(std::int64_t bytes) {
    void* const data = arena_.allocate(bytes);
    if (data != nullptr) taken_.push_back({data, bytes});
    return data;
  }
  // Takes `count` pieces of `most` bytes each; if the arena has no room, of half the size, and so on.
  std::vector<void*> take(int count, std::int64_t most) {
    for (bytes_ = most; bytes_ >= 4096; bytes_ /= 2) {
      std::vector<void*> pieces;
      while (static_cast<int>(pieces.size()) < count) {
        pieces.push_back(try_take(bytes_));
        if (pieces.back() == nullptr) break;
      }
      if (pieces.back() != nullptr) return pieces;
      give_back();
    }
    throw Error(Errc::kMemory, "roofs", fmt::format("{} bytes of memory cannot be had to measure it", most),
                "raise tiers.device");
  }
  std::int64_t bytes() const { return bytes_; }  // of each piece that the last take() got

 private:
  void give_back() {
    for (const auto& [data, bytes] : taken_) arena_.release(data, bytes);
    taken_.clear();
  }
  Arena& arena_;
  std::vector<std::pair<void*, std::int64_t>> taken_;
  std::int64_t bytes_ = 0;
};

// Random values, uniform in (-1, 1), as operands: a processor's power use, and so its speed, depends on how
// many bits change.
std::vector<char> random_numbers(DType dtype, std::int64_t bytes) {
  std::vector<char> out(static_cast<std::size_t>(bytes));
  const auto each = size_of(dtype);
  std::uint64_t state = 1;
  for (std::size_t i = 0; i + each <= out.size(); i += each) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const float x = static_cast<float>(static_cast<std::int32_t>(state >> 32)) * 0x1p-31f;
    const double wide = static_cast<double>(x);
    const bf16 brain(x);
    const fp16 half(x);
    const void* const from = dtype == DType::kF64    ? static_cast<const void*>(&wide)
                             : dtype == DType::kBF16 ? static_cast<const void*>(&brain)
                             : dtype == DType::kF16  ? static_cast<const void*>(&half)
                                                     : static_cast<const void*>(&x);
    std::memcpy(out.data() + i, from, each);
  }
  return out;
}

void fill(Device& device, Stream& stream, void* to, std::int64_t bytes, const std::vector<char>& pattern) {
  const auto size = static_cast<std::int64_t>(pattern.size());
  for (std::int64_t at = 0; at < bytes; at += size)
    device.copy_to_device(stream, static_cast<char*>(to) + at, pattern.data(), std::min(size, bytes - at));
  stream.synchronize();
}

// Host memory as in a run: from an arena, registered with the device.
struct HostBuffers {
  std::unique_ptr<HostMemory> memory;
  void* pieces[2] = {nullptr, nullptr};
  std::int64_t bytes;

  HostBuffers(Device& device, std::int64_t each) : bytes(each) {
    memory =
        make_host_memory({.name = "memory to measure copies with", .budget = 2 * round_up(each, 2 * kMiB)});
    memory->set_hooks(device.host_hooks());
    for (void*& piece : pieces) {
      piece = memory->allocate(bytes);
      ZG_ASSERT(piece != nullptr);
      std::memset(piece, 1, static_cast<std::size_t>(bytes));
    }
  }
  HostBuffers(const HostBuffers&) = delete;
  HostBuffers& operator=(const HostBuffers&) = delete;
  ~HostBuffers() {
    for (void* piece : pieces) memory->release(piece, bytes);
    memory->set_hooks({});
  }
};

}  // namespace

double measure_products(Device& device, DType dtype) {
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t largest = device.is_host() ? (element == 8 ? 256 : 1024) : element == 2 ? 8192 : 4096;
  const auto stream = device.make_stream("roofs");
  Loan loan(device.arena());
  const std::vector<void*> matrix = loan.take(3, largest * largest * element);
  std::int64_t n = largest;
  while (n * n * element > loan.bytes()) n /= 2;
  const std::vector<char> numbers = random_numbers(dtype, std::min(4 * kMiB, loan.bytes()));
  for (void* m : matrix) fill(device, *stream, m, loan.bytes(), numbers);
  GemmOptions options;
  options.b = Trans::kYes;
  const double seconds = seconds_per_call(*stream, [&] {
    device.ops().gemm(*stream, View(matrix[0], dtype, n, n), View(matrix[1], dtype, n, n),
                      View(matrix[2], dtype, n, n), options);
  });
  return 2.0 * static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n) / seconds;
}

double measure_memory(Device& device) {
  const auto stream = device.make_stream("roofs");
  Loan loan(device.arena());
  // The pieces are much larger than the caches.
  const std::vector<void*> piece = loan.take(3, device.is_host() ? 32 * kMiB : kRoofMemory / 4);
  const std::vector<char> numbers = random_numbers(DType::kF32, std::min(4 * kMiB, loan.bytes()));
  for (void* p : piece) fill(device, *stream, p, loan.bytes(), numbers);
  constexpr std::int64_t kColumns = 1024;
  const std::int64_t rows = loan.bytes() / (4 * kColumns);
  const auto view = [&](int i) {
    return View(piece[static_cast<std::size_t>(i)], DType::kF32, rows, kColumns);
  };
  const double bytes = static_cast<double>(4 * rows * kColumns);
  const double copy = seconds_per_call(*stream, [&] { device.ops().cast(*stream, view(0), view(2)); });
  const double sum = seconds_per_call(*stream, [&] { device.ops().add(*stream, view(0), view(1), view(2)); });
  return std::max(2 * bytes / copy, 3 * bytes / sum);
}

LinkRates measure_link(Device& device) {
  const auto in = device.make_stream("roofs in"), out = device.make_stream("roofs out");
  Loan loan(device.arena());
  const std::vector<void*> piece = loan.take(2, device.is_host() ? 8 * kMiB : 32 * kMiB);
  const std::int64_t bytes = loan.bytes();
  HostBuffers host(device, bytes);
  const auto to_device = [&] { device.copy_to_device(*in, piece[0], host.pieces[0], bytes); };
  const auto to_host = [&] { device.copy_to_host(*out, host.pieces[1], piece[1], bytes); };
  LinkRates rates;
  rates.to_device = static_cast<double>(bytes) / seconds_per_call(*in, to_device);
  rates.to_host = static_cast<double>(bytes) / seconds_per_call(*out, to_host);
  constexpr int kCopies = 16;
  const double both = best_of(4, [&] {
    for (int i = 0; i < kCopies; ++i) to_device(), to_host();
    in->synchronize();
    out->synchronize();
  });
  rates.both = 2.0 * kCopies * static_cast<double>(bytes) / both;
  return rates;
}

Roofs measure_roofs(Device& device, DType dtype) {
  const LinkRates link = measure_link(device);
  Roofs roofs;
  roofs.flops = measure_products(device, dtype);
  roofs.host_to_device = link.to_device;
  roofs.device_to_host = link.to_host;
  return roofs;
}

Roofs measure_roofs(DType dtype) {
  Roofs roofs;
  HostStream now("roofs", HostStream::Mode::kInline);
  // Sizes as of a matrix product in a layer of width 1024, large enough to be limited by arithmetic. Where
  // fewer rows take long enough to be measured, they are limited by it, too.
  constexpr std::int64_t kM = 2048, kN = 2048, kK = 1024;
  constexpr double kLong = 0.01;
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t shrink = dtype == DType::kF64 ? 4 : 1;  // fp64 is slow, and for tests only
  const std::int64_t most = kM / shrink, n = kN / shrink, k = kK / shrink;
  std::vector<char> a, b(static_cast<std::size_t>(n * k * element)), c;
  GemmOptions options;
  options.b = Trans::kYes;
  for (std::int64_t m = most / 4; m <= most; m *= 2) {
    a.resize(static_cast<std::size_t>(m * k * element));
    c.resize(static_cast<std::size_t>(m * n * element));
    const double product = best_of(m < most ? 3 : 6, [&] {
      host_ops().gemm(now, View(a.data(), dtype, m, k), View(b.data(), dtype, n, k),
                      View(c.data(), dtype, m, n), options);
    });
    roofs.flops = 2.0 * static_cast<double>(m * n * k) / product;
    if (product >= kLong) break;
  }
  std::vector<char> from(8 * kMiB, 1), to(8 * kMiB);
  const double copy = best_of(4, [&] { std::memcpy(to.data(), from.data(), from.size()); });
  roofs.host_to_device = roofs.device_to_host = static_cast<double>(from.size()) / copy;
  return roofs;
}

}  // namespace zg
