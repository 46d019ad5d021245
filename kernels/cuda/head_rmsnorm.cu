// RMSNorm of each head of a row by itself. The kernels are in norms.hpp and norms_backward.hpp, where a head
// counts as a row.
#include "kernels/cuda/norms_backward.hpp"

namespace zg::cuda {
namespace {

template <class T>
HeadRows<T> heads_of(Strided<T> rows, std::int64_t heads, std::int64_t size) {
  return {rows.data, rows.ld, size, static_cast<unsigned>(heads)};
}

}  // namespace

template <class T>
void head_rmsnorm(const Launch& on, std::int64_t rows, const HeadRmsNorm<T>& args) {
  const Extent extent{rows * args.heads, args.head_size};
  const NormOperands<T, HeadRows> operands{.x = heads_of(args.x, args.heads, args.head_size),
                                           .w = args.w,
                                           .eps = static_cast<Acc<T>>(args.eps),
                                           .y = heads_of(args.y, args.heads, args.head_size),
                                           .stats = heads_of(args.stats, args.heads, 1)};
  if (args.weight == NormWeight::kPlusOne) {
    launch_norm<Norm::kRmsPlusOne, HeadRows, T>("head_rmsnorm", on, extent, operands);
  } else {
    launch_norm<Norm::kRms, HeadRows, T>("head_rmsnorm", on, extent, operands);
  }
}

template <class T>
void head_rmsnorm_backward(const Launch& on, std::int64_t rows, const HeadRmsNormBackward<T>& args) {
  const Extent extent{rows * args.heads, args.head_size};
  const NormGradients<T, HeadRows> operands{.dy = heads_of(args.dy, args.heads, args.head_size),
                                            .x = heads_of(args.x, args.heads, args.head_size),
                                            .w = args.w,
                                            .stats = heads_of(args.stats, args.heads, 1),
                                            .dx = heads_of(args.dx, args.heads, args.head_size),
                                            .scratch = args.scratch};
  if (args.weight == NormWeight::kPlusOne) {
    launch_norm_backward<Norm::kRmsPlusOne, HeadRows, T>("head_rmsnorm_backward", on, extent, operands,
                                                         args.dw, nullptr);
  } else {
    launch_norm_backward<Norm::kRms, HeadRows, T>("head_rmsnorm_backward", on, extent, operands, args.dw,
                                                  nullptr);
  }
}

#define ZG_INSTANTIATE(T)                                                         \
  template void head_rmsnorm(const Launch&, std::int64_t, const HeadRmsNorm<T>&); \
  template void head_rmsnorm_backward(const Launch&, std::int64_t, const HeadRmsNormBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
