// Dropout (zg::Dropout in ziggurat/kernels/types.hpp defines the mask).
#include "ziggurat/kernels/dropout.hpp"

#include "kernels/host/elementwise.hpp"
#include "kernels/host/spans.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg::host {

template <class T>
void dropout(Extent extent, Strided<const T> x, const Dropout& dropout, Strided<T> y) {
  using A = Acc<T>;
  ZG_ASSERT(dropout.rate >= 0 && dropout.rate < 1, "dropout of rate {}", dropout.rate);
  const std::uint64_t threshold = kernels::dropout_threshold(dropout);
  const A scale = kernels::dropout_scale<A>(dropout);
  for_spans(extent, [&](std::int64_t r, std::int64_t c, std::int64_t n) {
    const T* from = x.row(r) + c;
    T* to = y.row(r) + c;
    const kernels::DropoutRow row(dropout, r);
    const std::int64_t first = dropout.first_column + c;
    Philox4 words = {};
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t column = first + i;
      if (i == 0 || column % 4 == 0) {
        words = philox4x32_10({static_cast<std::uint32_t>(column / 4), row.position, row.sequence, row.step},
                              {dropout.key.key[0], dropout.key.key[1]});
      }
      const A kept = static_cast<A>(from[i]) * scale;
      to[i] = static_cast<T>(words[static_cast<std::size_t>(column % 4)] >= threshold ? kept : A{0});
    }
  });
}

#define ZG_INSTANTIATE(T) template void dropout(Extent, Strided<const T>, const Dropout&, Strided<T>);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
