// Constants that the dropout kernels of every device derive from a Dropout.
#pragma once
#include <cmath>
#include <cstdint>

#include "ziggurat/kernels/types.hpp"

namespace zg::kernels {

// An element is kept if its random 32-bit word is at least this. With a rate near 1 it is 2^32, which no word
// reaches: hence 64 bits.
inline std::uint64_t dropout_threshold(const Dropout& dropout) {
  return static_cast<std::uint64_t>(std::ceil(dropout.rate * 0x1p32));
}
// The factor of elements that are kept, 1 / (1 - rate), in the type A of arithmetic.
template <class A>
A dropout_scale(const Dropout& dropout) {
  return static_cast<A>(1 / (1 - dropout.rate));
}

}  // namespace zg::kernels
