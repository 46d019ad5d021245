// Embedding: rows of a table by token id, and the table's gradient.
#include <type_traits>

#include "kernels/cuda/scalar.hpp"

namespace zg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAll = 0xffffffffu;

// A warp works on tiles of a row: each lane has Pack<T>::kCount columns, which are consecutive if rows are
// accessed in packs, and 32 apart if not.
template <class T>
constexpr std::int64_t kTile = 32 * Pack<T>::kCount;

template <class T, bool kPacks>
__device__ __forceinline__ std::int64_t column(std::int64_t tile, int lane, int j) {
  return tile * kTile<T> + (kPacks ? lane * Pack<T>::kCount + j : lane + 32 * j);
}

// This lane's elements of a tile, with zeros after the end of the row.
template <class T, bool kPacks, class From>
__device__ __forceinline__ Pack<T> load_columns(const From* row, std::int64_t tile, std::int64_t cols,
                                                int lane) {
  static_assert(std::is_same_v<T, From>);
  Pack<T> x;
  if constexpr (kPacks) {
    const std::int64_t c = column<T, true>(tile, lane, 0);
    if (c < cols) return load_pack(row + c);
  }
  ZG_UNROLL
  for (int j = 0; j < Pack<T>::kCount; ++j) {
    const std::int64_t c = column<T, kPacks>(tile, lane, j);
    x.at[j] = !kPacks && c < cols ? row[c] : T{};
  }
  return x;
}

// Adds x to the same elements of a row of sums.
template <class T, bool kPacks>
__device__ __forceinline__ void add_columns(Acc<T>* row, std::int64_t tile, std::int64_t cols, int lane,
                                            const Acc<T> (&x)[Pack<T>::kCount]) {
  if constexpr (kPacks) {
    const std::int64_t c = column<T, true>(tile, lane, 0);
    if (c >= cols) return;
    ZG_UNROLL
    for (int p = 0; p < Pack<T>::kCount; p += Pack<Acc<T>>::kCount) {
      Pack<Acc<T>> sum = load_pack(row + c + p);
      ZG_UNROLL
      for (int j = 0; j < Pack<Acc<T>>::kCount; ++j) sum.at[j] += x[p + j];
      store_pack(row + c + p, sum);
    }
  } else {
    ZG_UNROLL
    for (int j = 0; j < Pack<T>::kCount; ++j) {
      const std::int64_t c = column<T, false>(tile, lane, j);
      if (c < cols) row[c] += x[j];
    }
  }
}

// Ids come from data: an id outside of the table must not become an address.
__device__ __forceinline__ std::int64_t checked(std::int64_t id, std::int64_t count) {
  if (id < 0 || id >= count) __trap();
  return id;
}

// The row of an id in this rank's table. It is outside of [0, vocabulary) if another vocabulary shard has the
// id.
template <class Args>
__device__ __forceinline__ std::int64_t row_of(const Args& args, std::int64_t id) {
  return checked(id, args.part.whole > 0 ? args.part.whole : args.vocabulary) - args.part.first;
}
template <class Args>
__device__ __forceinline__ bool is_here(const Args& args, std::int64_t row) {
  return row >= 0 && row < args.vocabulary;
}

// A warp computes one tile of one token.
template <class T, bool kPacks>
__global__ void __launch_bounds__(kThreads) embedding_rows(Extent extent, Embedding<T> args) {
  const std::int64_t r = std::int64_t{blockIdx.x} * kWarps + threadIdx.y, tile = blockIdx.y;
  if (r >= extent.rows) return;
  const int lane = static_cast<int>(threadIdx.x);
  const std::int64_t row = row_of(args, args.ids[r]);
  const bool here = is_here(args, row);
  if (args.part.only && !here) return;
  Pack<T> x = {};
  if (here) x = load_columns<T, kPacks>(args.wte.row(row), tile, extent.cols, lane);
  if (args.wpe.data != nullptr) {
    const T* const position =
        args.wpe.row(checked(position_of(args.rows, args.first_keys, r), args.positions));
    const Pack<T> p = load_columns<T, kPacks>(position, tile, extent.cols, lane);
    ZG_UNROLL
    for (int j = 0; j < Pack<T>::kCount; ++j) x.at[j] = from_acc<T>(to_acc(x.at[j]) + to_acc(p.at[j]));
  }
  T* const out = args.out.row(r);
  const std::int64_t first = column<T, kPacks>(tile, lane, 0);
  if constexpr (kPacks) {
    if (first < extent.cols) store_pack(out + first, x);
  } else {
    ZG_UNROLL
    for (int j = 0; j < Pack<T>::kCount; ++j) {
      if (first + 32 * j < extent.cols) out[first + 32 * j] = x.at[j];
    }
  }
}

