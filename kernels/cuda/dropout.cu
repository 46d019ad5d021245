// Dropout, with the same bits as kernels/host/dropout.cpp.
#include "ziggurat/kernels/dropout.hpp"

#include "kernels/cuda/elementwise.hpp"
#include "kernels/cuda/philox.hpp"

namespace zg::cuda {
namespace {

template <class A>
struct ApplyDropout {
  std::uint64_t threshold, first, counter;
  uint2 key;
  A scale;

  __device__ __forceinline__ A of(A x, unsigned word) const { return word >= threshold ? x * scale : A{0}; }

  // For N > 1 a pack begins at the first word of a Philox block, or, for N = 2, perhaps at the third.
  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t element, const A (&in)[1][N],
                                             A (&out)[1][N]) const {
    const std::uint64_t at = first + static_cast<std::uint64_t>(element);
    constexpr int kBlocks = (N + 3) / 4;
    ZG_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      const std::uint64_t block = at / 4 + static_cast<std::uint64_t>(b);
      const uint4 words =
          philox4x32_10(make_uint4(static_cast<unsigned>(block), static_cast<unsigned>(block >> 32),
                                   static_cast<unsigned>(counter), static_cast<unsigned>(counter >> 32)),
                        key);
      if constexpr (N >= 4) {
        out[0][4 * b] = of(in[0][4 * b], words.x);
        out[0][4 * b + 1] = of(in[0][4 * b + 1], words.y);
        out[0][4 * b + 2] = of(in[0][4 * b + 2], words.z);
        out[0][4 * b + 3] = of(in[0][4 * b + 3], words.w);
      } else {
        const bool right = at % 4 >= 2;
        const unsigned even = right ? words.z : words.x, odd = right ? words.w : words.y;
        if constexpr (N == 2) {
          out[0][0] = of(in[0][0], even);
          out[0][1] = of(in[0][1], odd);
        } else {
          out[0][0] = of(in[0][0], at % 2 == 0 ? even : odd);
        }
      }
    }
  }
};

}  // namespace

template <class T>
void dropout(const Launch& on, Extent extent, Strided<const T> x, const Dropout& dropout, Strided<T> y) {
  using A = Acc<T>;
  const ApplyDropout<A> f{dropout_threshold(dropout), static_cast<std::uint64_t>(dropout.first_element),
                          dropout.counter, make_uint2(dropout.key.key[0], dropout.key.key[1]),
                          dropout_scale<A>(dropout)};
  // Packs need that the first element, and every row, begins at the first word of a Philox block. (A matrix
  // without gaps is one long row.)
  const bool dense = x.ld == extent.cols && y.ld == extent.cols;
  const bool may_pack = dropout.first_element % 4 == 0 && (dense || extent.rows == 1 || extent.cols % 4 == 0);
  elementwise<T, 1, 1>("dropout", on, extent, {{x}, {y}}, f, may_pack);
}

#define ZG_INSTANTIATE(T) \
  template void dropout(const Launch&, Extent, Strided<const T>, const Dropout&, Strided<T>);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
