// Softmax cross entropy and its gradient, row by row. The largest logit and the sum of exponentials are
// computed while a row is read (online softmax: Milakov and Gimelshein, 2018), and as much of it as fits
// stays in shared memory for the gradient. While a block writes the gradient of a row, it already loads its
// next row into the memory that becomes free (cp.async). So reads and writes overlap even if one row nearly
// fills a multiprocessor's shared memory.
//
// A row is cut into tiles, in which each thread has one quad. A thread only uses quads that it has loaded
// itself, so a load and its use need no barrier between them. The first tiles of a row are kept in shared
// memory from the first pass to the second; the other tiles are loaded in each pass, through a ring of a few
// tiles that are loaded ahead.
#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels/cuda/mma.hpp"
#include "kernels/cuda/quads.hpp"
#include "kernels/cuda/sums.hpp"

namespace zg::cuda {
namespace {

template <class A>
constexpr A kInfinity = std::numeric_limits<A>::infinity();

constexpr int kAhead = 3;  // tiles of the ring: two are being loaded while one is used

// The numbers of tiles of a row: the first `kept` stay in shared memory; the other `rest` go through the
// ring, which has `ahead` tiles. The first `whole` tiles of the row lie completely in it and need no check
// for its end.
struct Tiles {
  int kept = 0, rest = 0, ahead = 0, whole = 0;
};

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

// e^x, for float without the handling of subnormal results: the relative error is 2^-22, plus the error from
// rounding the exponent.
__device__ __forceinline__ float exponential(float x) {
  return exp2_flushed(x * 1.44269504f);
}
__device__ __forceinline__ double exponential(double x) {
  return std::exp(x);
}

__device__ __forceinline__ float tangent(float x) {
  return tanhf(x);
}
__device__ __forceinline__ double tangent(double x) {
  return std::tanh(x);
}

// Starts to copy `bytes` bytes to shared memory, and zeros for the rest of 16 bytes. Both addresses are
// multiples of 16.
__device__ __forceinline__ void start_copy(void* to, const void* from, int bytes) {
#if defined(__CUDACC__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
#else
  emulation::check_access(from, 16);
  emulation::start_copy(to, from, static_cast<std::size_t>(bytes));
#endif
}

// kAll in the functions below: all of the tile is in the row, and rows can be accessed in quads. kCapped:
// logits become softcap * tanh(logit / softcap).
template <class T, int kThreads, bool kCapped>
struct Rows {
  using A = Acc<T>;
  static constexpr int kWarps = kThreads / 32, kTile = 4 * kThreads;

  Strided<const A> logits;
  Strided<T> gradient;  // null: loss only
  std::int64_t cols;
  Tiles tiles;
  bool aligned;
  Quad<A>* shared;  // the tiles that are kept, and then the ring
  A softcap;
  int slot = 0;  // next slot of the ring

  __device__ __forceinline__ const A* row(std::int64_t r) const { return r < 0 ? nullptr : logits.row(r); }
  __device__ __forceinline__ Quad<A>* quad(int at) const {
    return shared + (at * kThreads + static_cast<int>(threadIdx.x));
  }
  // The column of the thread's first element in a tile.
  __device__ __forceinline__ std::int64_t place(int tile) const {
    return std::int64_t{tile} * kTile + 4 * static_cast<int>(threadIdx.x);
  }
  // Calls body(kAll), as a type.
  template <class Body>
  __device__ __forceinline__ void for_tile(int tile, const Body& body) const {
    if (tile < tiles.whole) {
      body(std::true_type{});
    } else {
      body(std::false_type{});
    }
  }

