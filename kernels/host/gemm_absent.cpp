// Stand-ins for matrix products in a build without oneDNN. Such a build has the store, the optimizers and
// I/O, and no model that would need a product.
#include "kernels/host/matrix.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::host {

template <class In, class Out>
void gemm(const GemmShape&, const In*, const In*, Out*, const In*) {
  throw Error(Errc::kUsage, "matrix product", "is not offered by this build, which has no oneDNN",
              "build with ZG_ONEDNN=ON");
}

template void gemm(const GemmShape&, const bf16*, const bf16*, bf16*, const bf16*);
template void gemm(const GemmShape&, const bf16*, const bf16*, float*, const bf16*);
template void gemm(const GemmShape&, const fp16*, const fp16*, fp16*, const fp16*);
template void gemm(const GemmShape&, const fp16*, const fp16*, float*, const fp16*);
template void gemm(const GemmShape&, const float*, const float*, float*, const float*);
template void gemm(const GemmShape&, const double*, const double*, double*, const double*);

const char* bf16_description() {
  return "none: this build has no matrix products";
}

bool has_native_bf16() {
  return false;
}

}  // namespace zg::host
