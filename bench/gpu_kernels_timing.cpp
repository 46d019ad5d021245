#include <algorithm>
#include <cmath>
#include <cstring>

#include "bench/gpu_kernels.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::bench {
namespace {

constexpr std::int64_t kAlign = 512;
constexpr std::int64_t kPattern = 16 * kMiB;
// Operands of one case, all sets together: several times the largest cache, so that memory is what is
// measured.
constexpr std::int64_t kBeyondCaches = 256 * kMiB;
constexpr int kMostSets = 8;
// How long one timed run takes: the launches and the wait at its end then cost a hundredth of it.
constexpr double kRun = 0.006;

std::uint64_t next(std::uint64_t& state) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return state >> 32;
}

void write_number(char* to, DType dtype, float x) {
  const double wide = static_cast<double>(x);
  const bf16 brain(x);
  const fp16 half(x);
  const void* const from = dtype == DType::kF64    ? static_cast<const void*>(&wide)
                           : dtype == DType::kBF16 ? static_cast<const void*>(&brain)
                           : dtype == DType::kF16  ? static_cast<const void*>(&half)
                                                   : static_cast<const void*>(&x);
  std::memcpy(to, from, size_of(dtype));
}

std::vector<char> pattern_of(const Slabs::Key& key, std::int64_t bytes) {
  std::vector<char> out(static_cast<std::size_t>(bytes));
  const std::size_t each = size_of(key.dtype);
  if (key.content == Content::kZero || key.content == Content::kAnything) return out;
  std::uint64_t state = 20261121;
  for (std::size_t i = 0; i + each <= out.size(); i += each) {
    const std::uint64_t bits = next(state);
    if (key.content == Content::kIds) {
      const auto id = static_cast<std::int32_t>(bits % static_cast<std::uint64_t>(key.bound));
      std::memcpy(out.data() + i, &id, sizeof id);
    } else {
      write_number(out.data() + i, key.dtype, static_cast<float>(static_cast<std::int32_t>(bits)) * 0x1p-31f);
    }
  }
  return out;
}

}  // namespace

Slabs::~Slabs() {
  for (const auto& [key, slab] : slabs_) {
    if (slab.data != nullptr) device_.arena().release(slab.data, slab.bytes);
  }
}

void Slabs::need(const Key& key, std::int64_t bytes) {
  Slab& slab = slabs_[key];
  slab.bytes = std::max(slab.bytes, bytes);
}

std::int64_t Slabs::bytes() const {
  std::int64_t sum = 0;
  for (const auto& [key, slab] : slabs_) sum += slab.bytes;
  return sum;
}

void Slabs::allocate() {
  const auto stream = device_.make_stream("fill");
  for (auto& [key, slab] : slabs_) {
    slab.data = static_cast<char*>(device_.arena().allocate(slab.bytes));
    if (slab.data == nullptr) {
      throw Error(Errc::kMemory, "bench_gpu_kernels",
                  fmt::format("no room for operands of {} among {}", format_bytes(slab.bytes),
                              format_bytes(bytes())));
    }
    fill(key, slab, *stream);
  }
}

void Slabs::fill(const Key& key, const Slab& slab, Stream& stream) {
  const std::vector<char> pattern = pattern_of(key, std::min(kPattern, slab.bytes));
  const auto size = static_cast<std::int64_t>(pattern.size());
  for (std::int64_t at = 0; at < slab.bytes; at += size)
    device_.copy_to_device(stream, slab.data + at, pattern.data(), std::min(size, slab.bytes - at));
  stream.synchronize();
}

std::int64_t Takes::footprint() const {
  std::int64_t sum = 0;
  for (const auto& [key, bytes] : used_) sum += bytes;
  return sum;
}

View Takes::take(Content content, DType t, std::int64_t rows, std::int64_t cols, int passes,
                 std::int64_t bound) {
  // What is only written has no type.
  const bool typed = content != Content::kAnything && content != Content::kZero;
  const Slabs::Key key{content, typed ? t : DType::kU8, bound};
  const std::int64_t bytes = rows * cols * static_cast<std::int64_t>(size_of(t));
  std::int64_t& used = used_[key];
  char* const base = slabs_ == nullptr ? nullptr : slabs_->base(key);
  const View view(base == nullptr ? nullptr : base + used, t, rows, cols);
  used += round_up(bytes, kAlign);
  bytes_ += static_cast<double>(bytes) * passes;
  return view;
}

namespace {

struct Running {
  std::vector<Work> sets;
  double bytes = 0;
  int calls = 1;
  std::vector<double> seconds;  // of a call, by round
  std::size_t at = 0;

  double run(Stream& stream, int count) {
    const auto begin = Clock::now();
    for (int i = 0; i < count; ++i) sets[at++ % sets.size()](stream);
    stream.synchronize();
    return seconds_between(begin, Clock::now()) / count;
  }
};

int sets_of(std::int64_t footprint, const Options& options) {
  if (options.tiny) return 1;
  return static_cast<int>(
      std::clamp<std::int64_t>(kBeyondCaches / std::max<std::int64_t>(1, footprint) + 1, 1, kMostSets));
}

}  // namespace

std::vector<Measured> measure(Device& device, Stream& stream, const std::vector<Case>& cases,
                              const Options& options, Clock::time_point end) {
  Slabs slabs(device);
  std::vector<int> sets;
  for (const Case& c : cases) {
    Takes one(nullptr);
    c.make(one);
    // Products read what they read many times over; one set is as good as many.
    sets.push_back(c.flops > 0 ? 1 : sets_of(one.footprint(), options));
    for (const auto& [key, bytes] : one.used()) slabs.need(key, bytes * sets.back());
  }
  slabs.allocate();
  std::vector<Running> running(cases.size());
  for (std::size_t i = 0; i < cases.size(); ++i) {
    Takes takes(&slabs);
    for (int s = 0; s < sets[i]; ++s) {
      takes.next_set();
      running[i].sets.push_back(cases[i].make(takes));
    }
    running[i].bytes = takes.bytes();
    running[i].run(stream, static_cast<int>(running[i].sets.size()));
    const double once = running[i].run(stream, static_cast<int>(running[i].sets.size()));
    running[i].calls =
        std::clamp(static_cast<int>((options.tiny ? kRun / 10 : kRun) / std::max(1e-7, once)), 1, 400);
  }
  for (int r = 0; r < options.rounds; ++r) {
    if (r > 0 && Clock::now() > end) break;
    for (Running& c : running) c.seconds.push_back(c.run(stream, c.calls));
  }
  std::vector<Measured> out;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    out.push_back({.seconds = median(running[i].seconds),
                   .mad = mad(running[i].seconds),
                   .bytes = running[i].bytes,
                   .flops = cases[i].flops});
  }
  return out;
}

}  // namespace zg::bench
