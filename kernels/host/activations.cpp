// GELU, gated activations, addition and scaling.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/host/activations.cpp"
// clang-format off
#include "kernels/host/targets.hpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
// clang-format on

#include "kernels/host/elementwise.hpp"
#include "kernels/host/for_each_type.hpp"
#include "kernels/host/gates.hpp"
#include "kernels/host/lanes.hpp"
#include "kernels/host/spans.hpp"

#ifndef ZG_ACTIVATION_KERNELS
#define ZG_ACTIVATION_KERNELS
namespace zg::host {
// The kernels of one instruction set, each over n consecutive elements.
template <class T>
struct ActivationKernels {
  void (*gelu)(std::int64_t n, const T* x, T* y);
  void (*gelu_backward)(std::int64_t n, const T* x, const T* dy, T* dx);
  // Indexed by Gate.
  void (*gated[2])(std::int64_t n, const T* gate, const T* up, T* y);
  void (*gated_backward[2])(std::int64_t n, const T* gate, const T* up, const T* dy, T* dgate, T* dup);
  void (*add)(std::int64_t n, const T* a, const T* b, T* out);
  void (*scale)(std::int64_t n, const T* x, Acc<T> factor, T* y);
};
}  // namespace zg::host
#endif

HWY_BEFORE_NAMESPACE();
namespace zg::host::HWY_NAMESPACE {
namespace {

template <class T>
void gelu(std::int64_t n, const T* x, T* y) {
  const Lanes<T> d;
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    save(d, GeluTanh::value(d, load(d, x + i, w)), y + i, w);
  });
}

template <class T>
void gelu_backward(std::int64_t n, const T* x, const T* dy, T* dx) {
  const Lanes<T> d;
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    const auto activated = GeluTanh::both(d, load(d, x + i, w));
    save(d, hn::Mul(load(d, dy + i, w), activated.slope), dx + i, w);
  });
}

template <class Activation, class T>
void gated(std::int64_t n, const T* gate, const T* up, T* y) {
  const Lanes<T> d;
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    const auto g = load(d, gate + i, w);
    save(d, hn::Mul(Activation::value(d, g), load(d, up + i, w)), y + i, w);
  });
}

template <class Activation, class T>
void gated_backward(std::int64_t n, const T* gate, const T* up, const T* dy, T* dgate, T* dup) {
  const Lanes<T> d;
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    const auto g = load(d, gate + i, w);
    const auto u = load(d, up + i, w);
    const auto e = load(d, dy + i, w);
    const auto activated = Activation::both(d, g);
    save(d, hn::Mul(hn::Mul(e, u), activated.slope), dgate + i, w);
    save(d, hn::Mul(e, activated.value), dup + i, w);
  });
}

template <class T>
void add(std::int64_t n, const T* a, const T* b, T* out) {
  const Lanes<T> d;
  for_lanes(d, n, [&](std::int64_t i, auto w) HWY_ATTR {
    save(d, hn::Add(load(d, a + i, w), load(d, b + i, w)), out + i, w);
  });
}

template <class T>
void scale(std::int64_t n, const T* x, Acc<T> factor, T* y) {
  const Lanes<T> d;
  const auto times = hn::Set(d, factor);
  for_lanes(d, n,
            [&](std::int64_t i, auto w) HWY_ATTR { save(d, hn::Mul(load(d, x + i, w), times), y + i, w); });
}

template <class T>
ActivationKernels<T> activations_of() {
  return {gelu<T>,
          gelu_backward<T>,
          {gated<Silu, T>, gated<GeluTanh, T>},
          {gated_backward<Silu, T>, gated_backward<GeluTanh, T>},
          add<T>,
          scale<T>};
}
ForEachType<ActivationKernels> activations() {
  return {activations_of<float>(), activations_of<bf16>(), activations_of<fp16>(), activations_of<double>()};
}

}  // namespace
}  // namespace zg::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zg::host {
namespace {
HWY_EXPORT(activations);

template <class T>
ActivationKernels<T> kernels() {
  return std::get<ActivationKernels<T>>(HWY_DYNAMIC_DISPATCH(activations)());
}
}  // namespace

template <class T>
void gelu(Extent extent, Strided<const T> x, Strided<T> y) {
  const auto k = kernels<T>();
  for_spans(flattened(extent, x, y),
            [&](std::int64_t r, std::int64_t c, std::int64_t n) { k.gelu(n, x.row(r) + c, y.row(r) + c); });
}

template <class T>
void gelu_backward(Extent extent, Strided<const T> x, Strided<const T> dy, Strided<T> dx) {
  const auto k = kernels<T>();
  for_spans(flattened(extent, x, dy, dx), [&](std::int64_t r, std::int64_t c, std::int64_t n) {
    k.gelu_backward(n, x.row(r) + c, dy.row(r) + c, dx.row(r) + c);
  });
}

template <class T>
void swiglu(Extent extent, Strided<const T> gate_up, Strided<T> y, Gate activation) {
  const auto kernel = kernels<T>().gated[static_cast<int>(activation)];
  for_spans(extent, [&](std::int64_t r, std::int64_t c, std::int64_t n) {
    const T* gate = gate_up.row(r) + c;
    kernel(n, gate, gate + extent.cols, y.row(r) + c);
  });
}

template <class T>
void swiglu_backward(Extent extent, Strided<const T> gate_up, Strided<const T> dy, Strided<T> d_gate_up,
                     Gate activation) {
  const auto kernel = kernels<T>().gated_backward[static_cast<int>(activation)];
  for_spans(extent, [&](std::int64_t r, std::int64_t c, std::int64_t n) {
    const T* gate = gate_up.row(r) + c;
    T* dgate = d_gate_up.row(r) + c;
    kernel(n, gate, gate + extent.cols, dy.row(r) + c, dgate, dgate + extent.cols);
  });
}

template <class T>
void add(Extent extent, Strided<const T> a, Strided<const T> b, Strided<T> out) {
  const auto k = kernels<T>();
  for_spans(flattened(extent, a, b, out), [&](std::int64_t r, std::int64_t c, std::int64_t n) {
    k.add(n, a.row(r) + c, b.row(r) + c, out.row(r) + c);
  });
}

template <class T>
void scale(Extent extent, Strided<const T> x, Acc<T> factor, Strided<T> y) {
  const auto k = kernels<T>();
  for_spans(flattened(extent, x, y), [&](std::int64_t r, std::int64_t c, std::int64_t n) {
    k.scale(n, x.row(r) + c, factor, y.row(r) + c);
  });
}

#define ZG_INSTANTIATE(T)                                                                      \
  template void gelu(Extent, Strided<const T>, Strided<T>);                                    \
  template void gelu_backward(Extent, Strided<const T>, Strided<const T>, Strided<T>);         \
  template void swiglu(Extent, Strided<const T>, Strided<T>, Gate);                            \
  template void swiglu_backward(Extent, Strided<const T>, Strided<const T>, Strided<T>, Gate); \
  template void add(Extent, Strided<const T>, Strided<const T>, Strided<T>);                   \
  template void scale(Extent, Strided<const T>, Acc<T>, Strided<T>);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::host
#endif  // HWY_ONCE
