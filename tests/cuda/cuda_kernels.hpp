// CUDA's kernels, for cases that the host's run, too: tests/kernels/host_kernels.hpp says what the members
// are.
#pragma once
#include "tests/cuda/harness.hpp"
#include "tests/kernels/operand.hpp"

namespace zg::test {

struct CudaKernels {
  // Without gaps; aligned for widths of whole packs; aligned for a width of 43, which is none; and never
  // aligned.
  static constexpr Layout kLayouts[] = {{0, 0}, {16, 0}, {5, 0}, kUnaligned};
  static constexpr std::int64_t kRowGroups = cuda::kRowGroups;
  static constexpr std::int64_t kSumPartials = cuda::kSumPartials;

  static void layernorm(const auto&... args) { cuda::layernorm(launch(), args...); }
  static void layernorm_backward(const auto&... args) { cuda::layernorm_backward(launch(), args...); }
  static void rmsnorm(const auto&... args) { cuda::rmsnorm(launch(), args...); }
  static void rmsnorm_backward(const auto&... args) { cuda::rmsnorm_backward(launch(), args...); }
  static void head_rmsnorm(const auto&... args) { cuda::head_rmsnorm(launch(), args...); }
  static void head_rmsnorm_backward(const auto&... args) { cuda::head_rmsnorm_backward(launch(), args...); }
  static void bias_backward(const auto&... args) { cuda::bias_backward(launch(), args...); }
  static void gelu(const auto&... args) { cuda::gelu(launch(), args...); }
  static void gelu_backward(const auto&... args) { cuda::gelu_backward(launch(), args...); }
  static void swiglu(const auto&... args) { cuda::swiglu(launch(), args...); }
  static void swiglu_backward(const auto&... args) { cuda::swiglu_backward(launch(), args...); }
  static void add(const auto&... args) { cuda::add(launch(), args...); }
  static void scale(const auto&... args) { cuda::scale(launch(), args...); }
  static void dropout(const auto&... args) { cuda::dropout(launch(), args...); }
  static void rope(const auto&... args) { cuda::rope(launch(), args...); }
  static void cast(const auto&... args) { cuda::cast(launch(), args...); }
  static void embedding(const auto&... args) { cuda::embedding(launch(), args...); }
  static void embedding_backward(const auto&... args) { cuda::embedding_backward(launch(), args...); }
  static void cross_entropy(const auto&... args) { cuda::cross_entropy(launch(), args...); }
  static void softmax_part(const auto&... args) { cuda::softmax_part(launch(), args...); }
  static void cross_entropy_part(const auto&... args) { cuda::cross_entropy_part(launch(), args...); }
  static void route(const auto&... args) { cuda::route(launch(), args...); }
  static void route_backward(const auto&... args) { cuda::route_backward(launch(), args...); }
  static void router_sums(const auto&... args) { cuda::router_sums(launch(), args...); }
  static void sort_slots(const auto&... args) { cuda::sort_slots(launch(), args...); }
  static void gather_rows(const auto&... args) { cuda::gather_rows(launch(), args...); }
  static void add_rows(const auto&... args) { cuda::add_rows(launch(), args...); }
  static void expert_gate(const auto&... args) { cuda::expert_gate(launch(), args...); }
  static void expert_gate_backward(const auto&... args) { cuda::expert_gate_backward(launch(), args...); }
  static void expert_bias_backward(const auto&... args) { cuda::expert_bias_backward(launch(), args...); }

  static void for_each_variant(const std::function<void()>& body) { body(); }
  static void for_each_order(const std::function<void()>& body) { test::for_each_order(body); }
};

template <class Type>
struct Cuda : CudaKernels {
  using T = Type;
  using A = Acc<T>;
  static constexpr std::int64_t kPack = 16 / static_cast<std::int64_t>(sizeof(T));  // elements of a pack
};

// ... and what the tests of elementwise ones have to know of them.
template <class T>
struct CudaElementwise : Cuda<T> {
  // Less than a pack, packs with and without a rest, more than one block.
  static std::vector<std::int64_t> columns() { return {1, 7, 8, 43, 256, 257, 4104}; }
  static constexpr double kLargestExponent = 87;
  // CUDA states 2 + 1.173 |x| units in the last place for __expf, which are twice as many roundings; the
  // argument is rounded up to five times and stands in the exponent; __fdividef has two units; a handful of
  // roundings follow. (For arguments beyond 87 the result is below 1e-37.)
  static double sigmoid_roundings(double argument) {
    return 20 + 8 * std::min(std::abs(argument), kLargestExponent);
  }
};

}  // namespace zg::test
