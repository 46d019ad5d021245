// The rules for operands that several ops share, and views as the typed pointers that kernels take. An
// operand that breaks a rule ends the process.
#pragma once
#include <cstdint>

#include "ziggurat/base/error.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/kernels/arguments.hpp"

namespace zg::checked {

using namespace kernels;

inline DType acc_of(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

// The view must have this type and shape.
inline void expect(const View& v, const char* name, DType dtype, std::int64_t rows, std::int64_t cols) {
  ZG_ASSERT(v.dtype == dtype && v.rows == rows && v.cols == cols, "{} is {} [{}, {}], expected {} [{}, {}]",
            name, name_of(v.dtype), v.rows, v.cols, name_of(dtype), rows, cols);
  ZG_ASSERT(v.data != nullptr || v.count() == 0, "{} is null", name);
  ZG_ASSERT(v.ld >= v.cols || v.rows <= 1, "{}: rows of {} elements, {} apart", name, v.cols, v.ld);
}

// Calls f<T>() for this storage type.
template <class F>
void with_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kF32:
      return f.template operator()<float>();
    case DType::kBF16:
      return f.template operator()<bf16>();
    case DType::kF16:
      return f.template operator()<fp16>();
    case DType::kF64:
      return f.template operator()<double>();
    default:
      ZG_ASSERT(false, "no kernel for {}", name_of(dtype));
  }
}

template <class T>
Strided<T> strided(const View& v) {
  return v.data == nullptr ? Strided<T>() : Strided<T>(v.as<T>(), v.ld);
}

inline Extent extent_of(const View& v) {
  return {v.rows, v.cols};
}

// The view must have `count` elements, without gaps.
inline void expect_dense(const View& v, const char* name, std::int64_t count) {
  ZG_ASSERT(v.count() == count && (v.rows <= 1 || v.ld == v.cols),
            "{} is [{}, {}] with rows {} apart, expected {} in one piece", name, v.rows, v.cols, v.ld, count);
  ZG_ASSERT(v.data != nullptr || count == 0, "{} is null", name);
}

inline void expect_dense(const View& v, const char* name, DType dtype, std::int64_t count) {
  ZG_ASSERT(v.dtype == dtype, "{} is {}, expected {}", name, name_of(v.dtype), name_of(dtype));
  expect_dense(v, name, count);
}

inline void expect_scratch(const View& scratch, std::int64_t bytes) {
  ZG_ASSERT(scratch.count() >= bytes && (scratch.data != nullptr || bytes == 0),
            "attention needs {} bytes of scratch, given {}", bytes, scratch.count());
}
inline void expect_quantized(const View& values, int bits, const View& codes) {
  ZG_ASSERT(bits == 8 || bits == 4, "codes of {} bits", bits);
  expect_dense(values, "values", values.count());
  expect_dense(codes, "codes", DType::kU8, quantized_bytes(values.count(), bits));
  ZG_ASSERT_EQ(reinterpret_cast<std::uintptr_t>(codes.data) % 4, 0u);
}
// Libraries refuse a leading dimension that is too small even where there is only one row.
inline void expect_leading_dimension(const View& v) {
  ZG_ASSERT_GE(v.ld, v.cols);
}
inline bool has_epilogue(const GemmOptions& o) {
  return o.bias || o.addend || o.gelu_input || o.gelu_backward;
}
inline void check_epilogue(const GemmOptions& o, DType t, const View& c) {
  if (!has_epilogue(o)) return;
  expect(c, "c", t, c.rows, c.cols);
  ZG_ASSERT(!o.accumulate,
            "a bias, or what else is added to a product, would be added once more with every accumulation");
  if (o.bias) expect(o.bias, "bias", t, 1, c.cols);
  for (const View& v : {o.addend, o.gelu_input, o.gelu_backward}) {
    if (!v) continue;
    expect(v, "an operand of the epilogue", t, c.rows, c.cols);
    expect_leading_dimension(v);
    ZG_ASSERT(v.data != c.data, "an operand of the epilogue is C itself");
  }
  ZG_ASSERT(!o.addend + !o.gelu_input + !o.gelu_backward >= 2, "more than one of addend and gelu");
  ZG_ASSERT(!o.gelu_backward || !o.bias, "a bias has no place in a backward");
}

}  // namespace zg::checked
