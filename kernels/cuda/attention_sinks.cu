// The gradient of attention's sinks. A block has one head. Its warps take the rows in turn, and each lane
// sums the terms of some columns, so the order of sums is fixed.
#include <cmath>

#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/sums.hpp"

namespace zg::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class T>
__global__ void __launch_bounds__(kThreads) attention_sinks_gradient(AttentionSinksBackward<T> x) {
  using A = Acc<T>;
  __shared__ double shared[32];
  const std::int64_t head = blockIdx.x, rows = x.batch * x.time;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const A sink = to_acc(x.sinks[head]);
  double sum = 0;
  for (std::int64_t row = warp; row < rows; row += kWarps) {
    const T* const o = x.o.row(row) + head * x.value_size;
    const T* const d_o = x.d_o.row(row) + head * x.value_size;
    A dot = 0;
    for (std::int64_t c = lane; c < x.value_size; c += 32) dot += to_acc(o[c]) * to_acc(d_o[c]);
    sum += dot * std::exp(sink - x.lse.row(row / x.time * x.heads + head)[row % x.time]);
  }
  const double total = block_sum<kThreads>(sum, shared);
  if (threadIdx.x == 0) x.d_sinks[head] -= static_cast<A>(total);
}

}  // namespace

template <class T>
void attention_sinks_backward(const Launch& on, const AttentionSinksBackward<T>& args) {
  launch("attention_sinks_backward", attention_sinks_gradient<T>, on,
         Shape{dim3(static_cast<unsigned>(args.heads)), dim3(kThreads)}, args);
}

#define ZG_INSTANTIATE(T) \
  template void attention_sinks_backward<T>(const Launch&, const AttentionSinksBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