// sum += the rows of dout whose bits are set in `mask`, in order; bit b stands for row row_of(b).
template <class T, bool kPacks, int kRows, class RowOf>
__device__ __forceinline__ void add_rows_of(unsigned mask, const EmbeddingBackward<T>& args,
                                            std::int64_t tile, std::int64_t cols, int lane,
                                            Acc<T> (&sum)[Pack<T>::kCount], const RowOf& row_of) {
  while (mask != 0) {
    Pack<T> x[kRows] = {};  // rows whose loads are in flight together
    int count = 0;
    ZG_UNROLL
    for (int u = 0; u < kRows; ++u) {
      if (mask == 0) continue;
      x[u] =
          load_columns<T, kPacks>(args.dout.row(row_of(__ffs(static_cast<int>(mask)) - 1)), tile, cols, lane);
      mask &= mask - 1;
      count = u + 1;
    }
    ZG_UNROLL
    for (int u = 0; u < kRows; ++u) {
      if (u >= count) continue;
      ZG_UNROLL
      for (int j = 0; j < Pack<T>::kCount; ++j) sum[j] += to_acc(x[u].at[j]);
    }
  }
}

// The table's gradient in a fixed order, without scratch. Ids are rows of the table (row_of()), and ids of
// other vocabulary shards are skipped. A block has some columns and a share of the ids: share s are the ids
// that are s modulo the number of shares, a power of two. It scans all ids, which take few bytes, for the ids
// of its share, and lists their tokens in order. When the list is full, and at the end, the rows of each id
// in it are summed in registers and added to the table once: by the warp that finds the id's first token in
// the list, or, if the id has more than kFew tokens, by all warps, each of which sums some windows of the
// list.
constexpr int kListed = 2048;
constexpr int kScanned = 4 * kThreads;  // ids that are scanned at a time
constexpr int kFew = 32;

template <class T>
struct List {
  int tokens[kListed], ids[kListed];
  int many[kListed / kFew];  // positions of the first tokens of ids with more than kFew tokens
  Acc<T> parts[kWarps][kTile<T>];
  int warp_counts[kWarps];
  int many_count;
};

// A mask of the 32 list positions from `window` on that have this id and are not before `begin`.
template <class T>
__device__ __forceinline__ unsigned same_id(const List<T>& list, int id, int window, int begin, int count,
                                            int lane) {
  const int i = window + lane;
  return __ballot_sync(kAll, i >= begin && i < count && list.ids[i] == id);
}

template <class T, bool kPacks>
struct ById {
  EmbeddingBackward<T> args;
  std::int64_t cols, first_tile, last_tile;
  List<T>& list;
  int warp, lane;

  // x += the rows of the id's tokens from list position `begin` on, in the windows first, first + stride, ...
  __device__ __forceinline__ void sum(int id, int begin, int first, int stride, int count, std::int64_t tile,
                                      Acc<T> (&x)[Pack<T>::kCount]) const {
    for (int w = first; w < count; w += stride) {
      const unsigned mask = same_id(list, id, w, begin, count, lane);
      add_rows_of<T, kPacks, 4>(mask, args, tile, cols, lane, x,
                                [&](int bit) { return std::int64_t{list.tokens[w + bit]}; });
    }
  }