  template <bool kAll>
  __device__ __forceinline__ void start_quad(const A* from, int tile, int at) const {
    const std::int64_t i = place(tile), left = cols - i;
    A* const to = quad(at)->at;
    constexpr int kEach = 16 / sizeof(A);
    if (kAll || aligned) {
      ZG_UNROLL
      for (int j = 0; j < 4; j += kEach) {
        const int there = kAll || left - j >= kEach ? kEach : static_cast<int>(left) - j;
        if (kAll || left > j) start_copy(to + j, from + i + j, there * static_cast<int>(sizeof(A)));
      }
    } else {
      ZG_NO_UNROLL
      for (int j = 0; j < 4 && j < left; ++j) to[j] = from[i + j];
    }
  }
  // Starts to load a tile of the row at `from` as one group of copies; null: an empty group.
  __device__ __forceinline__ void start(const A* from, int tile, int at) const {
    if (from != nullptr) for_tile(tile, [&](auto all) { start_quad<all()>(from, tile, at); });
    cp_async_commit();
  }
  __device__ __forceinline__ void start_first(const A* from) const {
    for (int i = 0; i < tiles.ahead; ++i) start(from, tiles.kept + i, tiles.kept + i);
    for (int t = 0; t < tiles.kept; ++t) start(from, t, t);
  }
  __device__ __forceinline__ Quad<A> capped(Quad<A> x) const {
    if constexpr (kCapped) {
      ZG_UNROLL
      for (int j = 0; j < 4; ++j) x.at[j] = softcap * tangent(x.at[j] / softcap);
    }
    return x;
  }
  // The thread's quad of a loaded tile, capped, with -infinity after the end of the row.
  template <bool kAll>
  __device__ __forceinline__ Quad<A> load(int tile, int at) const {
    if constexpr (kAll) return capped(*quad(at));
    // Kept tiles end with the row, so there may be no shared memory after its end.
    const std::int64_t left = cols - place(tile);
    Quad<A> x{};
    if (left > 0) x = capped(*quad(at));
    ZG_UNROLL
    for (int j = 0; j < 4; ++j) x.at[j] = j < left ? x.at[j] : -kInfinity<A>;
    return x;
  }

