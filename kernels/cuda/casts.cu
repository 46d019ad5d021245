// Conversions between storage types, and the final cast of accumulated gradients.
#include <type_traits>

#include "kernels/cuda/quads.hpp"
#include "kernels/cuda/sums.hpp"

namespace zg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kQuads = 4;  // a thread's loads that are in flight together
constexpr std::int64_t kTile = std::int64_t{kThreads} * 4 * kQuads;

// double is rounded to float on its way to 16 bits.
template <class Out, class In>
__device__ __forceinline__ Out convert(In x) {
  if constexpr (std::is_same_v<In, Out>) {
    return x;
  } else if constexpr (sizeof(Out) == 2) {
    return from_acc<Out>(static_cast<float>(to_acc(x)));
  } else {
    return static_cast<Out>(to_acc(x));
  }
}

// Converts elements [begin, begin + kTile) of n, and calls `see` with each result of this thread.
template <bool kAll, class In, class Out, class See>
__device__ __forceinline__ void convert_quads(std::int64_t n, std::int64_t begin, const In* in, Out* out,
                                              bool aligned, const See& see) {
  Quad<In> from[kQuads];
  const std::int64_t first = begin + 4 * std::int64_t{threadIdx.x};
  ZG_UNROLL
  for (int q = 0; q < kQuads; ++q) {
    const std::int64_t i = first + q * 4 * kThreads;
    from[q] = load_quad<kAll>(in + i, n - i, aligned);
  }
  ZG_UNROLL
  for (int q = 0; q < kQuads; ++q) {
    const std::int64_t i = first + q * 4 * kThreads;
    Quad<Out> to;
    ZG_UNROLL
    for (int j = 0; j < 4; ++j) {
      to.at[j] = convert<Out>(from[q].at[j]);
      see(to.at[j]);
    }
    store_quad<kAll>(out + i, to, n - i, aligned);
  }
}

template <class In, class Out, class See>
__device__ __forceinline__ void convert_tile(std::int64_t n, std::int64_t begin, const In* in, Out* out,
                                             bool aligned, const See& see) {
  if (aligned && n - begin >= kTile) {
    convert_quads<true>(n, begin, in, out, true, see);
  } else {
    convert_quads<false>(n, begin, in, out, aligned, see);
  }
}

template <class In, class Out>
__global__ void __launch_bounds__(kThreads)
    cast_rows(std::int64_t cols, unsigned tiles, Strided<const In> in, Strided<Out> out, bool aligned) {
  const std::int64_t row = blockIdx.x / tiles, begin = blockIdx.x % tiles * kTile;
  convert_tile(cols, begin, in.row(row), out.row(row), aligned, [](Out) {});
}

// Block b converts the tiles b, b + gridDim.x, ... The order of the sum depends on n and the grid, which
// depends on n alone. Elements after the end count as zero.
template <class In, class Out>
__global__ void __launch_bounds__(kThreads)
    finish_tiles(std::int64_t n, const In* in, Out* out, bool aligned, double* partials) {
  __shared__ double shared[kThreads / 32];
  double sum = 0;
  for (std::int64_t begin = blockIdx.x * kTile; begin < n; begin += gridDim.x * kTile) {
    convert_tile(n, begin, in, out, aligned, [&](Out written) {
      const double value = static_cast<double>(to_acc(written));
      sum += value * value;
    });
  }
  sum = block_sum<kThreads>(sum, shared);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

}  // namespace

template <class In, class Out>
void cast(const Launch& on, Extent extent, Strided<const In> in, Strided<Out> out) {
  if (extent.rows == 1 || (in.ld == extent.cols && out.ld == extent.cols)) {
    extent = {1, extent.rows * extent.cols};
    in.ld = out.ld = 0;  // a single row has no pitch
  }
  const std::int64_t tiles = (extent.cols + kTile - 1) / kTile;
  const Shape shape{dim3(static_cast<unsigned>(extent.rows * tiles)), dim3(kThreads)};
  launch("cast", cast_rows<In, Out>, on, shape, extent.cols, static_cast<unsigned>(tiles), in, out,
         quads(in.data, in.ld) && quads(out.data, out.ld));
}

template <class In, class Out>
void finish_gradient(const Launch& on, std::int64_t n, const In* in, Out* out, double* norm_sq,
                     double* scratch) {
  if (n == 0) return;
  const std::int64_t tiles = (n + kTile - 1) / kTile;
  const std::int64_t blocks = tiles < kSumPartials ? tiles : kSumPartials;
  launch("finish_gradient", finish_tiles<In, Out>, on,
         Shape{dim3(static_cast<unsigned>(blocks)), dim3(kThreads)}, n, in, out,
         quads(in, 0) && quads(out, 0), scratch);
  add_partials(on, blocks, scratch, norm_sq);
}

#define ZG_INSTANTIATE(In)                                                      \
  template void cast(const Launch&, Extent, Strided<const In>, Strided<float>); \
  template void cast(const Launch&, Extent, Strided<const In>, Strided<bf16>);  \
  template void cast(const Launch&, Extent, Strided<const In>, Strided<fp16>);  \
  template void cast(const Launch&, Extent, Strided<const In>, Strided<double>);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE
template void finish_gradient(const Launch&, std::int64_t, const float*, bf16*, double*, double*);
template void finish_gradient(const Launch&, std::int64_t, const float*, fp16*, double*, double*);
template void finish_gradient(const Launch&, std::int64_t, const float*, float*, double*, double*);
template void finish_gradient(const Launch&, std::int64_t, const double*, double*, double*, double*);

}  // namespace zg::cuda
