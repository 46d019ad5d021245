// RMSNorm. The kernels are in norms.hpp and norms_backward.hpp.
#include "kernels/cuda/norms_backward.hpp"

namespace zg::cuda {

template <class T>
void rmsnorm(const Launch& on, Extent extent, const RmsNorm<T>& args) {
  const NormOperands<T> operands{
      .x = args.x, .w = args.w, .eps = static_cast<Acc<T>>(args.eps), .y = args.y, .stats = args.stats};
  if (args.weight == NormWeight::kPlusOne) {
    launch_norm<Norm::kRmsPlusOne, Strided, T>("rmsnorm", on, extent, operands);
  } else {
    launch_norm<Norm::kRms, Strided, T>("rmsnorm", on, extent, operands);
  }
}

template <class T>
void rmsnorm_backward(const Launch& on, Extent extent, const RmsNormBackward<T>& args) {
  const NormGradients<T> operands{
      .dy = args.dy, .x = args.x, .w = args.w, .stats = args.stats, .dx = args.dx, .scratch = args.scratch};
  if (args.weight == NormWeight::kPlusOne) {
    launch_norm_backward<Norm::kRmsPlusOne, Strided, T>("rmsnorm_backward", on, extent, operands, args.dw,
                                                        nullptr);
  } else {
    launch_norm_backward<Norm::kRms, Strided, T>("rmsnorm_backward", on, extent, operands, args.dw, nullptr);
  }
}

#define ZG_INSTANTIATE(T)                                          \
  template void rmsnorm(const Launch&, Extent, const RmsNorm<T>&); \
  template void rmsnorm_backward(const Launch&, Extent, const RmsNormBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
