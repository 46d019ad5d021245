// Softmax cross entropy and its gradient, row by row. A row is read from memory once: the largest logit and
// the sum of exponentials are computed while it is read (online softmax: Milakov and Gimelshein, 2018), and
// as much of it as fits stays in shared memory for the gradient. The rest, if any, is read again.
#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels/cuda/quads.hpp"
#include "kernels/cuda/sums.hpp"

namespace zg::cuda {
namespace {

template <class A>
constexpr A kInfinity = std::numeric_limits<A>::infinity();

// The largest logit so far, and the sum of exp(logit - max). In the exponent a max of -infinity is replaced
// by 0 (finite_below), so that the sum over logits that are all -infinity is 0 and not NaN.
template <class A>
struct Softmax {
  A max, sum;
};
template <class A>
__device__ __forceinline__ A finite_below(A max) {
  return max == -kInfinity<A> ? A{0} : max;
}

template <class T, int kThreads>
struct Row {
  using A = Acc<T>;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kQuads = sizeof(A) == 4 ? 4 : 2;  // a thread's loads that are in flight together
  static constexpr std::int64_t kTile = std::int64_t{kThreads} * 4 * kQuads;

  const A* logits;
  T* gradient;  // null: loss only
  std::int64_t cols;
  A* kept;                 // shared memory for the first logits of the row
  std::int64_t kept_cols;  // how many: a multiple of kTile, or all
  bool aligned;

  __device__ __forceinline__ std::int64_t place(std::int64_t begin, int q) const {
    return begin + 4 * (std::int64_t{q} * kThreads + threadIdx.x);
  }

  // Loads one tile of the row, with -infinity behind its end.
  template <bool kAll>
  __device__ __forceinline__ void load(const A* from, std::int64_t begin, Quad<A> (&x)[kQuads],
                                       bool in_quads) const {
    ZG_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      const std::int64_t i = place(begin, q);
      x[q] = load_quad<kAll>(from + i, cols - i, in_quads, -kInfinity<A>);
    }
  }
  __device__ __forceinline__ bool all(std::int64_t begin) const { return aligned && cols - begin >= kTile; }

  template <bool kAll>
  __device__ __forceinline__ void read_tile(std::int64_t begin, Softmax<A>& s) const {
    Quad<A> x[kQuads];
    load<kAll>(logits, begin, x, aligned);
    A max = s.max;
    ZG_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      const std::int64_t i = place(begin, q);
      if (i < kept_cols) *aligned_as<Quad<A>>(kept + i) = x[q];
      ZG_UNROLL
      for (int j = 0; j < 4; ++j) max = max < x[q].at[j] ? x[q].at[j] : max;
    }
    const A top = finite_below(max);
    s.sum *= std::exp(s.max - top);
    ZG_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      ZG_UNROLL
      for (int j = 0; j < 4; ++j) s.sum += std::exp(x[q].at[j] - top);
    }
    s.max = max;
  }
  // Reads the row; returns the softmax over what this thread read of it.
  __device__ __forceinline__ Softmax<A> read() const {
    Softmax<A> s{-kInfinity<A>, 0};
    for (std::int64_t begin = 0; begin < cols; begin += kTile) {
      all(begin) ? read_tile<true>(begin, s) : read_tile<false>(begin, s);
    }
    return s;
  }

  // gradient = exp(logit - max) * factor, except for the target. If the gradient shares the logits' memory
  // and its elements are narrower, element i lies over logit i / 2: writing a tile overwrites logits of
  // this tile and of earlier ones, so all threads must have read the tile first. Kept logits have all been
  // read.
  template <bool kAll>
  __device__ __forceinline__ void write_tile(std::int64_t begin, A max, A factor, std::int64_t target,
                                             T at_target) const {
    Quad<A> x[kQuads];
    if (begin < kept_cols) {
      load<kAll>(kept, begin, x, true);
    } else {
      load<kAll>(logits, begin, x, aligned);
      __syncthreads();
    }
    ZG_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      const std::int64_t i = place(begin, q);
      Quad<T> d;
      ZG_UNROLL
      for (int j = 0; j < 4; ++j) {
        d.at[j] = i + j == target ? at_target : from_acc<T>(std::exp(x[q].at[j] - max) * factor);
      }
      store_quad<kAll>(gradient + i, d, cols - i, aligned);
    }
  }
  __device__ __forceinline__ void write(A max, A factor, std::int64_t target, T at_target) const {
    for (std::int64_t begin = 0; begin < cols; begin += kTile) {
      all(begin) ? write_tile<true>(begin, max, factor, target, at_target)
                 : write_tile<false>(begin, max, factor, target, at_target);
    }
  }

  __device__ __forceinline__ void clear() const {
    for (std::int64_t i = 4 * threadIdx.x; i < cols; i += 4 * kThreads) {
      store_quad<false>(gradient + i, Quad<T>{}, cols - i, aligned);
    }
  }
};

