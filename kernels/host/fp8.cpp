#include "kernels/host/fp8.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/fp8.cpp"
// clang-format off
#include "kernels/host/targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <cmath>

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

// A magnitude replaces the largest one only if it compares greater, which no NaN does.
float largest_magnitude(const float* from, std::int64_t n) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto most = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto size = hn::Abs(hn::LoadU(d, from + i));
    most = hn::IfThenElse(hn::Lt(most, size), size, most);
  }
  float each[hn::MaxLanes(hn::ScalableTag<float>())];
  hn::StoreU(most, d, each);
  float largest = *std::max_element(each, each + lanes);
  for (; i < n; ++i) largest = std::max(largest, std::abs(from[i]));
  return largest;
}

// From 2^-6 on the numbers of e4m3 are normal: three bits of the mantissa stay, and exponents count from
// another bias. Smaller ones are multiples of 2^-9, as are the floats from 2^14 on.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> e4m3_of(D d, hn::Vec<D> x) {
  const hn::RebindToUnsigned<D> d32;
  const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(d32, x)), hn::Set(d32, 0x80u));
  const auto size = hn::Min(hn::Abs(x), hn::Set(d, kLargestE4m3));
  const auto bits = hn::BitCast(d32, size);
  const auto odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(d32, 1u));
  const auto rounded = hn::ShiftRight<20>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7ffffu))));
  const auto normal = hn::Sub(rounded, hn::Set(d32, (127u - 7u) << 3));
  const auto multiples = hn::BitCast(d32, hn::Add(size, hn::Set(d, 0x1p14f)));
  const auto subnormal = hn::Sub(multiples, hn::BitCast(d32, hn::Set(d, 0x1p14f)));
  const auto small = hn::RebindMask(d32, hn::Lt(size, hn::Set(d, 0x1p-6f)));
  const auto number = hn::IfThenElse(small, subnormal, normal);
  const auto nan = hn::RebindMask(d32, hn::IsNaN(x));
  const auto code = hn::Or(hn::IfThenElse(nan, hn::Set(d32, 0x7fu), number), sign);
  return hn::BitCast(hn::RebindToSigned<D>(), code);
}

void encode_e4m3(const float* in, std::int64_t n, float factor, std::uint8_t* codes) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<std::uint8_t, decltype(d)> d8;
  constexpr std::size_t kMost = hn::MaxLanes(hn::ScalableTag<float>());
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto times = hn::Set(d, factor);
  const auto encode = [&](const float* from, std::uint8_t* to) HWY_ATTR {
    hn::StoreU(hn::DemoteTo(d8, e4m3_of(d, hn::Mul(hn::LoadU(d, from), times))), d8, to);
  };
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) encode(in + i, codes + i);
  if (i == n) return;
  float rest[kMost] = {};
  std::uint8_t made[kMost];
  std::copy_n(in + i, n - i, rest);
  encode(rest, made);
  std::copy_n(made, n - i, codes + i);
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
HWY_EXPORT(largest_magnitude);
HWY_EXPORT(encode_e4m3);

float largest_magnitude(const float* from, std::int64_t n) {
  return HWY_DYNAMIC_DISPATCH(largest_magnitude)(from, n);
}
void encode_e4m3(const float* in, std::int64_t n, float factor, std::uint8_t* codes) {
  HWY_DYNAMIC_DISPATCH(encode_e4m3)(in, n, factor, codes);
}

}  // namespace zg::host
#endif  // HWY_ONCE
