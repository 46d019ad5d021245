// Dropout, with the same bits as kernels/host/dropout.cpp.
#include "ziggurat/kernels/dropout.hpp"

#include "kernels/cuda/elementwise.hpp"
#include "kernels/cuda/philox.hpp"

namespace zg::cuda {
namespace {

template <class A>
struct ApplyDropout {
  using ByRow = void;  // takes rows and columns: a row begins at the first word of a Philox block
  Dropout dropout;
  std::uint64_t threshold;
  uint2 key;
  A scale;

  __device__ __forceinline__ A kept(A x, unsigned word) const { return word >= threshold ? x * scale : A{0}; }

  __device__ __forceinline__ uint4 words_of(unsigned block, const kernels::DropoutRow& of) const {
    return philox4x32_10(make_uint4(block, of.position, of.sequence, of.step), key);
  }
  // If the view's first column is a multiple of 4, a pack (N > 1) begins at the first word of a Philox block
  // or, for N = 2, perhaps at the third. Otherwise the word of each column is looked up by itself.
  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t row, std::int64_t column, const A (&in)[1][N],
                                             A (&out)[1][N]) const {
    const kernels::DropoutRow of(dropout, row);
    const auto at = static_cast<unsigned>(dropout.first_column + column);
    if (dropout.first_column % 4 != 0) {
      ZG_UNROLL
      for (int i = 0; i < N; ++i) {
        const unsigned c = at + static_cast<unsigned>(i);
        const uint4 words = words_of(c / 4, of);
        const unsigned left = c % 2 == 0 ? words.x : words.y, right = c % 2 == 0 ? words.z : words.w;
        out[0][i] = kept(in[0][i], c % 4 < 2 ? left : right);
      }
      return;
    }
    constexpr int kBlocks = (N + 3) / 4;
    ZG_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      const uint4 words = words_of(at / 4 + static_cast<unsigned>(b), of);
      if constexpr (N >= 4) {
        out[0][4 * b] = kept(in[0][4 * b], words.x);
        out[0][4 * b + 1] = kept(in[0][4 * b + 1], words.y);
        out[0][4 * b + 2] = kept(in[0][4 * b + 2], words.z);
        out[0][4 * b + 3] = kept(in[0][4 * b + 3], words.w);
      } else {
        const bool right = at % 4 >= 2;
        const unsigned even = right ? words.z : words.x, odd = right ? words.w : words.y;
        if constexpr (N == 2) {
          out[0][0] = kept(in[0][0], even);
          out[0][1] = kept(in[0][1], odd);
        } else {
          out[0][0] = kept(in[0][0], at % 2 == 0 ? even : odd);
        }
      }
    }
  }
};

}  // namespace

template <class T>
void dropout(const Launch& on, Extent extent, Strided<const T> x, const Dropout& dropout, Strided<T> y) {
  using A = Acc<T>;
  const ApplyDropout<A> f{dropout, dropout_threshold(dropout),
                          make_uint2(dropout.key.key[0], dropout.key.key[1]), dropout_scale<A>(dropout)};
  elementwise<T, 1, 1>("dropout", on, extent, {{x}, {y}}, f);
}

#define ZG_INSTANTIATE(T) \
  template void dropout(const Launch&, Extent, Strided<const T>, const Dropout&, Strided<T>);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
