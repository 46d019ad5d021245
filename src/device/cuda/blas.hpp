// Matrix products on a CUDA device: a library's algorithms (Blas), and the choice between them (Products).
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>

#include "device/cuda/runtime.hpp"
#include "ziggurat/base/dtype.hpp"
#include "ziggurat/kernels/arguments.hpp"

namespace zg::cuda {

struct Product {
  kernels::GemmShape shape;
  DType in = DType::kF32, out = DType::kF32;
  const void *a = nullptr, *b = nullptr;
  void* c = nullptr;
  // The epilogue (GemmOptions in ziggurat/device/ops.hpp); a null pointer: that step is absent. Operands have
  // type `in`, and with an epilogue `out` must be the same type. Leading dimensions are in elements.
  const void* bias = nullptr;  // [n]
  const void* addend = nullptr;
  std::int64_t ld_addend = 0;
  void* gelu_input = nullptr;
  std::int64_t ld_gelu_input = 0;
  const void* gelu_backward = nullptr;
  std::int64_t ld_gelu_backward = 0;
  // [m], of type `out`: overwritten with the row sums of op(A), even if C is added to.
  void* bias_gradient = nullptr;
};

// The steps of an epilogue that a library may lack. The addend is none of them: it is the C of C = A B + C.
enum Part : unsigned { kBias = 1, kGeluInput = 2, kGeluBackward = 4, kBiasGradient = 8 };

// A library of products. All calls come from one thread at a time.
class Blas {
 public:
  // The library's plan for one product, and for all products that differ from it only in addresses of the
  // same alignment.
  class Plan {
   public:
    virtual ~Plan() = default;
    // Enqueues such a product. Throws Error(kDevice), naming it.
    virtual void run(StreamHandle stream, const Product& product) = 0;
  };
  virtual ~Blas() = default;
  // Null: the library has no algorithm for the product with its epilogue. Sums are in fp32 (fp64 for f64), in
  // an order that depends only on the operands' shapes, types and alignment.
  virtual std::unique_ptr<Plan> plan(const Product& product) = 0;
  // "cuBLASLt 13.0.2"
  virtual std::string describe() const = 0;
};

// Has the library plan each product once, with as much of the epilogue as the library has an algorithm for.
// May be called from any thread.
class Products {
 public:
  explicit Products(Blas& blas) : blas_(blas) {}
  // Enqueues the product, and returns the steps (Part) of its epilogue that were left out: the caller makes
  // them, in the order of their values. If kGeluInput is among them, gelu_input holds the product and C is
  // not written yet. Throws Error(kDevice), naming the product, if even the plain product has no algorithm.
  unsigned multiply(StreamHandle stream, const Product& product);

 private:
  // All that a plan may depend on.
  using Key =
      std::tuple<std::int64_t, std::int64_t, std::int64_t, bool, bool, std::int64_t, std::int64_t,
                 std::int64_t, bool, DType, DType, unsigned, bool, std::int64_t, std::int64_t, std::uint64_t>;
  struct Choice {
    std::unique_ptr<Blas::Plan> plan;
    unsigned left = 0;
  };
  static Key key_of(const Product& product);
  Choice choose(const Product& product);

  Blas& blas_;
  std::mutex mutex_;  // guards the members below, and calls of the library
  std::map<Key, Choice> choices_;
  std::set<std::string> said_;  // texts already logged
};

struct BlasOptions {
  bool tf32 = false;  // fp32 products on TF32 tensor cores (10 bits of mantissa)
};

// The product for messages: "bf16 [4096, 768] x [768, 50257]^T -> f32, bias".
std::string text_of(const Product& product);

// Products by cuBLASLt. It takes a workspace of device memory, outside of the arena, for each stream that
// uses it.
std::unique_ptr<Blas> make_cublaslt(Runtime& runtime, int device, const BlasOptions& options);

}  // namespace zg::cuda
