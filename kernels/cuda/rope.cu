// Rotary embedding (Su et al., "RoFormer", 2021). Pair i of the rotating columns is rotated by the angle
// position * frequency[i] and multiplied by an amplitude; RopeTable says which columns are a pair.
//
// Angles are computed in double, in half turns, so that subtracting whole quarter turns is exact for any
// angle. The remainder is at most 1/4, and rounding it to float costs 2^-27 half turns.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/held.hpp"

namespace zg::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kHeads = 8;  // heads of a thread, which uses its angles for all of them
constexpr int kBatch = 4;  // heads whose loads are in flight together

// For each pair its frequency: half turns from one position to the next.
struct Frequencies {
  double of[kMaxRopePairs];
};

template <class T>
struct Rows {
  T* x;
  std::int64_t ld, count, heads, head_size, first_column, pairs;
  RowPositions positions;
  const std::int32_t* first_keys;  // or null
  Acc<T> amplitude;
  bool inverse;
};

__device__ __forceinline__ void cos_sin(double half_turns, float& cosine, float& sine) {
  const double quarters = rint(2 * half_turns);
  float s = 0, c = 0;
  sincospif(static_cast<float>(half_turns - 0.5 * quarters), &s, &c);
  const int quarter = static_cast<int>(static_cast<long long>(quarters) & 3);
  cosine = quarter % 2 == 0 ? c : s;
  sine = quarter % 2 == 0 ? s : c;
  if (quarter == 1 || quarter == 2) cosine = -cosine;
  if (quarter >= 2) sine = -sine;
}
__device__ __forceinline__ void cos_sin(double half_turns, double& cosine, double& sine) {
  sincospi(half_turns, &sine, &cosine);
}

// The pairs that lie in two runs of N elements: interleaved, pair j is the elements 2 j and 2 j + 1 of both
// runs together; otherwise it is element j of each.
template <bool kInterleaved, class T, int N>
struct Pairs {
  static_assert(!kInterleaved || N == 1 || N % 2 == 0);
  Elements<T, N> run[2] = {};
  static constexpr int run_of(int pair, int side) { return kInterleaved ? (2 * pair + side) / N : side; }
  static constexpr int place_of(int pair, int side) { return kInterleaved ? (2 * pair + side) % N : pair; }
  __device__ __forceinline__ Acc<T> get(int pair, int side) const {
    return run[run_of(pair, side)][place_of(pair, side)];
  }
  __device__ __forceinline__ void set(int pair, int side, Acc<T> value) {
    run[run_of(pair, side)].set(place_of(pair, side), from_acc<T>(value));
  }
};

// A thread rotates N consecutive pairs in up to kHeads heads of a row.
template <class T, int N, bool kInterleaved>
__global__ void __launch_bounds__(kThreads, 3)
    rotate_heads(Rows<T> rows, const __grid_constant__ Frequencies frequencies) {
  using A = Acc<T>;
  const std::int64_t per_head = rows.pairs / N, chunks = (rows.heads + kHeads - 1) / kHeads;
  const std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t row = item / per_head / chunks;
  if (row >= rows.count) return;
  const int pair = static_cast<int>(item % per_head) * N;
  const std::int64_t begin = item / per_head % chunks * kHeads;
  const int heads = static_cast<int>(rows.heads - begin < kHeads ? rows.heads - begin : kHeads);

  const double position = static_cast<double>(position_of(rows.positions, rows.first_keys, row));
  A cosine[N], sine[N];
  ZG_UNROLL
  for (int j = 0; j < N; ++j) {
    cos_sin(position * frequencies.of[pair + j], cosine[j], sine[j]);
    cosine[j] *= rows.amplitude, sine[j] *= rows.inverse ? -rows.amplitude : rows.amplitude;
  }
  T* const head = rows.x + row * rows.ld + begin * rows.head_size + rows.first_column;
  T* const first = head + (kInterleaved ? 2 * pair : pair);
  const std::int64_t distance = kInterleaved ? N : rows.pairs;  // between the two runs
  ZG_NO_UNROLL
  for (int h = 0; h < heads; h += kBatch) {
    Pairs<kInterleaved, T, N> x[kBatch] = {};
    ZG_UNROLL
    for (int k = 0; k < kBatch; ++k) {
      if (h + k >= heads) continue;
      const T* const from = first + (h + k) * rows.head_size;
      x[k].run[0] = load_elements<N>(from);
      x[k].run[1] = load_elements<N>(from + distance);
    }
    ZG_UNROLL
    for (int k = 0; k < kBatch; ++k) {
      if (h + k >= heads) continue;
      Pairs<kInterleaved, T, N> y = {};
      ZG_UNROLL
      for (int j = 0; j < N; ++j) {
        const A l = x[k].get(j, 0), r = x[k].get(j, 1);
        y.set(j, 0, l * cosine[j] - r * sine[j]);
        y.set(j, 1, r * cosine[j] + l * sine[j]);
      }
      T* const to = first + (h + k) * rows.head_size;
      store_elements(to, y.run[0]);
      store_elements(to + distance, y.run[1]);
    }
  }
}

// The kernel of a table, for pairs in packs or one by one.
template <class T, int N>
auto kernel_of(const RopeTable& table) {
  return table.interleaved ? rotate_heads<T, N, true> : rotate_heads<T, N, false>;
}

}  // namespace

template <class T>
void rope(const Launch& on, std::int64_t rows, const Rotation<T>& args) {
  constexpr double kPi = 3.14159265358979323846;
  constexpr std::int64_t kCount = Pack<T>::kCount;
  const RopeTable& table = args.table;
  if (table.pairs == 0) return;
  const bool packed = packs(args.x.data, args.x.ld) && args.head_size % kCount == 0 &&
                      table.first_column % kCount == 0 && table.pairs % kCount == 0;
  const std::int64_t width = packed ? kCount : 1;
  Frequencies frequencies{};
  for (std::int64_t i = 0; i < table.pairs; ++i)
    frequencies.of[i] = table.frequency[static_cast<std::size_t>(i)] / kPi;
  const Rows<T> work{.x = args.x.data,
                     .ld = args.x.ld,
                     .count = rows,
                     .heads = args.heads,
                     .head_size = args.head_size,
                     .first_column = table.first_column,
                     .pairs = table.pairs,
                     .positions = args.positions,
                     .first_keys = args.first_keys,
                     .amplitude = static_cast<Acc<T>>(table.amplitude),
                     .inverse = args.inverse};
  const std::int64_t items = rows * ((args.heads + kHeads - 1) / kHeads) * (table.pairs / width);
  launch("rope", packed ? kernel_of<T, Pack<T>::kCount>(table) : kernel_of<T, 1>(table), on,
         Shape{dim3(static_cast<unsigned>((items + kThreads - 1) / kThreads)), kThreads}, work, frequencies);
}

#define ZG_INSTANTIATE(T) template void rope(const Launch&, std::int64_t, const Rotation<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