  // When the pass over a row begins, kept tiles are the latest groups. Waits for four of them, from tile t
  // on.
  __device__ __forceinline__ void await_kept(int t) const {
    const int left = tiles.kept - 4 - t;
    if (left >= 8) {
      cp_async_wait<8>();
    } else if (left >= 4) {
      cp_async_wait<4>();
    } else {
      cp_async_wait<0>();
    }
  }
  // Waits for the next tile of the ring.
  __device__ __forceinline__ void await_next() const {
    static_assert(kAhead == 3);
    if (tiles.ahead == 3) {
      cp_async_wait<2>();
    } else if (tiles.ahead == 2) {
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
  }
  // To be called when tile i of the rest has been used: starts to load the next tile into its slot of the
  // ring. The next tile belongs to this pass, over the row at `from`, or at its end to the next pass, over
  // the row at `then`.
  __device__ __forceinline__ void refill(int i, const A* from, const A* then) {
    const int next = i + tiles.ahead;
    const bool here = next < tiles.rest;
    start(here ? from : then, tiles.kept + (here ? next : next - tiles.rest), tiles.kept + slot);
    slot = slot + 1 == tiles.ahead ? 0 : slot + 1;
  }

  static __device__ __forceinline__ void add(const Quad<A>& x, Softmax<A>& s) {
    A max = s.max;
    ZG_UNROLL
    for (int j = 0; j < 4; ++j) max = std::fmax(max, x.at[j]);
    const A top = finite_below(max);
    if (s.max < max) s.sum *= exponential(s.max - top);
    s.max = max;
    ZG_UNROLL
    for (int j = 0; j < 4; ++j) s.sum += exponential(x.at[j] - top);
  }
  // The softmax over this thread's elements of the row at `from`. `then`: the row of the next pass, which may
  // be the same.
  __device__ __forceinline__ Softmax<A> read(const A* from, const A* then) {
    Softmax<A> s{-kInfinity<A>, 0};
    for (int t = 0; t < tiles.kept; ++t) {
      if (t % 4 == 0) await_kept(t);
      for_tile(t, [&](auto all) { add(load<all()>(t, t), s); });
    }
    for (int i = 0; i < tiles.rest; ++i) {
      const int t = tiles.kept + i;
      await_next();
      for_tile(t, [&](auto all) { add(load<all()>(t, tiles.kept + slot), s); });
      refill(i, from, then);
    }
    return s;
  }

  // gradient = exp(logit - max) * factor, except at the target, where it is at_target.
  struct Gradient {
    T* row;
    A max, factor;
    std::int64_t target;
    T at_target;
  };
  template <bool kAll>
  __device__ __forceinline__ void store(int tile, int at, const Gradient& g) const {
    const Quad<A> x = load<kAll>(tile, at);
    const std::int64_t i = place(tile), left = cols - i;
    A y[4];
    ZG_UNROLL
    for (int j = 0; j < 4; ++j) {
      y[j] = exponential(x.at[j] - g.max) * g.factor;
      if constexpr (kCapped) {
        const A t = x.at[j] / softcap;
        y[j] *= A{1} - t * t;
      }
    }
    Quad<T> d;
    if constexpr (sizeof(T) == 2) {
      const unsigned words[2] = {pack_halves<T>(y[0], y[1]), pack_halves<T>(y[2], y[3])};
      ZG_UNROLL
      for (int j = 0; j < 4; ++j) d.at[j].bits = static_cast<std::uint16_t>(words[j / 2] >> j % 2 * 16);
    } else {
      ZG_UNROLL
      for (int j = 0; j < 4; ++j) d.at[j] = y[j];
    }
    const std::int64_t target = g.target - i;
    if (target >= 0 && target < 4) {
      ZG_UNROLL
      for (int j = 0; j < 4; ++j) d.at[j] = j == target ? g.at_target : d.at[j];
    }
    store_quad<kAll>(g.row + i, d, left, aligned);
  }
  // Writes the gradient of the row at `from`, and loads the row at `then` where tiles become free. If the
  // gradient shares the logits' memory and its elements are narrower, element i lies over logit i / 2:
  // writing a tile overwrites logits of this tile and of earlier ones. So all threads must have loaded the
  // tile before it is written; the kept tiles they have loaded before the gradient was known.
  __device__ __forceinline__ void write(const A* from, const A* then, const Gradient& g) {
    const bool in_place = static_cast<const void*>(g.row) == static_cast<const void*>(from);
    for (int i = 0; i < tiles.rest; ++i) {
      const int t = tiles.kept + i;
      await_next();
      if (in_place) __syncthreads();
      for_tile(t, [&](auto all) { store<all()>(t, tiles.kept + slot, g); });
      refill(i, from, then);
    }
    for (int t = 0; t < tiles.kept; ++t) {
      for_tile(t, [&](auto all) {
        store<all()>(t, t, g);
        if (then != nullptr) start_quad<all()>(then, t, t);
      });
      cp_async_commit();
    }
  }

  __device__ __forceinline__ void clear(std::int64_t r) const {
    T* const row = gradient.row(r);
    for (std::int64_t i = 4 * static_cast<int>(threadIdx.x); i < cols; i += kTile)
      store_quad<false>(row + i, Quad<T>{}, cols - i, aligned);
  }
};

// Scalars of a row are computed by three threads of different warps.
constexpr int kFactorThread = 0, kTargetThread = 32, kLossThread = 64;

template <class A>
struct Shared {
  double sums[32];
  A maxima[32];
  A factor, at_target;
};

// The loss of row `r`, in kLossThread. `shared` may be used for the next row without a further barrier: for
// each of its members there is a barrier between the last read and the next write.
template <class T, int kThreads, bool kCapped>
__device__ __forceinline__ double row_loss(Rows<T, kThreads, kCapped>& rows, std::int64_t r,
                                           std::int64_t then, std::int64_t target, double scale,
                                           Shared<Acc<T>>& shared) {
  using A = Acc<T>;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const bool writes = rows.gradient.data != nullptr;
  const A *const row = rows.row(r), *const next = rows.row(then);
  // Loaded first, so that this overlaps with reading the row.
  A of_target = row[target];
  double slope = 1;
  const Softmax<A> mine = rows.read(row, writes ? row : next);
  if constexpr (kCapped) {
    // Computed so that it has the same bits as the other capped logits.
    const A t = tangent(of_target / rows.softcap);
    of_target = rows.softcap * t;
    slope = 1 - static_cast<double>(t) * static_cast<double>(t);
  }
  const A of_warp = warp_max(mine.max);
  if (lane == 0) shared.maxima[warp] = of_warp;
  __syncthreads();
  const A max = warp_max(lane < rows.kWarps ? shared.maxima[lane] : -kInfinity<A>);
  const A share = mine.sum * exponential(mine.max - finite_below(max));
  const double total = block_sum<kThreads>(static_cast<double>(share), shared.sums);
  const double distance = static_cast<double>(of_target) - static_cast<double>(max);
  if (threadIdx.x == kFactorThread) shared.factor = static_cast<A>(scale / total);
  if (threadIdx.x == kTargetThread)
    shared.at_target = static_cast<A>(scale * (std::exp(distance) / total - 1.0) * slope);
  const double loss = threadIdx.x == kLossThread ? std::log(total) - distance : 0;
  __syncthreads();
  if (writes)
    rows.write(row, next, {rows.gradient.row(r), max, shared.factor, target, from_acc<T>(shared.at_target)});
  return loss;
}

// A block computes some of the groups of rows, one row after the other, and writes the sum of losses of each
// group. So the sums do not depend on the number of blocks.
template <class T, int kThreads, bool kCapped>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    cross_entropy_rows(Extent extent, CrossEntropy<T> args, std::int64_t groups, Tiles tiles, bool aligned,
                       double* losses) {
  __shared__ Shared<Acc<T>> shared;
  const std::int64_t blocks = gridDim.x, block = blockIdx.x;
  const std::int64_t first_group = groups * block / blocks, last_group = groups * (block + 1) / blocks;
  const std::int64_t end = extent.rows * last_group / groups;
  // The first row from `r` on that is not ignored; -1 if there is none.
  const auto counted = [&](std::int64_t r) {
    while (r < end && args.targets[r] < 0) ++r;
    if (r >= end) return std::int64_t{-1};
    if (args.targets[r] >= extent.cols) __trap();
    return r;
  };
  Rows<T, kThreads, kCapped> rows{args.logits,
                                  args.dlogits,
                                  extent.cols,
                                  tiles,
                                  aligned,
                                  dynamic_shared<Quad<Acc<T>>>(),
                                  static_cast<Acc<T>>(args.softcap)};
  std::int64_t r = extent.rows * first_group / groups, now = counted(r);
  rows.start_first(rows.row(now));
  for (std::int64_t g = first_group; g < last_group; ++g) {
    double loss = 0;
    for (; r < extent.rows * (g + 1) / groups; ++r) {
      if (r == now) {
        const std::int64_t then = counted(r + 1);
        loss += row_loss(rows, r, then, args.targets[r], args.scale, shared);
        now = then;
      } else if (args.dlogits.data != nullptr) {
        rows.clear(r);
      }
    }
    if (threadIdx.x == kLossThread) losses[g] = loss;
  }
}

constexpr int kOther = 2048;  // other bytes of a block: static shared memory, and CUDA's own

// The most dynamic shared memory of a block.
std::int64_t most_shared_bytes() {
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
void launch_rows(const Launch& on, Extent extent, const CrossEntropy<T>& args, std::int64_t groups) {
  using Quads = Quad<Acc<T>>;
  const auto at_most = [](std::int64_t a, std::int64_t b) { return a < b ? a : b; };
  constexpr std::int64_t kTileBytes = kThreads * std::int64_t{sizeof(Quads)};
  const std::int64_t most = most_shared_bytes(),
                     row_bytes = (extent.cols + 3) / 4 * std::int64_t{sizeof(Quads)};
  const auto all = static_cast<int>((row_bytes + kTileBytes - 1) / kTileBytes);
  // How much is kept does not change results.
  Tiles tiles{.kept = all};
  std::int64_t bytes = row_bytes;
  if (args.dlogits.data == nullptr || row_bytes > most) {
    const auto kept = args.dlogits.data == nullptr ? 0 : static_cast<int>(most / kTileBytes) - kAhead;
    tiles = {.kept = kept, .rest = all - kept, .ahead = static_cast<int>(at_most(kAhead, all - kept))};
    bytes = (tiles.kept + tiles.ahead) * kTileBytes;
  }
  // As many blocks as can run at the same time: each then loads only its first row without overlap.
  const std::int64_t each = at_most(1024 / kThreads, most / (bytes + kOther));
  const std::int64_t blocks = at_most(groups, on.multiprocessors * (each < 1 ? 1 : each));
  const bool aligned = quads(args.logits.data, args.logits.ld) && quads(args.dlogits.data, args.dlogits.ld);
  if (aligned) tiles.whole = static_cast<int>(extent.cols / (4 * kThreads));
  launch("cross_entropy",
         args.softcap == 0 ? cross_entropy_rows<T, kThreads, false> : cross_entropy_rows<T, kThreads, true>,
         on, Shape{dim3(static_cast<unsigned>(blocks)), dim3(kThreads), static_cast<std::size_t>(bytes)},
         extent, args, groups, tiles, aligned, args.scratch);
}

}  // namespace

template <class T>
void cross_entropy(const Launch& on, Extent extent, const CrossEntropy<T>& args) {
  const std::int64_t groups = extent.rows < kSumPartials ? extent.rows : kSumPartials;
  if (groups == 0) return;
  if (extent.cols <= 8192) {
    launch_rows<T, 256>(on, extent, args, groups);
  } else {
    launch_rows<T, 1024>(on, extent, args, groups);
  }
  add_partials(on, groups, args.scratch, args.loss_sum);
}

#define ZG_INSTANTIATE(T) template void cross_entropy(const Launch&, Extent, const CrossEntropy<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
