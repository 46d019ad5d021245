// What kernels derive from a Dropout, the same on every device.
#pragma once
#include <cmath>
#include <cstdint>

#include "ziggurat/kernels/types.hpp"

namespace zg::kernels {

// Words from here on stay: 2^32 where none does, so that more than 32 bits are needed.
inline std::uint64_t dropout_threshold(const Dropout& dropout) {
  return static_cast<std::uint64_t>(std::ceil(dropout.rate * 0x1p32));
}
// What stays is multiplied by this, in the type of arithmetic.
template <class A>
A dropout_scale(const Dropout& dropout) {
  return static_cast<A>(1 / (1 - dropout.rate));
}

}  // namespace zg::kernels
