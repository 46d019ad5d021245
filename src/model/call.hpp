// What the parts of a model share: the operands of one call, and the layout of buffers in the caller's
// memory.
#pragma once
#include <cstddef>
#include <cstdint>

#include "ziggurat/base/units.hpp"
#include "ziggurat/model/model.hpp"

namespace zg::model {

inline DType accumulator_of(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

// Hands out views of one piece of memory, one after the other, each aligned to kAlign bytes. With a null base
// it only counts bytes: the same code computes a layout and its size, so the two cannot disagree.
class BufferPlan {
 public:
  static constexpr std::int64_t kAlign = 256;

  explicit BufferPlan(void* base) : base_(static_cast<char*>(base)) {
    ZG_ASSERT(reinterpret_cast<std::uintptr_t>(base) % kAlign == 0, "a buffer is not aligned to {} bytes",
              kAlign);
  }
  View take(DType dtype, std::int64_t rows, std::int64_t cols) { return take(dtype, rows, cols, cols); }
  View take(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t ld) {
    const View view(base_ ? base_ + bytes_ : nullptr, dtype, rows, cols, ld);
    bytes_ = round_up(bytes_ + rows * ld * static_cast<std::int64_t>(size_of(dtype)), kAlign);
    return view;
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  std::int64_t bytes_ = 0;
};

// One parameter's part [rows, cols] of a unit's flat tensor (weights or gradients).
inline View param_view(const View& flat, const Param& param) {
  const View at = flat.col_range(param.offset, param.count());
  return {at.data, at.dtype, param.rows, param.cols};
}

// The operands of one call on one unit. `grads` is null in a forward call.
struct Call {
  Ops& ops;
  Stream& stream;
  const ModelConfig& config;
  DType dtype;
  BatchShape shape;
  const Unit& unit;
  View weights, grads;
  std::int64_t logits_bytes = 0;  // of the head: see head_chunk_rows()
  Gradients into = Gradients::kAdd;
  ContextExchange* exchange = nullptr;  // null: sequences are whole

  View weight(std::size_t index) const { return param_view(weights, unit.params[index]); }
  View grad(std::size_t index) const { return param_view(grads, unit.params[index]); }

  // Weight matrices are w [out, in].
  // y = x w^T (+ bias)
  void linear(const View& x, const View& w, const View& bias, const View& y) const {
    GemmOptions options;
    options.b = Trans::kYes;
    options.bias = bias;
    ops.gemm(stream, x, w, y, options);
  }
  // y = x w^T (+ bias) + addend
  void linear_add(const View& x, const View& w, const View& bias, const View& addend, const View& y) const {
    GemmOptions options;
    options.b = Trans::kYes;
    options.bias = bias;
    options.addend = addend;
    ops.gemm(stream, x, w, y, options);
  }
  // y = gelu(inner), inner = x w^T + bias
  void linear_gelu(const View& x, const View& w, const View& bias, const View& inner, const View& y) const {
    GemmOptions options;
    options.b = Trans::kYes;
    options.bias = bias;
    options.gelu_input = inner;
    ops.gemm(stream, x, w, y, options);
  }
  // dx = (dy w) * gelu'(inner)
  void linear_dx_gelu(const View& dy, const View& w, const View& inner, const View& dx) const {
    GemmOptions options;
    options.gelu_backward = inner;
    ops.gemm(stream, dy, w, dx, options);
  }
  // dx = dy w
  void linear_dx(const View& dy, const View& w, const View& dx) const {
    ops.gemm(stream, dy, w, dx, GemmOptions{});
  }
  // dx += dy w
  void linear_dx_more(const View& dy, const View& w, const View& dx) const {
    GemmOptions options;
    options.accumulate = true;
    ops.gemm(stream, dy, w, dx, options);
  }
  // dw = dy^T x, or += by `how`
  void linear_dw(const View& dy, const View& x, const View& dw, Gradients how) const {
    GemmOptions options;
    options.a = Trans::kYes;
    options.accumulate = how == Gradients::kAdd;
    ops.gemm(stream, dy, x, dw, options);
  }
  void linear_dw(const View& dy, const View& x, const View& dw) const { linear_dw(dy, x, dw, into); }
  // The same, and db = the column sums of dy, or +=. scratch: [row groups, at least the columns of dy].
  void linear_dw_db(const View& dy, const View& x, const View& dw, const View& db,
                    const View& scratch) const {
    GemmOptions options;
    options.a = Trans::kYes;
    options.accumulate = into == Gradients::kAdd;
    options.bias_gradient = db;
    options.scratch = scratch;
    ops.gemm(stream, dy, x, dw, options);
  }
};

}  // namespace zg::model
