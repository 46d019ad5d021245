// Keys and values of latent attention (ExpandKv): each is copied to its place, and the gradients of the
// columns that all keys share are summed over heads.
#include <algorithm>
#include <cstdint>

#include "kernels/host/matrix.hpp"
#include "ziggurat/base/dtype.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::host {
namespace {

constexpr std::int64_t kGrain = 16;

// Calls visit(head's first column in `joint`, in the keys, and in the values) for each head.
template <class F>
void for_heads(const LatentHeads& x, const F& visit) {
  for (std::int64_t h = 0; h < x.heads; ++h)
    visit(h * (x.plain + x.value), h * (x.plain + x.shared), x.key_columns() + h * x.value);
}

}  // namespace

template <class T>
void expand_kv(std::int64_t rows, const ExpandKv<T>& args) {
  const LatentHeads& x = args.heads;
  parallel_for(rows, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const T *const joint = args.joint.row(r), *const shared = args.shared.row(r);
      T* const kv = args.kv.row(r);
      for_heads(x, [&](std::int64_t at, std::int64_t key, std::int64_t value) {
        std::copy_n(joint + at, x.plain, kv + key);
        std::copy_n(shared, x.shared, kv + key + x.plain);
        std::copy_n(joint + at + x.plain, x.value, kv + value);
      });
    }
  });
}

template <class T>
void expand_kv_backward(std::int64_t rows, const ExpandKvBackward<T>& args) {
  const LatentHeads& x = args.heads;
  parallel_for(rows, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const T* const dkv = args.dkv.row(r);
      T *const d_joint = args.d_joint.row(r), *const d_shared = args.d_shared.row(r);
      for_heads(x, [&](std::int64_t at, std::int64_t key, std::int64_t value) {
        std::copy_n(dkv + key, x.plain, d_joint + at);
        std::copy_n(dkv + value, x.value, d_joint + at + x.plain);
      });
      for (std::int64_t c = 0; c < x.shared; ++c) {
        Acc<T> sum = 0;
        for (std::int64_t h = 0; h < x.heads; ++h)
          sum += static_cast<Acc<T>>(dkv[h * (x.plain + x.shared) + x.plain + c]);
        d_shared[c] = static_cast<T>(sum);
      }
    }
  });
}

#define ZG_INSTANTIATE(T)                                    \
  template void expand_kv(std::int64_t, const ExpandKv<T>&); \
  template void expand_kv_backward(std::int64_t, const ExpandKvBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