  // Sums ids with few tokens, each by one warp; notes the others in list.many.
  __device__ __forceinline__ void first_tokens(int count) const {
    for (int i = warp; i < count; i += kWarps) {
      const int id = list.ids[i], window = i / 32 * 32;
      bool is_first = true;
      for (int w = 0; w <= window && is_first; w += 32) is_first = same_id(list, id, w, 0, i, lane) == 0;
      if (!is_first) continue;
      int tokens = 0;
      for (int w = window; w < count; w += 32) tokens += __popc(same_id(list, id, w, i, count, lane));
      if (tokens > kFew) {
        if (lane == 0) list.many[atomicAdd(&list.many_count, 1)] = i;
        continue;
      }
      Acc<T>* const row = args.dwte.row(checked(id, args.vocabulary));
      for (std::int64_t tile = first_tile; tile < last_tile; ++tile) {
        Acc<T> x[Pack<T>::kCount] = {};
        sum(id, i, window, 32, count, tile, x);
        add_columns<T, kPacks>(row, tile, cols, lane, x);
      }
    }
  }

  // Sums ids with many tokens, each by all warps; the warps' sums are added in order.
  __device__ __forceinline__ void many_tokens(int count) const {
    for (int m = 0; m < list.many_count; ++m) {
      const int i = list.many[m], id = list.ids[i];
      for (std::int64_t tile = first_tile; tile < last_tile; ++tile) {
        Acc<T> x[Pack<T>::kCount] = {};
        sum(id, i, 32 * warp, 32 * kWarps, count, tile, x);
        ZG_UNROLL
        for (int j = 0; j < Pack<T>::kCount; ++j) list.parts[warp][32 * j + lane] = x[j];
        __syncthreads();
        if (warp == 0) {
          for (int w = 1; w < kWarps; ++w) {
            ZG_UNROLL
            for (int j = 0; j < Pack<T>::kCount; ++j) x[j] += list.parts[w][32 * j + lane];
          }
          add_columns<T, kPacks>(args.dwte.row(checked(id, args.vocabulary)), tile, cols, lane, x);
        }
        __syncthreads();
      }
    }
  }

  __device__ __forceinline__ void add_listed(int count) const {
    if (threadIdx.x == 0) list.many_count = 0;
    __syncthreads();
    first_tokens(count);
    __syncthreads();
    many_tokens(count);
  }
};

__device__ __forceinline__ int4 load_ids(const std::int32_t* ids, std::int64_t i, std::int64_t tokens,
                                         bool whole) {
  if (whole && i + 4 <= tokens) return *aligned_as<const int4>(ids + i);
  return make_int4(i < tokens ? ids[i] : 0, i + 1 < tokens ? ids[i + 1] : 0, i + 2 < tokens ? ids[i + 2] : 0,
                   i + 3 < tokens ? ids[i + 3] : 0);
}

template <class T, bool kPacks>
__global__ void __launch_bounds__(kThreads, 3)
    embedding_by_id(Extent extent, EmbeddingBackward<T> args, std::int64_t tiles_each, bool whole_ids) {
  __shared__ List<T> list;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const std::int64_t tiles = (extent.cols + kTile<T> - 1) / kTile<T>;
  const std::int64_t first_tile = blockIdx.y * tiles_each;
  const std::int64_t last_tile = first_tile + tiles_each < tiles ? first_tile + tiles_each : tiles;
  const ById<T, kPacks> by_id{args, extent.cols, first_tile, last_tile, list, warp, lane};
  const int share = static_cast<int>(blockIdx.x), shares_less_one = static_cast<int>(gridDim.x) - 1;
  int count = 0;
  std::int64_t i = 4 * std::int64_t{threadIdx.x};
  int4 next = load_ids(args.ids, i, extent.rows, whole_ids);
  for (std::int64_t begin = 0; begin < extent.rows; begin += kScanned, i += kScanned) {
    int id[4] = {next.x, next.y, next.z, next.w};
    if (args.part.whole > 0) {
      ZG_UNROLL
      for (int j = 0; j < 4; ++j) id[j] = static_cast<int>(row_of(args, id[j]));
    }
    next = load_ids(args.ids, i + kScanned, extent.rows, whole_ids);
    unsigned found[4];
    int of_warp = 0, before = 0;
    ZG_UNROLL
    for (int j = 0; j < 4; ++j) {
      found[j] = __ballot_sync(kAll, i + j < extent.rows && (id[j] & shares_less_one) == share &&
                                         (args.part.whole == 0 || is_here(args, id[j])));
      of_warp += __popc(found[j]);
      before += __popc(found[j] & ((1u << lane) - 1));
    }
    if (lane == 0) list.warp_counts[warp] = of_warp;
    __syncthreads();
    int at = count + before;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) at += list.warp_counts[w];
      count += list.warp_counts[w];
    }
    ZG_UNROLL
    for (int j = 0; j < 4; ++j) {
      if ((found[j] >> lane & 1) == 0) continue;
      list.tokens[at] = static_cast<int>(i + j);
      list.ids[at] = id[j];
      ++at;
    }
    __syncthreads();
    if (count > kListed - kScanned || begin + kScanned >= extent.rows) {
      by_id.add_listed(count);
      count = 0;
    }
  }
}

