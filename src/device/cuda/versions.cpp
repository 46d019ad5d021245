#include <cstdlib>

#include "device/cuda/runtime.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::cuda {
namespace {

constexpr const char *kLoading = "CUDA_MODULE_LOADING", *kConnections = "CUDA_DEVICE_MAX_CONNECTIONS";
constexpr int kStreams = 16;    // the most streams that a device makes
constexpr int kLeastMajor = 8;  // compute capability: bf16, asynchronous copies into shared memory

std::string text_of(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

// The oldest NVIDIA driver that supports this major version of CUDA, after CUDA's release notes.
std::string driver_of(int runtime) {
  switch (runtime / 1000) {
    case 11:
      return "450";
    case 12:
      return "525";
    case 13:
      return "580";
    default:
      return {};
  }
}

}  // namespace

void check_versions(int driver, int runtime) {
  const std::string release = driver_of(runtime);
  const std::string hint =
      fmt::format("install NVIDIA's driver{} or newer, or train on the host device",
                  release.empty() ? fmt::format(" for CUDA {}", text_of(runtime)) : " " + release);
  if (driver == 0) {
    throw Error(Errc::kDevice, "CUDA",
                fmt::format("there is no NVIDIA driver on this machine; this build needs one for CUDA {}",
                            text_of(runtime)),
                hint);
  }
  // A driver supports newer toolkits of its own major version.
  if (driver / 1000 >= runtime / 1000) return;
  throw Error(Errc::kDevice, "CUDA",
              fmt::format("the NVIDIA driver of this machine serves CUDA {}; this build's toolkit is CUDA {}",
                          text_of(driver), text_of(runtime)),
              hint);
}

void set_cuda_environment() {
  setenv(kLoading, "EAGER", 0);
  setenv(kConnections, "32", 0);  // the most that CUDA gives; the default is 8
}

std::string why_no_wait_values(bool lazy_kernels, const char* connections) {
  if (lazy_kernels) {
    return fmt::format(
        "CUDA loads kernels at their first use ({} is not EAGER, or the process had initialised "
        "CUDA before)",
        kLoading);
  }
  if (connections == nullptr || std::atoi(connections) >= kStreams) return {};
  return fmt::format("streams share work queues ({} is {}, less than {})", kConnections, connections,
                     kStreams);
}

void check_device(const DeviceInfo& info) {
  if (info.major >= kLeastMajor) return;
  throw Error(Errc::kDevice, info.name,
              fmt::format("its compute capability is {}.{}; the kernels need {}.0 (A100) or newer",
                          info.major, info.minor, kLeastMajor),
              "choose another GPU (CUDA_VISIBLE_DEVICES), or train on the host device");
}

}  // namespace zg::cuda
