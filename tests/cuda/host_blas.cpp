#include "tests/cuda/host_blas.hpp"

#include <vector>

#include "kernels/cuda/emulation/emulation.hpp"
#include "kernels/host/elementwise.hpp"
#include "kernels/host/matrix.hpp"
#include "tests/cuda/fake_runtime.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::test {
namespace {

using cuda::Product;

template <class In, class Out>
void multiply(const Product& p) {
  const In *a = static_cast<const In*>(p.a), *b = static_cast<const In*>(p.b);
  const In* bias = static_cast<const In*>(p.bias);
  if (p.bias_gradient != nullptr) {
    const std::int64_t m = p.shape.m;
    auto* const sums = static_cast<host::Acc<In>*>(p.bias_gradient);
    std::vector<host::Acc<In>> scratch(static_cast<std::size_t>(host::kRowGroups * m));
    std::fill_n(sums, m, host::Acc<In>(0));
    host::bias_backward<In>({p.shape.k, m}, host::Strided<const In>(a, p.shape.lda), sums,
                            {scratch.data(), m});
  }
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
  HostBlas(cuda::Runtime& runtime, std::function<bool(const Product&)> refuses)
      : runtime_(dynamic_cast<FakeRuntime&>(runtime)), refuses_(std::move(refuses)) {}
  std::string describe() const override { return "products of the host"; }
  std::unique_ptr<Plan> plan(const Product& p) override {
    if (refuses_(p)) return nullptr;
    return std::make_unique<HostPlan>(runtime_);
  }

 private:
  struct HostPlan : Plan {
    explicit HostPlan(FakeRuntime& r) : runtime(r) {}
    void run(cuda::StreamHandle stream, const Product& p) override {
      runtime.load(text_of(p));
      emulation::enqueue(stream, [p] {
        if (p.in == DType::kBF16)
          return p.out == DType::kF32 ? multiply<bf16, float>(p) : multiply<bf16, bf16>(p);
        if (p.in == DType::kF16)
          return p.out == DType::kF32 ? multiply<fp16, float>(p) : multiply<fp16, fp16>(p);
        if (p.in == DType::kF32) return multiply<float, float>(p);
        multiply<double, double>(p);
      });
    }
    FakeRuntime& runtime;
  };
  FakeRuntime& runtime_;
  const std::function<bool(const Product&)> refuses_;
};

}  // namespace

std::unique_ptr<cuda::Blas> make_host_blas(cuda::Runtime& runtime, int, const cuda::BlasOptions&) {
  return std::make_unique<HostBlas>(runtime, [](const Product&) { return false; });
}

cuda::MakeBlas host_blas_without(std::function<bool(const Product&)> refuses) {
  return [=](cuda::Runtime& runtime, int, const cuda::BlasOptions&) {
    return std::make_unique<HostBlas>(runtime, refuses);
  };
}

}  // namespace zg::test