// The table's gradient by atomics, in no fixed order.
template <class T, bool kPacks>
__global__ void __launch_bounds__(kThreads) embedding_by_atomics(Extent extent, EmbeddingBackward<T> args) {
  const std::int64_t r = std::int64_t{blockIdx.x} * kWarps + threadIdx.y, tile = blockIdx.y;
  if (r >= extent.rows) return;
  const int lane = static_cast<int>(threadIdx.x);
  const std::int64_t row = row_of(args, args.ids[r]);
  if (!is_here(args, row)) return;
  Acc<T>* const sums = args.dwte.row(row);
  const Pack<T> x = load_columns<T, kPacks>(args.dout.row(r), tile, extent.cols, lane);
  ZG_UNROLL
  for (int j = 0; j < Pack<T>::kCount; ++j) {
    const std::int64_t c = column<T, kPacks>(tile, lane, j);
    if (c < extent.cols) atomicAdd(sums + c, to_acc(x.at[j]));
  }
}

// The gradient of the position table: a warp adds one tile of one position over all sequences, in order.
template <class T, bool kPacks>
__global__ void __launch_bounds__(kThreads) embedding_by_position(Extent extent, EmbeddingBackward<T> args) {
  constexpr int kRows = 8;
  const std::int64_t p = std::int64_t{blockIdx.x} * kWarps + threadIdx.y, tile = blockIdx.y;
  const std::int64_t time = args.rows.time;
  if (p >= time || p >= extent.rows) return;
  const int lane = static_cast<int>(threadIdx.x);
  Acc<T> sum[Pack<T>::kCount] = {};
  for (std::int64_t r = p; r < extent.rows; r += kRows * time) {
    const std::int64_t left = (extent.rows - r + time - 1) / time;
    const unsigned mask = left >= kRows ? (1u << kRows) - 1 : (1u << left) - 1;
    add_rows_of<T, kPacks, kRows>(mask, args, tile, extent.cols, lane, sum,
                                  [&](int bit) { return r + bit * time; });
  }
  add_columns<T, kPacks>(args.dwpe.row(checked(args.rows.of(p), args.positions)), tile, extent.cols, lane,
                         sum);
}

// The same with documents: a warp scans all rows for rows at its position, 32 at a time, and adds them in
// order.
template <class T, bool kPacks>
__global__ void __launch_bounds__(kThreads) embedding_by_place(Extent extent, EmbeddingBackward<T> args) {
  const std::int64_t p = std::int64_t{blockIdx.x} * kWarps + threadIdx.y, tile = blockIdx.y;
  if (p >= args.positions) return;
  const int lane = static_cast<int>(threadIdx.x);
  Acc<T> sum[Pack<T>::kCount] = {};
  bool any = false;
  for (std::int64_t first = 0; first < extent.rows; first += 32) {
    const std::int64_t r = first + lane;
    const bool here =
        r < extent.rows && checked(position_of(args.rows, args.first_keys, r), args.positions) == p;
    const unsigned mask = __ballot_sync(kAll, here);
    any = any || mask != 0;
    add_rows_of<T, kPacks, 4>(mask, args, tile, extent.cols, lane, sum, [&](int bit) { return first + bit; });
  }
  if (any) add_columns<T, kPacks>(args.dwpe.row(p), tile, extent.cols, lane, sum);
}

