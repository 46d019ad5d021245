#include "device/cuda/blas.hpp"

#include <fmt/format.h>

#include <bit>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"

namespace zg::cuda {
namespace {

unsigned parts_of(const Product& p) {
  return (p.bias != nullptr ? kBias : 0u) | (p.gelu_input != nullptr ? kGeluInput : 0u) |
         (p.gelu_backward != nullptr ? kGeluBackward : 0u) |
         (p.bias_gradient != nullptr ? kBiasGradient : 0u);
}

// The steps of the epilogue that are fused into products of this type. In fp32 our own GELU is more exact
// than cuBLASLt's; in fp64 cuBLASLt documents no epilogue.
unsigned fused_in(DType in) {
  if (in == DType::kF64) return 0;
  return in == DType::kF32 ? kBias | kBiasGradient : kBias | kBiasGradient | kGeluInput | kGeluBackward;
}

// Whether the leading dimension of GELU's operand meets cuBLASLt's requirements.
bool leading_dimension_fits(const Product& p) {
  const std::int64_t ld = p.gelu_input != nullptr ? p.ld_gelu_input : p.ld_gelu_backward;
  return (p.gelu_input == nullptr && p.gelu_backward == nullptr) || (ld % 8 == 0 && ld >= p.shape.n);
}

Product without(Product p, unsigned parts) {
  if ((parts & kBias) != 0) p.bias = nullptr;
  if ((parts & kGeluInput) != 0) {
    p.c = std::exchange(p.gelu_input, nullptr);
    p.shape.ldc = std::exchange(p.ld_gelu_input, 0);
  }
  if ((parts & kGeluBackward) != 0) {
    p.gelu_backward = nullptr;
    p.ld_gelu_backward = 0;
  }
  if ((parts & kBiasGradient) != 0) p.bias_gradient = nullptr;
  return p;
}

std::string names_of(unsigned parts) {
  std::string names;
  for (const auto& [part, name] :
       {std::pair(kBias, ", bias"), std::pair(kGeluInput, ", gelu"),
        std::pair(kGeluBackward, ", gelu backward"), std::pair(kBiasGradient, ", bias gradient")}) {
    if ((parts & part) != 0) names += name;
  }
  return names;
}

}  // namespace

Products::Key Products::key_of(const Product& p) {
  const kernels::GemmShape& s = p.shape;
  // The largest powers of two, up to 256, that divide the addresses: a library may rely on exactly these.
  std::uint64_t alignments = 0;
  for (const void* operand :
       {p.a, p.b, static_cast<const void*>(p.c), p.bias, p.addend, static_cast<const void*>(p.gelu_input),
        p.gelu_backward, static_cast<const void*>(p.bias_gradient)}) {
    const auto bits = reinterpret_cast<std::uintptr_t>(operand) | 256u;
    alignments = alignments << 4 | static_cast<unsigned>(std::countr_zero(bits));
  }
  return {s.m,
          s.n,
          s.k,
          s.ta == Trans::kYes,
          s.tb == Trans::kYes,
          s.lda,
          s.ldb,
          s.ldc,
          s.accumulate,
          p.in,
          p.out,
          parts_of(p),
          p.addend != nullptr,
          p.ld_addend,
          p.ld_gelu_input + p.ld_gelu_backward,
          alignments};
}

// Chooses a product with the whole epilogue fused, else with only the bias, else plain.
Products::Choice Products::choose(const Product& p) {
  const unsigned has = parts_of(p), wanted = has & fused_in(p.in);
  unsigned tried = ~0u;
  for (const unsigned parts : {leading_dimension_fits(p) ? wanted : wanted & kBias, wanted & kBias, 0u}) {
    if (parts == tried) continue;
    tried = parts;
    Choice choice{blas_.plan(without(p, has & ~parts)), has & ~parts};
    if (choice.plan == nullptr) continue;
    if (const unsigned lacks = wanted & ~parts; lacks != 0) {
      const std::string line = fmt::format("{} has no algorithm for {}; done after the product: {}",
                                           blas_.describe(), text_of(p), names_of(lacks).substr(2));
      if (said_.insert(line).second) log::info("{}", line);
    }
    return choice;
  }
  throw Error(Errc::kDevice, "a matrix product",
              fmt::format("{} has no algorithm for {}", blas_.describe(), text_of(without(p, has))));
}

unsigned Products::multiply(StreamHandle stream, const Product& p) {
  if (p.shape.m == 0 || p.shape.n == 0) return parts_of(p);
  ZG_ASSERT(p.shape.k > 0, "{}", text_of(p));
  std::lock_guard lock(mutex_);
  const Key key = key_of(p);
  auto known = choices_.find(key);
  if (known == choices_.end()) known = choices_.emplace(key, choose(p)).first;
  const Choice& choice = known->second;
  choice.plan->run(stream, without(p, choice.left));
  return choice.left;
}

std::string text_of(const Product& p) {
  const kernels::GemmShape& s = p.shape;
  const auto matrix = [](std::int64_t rows, std::int64_t cols, Trans t) {
    return t == Trans::kYes ? fmt::format("[{}, {}]^T", cols, rows) : fmt::format("[{}, {}]", rows, cols);
  };
  return fmt::format("{} {} x {} -> {}{}{}{}", name_of(p.in), matrix(s.m, s.k, s.ta), matrix(s.k, s.n, s.tb),
                     name_of(p.out), s.accumulate ? ", accumulated" : "",
                     p.addend != nullptr ? ", addend" : "", names_of(parts_of(p)));
}

}  // namespace zg::cuda
