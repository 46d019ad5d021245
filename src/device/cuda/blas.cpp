#include "device/cuda/blas.hpp"

#include <fmt/format.h>

namespace zg::cuda {

std::string text_of(const Product& p) {
  const kernels::GemmShape& s = p.shape;
  const auto matrix = [](std::int64_t rows, std::int64_t cols, Trans t) {
    return t == Trans::kYes ? fmt::format("[{}, {}]^T", cols, rows) : fmt::format("[{}, {}]", rows, cols);
  };
  std::string text = fmt::format("{} {} x {} -> {}", name_of(p.in), matrix(s.m, s.k, s.ta),
                                 matrix(s.k, s.n, s.tb), name_of(p.out));
  if (s.accumulate) text += ", accumulated";
  if (p.bias != nullptr) text += ", bias";
  if (p.addend != nullptr) text += ", addend";
  if (p.gelu_input != nullptr) text += ", gelu";
  if (p.gelu_backward != nullptr) text += ", gelu backward";
  return text;
}

}  // namespace zg::cuda