template <class T>
struct Shared {
  double sums[32];
  Acc<T> maxima[32];
  Acc<T> factor;
  T at_target;
};

// The loss of a row, in the first thread of the block. `shared` may be used for the next row without a
// barrier: for each of its members there is one between the last read and the next write.
template <class T, int kThreads>
__device__ __forceinline__ double row_loss(const Row<T, kThreads>& row, std::int64_t target, double scale,
                                           Shared<T>& shared) {
  using A = Acc<T>;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  // Loaded first, so that this overlaps with reading the row.
  const double of_target = static_cast<double>(row.logits[target]);
  const Softmax<A> mine = row.read();
  const A of_warp = warp_max(mine.max);
  if (lane == 0) shared.maxima[warp] = of_warp;
  __syncthreads();
  const A max = warp_max(lane < row.kWarps ? shared.maxima[lane] : -kInfinity<A>);
  const A share = mine.sum * std::exp(mine.max - finite_below(max));
  const double total = block_sum<kThreads>(static_cast<double>(share), shared.sums);
  double loss = 0;
  if (threadIdx.x == 0) {
    const double distance = of_target - static_cast<double>(max);
    loss = std::log(total) - distance;
    shared.factor = static_cast<A>(scale / total);
    shared.at_target = from_acc<T>(static_cast<A>(scale * (std::exp(distance) / total - 1.0)));
  }
  __syncthreads();
  if (row.gradient != nullptr) row.write(max, shared.factor, target, shared.at_target);
  return loss;
}

// A block computes a group of rows, one after the other, and writes the sum of their losses.
template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_rows(Extent extent, CrossEntropy<T> args, std::int64_t kept_cols, bool aligned,
                       double* losses) {
  __shared__ Shared<T> shared;
  const std::int64_t groups = gridDim.x, group = blockIdx.x;
  double loss = 0;
  for (std::int64_t r = extent.rows * group / groups; r < extent.rows * (group + 1) / groups; ++r) {
    const std::int64_t target = args.targets[r];
    if (target >= extent.cols) __trap();
    const Row<T, kThreads> row{args.logits.row(r),
                               args.dlogits.data == nullptr ? nullptr : args.dlogits.row(r),
                               extent.cols,
                               dynamic_shared<Acc<T>>(),
                               args.dlogits.data == nullptr ? 0 : kept_cols,
                               aligned};
    if (target >= 0) {
      loss += row_loss(row, target, args.scale, shared);
    } else if (row.gradient != nullptr) {
      row.clear();
    }
  }
  if (threadIdx.x == 0) losses[group] = loss;
}

// The most dynamic shared memory of a block: the device's limit, less some for static shared memory.
std::int64_t most_kept_bytes() {
  constexpr int kOther = 2048;
#if defined(__CUDACC__)
  int device = 0, bytes = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (status != cudaSuccess) refused("cross_entropy", static_cast<int>(status));
  return bytes - kOther;
#else
  return 163 * 1024 - kOther;  // sm_80's
#endif
}

template <class T, int kThreads>
void launch_rows(const Launch& on, Extent extent, const CrossEntropy<T>& args, std::int64_t groups,
                 double* losses) {
  constexpr std::int64_t kTile = Row<T, kThreads>::kTile, kSize = sizeof(Acc<T>);
  // How much is kept does not change results.
  const std::int64_t tiles = (extent.cols + kTile - 1) / kTile, fit = most_kept_bytes() / (kTile * kSize);
  const std::int64_t all = (extent.cols + 3) / 4 * 4;
  const bool keep_all = all * kSize <= most_kept_bytes();
  const std::int64_t kept = args.dlogits.data == nullptr ? 0
                            : keep_all                   ? all
                                                         : (fit < tiles ? fit : tiles) * kTile;
  const bool aligned = quads(args.logits.data, args.logits.ld) && quads(args.dlogits.data, args.dlogits.ld);
  launch("cross_entropy", cross_entropy_rows<T, kThreads>, on,
         Shape{dim3(static_cast<unsigned>(groups)), dim3(kThreads), static_cast<std::size_t>(kept * kSize)},
         extent, args, kept, aligned, losses);
}

}  // namespace

template <class T>
void cross_entropy(const Launch& on, Extent extent, const CrossEntropy<T>& args, double* scratch) {
  const std::int64_t groups = extent.rows < kSumPartials ? extent.rows : kSumPartials;
  if (groups == 0) return;
  if (extent.cols <= 8192) {
    launch_rows<T, 256>(on, extent, args, groups, scratch);
  } else {
    launch_rows<T, 1024>(on, extent, args, groups, scratch);
  }
  add_partials(on, groups, scratch, args.loss_sum);
}

#define ZG_INSTANTIATE(T) template void cross_entropy(const Launch&, Extent, const CrossEntropy<T>&, double*);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
