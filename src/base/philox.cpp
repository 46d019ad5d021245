#include "ziggurat/base/philox.hpp"

#include <cmath>
#include <numbers>

namespace zg {

float NamedRandom::normal(std::uint64_t index) const {
  const Philox4 b = block(index);
  const double u = (static_cast<double>(b[0]) + 0.5) * 0x1p-32;
  const double v = static_cast<double>(b[1]) * 0x1p-32;
  return static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v));
}

}  // namespace zg
