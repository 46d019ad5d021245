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
  // Worked in before C is stored; null: not there. Of type `in`, as `out` is then.
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
  // Sums are made in fp32 (fp64 for f64), in an order that depends on the operands' shapes, types and
  // alignment alone. Throws Error(kDevice), naming the product.
  virtual void multiply(StreamHandle stream, const Product& product) = 0;
  // Whether gelu_input and gelu_backward can be worked in; if not, they are passes of their own. A bias and
  // an addend always can.
  virtual bool fuses_gelu(DType in) const = 0;
  // "cuBLASLt 13.0.2"
  virtual std::string describe() const = 0;
};

struct BlasOptions {
  bool tf32 = false;  // products of f32 with 10 bits of mantissa
};

// "bf16 [4096, 768] x [768, 50257]^T -> f32", for messages.
std::string text_of(const Product& product);

// cuBLASLt. Takes a workspace of device memory for each stream that it is used on.
std::unique_ptr<Blas> make_cublaslt(Runtime& runtime, int device, const BlasOptions& options);

}  // namespace zg::cuda
