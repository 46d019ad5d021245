#include "comm/reduce.hpp"

#include <algorithm>
#include <type_traits>

#include "kernels/host/elementwise.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::comm {
namespace {

constexpr std::int64_t kBlock = 2048;   // elements whose sums stay in the first-level cache
constexpr std::int64_t kGrain = 65536;  // elements that one thread reduces at a time

template <class A>
void add(A* sum, const A* x, std::int64_t n, Reduction reduction) {
  if (reduction == Reduction::kSum) {
    for (std::int64_t i = 0; i < n; ++i) sum[i] += x[i];
  } else {
    // A comparison with NaN is false, so that a NaN in either operand stays.
    for (std::int64_t i = 0; i < n; ++i) sum[i] = sum[i] >= x[i] || sum[i] != sum[i] ? sum[i] : x[i];
  }
}

// Returns the operand itself if it has type A, else its values converted into `wide`.
template <class T, class A>
const A* widened(const T* x, std::int64_t n, A* wide) {
  if constexpr (std::is_same_v<T, A>) {
    return x;
  } else {
    host::cast<T, A>({1, n}, {x, n}, {wide, n});
    return wide;
  }
}

template <class T>
void reduce_as(std::span<const void* const> operands, void* out, std::int64_t count, Reduction reduction) {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  parallel_for(count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    A sum[kBlock], wide[kBlock];
    for (std::int64_t first = begin; first < end; first += kBlock) {
      const std::int64_t n = std::min(kBlock, end - first);
      const auto at = [&](const void* data) { return static_cast<const T*>(data) + first; };
      std::copy_n(widened(at(operands[0]), n, wide), n, sum);
      for (const void* operand : operands.subspan(1)) add(sum, widened(at(operand), n, wide), n, reduction);
      T* const to = static_cast<T*>(out) + first;
      if constexpr (std::is_same_v<T, A>) {
        std::copy_n(sum, n, to);
      } else {
        host::cast<A, T>({1, n}, {sum, n}, {to, n});
      }
    }
  });
}

}  // namespace

void reduce(std::span<const void* const> operands, void* out, std::int64_t count, DType dtype,
            Reduction reduction) {
  switch (dtype) {
    case DType::kF64:
      return reduce_as<double>(operands, out, count, reduction);
    case DType::kF32:
      return reduce_as<float>(operands, out, count, reduction);
    case DType::kF16:
      return reduce_as<fp16>(operands, out, count, reduction);
    case DType::kBF16:
      return reduce_as<bf16>(operands, out, count, reduction);
    default:
      ZG_ASSERT(false, "no reduction of {}", zg::name_of(dtype));
  }
}

}  // namespace zg::comm
