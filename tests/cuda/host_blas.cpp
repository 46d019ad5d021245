#include "tests/cuda/host_blas.hpp"

#include "kernels/cuda/emulation/emulation.hpp"
#include "kernels/host/elementwise.hpp"
#include "kernels/host/matrix.hpp"
#include "tests/cuda/fake_runtime.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::test {
namespace {

using cuda::Product;

template <class In, class Out>
void run(const Product& p) {
  const In *a = static_cast<const In*>(p.a), *b = static_cast<const In*>(p.b);
  const In* bias = static_cast<const In*>(p.bias);
  if constexpr (std::is_same_v<In, Out>) {
    const host::Extent extent{p.shape.m, p.shape.n};
    const host::Strided<In> c(static_cast<In*>(p.c), p.shape.ldc);
    if (p.gelu_input != nullptr) {
      host::GemmShape into = p.shape;
      into.ldc = p.ld_gelu_input;
      const host::Strided<In> inner(static_cast<In*>(p.gelu_input), p.ld_gelu_input);
      host::gemm<In, Out>(into, a, b, inner.data, bias);
      return host::gelu<In>(extent, inner, c);
    }
    host::gemm<In, Out>(p.shape, a, b, c.data, bias);
    if (p.addend != nullptr)
      host::add<In>(extent, c, host::Strided<const In>(static_cast<const In*>(p.addend), p.ld_addend), c);
    if (p.gelu_backward != nullptr) {
      const host::Strided<const In> x(static_cast<const In*>(p.gelu_backward), p.ld_gelu_backward);
      host::gelu_backward<In>(extent, x, c, c);
    }
  } else {
    host::gemm<In, Out>(p.shape, a, b, static_cast<Out*>(p.c), bias);
  }
}

class HostBlas : public cuda::Blas {
 public:
  explicit HostBlas(cuda::Runtime& runtime) : runtime_(dynamic_cast<FakeRuntime&>(runtime)) {}
  bool fuses_gelu(DType in) const override { return in == DType::kBF16 || in == DType::kF16; }
  std::string describe() const override { return "products of the host"; }
  void multiply(cuda::StreamHandle stream, const Product& p) override {
    ZG_ASSERT(fuses_gelu(p.in) || (p.gelu_input == nullptr && p.gelu_backward == nullptr));
    runtime_.load(text_of(p));
    emulation::enqueue(stream, [p] {
      if (p.in == DType::kBF16) return p.out == DType::kF32 ? run<bf16, float>(p) : run<bf16, bf16>(p);
      if (p.in == DType::kF16) return p.out == DType::kF32 ? run<fp16, float>(p) : run<fp16, fp16>(p);
      if (p.in == DType::kF32) return run<float, float>(p);
      run<double, double>(p);
    });
  }

 private:
  FakeRuntime& runtime_;
};

}  // namespace

std::unique_ptr<cuda::Blas> make_host_blas(cuda::Runtime& runtime, int, const cuda::BlasOptions&) {
  return std::make_unique<HostBlas>(runtime);
}

}  // namespace zg::test
