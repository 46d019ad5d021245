// Keys and values of latent attention (ExpandKv). A thread copies N elements of a row, or sums the gradients
// of N columns that all keys share over the heads.
#include "kernels/cuda/held.hpp"
#include "kernels/cuda/kernels.hpp"

namespace zg::cuda {
namespace {

constexpr unsigned kThreads = 256;

// The row and the first column of a thread's elements. columns: of a row.
template <int N>
struct Item {
  std::int64_t row, col;
  __device__ __forceinline__ explicit Item(std::int64_t columns) {
    const std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
    row = item / (columns / N), col = item % (columns / N) * N;
  }
};

template <class T, int N>
__global__ void __launch_bounds__(kThreads) expand_heads(ExpandKv<T> x, std::int64_t rows) {
  const LatentHeads& h = x.heads;
  const Item<N> at(h.kv_columns());
  if (at.row >= rows) return;
  const T* const joint = x.joint.row(at.row);
  const T* from = nullptr;
  if (at.col < h.key_columns()) {
    const std::int64_t head = at.col / (h.plain + h.shared), col = at.col % (h.plain + h.shared);
    from = col < h.plain ? joint + head * (h.plain + h.value) + col : x.shared.row(at.row) + col - h.plain;
  } else {
    const std::int64_t head = (at.col - h.key_columns()) / h.value;
    from = joint + head * (h.plain + h.value) + h.plain + (at.col - h.key_columns()) % h.value;
  }
  store_elements(x.kv.row(at.row) + at.col, load_elements<N>(from));
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) gather_heads(ExpandKvBackward<T> x, std::int64_t rows) {
  using A = Acc<T>;
  const LatentHeads& h = x.heads;
  const Item<N> at(h.joint_columns() + h.shared);
  if (at.row >= rows) return;
  const T* const dkv = x.dkv.row(at.row);
  if (at.col < h.joint_columns()) {
    const std::int64_t head = at.col / (h.plain + h.value), col = at.col % (h.plain + h.value);
    const T* const from = col < h.plain ? dkv + head * (h.plain + h.shared) + col
                                        : dkv + h.key_columns() + head * h.value + col - h.plain;
    return store_elements(x.d_joint.row(at.row) + at.col, load_elements<N>(from));
  }
  const std::int64_t col = at.col - h.joint_columns();
  A sums[N] = {};
  ZG_NO_UNROLL
  for (std::int64_t head = 0; head < h.heads; ++head) {
    const auto part = load_elements<N>(dkv + head * (h.plain + h.shared) + h.plain + col);
    ZG_UNROLL
    for (int j = 0; j < N; ++j) sums[j] += part[j];
  }
  Elements<T, N> out = {};
  ZG_UNROLL
  for (int j = 0; j < N; ++j) out.set(j, from_acc<T>(sums[j]));
  store_elements(x.d_shared.row(at.row) + col, out);
}

// Whether all parts of heads are whole packs.
template <class T>
bool in_packs(const LatentHeads& h) {
  constexpr std::int64_t kCount = Pack<T>::kCount;
  return h.plain % kCount == 0 && h.shared % kCount == 0 && h.value % kCount == 0;
}
template <class T>
bool rows_in_packs(const Strided<T>& x) {
  return packs(x.data, x.ld);
}

Shape shape_of(std::int64_t items) {
  return Shape{dim3(static_cast<unsigned>((items + kThreads - 1) / kThreads)), kThreads};
}

}  // namespace

template <class T>
void expand_kv(const Launch& on, std::int64_t rows, const ExpandKv<T>& args) {
  constexpr int kCount = Pack<T>::kCount;
  const bool packed = in_packs<T>(args.heads) && rows_in_packs(args.joint) && rows_in_packs(args.shared) &&
                      rows_in_packs(args.kv);
  launch("expand_kv", packed ? expand_heads<T, kCount> : expand_heads<T, 1>, on,
         shape_of(rows * args.heads.kv_columns() / (packed ? kCount : 1)), args, rows);
}

template <class T>
void expand_kv_backward(const Launch& on, std::int64_t rows, const ExpandKvBackward<T>& args) {
  constexpr int kCount = Pack<T>::kCount;
  const std::int64_t columns = args.heads.joint_columns() + args.heads.shared;
  const bool packed = in_packs<T>(args.heads) && rows_in_packs(args.dkv) && rows_in_packs(args.d_joint) &&
                      rows_in_packs(args.d_shared);
  launch("expand_kv_backward", packed ? gather_heads<T, kCount> : gather_heads<T, 1>, on,
         shape_of(rows * columns / (packed ? kCount : 1)), args, rows);
}

#define ZG_INSTANTIATE(T)                                                   \
  template void expand_kv(const Launch&, std::int64_t, const ExpandKv<T>&); \
  template void expand_kv_backward(const Launch&, std::int64_t, const ExpandKvBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