// A warp for each row (along x) and tile (along y).
template <class T>
Shape warps_of(std::int64_t rows, std::int64_t cols) {
  return {dim3(static_cast<unsigned>((rows + kWarps - 1) / kWarps),
               static_cast<unsigned>((cols + kTile<T> - 1) / kTile<T>)),
          dim3(32, kWarps)};
}

template <class T, bool kPacks>
void backward_by_id(const Launch& on, Extent extent, const EmbeddingBackward<T>& args) {
  // The number of blocks is large enough that scans overlap and that the columns of a frequent id are spread
  // over several blocks, and so small that scanning costs less than adding. It depends on the sizes alone.
  constexpr std::int64_t kPieces = 4, kBlocks = 2048, kShares = 1024;
  const std::int64_t tiles = (extent.cols + kTile<T> - 1) / kTile<T>;
  if (tiles == 0 || extent.rows == 0) return;
  const std::int64_t each = (tiles + kPieces - 1) / kPieces, pieces = (tiles + each - 1) / each;
  std::int64_t shares = 1;
  while (shares < kShares && shares < extent.rows && 2 * shares * pieces <= kBlocks) shares *= 2;
  launch("embedding_backward", embedding_by_id<T, kPacks>, on,
         Shape{dim3(static_cast<unsigned>(shares), static_cast<unsigned>(pieces)), dim3(kThreads)}, extent,
         args, each, reinterpret_cast<std::uintptr_t>(args.ids) % sizeof(int4) == 0);
}

template <class T, bool kPacks>
void backward(const Launch& on, Extent extent, const EmbeddingBackward<T>& args) {
  if (args.dwte.data != nullptr && on.deterministic) backward_by_id<T, kPacks>(on, extent, args);
  if (args.dwte.data != nullptr && !on.deterministic) {
    launch("embedding_backward", embedding_by_atomics<T, kPacks>, on, warps_of<T>(extent.rows, extent.cols),
           extent, args);
  }
  if (args.dwpe.data != nullptr && args.first_keys != nullptr) {
    launch("embedding_backward", embedding_by_place<T, kPacks>, on, warps_of<T>(args.positions, extent.cols),
           extent, args);
  } else if (args.dwpe.data != nullptr) {
    const std::int64_t positions = args.rows.time < extent.rows ? args.rows.time : extent.rows;
    launch("embedding_backward", embedding_by_position<T, kPacks>, on, warps_of<T>(positions, extent.cols),
           extent, args);
  }
}

}  // namespace

template <class T>
void embedding(const Launch& on, Extent extent, const Embedding<T>& args) {
  const bool in_packs = extent.cols % Pack<T>::kCount == 0 && packs(args.wte.data, args.wte.ld) &&
                        packs(args.wpe.data, args.wpe.ld) && packs(args.out.data, args.out.ld);
  launch("embedding", in_packs ? embedding_rows<T, true> : embedding_rows<T, false>, on,
         warps_of<T>(extent.rows, extent.cols), extent, args);
}

template <class T>
void embedding_backward(const Launch& on, Extent extent, const EmbeddingBackward<T>& args) {
  const bool in_packs = extent.cols % Pack<T>::kCount == 0 && packs(args.dout.data, args.dout.ld) &&
                        packs(args.dwte.data, args.dwte.ld) && packs(args.dwpe.data, args.dwpe.ld);
  in_packs ? backward<T, true>(on, extent, args) : backward<T, false>(on, extent, args);
}

#define ZG_INSTANTIATE(T)                                              \
  template void embedding(const Launch&, Extent, const Embedding<T>&); \
  template void embedding_backward(const Launch&, Extent, const EmbeddingBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
