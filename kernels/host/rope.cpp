// Rotary embedding (Su et al., "RoFormer", 2021) in the half-split convention of Hugging Face: the pair of
// column i is column i + head_size / 2, turned by position * theta^(-2 i / head_size).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/rope.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstdint>

#include "kernels/host/simd.hpp"
#include "ziggurat/base/dtype.hpp"

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

// One row: `heads` heads of two halves each.
template <class T>
HWY_INLINE void turn(T* x, std::int64_t heads, std::int64_t half, const float* cosine, const float* sine,
                     float sign) {
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

void turn_f32(float* x, std::int64_t heads, std::int64_t half, const float* cosine, const float* sine,
              float sign) {
  turn(x, heads, half, cosine, sine, sign);
}
void turn_bf16(bf16* x, std::int64_t heads, std::int64_t half, const float* cosine, const float* sine,
               float sign) {
  turn(x, heads, half, cosine, sine, sign);
}
void turn_f16(fp16* x, std::int64_t heads, std::int64_t half, const float* cosine, const float* sine,
              float sign) {
  turn(x, heads, half, cosine, sine, sign);
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

HWY_EXPORT(turn_f32);
HWY_EXPORT(turn_bf16);
HWY_EXPORT(turn_f16);

void turn_row(float* x, std::int64_t heads, std::int64_t half, const float* cosine, const float* sine,
              float sign) {
  HWY_DYNAMIC_DISPATCH(turn_f32)(x, heads, half, cosine, sine, sign);
}
void turn_row(bf16* x, std::int64_t heads, std::int64_t half, const float* cosine, const float* sine,
              float sign) {
  HWY_DYNAMIC_DISPATCH(turn_bf16)(x, heads, half, cosine, sine, sign);
}
void turn_row(fp16* x, std::int64_t heads, std::int64_t half, const float* cosine, const float* sine,
              float sign) {
  HWY_DYNAMIC_DISPATCH(turn_f16)(x, heads, half, cosine, sine, sign);
}
void turn_row(double* x, std::int64_t heads, std::int64_t half, const double* cosine, const double* sine,
              double sign) {
  for (std::int64_t h = 0; h < heads; ++h, x += 2 * half) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double a = x[i], b = x[half + i], c = cosine[i], s = sine[i] * sign;
      x[i] = a * c - b * s;
      x[half + i] = b * c + a * s;
    }
  }
}

// Cosines and sines [time, half], made in double. Every layer of a model asks for the same ones.
template <class A>
struct Table {
  Table(std::int64_t t, std::int64_t h, double th)
      : time(t), half(h), theta(th), cosine(static_cast<std::size_t>(t * h)), sine(cosine.size()) {
    constexpr std::int64_t kGrain = 64;
    parallel_for(time, kGrain, [this](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = 0; i < half; ++i) {
        const double speed = std::pow(theta, -static_cast<double>(i) / static_cast<double>(half));
        for (std::int64_t p = begin; p < end; ++p) {
          const auto at = static_cast<std::size_t>(p * half + i);
          cosine[at] = static_cast<A>(std::cos(static_cast<double>(p) * speed));
          sine[at] = static_cast<A>(std::sin(static_cast<double>(p) * speed));
        }
      }
    });
  }
  std::int64_t time, half;
  double theta;
  std::vector<A> cosine, sine;
};

// The calling thread keeps its last table. A caller holds what it uses, since while it waits for a loop its
// thread may run another task that asks for another table.
template <class A>
std::shared_ptr<const Table<A>> table_of(std::int64_t time, std::int64_t half, double theta) {
  static thread_local std::shared_ptr<const Table<A>> kept;
  if (!kept || kept->time != time || kept->half != half || kept->theta != theta) {
    auto made = std::make_shared<const Table<A>>(time, half, theta);
    kept = made;
    return made;
  }
  return kept;
}

}  // namespace

template <class T>
void rope(T* x, std::int64_t ld, std::int64_t rows, std::int64_t time, std::int64_t heads,
          std::int64_t head_size, double theta, bool inverse) {
  ZG_ASSERT_EQ(head_size % 2, 0);
  ZG_ASSERT_GE(time, 1);
  ZG_ASSERT_GE(ld, heads * head_size);
  using A = Acc<T>;
  const std::int64_t half = head_size / 2;
  const std::shared_ptr<const Table<A>> table = table_of<A>(time, half, theta);
  constexpr std::int64_t kGrain = 32;
  parallel_for(rows, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const auto at = static_cast<std::size_t>(r % time * half);
      turn_row(x + r * ld, heads, half, table->cosine.data() + at, table->sine.data() + at,
               static_cast<A>(inverse ? -1 : 1));
    }
  });
}

template void rope(float*, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, double,
                   bool);
template void rope(bf16*, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, double, bool);
template void rope(fp16*, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, double, bool);
template void rope(double*, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, double,
                   bool);

}  // namespace zg::host
#endif  // HWY_ONCE
