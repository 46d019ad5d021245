// The host's kernels, for cases that CUDA's run, too: tests/cuda/cuda_kernels.hpp has the same members.
#pragma once
#include "tests/kernels/operand.hpp"

namespace zg::test {

struct HostKernels {
  static constexpr Layout kLayouts[] = {{0, 0}, {5, 0}, kUnaligned};
  static constexpr std::int64_t kRowGroups = host::kRowGroups;
  static constexpr std::int64_t kSumPartials = 0;  // doubles of scratch for sums over all elements

  static void layernorm(const auto&... args) { host::layernorm(args...); }
  static void layernorm_backward(const auto&... args) { host::layernorm_backward(args...); }
  static void rmsnorm(const auto&... args) { host::rmsnorm(args...); }
  static void rmsnorm_backward(const auto&... args) { host::rmsnorm_backward(args...); }
  static void head_rmsnorm(const auto&... args) { host::head_rmsnorm(args...); }
  static void head_rmsnorm_backward(const auto&... args) { host::head_rmsnorm_backward(args...); }
  static void bias_backward(const auto&... args) { host::bias_backward(args...); }
  static void gelu(const auto&... args) { host::gelu(args...); }
  static void gelu_backward(const auto&... args) { host::gelu_backward(args...); }
  static void swiglu(const auto&... args) { host::swiglu(args...); }
  static void swiglu_backward(const auto&... args) { host::swiglu_backward(args...); }
  static void add(const auto&... args) { host::add(args...); }
  static void scale(const auto&... args) { host::scale(args...); }
  static void dropout(const auto&... args) { host::dropout(args...); }
  static void rope(const auto&... args) { host::rope(args...); }
  static void cast(const auto&... args) { host::cast(args...); }
  static void embedding(const auto&... args) { host::embedding(args...); }
  static void embedding_backward(const auto&... args) { host::embedding_backward(args...); }
  static void cross_entropy(const auto&... args) { host::cross_entropy(args...); }
  static void softmax_part(const auto&... args) { host::softmax_part(args...); }
  static void cross_entropy_part(const auto&... args) { host::cross_entropy_part(args...); }
  static void route(const auto&... args) { host::route(args...); }
  static void route_backward(const auto&... args) { host::route_backward(args...); }
  static void router_sums(const auto&... args) { host::router_sums(args...); }
  static void sort_slots(const auto&... args) { host::sort_slots(args...); }
  static void gather_rows(const auto&... args) { host::gather_rows(args...); }
  static void add_rows(const auto&... args) { host::add_rows(args...); }
  static void expert_gate(const auto&... args) { host::expert_gate(args...); }
  static void expert_gate_backward(const auto&... args) { host::expert_gate_backward(args...); }
  static void expert_bias_backward(const auto&... args) { host::expert_bias_backward(args...); }

  // Runs `body` once for each variant of a kernel that may round in another way: here an instruction set.
  static void for_each_variant(const std::function<void()>& body) { for_each_target(body); }
  // Runs `body` with several numbers of threads, which must not change a bit.
  static void for_each_order(const std::function<void()>& body) {
    for_each_thread_count([&](int) { body(); });
  }
};

// The kernels for operands of one type.
template <class Type>
struct Host : HostKernels {
  using T = Type;
  using A = Acc<T>;
};

// ... and what the tests of elementwise ones have to know of them.
template <class T>
struct HostElementwise : Host<T> {
  static std::vector<std::int64_t> columns() { return {std::begin(kWidths), std::end(kWidths)}; }
  static constexpr double kLargestExponent = 88;
  // Highway states 1 ulp for exp; its argument is rounded four times and stands in the exponent, so it errs
  // by 4 units of itself; a handful of roundings follow. (For arguments beyond 88 the result is below 1e-36.)
  static double sigmoid_roundings(double argument) {
    return 16 + 8 * std::min(std::abs(argument), kLargestExponent);
  }
};

}  // namespace zg::test
