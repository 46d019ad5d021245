// LayerNorm. The kernels are in norms.hpp and norms_backward.hpp.
#include "kernels/cuda/norms_backward.hpp"

namespace zg::cuda {

template <class T>
void layernorm(const Launch& on, Extent extent, const LayerNorm<T>& args) {
  launch_norm<Norm::kLayer, Strided, T>("layernorm", on, extent,
                                        {.x = args.x,
                                         .w = args.w,
                                         .b = args.b,
                                         .eps = static_cast<Acc<T>>(args.eps),
                                         .y = args.y,
                                         .stats = args.stats});
}

template <class T>
void layernorm_backward(const Launch& on, Extent extent, const LayerNormBackward<T>& args) {
  launch_norm_backward<Norm::kLayer, Strided, T>(
      "layernorm_backward", on, extent,
      {.dy = args.dy, .x = args.x, .w = args.w, .stats = args.stats, .dx = args.dx, .scratch = args.scratch},
      args.dw, args.db);
}

#define ZG_INSTANTIATE(T)                                              \
  template void layernorm(const Launch&, Extent, const LayerNorm<T>&); \
  template void layernorm_backward(const Launch&, Extent, const LayerNormBackward<T>&);
ZG_FOR_STORAGE_TYPES(ZG_INSTANTIATE)
#undef ZG_INSTANTIATE

}  // namespace zg::cuda
