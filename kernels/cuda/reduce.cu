// One thread reduces one pack of elements over all operands, in the order of the operands.
#include "kernels/cuda/reduce.hpp"

#include <algorithm>

#include "kernels/cuda/held.hpp"

namespace zg::cuda {
namespace {

constexpr unsigned kThreads = 256;

template <class T>
struct RankOperands {
  const T* at[kMostOperands];
  int count;
};

template <bool kMaximum, class A>
__device__ __forceinline__ A combine(A sum, A x) {
  if constexpr (kMaximum) {
    return sum >= x || sum != sum ? sum : x;  // a comparison with NaN is false: NaN in either stays
  } else {
    return sum + x;
  }
}

template <int N, bool kMaximum, class T>
__device__ __forceinline__ void reduce_elements(const RankOperands<T>& operands, std::int64_t i, T* out) {
  Acc<T> sum[N];
  const Elements<T, N> first = load_elements<N>(operands.at[0] + i);
  ZG_UNROLL
  for (int j = 0; j < N; ++j) sum[j] = first[j];
  for (int m = 1; m < operands.count; ++m) {
    const Elements<T, N> x = load_elements<N>(operands.at[m] + i);
    ZG_UNROLL
    for (int j = 0; j < N; ++j) sum[j] = combine<kMaximum>(sum[j], static_cast<Acc<T>>(x[j]));
  }
  Elements<T, N> result = {};
  ZG_UNROLL
  for (int j = 0; j < N; ++j) result.set(j, from_acc<T>(sum[j]));
  store_elements(out + i, result);
}

template <class T, int N, bool kMaximum>
__global__ void __launch_bounds__(kThreads)
    reduce_operands(std::int64_t count, RankOperands<T> operands, T* out) {
  std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * N;
  if (i + N <= count) {
    reduce_elements<N, kMaximum>(operands, i, out);
  } else if constexpr (N > 1) {
    ZG_NO_UNROLL
    for (; i < count; ++i) reduce_elements<1, kMaximum>(operands, i, out);
  }
}

}  // namespace

template <class T>
void reduce(const Launch& on, std::span<const void* const> operands, void* out, std::int64_t count,
            bool maximum) {
  if (count == 0) return;
  RankOperands<T> held = {};
  bool packed = packs(static_cast<const T*>(out), 0);
  for (const void* operand : operands) {
    held.at[held.count++] = static_cast<const T*>(operand);
    packed = packed && packs(static_cast<const T*>(operand), 0);
  }
  constexpr int kPack = Pack<T>::kCount;
  const std::int64_t each = std::int64_t{kThreads} * (packed ? kPack : 1);
  const Shape shape{dim3(static_cast<unsigned>((count + each - 1) / each)), dim3(kThreads)};
  const auto kernel = packed ? (maximum ? reduce_operands<T, kPack, true> : reduce_operands<T, kPack, false>)
                             : (maximum ? reduce_operands<T, 1, true> : reduce_operands<T, 1, false>);
  launch("reduce", kernel, on, shape, count, held, static_cast<T*>(out));
}

#define ZG_INSTANTIATE(T) \
  template void reduce<T>(const Launch&, std::span<const void* const>, void*, std::int64_t, bool);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
