// Rotary embedding (Su et al., "RoFormer", 2021) in the half-split convention of Hugging Face: the pair of
// column i is column i + head_size / 2, rotated by the angle position * theta^(-2 i / head_size).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/rope.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstdint>
#include <tuple>

#include "kernels/host/simd.hpp"
#include "ziggurat/base/dtype.hpp"

#ifndef ZG_ROPE_KERNELS
#define ZG_ROPE_KERNELS
namespace zg::host {
// Rotates `heads` heads of one row, two halves each. sign: -1 rotates back.
template <class T>
using RotateRow = void (*)(T* x, std::int64_t heads, std::int64_t half, const float* cosine,
                           const float* sine, float sign);
using RowRotations = std::tuple<RotateRow<float>, RotateRow<bf16>, RotateRow<fp16>>;
}  // namespace zg::host
#endif

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

template <class T>
void rotate(T* x, std::int64_t heads, std::int64_t half, const float* cosine, const float* sine, float sign) {
  const hn::ScalableTag<float> d;
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(d));
  const auto sign_v = hn::Set(d, sign);
  for (std::int64_t h = 0; h < heads; ++h, x += 2 * half) {
    std::int64_t i = 0;
    for (; i + n <= half; i += n) {
      const auto a = load_f32(d, x + i), b = load_f32(d, x + half + i);
      const auto c = hn::LoadU(d, cosine + i), s = hn::Mul(hn::LoadU(d, sine + i), sign_v);
      store(d, hn::NegMulAdd(b, s, hn::Mul(a, c)), x + i);
      store(d, hn::MulAdd(a, s, hn::Mul(b, c)), x + half + i);
    }
    for (; i < half; ++i) {
      const float a = load_one(x + i), b = load_one(x + half + i), c = cosine[i], s = sine[i] * sign;
      store_one(a * c - b * s, x + i);
      store_one(b * c + a * s, x + half + i);
    }
  }
}

RowRotations row_rotations() {
  return {rotate<float>, rotate<bf16>, rotate<fp16>};
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <cmath>
#include <memory>
#include <vector>

#include "kernels/host/matrix.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::host {
namespace {

HWY_EXPORT(row_rotations);

template <class T>
void rotate_row(T* x, std::int64_t heads, std::int64_t half, const float* cosine, const float* sine,
                float sign) {
  std::get<RotateRow<T>>(HWY_DYNAMIC_DISPATCH(row_rotations)())(x, heads, half, cosine, sine, sign);
}
void rotate_row(double* x, std::int64_t heads, std::int64_t half, const double* cosine, const double* sine,
                double sign) {
  for (std::int64_t h = 0; h < heads; ++h, x += 2 * half) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double a = x[i], b = x[half + i], c = cosine[i], s = sine[i] * sign;
      x[i] = a * c - b * s;
      x[half + i] = b * c + a * s;
    }
  }
}

// Cosines and sines [time, half] of a sequence's rows, computed in double. Every layer of a model uses the
// same ones.
template <class A>
struct Table {
  Table(const RowPositions& of, std::int64_t h, double th)
      : positions(of),
        half(h),
        theta(th),
        cosine(static_cast<std::size_t>(of.time * h)),
        sine(cosine.size()) {
    constexpr std::int64_t kGrain = 64;
    parallel_for(positions.time, kGrain, [this](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = 0; i < half; ++i) {
        const double frequency = std::pow(theta, -static_cast<double>(i) / static_cast<double>(half));
        for (std::int64_t r = begin; r < end; ++r) {
          const auto at = static_cast<std::size_t>(r * half + i);
          const double angle = static_cast<double>(positions.of(r)) * frequency;
          cosine[at] = static_cast<A>(std::cos(angle));
          sine[at] = static_cast<A>(std::sin(angle));
        }
      }
    });
  }
  RowPositions positions;
  std::int64_t half;
  double theta;
  std::vector<A> cosine, sine;
};

// Each thread keeps its last table. The caller shares ownership of what it gets: while it waits for a
// parallel loop, its thread may run another task that replaces the kept table.
template <class A>
std::shared_ptr<const Table<A>> table_of(const RowPositions& positions, std::int64_t half, double theta) {
  static thread_local std::shared_ptr<const Table<A>> kept;
  if (!kept || kept->positions != positions || kept->half != half || kept->theta != theta) {
    auto made = std::make_shared<const Table<A>>(positions, half, theta);
    kept = made;
    return made;
  }
  return kept;
}

}  // namespace

template <class T>
void rope(T* x, std::int64_t ld, std::int64_t rows, const RowPositions& positions, std::int64_t heads,
          std::int64_t head_size, double theta, bool inverse) {
  ZG_ASSERT_EQ(head_size % 2, 0);
  ZG_ASSERT_GE(positions.time, 1);
  ZG_ASSERT_GE(ld, heads * head_size);
  using A = Acc<T>;
  const std::int64_t half = head_size / 2;
  const std::shared_ptr<const Table<A>> table = table_of<A>(positions, half, theta);
  constexpr std::int64_t kGrain = 32;
  parallel_for(rows, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const auto at = static_cast<std::size_t>(r % positions.time * half);
      rotate_row(x + r * ld, heads, half, table->cosine.data() + at, table->sine.data() + at,
                 static_cast<A>(inverse ? -1 : 1));
    }
  });
}

#define ZG_INSTANTIATE(T)                                                                             \
  template void rope(T*, std::int64_t, std::int64_t, const RowPositions&, std::int64_t, std::int64_t, \
                     double, bool);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
#endif  // HWY_ONCE
