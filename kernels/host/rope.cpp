// Rotary embedding (Su et al., "RoFormer", 2021). Pair i of the rotating columns is rotated by the angle
// position * frequency[i] and multiplied by an amplitude; RopeTable says which columns are a pair.
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
// Rotates the first 2 * half columns of `heads` heads of one row, whose next head is head_size columns later.
// sign: -1 rotates back.
template <class T>
using RotateRow = void (*)(T* x, std::int64_t heads, std::int64_t head_size, std::int64_t half,
                           const float* cosine, const float* sine, float sign);
using RowRotations = std::tuple<RotateRow<float>, RotateRow<bf16>, RotateRow<fp16>>;
}  // namespace zg::host
#endif

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

template <class T>
void rotate_halves(T* x, std::int64_t heads, std::int64_t head_size, std::int64_t half, const float* cosine,
                   const float* sine, float sign) {
  const hn::ScalableTag<float> d;
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(d));
  const auto sign_v = hn::Set(d, sign);
  for (std::int64_t h = 0; h < heads; ++h, x += head_size) {
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

template <class T>
void rotate_interleaved(T* x, std::int64_t heads, std::int64_t head_size, std::int64_t half,
                        const float* cosine, const float* sine, float sign) {
  const hn::ScalableTag<float> d;
  const std::int64_t n = static_cast<std::int64_t>(hn::Lanes(d));
  const auto sign_v = hn::Set(d, sign);
  HWY_ALIGN float pairs[2 * hn::MaxLanes(hn::ScalableTag<float>())];
  for (std::int64_t h = 0; h < heads; ++h, x += head_size) {
    std::int64_t i = 0;
    for (; i + n <= half; i += n) {
      T *const left = x + 2 * i, *const right = left + n;
      hn::Store(load_f32(d, left), d, pairs);
      hn::Store(load_f32(d, right), d, pairs + n);
      hn::Vec<decltype(d)> a, b;
      hn::LoadInterleaved2(d, pairs, a, b);
      const auto c = hn::LoadU(d, cosine + i), s = hn::Mul(hn::LoadU(d, sine + i), sign_v);
      hn::StoreInterleaved2(hn::NegMulAdd(b, s, hn::Mul(a, c)), hn::MulAdd(a, s, hn::Mul(b, c)), d, pairs);
      store(d, hn::Load(d, pairs), left);
      store(d, hn::Load(d, pairs + n), right);
    }
    for (; i < half; ++i) {
      const float a = load_one(x + 2 * i), b = load_one(x + 2 * i + 1), c = cosine[i], s = sine[i] * sign;
      store_one(a * c - b * s, x + 2 * i);
      store_one(b * c + a * s, x + 2 * i + 1);
    }
  }
}

RowRotations row_rotations(bool interleaved) {
  if (interleaved) return {rotate_interleaved<float>, rotate_interleaved<bf16>, rotate_interleaved<fp16>};
  return {rotate_halves<float>, rotate_halves<bf16>, rotate_halves<fp16>};
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/host/matrix.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::host {
namespace {

HWY_EXPORT(row_rotations);

template <class T>
void rotate_row(T* x, std::int64_t heads, std::int64_t head_size, const RopeTable& table, const float* cosine,
                const float* sine, float sign) {
  std::get<RotateRow<T>>(HWY_DYNAMIC_DISPATCH(row_rotations)(table.interleaved))(
      x + table.first_column, heads, head_size, table.pairs, cosine, sine, sign);
}
void rotate_row(double* x, std::int64_t heads, std::int64_t head_size, const RopeTable& table,
                const double* cosine, const double* sine, double sign) {
  const std::int64_t step = table.interleaved ? 2 : 1, distance = table.interleaved ? 1 : table.pairs;
  x += table.first_column;
  for (std::int64_t h = 0; h < heads; ++h, x += head_size) {
    for (std::int64_t i = 0; i < table.pairs; ++i) {
      double &left = x[i * step], &right = x[i * step + distance];
      const double a = left, b = right, c = cosine[i], s = sine[i] * sign;
      left = a * c - b * s;
      right = b * c + a * s;
    }
  }
}

// Cosines and sines [time, pairs] of a sequence's rows, times the amplitude, computed in double. All layers
// of a kind use the same angles.
template <class A>
struct Angles {
  Angles(const RowPositions& of, const RopeTable& t)
      : positions(of), table(t), cosine(static_cast<std::size_t>(of.time * t.pairs)), sine(cosine.size()) {
    constexpr std::int64_t kGrain = 64;
    parallel_for(positions.time, kGrain, [this](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = 0; i < table.pairs; ++i) {
        const double frequency = table.frequency[static_cast<std::size_t>(i)];
        for (std::int64_t r = begin; r < end; ++r) {
          const auto at = static_cast<std::size_t>(r * table.pairs + i);
          const double angle = static_cast<double>(positions.of(r)) * frequency;
          cosine[at] = static_cast<A>(table.amplitude * std::cos(angle));
          sine[at] = static_cast<A>(table.amplitude * std::sin(angle));
        }
      }
    });
  }
  RowPositions positions;
  RopeTable table;
  std::vector<A> cosine, sine;
};

// Each thread keeps the two sets of angles that it used last, since a model has at most two kinds of layers
// with different angles. The caller shares ownership of its angles: while it waits for a parallel loop, its
// thread may run another task that replaces them in the cache.
template <class A>
std::shared_ptr<const Angles<A>> angles_of(const RowPositions& positions, const RopeTable& table) {
  static thread_local std::shared_ptr<const Angles<A>> last, before;
  const auto fits = [&](const std::shared_ptr<const Angles<A>>& kept) {
    return kept && kept->positions == positions && kept->table == table;
  };
  if (fits(last)) return last;
  if (fits(before)) {
    std::swap(last, before);
    return last;
  }
  auto made = std::make_shared<const Angles<A>>(positions, table);
  before = std::exchange(last, made);
  return made;
}

// Checks the first positions of documents. `first`: for each row the position in its sequence at which its
// document begins.
void check_documents(const RowPositions& positions, std::int64_t rows, const std::int32_t* first) {
  for (std::int64_t r = 0; r < rows; ++r) {
    ZG_ASSERT(first[r] >= 0 && first[r] <= positions.of(r), "row {}, at {}, is of a document from {} on", r,
              positions.of(r), first[r]);
  }
}

}  // namespace

template <class T>
void rope(std::int64_t rows, const Rotation<T>& args) {
  const RopeTable& table = args.table;
  const RowPositions& positions = args.positions;
  const std::int32_t* const first_keys = args.first_keys;
  ZG_ASSERT(table.pairs >= 0 && table.pairs <= kMaxRopePairs && table.first_column >= 0 &&
                table.first_column + 2 * table.pairs <= args.head_size,
            "{} pairs turn from column {} of a head of {}", table.pairs, table.first_column, args.head_size);
  ZG_ASSERT_GE(positions.time, 1);
  ZG_ASSERT_GE(args.x.ld, args.heads * args.head_size);
  using A = Acc<T>;
  if (rows == 0) return;
  // With documents, row p of the angles is for position p.
  if (first_keys != nullptr) check_documents(positions, rows, first_keys);
  const RowPositions known = first_keys == nullptr ? positions : RowPositions(positions.end(rows));
  const std::shared_ptr<const Angles<A>> angles = angles_of<A>(known, table);
  constexpr std::int64_t kGrain = 32;
  parallel_for(rows, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t place =
          first_keys == nullptr ? r % positions.time : position_of(positions, first_keys, r);
      const auto at = static_cast<std::size_t>(place * table.pairs);
      rotate_row(args.x.row(r), args.heads, args.head_size, table, angles->cosine.data() + at,
                 angles->sine.data() + at, static_cast<A>(args.inverse ? -1 : 1));
    }
  });
}

#define ZG_INSTANTIATE(T) template void rope(std::int64_t, const Rotation<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
#endif  // HWY_ONCE
