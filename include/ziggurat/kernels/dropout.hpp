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
// The factor of kept elements, 1 / (1 - rate), in the type A of the arithmetic.
template <class A>
A dropout_scale(const Dropout& dropout) {
  return static_cast<A>(1 / (1 - dropout.rate));
}

// The words of Philox's counter that belong to row `r` of the view. They follow the counter's first word, the
// index of the block of four columns.
struct DropoutRow {
  std::uint32_t position, sequence, step;
  constexpr DropoutRow(const Dropout& dropout, std::int64_t r) : DropoutRow(row_of(dropout, r), dropout) {}

 private:
  constexpr DropoutRow(std::int64_t row, const Dropout& dropout)
      : position(static_cast<std::uint32_t>(dropout.positions.of(row))),
        sequence(static_cast<std::uint32_t>(dropout.first_sequence + row / dropout.positions.time)),
        step(static_cast<std::uint32_t>(dropout.step)) {}
  static constexpr std::int64_t row_of(const Dropout& dropout, std::int64_t r) {
    return dropout.slots == nullptr ? dropout.first_row + r : dropout.slots[r] / dropout.per_token;
  }
};

}  // namespace zg::kernels
