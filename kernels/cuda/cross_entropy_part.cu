// Cross entropy with a sharded vocabulary, where each shard has the logits of some tokens: first a row's
// three scalars, which the shards exchange, and then the loss and the gradient of this shard's logits. A
// block works on one row at a time.
#include <cmath>
#include <limits>

#include "kernels/cuda/sums.hpp"

namespace zg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__device__ __forceinline__ float exponential(float x) {
  return std::exp(x);
}
__device__ __forceinline__ double exponential(double x) {
  return std::exp(x);
}

// softcap * tanh(logit / softcap), or, with a softcap of 0, the logit.
__device__ __forceinline__ float capped(float logit, float softcap) {
  return softcap == 0 ? logit : softcap * tanhf(logit / softcap);
}
__device__ __forceinline__ double capped(double logit, double softcap) {
  return softcap == 0 ? logit : softcap * std::tanh(logit / softcap);
}
// The derivative of capped(), from its result `value`.
template <class A>
__device__ __forceinline__ A cap_slope(A value, A softcap) {
  const A t = softcap == 0 ? A{0} : value / softcap;
  return A{1} - t * t;
}

// The largest over the threads of a block, returned in all of them; there must be a barrier before `shared`,
// an element for each warp, is used again.
template <class A>
__device__ __forceinline__ A block_max(A x, A* shared) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  x = warp_max(x);
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  return warp_max(shared[lane < kWarps ? lane : 0]);
}

template <class T>
__global__ void __launch_bounds__(kThreads) softmax_part_rows(Extent extent, SoftmaxPart<T> args) {
  using A = Acc<T>;
  constexpr A kLeast = -std::numeric_limits<A>::infinity();
  __shared__ A largest[kWarps];
  __shared__ double sums[32];
  const std::int64_t r = blockIdx.x;
  const A* const logits = args.logits.row(r);
  A max = kLeast;
  for (std::int64_t c = threadIdx.x; c < extent.cols; c += kThreads) max = std::fmax(max, logits[c]);
  const A softcap = static_cast<A>(args.softcap);
  max = capped(block_max(max, largest), softcap);
  // If all logits of the shard are -infinity, the sum is 0 and not NaN.
  const A top = max == kLeast ? A{0} : max;
  A sum = 0;
  for (std::int64_t c = threadIdx.x; c < extent.cols; c += kThreads)
    sum += exponential(capped(logits[c], softcap) - top);
  const double total = block_sum<kThreads>(static_cast<double>(sum), sums);
  if (threadIdx.x != 0) return;
  const std::int64_t target = args.targets[r] - args.first;
  const bool here = args.targets[r] >= 0 && target >= 0 && target < extent.cols;
  args.numbers[r] = max;
  args.numbers[extent.rows + r] = static_cast<A>(total);
  args.numbers[2 * extent.rows + r] = here ? capped(logits[target], softcap) : A{0};
}

// The scalars of a row over the whole vocabulary.
struct Whole {
  double max, total, distance;
};
template <class A>
__device__ __forceinline__ Whole merged(const A* numbers, std::int64_t parts, std::int64_t rows,
                                        std::int64_t r) {
  const auto number = [&](std::int64_t part, int which) {
    return static_cast<double>(numbers[(3 * part + which) * rows + r]);
  };
  Whole w{number(0, 0), 0, 0};
  for (std::int64_t p = 1; p < parts; ++p) w.max = std::fmax(w.max, number(p, 0));
  for (std::int64_t p = 0; p < parts; ++p) {
    w.total += number(p, 1) * std::exp(number(p, 0) - w.max);
    w.distance += number(p, 2);
  }
  w.distance -= w.max;
  return w;
}

// One block for each group of rows. Each group has one sum of losses.
template <class T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_part_rows(Extent extent, CrossEntropyPart<T> args, double* losses) {
  using A = Acc<T>;
  const CrossEntropy<T>& local = args.local;
  const std::int64_t groups = gridDim.x, g = blockIdx.x;
  double loss = 0;
  for (std::int64_t r = extent.rows * g / groups; r < extent.rows * (g + 1) / groups; ++r) {
    T* const gradient = local.dlogits.data == nullptr ? nullptr : local.dlogits.row(r);
    const bool counts = local.targets[r] >= 0;
    Whole w{0, 1, 0};
    if (counts) {
      w = merged(args.numbers, args.parts, extent.rows, r);
      loss += std::log(w.total) - w.distance;
    }
    if (gradient == nullptr) continue;
    const A* const logits = local.logits.row(r);
    const std::int64_t target = counts ? local.targets[r] - args.first : -1;
    const A max = static_cast<A>(w.max), factor = static_cast<A>(local.scale / w.total),
            softcap = static_cast<A>(local.softcap);
    for (std::int64_t c = threadIdx.x; c < extent.cols; c += kThreads) {
      const A logit = capped(logits[c], softcap);
      A x = counts ? exponential(logit - max) * factor : A{0};
      if (c == target) x = static_cast<A>(local.scale * (std::exp(w.distance) / w.total - 1.0));
      gradient[c] = from_acc<T>(softcap == 0 || !counts ? x : x * cap_slope(logit, softcap));
    }
  }
  if (threadIdx.x == 0) losses[g] = loss;
}

}  // namespace

template <class T>
void softmax_part(const Launch& on, Extent extent, const SoftmaxPart<T>& args) {
  launch("softmax_part", softmax_part_rows<T>, on,
         Shape{dim3(static_cast<unsigned>(extent.rows)), dim3(kThreads)}, extent, args);
}

template <class T>
void cross_entropy_part(const Launch& on, Extent extent, const CrossEntropyPart<T>& args) {
  const std::int64_t groups = extent.rows < kSumPartials ? extent.rows : kSumPartials;
  if (groups == 0) return;
  launch("cross_entropy_part", cross_entropy_part_rows<T>, on,
         Shape{dim3(static_cast<unsigned>(groups)), dim3(kThreads)}, extent, args, args.local.scratch);
  add_partials(on, groups, args.local.scratch, args.local.loss_sum);
}

#define ZG_INSTANTIATE(T)                                                   \
  template void softmax_part(const Launch&, Extent, const SoftmaxPart<T>&); \
  template void cross_entropy_part(const Launch&, Extent, const CrossEntropyPart<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
