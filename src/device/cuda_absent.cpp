// The functions of ziggurat/device/cuda.hpp in a build without CUDA.
#if !defined(ZG_CUDA)
#include "ziggurat/base/error.hpp"
#include "ziggurat/device/cuda.hpp"

namespace zg {

std::unique_ptr<Device> make_cuda_device(const CudaOptions& options) {
  throw Error(
      Errc::kDevice, fmt::format("cuda:{}", options.device), "this build is without CUDA",
      "install the CUDA toolkit and build again with -DZG_CUDA=ON (tools/quickstart.sh does where it finds "
      "a GPU), or train on the processor: --devices host");
}

std::string describe_attention(const CudaOptions&) {
  return "none: this build is without CUDA";
}

std::vector<GpuInfo> list_gpus(std::string* why) {
  if (why != nullptr) *why = "this build is without CUDA";
  return {};
}

}  // namespace zg
#endif
