// The activations of gates: the sigmoid, SiLU and the tanh approximation of GELU, and their derivatives, for
// vectors. Included once for each instruction set, after hwy/contrib/math/math-inl.h, as simd.hpp is. Pure
// functions; any thread.
#if defined(ZG_KERNELS_HOST_GATES_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef ZG_KERNELS_HOST_GATES_HPP
#undef ZG_KERNELS_HOST_GATES_HPP
#else
#define ZG_KERNELS_HOST_GATES_HPP
#endif

#include <hwy/highway.h>

#include "ziggurat/kernels/types.hpp"

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// 1 / (1 + exp(-x)). The exponent is bounded where the result is negligible, so that exp stays finite.
template <class D, class V>
HWY_INLINE V sigmoid(D d, V x) {
  using A = hn::TFromD<D>;
  const V one = hn::Set(d, A{1});
  const V exponent = hn::Min(hn::Neg(x), hn::Set(d, static_cast<A>(sizeof(A) == 8 ? 700.0 : 88.0)));
  return hn::Div(one, hn::Add(one, hn::Exp(d, exponent)));
}

// GELU by tanh is x * sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3).
inline constexpr double kTwoSqrt2OverPi = 1.5957691216057307;
inline constexpr double kCubic = 0.044715;

// x, clamped to the range in which sigmoid(2u) still changes. Outside of it the cube of x could overflow.
template <class D, class V>
HWY_INLINE V gelu_domain(D d, V x) {
  using A = hn::TFromD<D>;
  return hn::Max(hn::Set(d, A{-30}), hn::Min(x, hn::Set(d, A{30})));
}
template <class D, class V>
HWY_INLINE V gelu_sigmoid(D d, V bounded) {
  using A = hn::TFromD<D>;
  const V square = hn::Mul(bounded, bounded);
  const V factor = hn::MulAdd(square, hn::Set(d, static_cast<A>(kTwoSqrt2OverPi * kCubic)),
                              hn::Set(d, static_cast<A>(kTwoSqrt2OverPi)));
  return sigmoid(d, hn::Mul(bounded, factor));
}

// An activation and its derivative.
template <class V>
struct Activated {
  V value, slope;
};
// Up as it is multiplied with the activation of the gate, and its derivative.
struct PlainUp {
  template <class D, class V>
  static HWY_INLINE Activated<V> up(D d, V u) {
    return {u, hn::Set(d, hn::TFromD<D>{1})};
  }
};
struct Silu : PlainUp {
  template <class D, class V>
  static HWY_INLINE V value(D d, V x) {
    return hn::Mul(x, sigmoid(d, x));
  }
  template <class D, class V>
  static HWY_INLINE Activated<V> both(D d, V x) {
    const V s = sigmoid(d, x), silu = hn::Mul(x, s);
    // silu' = s (1 + x (1 - s))
    return {silu, hn::MulAdd(silu, hn::Sub(hn::Set(d, hn::TFromD<D>{1}), s), s)};
  }
};
struct GeluTanh : PlainUp {
  template <class D, class V>
  static HWY_INLINE V value(D d, V x) {
    return hn::Mul(x, gelu_sigmoid(d, gelu_domain(d, x)));
  }
  template <class D, class V>
  static HWY_INLINE Activated<V> both(D d, V x) {
    using A = hn::TFromD<D>;
    const V bounded = gelu_domain(d, x), s = gelu_sigmoid(d, bounded);
    // d(2u)/dx
    const V slope =
        hn::MulAdd(hn::Mul(bounded, bounded), hn::Set(d, static_cast<A>(3 * kTwoSqrt2OverPi * kCubic)),
                   hn::Set(d, static_cast<A>(kTwoSqrt2OverPi)));
    const V rest = hn::Sub(hn::Set(d, A{1}), s);
    return {hn::Mul(x, s), hn::MulAdd(hn::Mul(x, slope), hn::Mul(s, rest), s)};
  }
};

// Gate::kClampedPairs. A NaN is not clamped.
struct ClampedPairs {
  template <class D, class V>
  static HWY_INLINE V value(D d, V x) {
    const V g = at_most(d, x);
    return hn::Mul(g, sigmoid(d, hn::Mul(g, hn::Set(d, static_cast<hn::TFromD<D>>(kPairsSlope)))));
  }
  template <class D, class V>
  static HWY_INLINE Activated<V> both(D d, V x) {
    using A = hn::TFromD<D>;
    const V slope = hn::Set(d, static_cast<A>(kPairsSlope)), g = at_most(d, x), scaled = hn::Mul(g, slope),
            s = sigmoid(d, scaled);
    // (g sigmoid(a g))' = s (1 + a g (1 - s))
    const V derivative = hn::Mul(s, hn::MulAdd(scaled, hn::Sub(hn::Set(d, A{1}), s), hn::Set(d, A{1})));
    return {hn::Mul(g, s), hn::IfThenZeroElse(hn::Gt(x, limit(d)), derivative)};
  }
  template <class D, class V>
  static HWY_INLINE Activated<V> up(D d, V u) {
    const V one = hn::Set(d, hn::TFromD<D>{1}), least = hn::Neg(limit(d));
    const auto low = hn::Lt(u, least), high = hn::Gt(u, limit(d));
    const V clamped = hn::IfThenElse(low, least, hn::IfThenElse(high, limit(d), u));
    return {hn::Add(clamped, one), hn::IfThenZeroElse(hn::Or(low, high), one)};
  }

 private:
  template <class D>
  static HWY_INLINE hn::Vec<D> limit(D d) {
    return hn::Set(d, static_cast<hn::TFromD<D>>(kPairsLimit));
  }
  template <class D, class V>
  static HWY_INLINE V at_most(D d, V x) {
    return hn::IfThenElse(hn::Gt(x, limit(d)), limit(d), x);
  }
};

}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the guard
