// The gradient of attention's sinks.
#include <cmath>
#include <cstdint>

#include "kernels/host/matrix.hpp"
#include "ziggurat/base/dtype.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::host {

// For each head the sum over the rows has a fixed order.
template <class T>
void attention_sinks_backward(const AttentionSinksBackward<T>& x) {
  parallel_for(x.heads, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t h = begin; h < end; ++h) {
      const auto sink = static_cast<Acc<T>>(x.sinks[h]);
      double sum = 0;
      for (std::int64_t r = 0; r < x.batch * x.time; ++r) {
        const T *o = x.o.row(r) + h * x.value_size, *d_o = x.d_o.row(r) + h * x.value_size;
        Acc<T> dot = 0;
        for (std::int64_t c = 0; c < x.value_size; ++c)
          dot += static_cast<Acc<T>>(o[c]) * static_cast<Acc<T>>(d_o[c]);
        sum += dot * std::exp(sink - x.lse.row(r / x.time * x.heads + h)[r % x.time]);
      }
      x.d_sinks[h] -= static_cast<Acc<T>>(sum);
    }
  });
}

#define ZG_INSTANTIATE(T) template void attention_sinks_backward(const AttentionSinksBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
