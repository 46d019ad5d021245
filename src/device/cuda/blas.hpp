// Matrix products on a CUDA device.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "device/cuda/runtime.hpp"
#include "ziggurat/base/dtype.hpp"
#include "ziggurat/kernels/arguments.hpp"

namespace zg::cuda {

struct Product {
  kernels::GemmShape shape;
  DType in = DType::kF32, out = DType::kF32;
  const void *a = nullptr, *b = nullptr;
  void* c = nullptr;
  // The epilogue (GemmOptions in ziggurat/device/ops.hpp); a null pointer: no such part. Operands of type
  // `in`, which `out` must equal then. Leading dimensions in elements.
  const void* bias = nullptr;  // [n]
  const void* addend = nullptr;
  std::int64_t ld_addend = 0;
  void* gelu_input = nullptr;
  std::int64_t ld_gelu_input = 0;
  const void* gelu_backward = nullptr;
  std::int64_t ld_gelu_backward = 0;
};

class Blas {
 public:
  virtual ~Blas() = default;
  // Enqueues the product. Sums are in fp32 (fp64 for f64), in an order that depends on the operands'
  // shapes, types and alignment alone. Throws Error(kDevice), naming the product.
  virtual void multiply(StreamHandle stream, const Product& product) = 0;
  // Whether gelu_input and gelu_backward can be fused; if not, the caller makes them passes of their own. A
  // bias and an addend can always be fused.
  virtual bool fuses_gelu(DType in) const = 0;
  // "cuBLASLt 13.0.2"
  virtual std::string describe() const = 0;
};

struct BlasOptions {
  bool tf32 = false;  // fp32 products on TF32 tensor cores (10 bits of mantissa)
};

// The product for messages: "bf16 [4096, 768] x [768, 50257]^T -> f32".
std::string text_of(const Product& product);

// Products by cuBLASLt. It takes a workspace of device memory, outside of the arena, for each stream that
// uses it.
std::unique_ptr<Blas> make_cublaslt(Runtime& runtime, int device, const BlasOptions& options);

}  // namespace zg::cuda
