// Rotary embedding (Su et al., "RoFormer", 2021) in the half-split convention of Hugging Face: the pair of
// column i is column i + head_size / 2, turned by position * theta^(-2 i / head_size).
//
// Angles are made in double, in half turns, so that taking the whole quarter turns off is exact however large
// they are; what is left is at most 1/4 and its float errs by 2^-27 half turns.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/held.hpp"

namespace zg::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kHeads = 8;  // that share a thread's angles
constexpr int kBatch = 4;  // heads whose loads are under way together
constexpr int kSpeeds = 256;

// Half turns from a position to the next, of the pairs of a call.
struct Speeds {
  double of[kSpeeds];
};

template <class T>
struct Rows {
  T* x;
  std::int64_t ld, count, time, heads, half;
  std::int64_t first, pairs;  // the call's pairs in each head
  bool inverse;
};

__device__ __forceinline__ void turn_of(double half_turns, float& cosine, float& sine) {
  const double quarters = rint(2 * half_turns);
  float s = 0, c = 0;
  sincospif(static_cast<float>(half_turns - 0.5 * quarters), &s, &c);
  const int quarter = static_cast<int>(static_cast<long long>(quarters) & 3);
  cosine = quarter % 2 == 0 ? c : s;
  sine = quarter % 2 == 0 ? s : c;
  if (quarter == 1 || quarter == 2) cosine = -cosine;
  if (quarter >= 2) sine = -sine;
}
__device__ __forceinline__ void turn_of(double half_turns, double& cosine, double& sine) {
  sincospi(half_turns, &sine, &cosine);
}

// A thread turns N neighbouring pairs in kHeads heads of a row.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, 3)
    turn_heads(Rows<T> rows, const __grid_constant__ Speeds speeds) {
  using A = Acc<T>;
  const std::int64_t per_head = rows.pairs / N, chunks = (rows.heads + kHeads - 1) / kHeads;
  const std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t row = item / per_head / chunks;
  if (row >= rows.count) return;
  const int pair = static_cast<int>(item % per_head) * N;
  const std::int64_t begin = item / per_head % chunks * kHeads;
  const int heads = static_cast<int>(rows.heads - begin < kHeads ? rows.heads - begin : kHeads);

  const double position = static_cast<double>(row % rows.time);
  A cosine[N], sine[N];
  ZG_UNROLL
  for (int j = 0; j < N; ++j) {
    turn_of(position * speeds.of[pair + j], cosine[j], sine[j]);
    if (rows.inverse) sine[j] = -sine[j];
  }
  T* const left = rows.x + row * rows.ld + begin * 2 * rows.half + rows.first + pair;
  ZG_NO_UNROLL
  for (int h = 0; h < heads; h += kBatch) {
    Few<T, N> a[kBatch] = {}, b[kBatch] = {};
    ZG_UNROLL
    for (int k = 0; k < kBatch; ++k) {
      if (h + k >= heads) continue;
      const T* const from = left + (h + k) * 2 * rows.half;
      a[k] = load_few<N>(from);
      b[k] = load_few<N>(from + rows.half);
    }
    ZG_UNROLL
    for (int k = 0; k < kBatch; ++k) {
      if (h + k >= heads) continue;
      Few<T, N> to_left = {}, to_right = {};
      ZG_UNROLL
      for (int j = 0; j < N; ++j) {
        const A l = a[k][j], r = b[k][j];
        to_left.set(j, from_acc<T>(l * cosine[j] - r * sine[j]));
        to_right.set(j, from_acc<T>(r * cosine[j] + l * sine[j]));
      }
      T* const to = left + (h + k) * 2 * rows.half;
      store_few(to, to_left);
      store_few(to + rows.half, to_right);
    }
  }
}

}  // namespace

template <class T>
void rope(const Launch& on, T* x, std::int64_t ld, std::int64_t rows, std::int64_t time, std::int64_t heads,
          std::int64_t head_size, double theta, bool inverse) {
  constexpr double kPi = 3.14159265358979323846;
  constexpr std::int64_t kCount = Pack<T>::kCount;
  const std::int64_t half = head_size / 2;
  const bool packed = packs(x, ld) && half % kCount == 0;
  const std::int64_t width = packed ? kCount : 1;
  for (std::int64_t first = 0; first < half; first += kSpeeds) {
    const std::int64_t pairs = std::min<std::int64_t>(half - first, kSpeeds);
    Speeds speeds;
    for (std::int64_t i = 0; i < pairs; ++i)
      speeds.of[i] = std::pow(theta, -static_cast<double>(first + i) / static_cast<double>(half)) / kPi;
    const Rows<T> work{x, ld, rows, time, heads, half, first, pairs, inverse};
    const std::int64_t items = rows * ((heads + kHeads - 1) / kHeads) * (pairs / width);
    launch("rope", packed ? turn_heads<T, Pack<T>::kCount> : turn_heads<T, 1>, on,
           Shape{dim3(static_cast<unsigned>((items + kThreads - 1) / kThreads)), kThreads}, work, speeds);
  }
}

#define ZG_INSTANTIATE(T)                                                                       \
  template void rope(const Launch&, T*, std::int64_t, std::int64_t, std::int64_t, std::int64_t, \
                     std::int64_t, double, bool);
ZG_INSTANTIATE(float)
ZG_INSTANTIATE(bf16)
ZG_INSTANTIATE(fp16)
ZG_INSTANTIATE(double)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
