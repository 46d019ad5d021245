// cudaMemcpyAsync between pinned host memory and the device, with nothing in between: what our copies are
// held against.
#include <cuda_runtime_api.h>

#include "bench/gpu_kernels.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::bench {
namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Error(Errc::kDevice, what, cudaGetErrorString(status));
}

class CudaCopies : public CopyPeer {
 public:
  CudaCopies(int device, std::int64_t largest) : device_(device) {
    check(cudaSetDevice(device_), "cudaSetDevice");
    const auto bytes = static_cast<std::size_t>(largest);
    for (int i = 0; i < 2; ++i) {
      check(cudaStreamCreateWithFlags(&streams_[i], cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
      check(cudaMallocHost(&host_[i], bytes), "cudaMallocHost");
      check(cudaMalloc(&there_[i], bytes), "cudaMalloc");
      check(cudaMemset(there_[i], i + 1, bytes), "cudaMemset");
    }
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  CudaCopies(const CudaCopies&) = delete;
  CudaCopies& operator=(const CudaCopies&) = delete;
  ~CudaCopies() override {
    for (int i = 0; i < 2; ++i) {
      cudaFree(there_[i]);
      cudaFreeHost(host_[i]);
      cudaStreamDestroy(streams_[i]);
    }
  }

  double seconds(Way way, std::int64_t bytes, int count) override {
    check(cudaSetDevice(device_), "cudaSetDevice");
    const auto n = static_cast<std::size_t>(bytes);
    const auto begin = Clock::now();
    for (int i = 0; i < count; ++i) {
      if (way != Way::kToHost)
        check(cudaMemcpyAsync(there_[0], host_[0], n, cudaMemcpyHostToDevice, streams_[0]),
              "cudaMemcpyAsync");
      if (way != Way::kToDevice)
        check(cudaMemcpyAsync(host_[1], there_[1], n, cudaMemcpyDeviceToHost, streams_[1]),
              "cudaMemcpyAsync");
    }
    if (way != Way::kToHost) check(cudaStreamSynchronize(streams_[0]), "cudaStreamSynchronize");
    if (way != Way::kToDevice) check(cudaStreamSynchronize(streams_[1]), "cudaStreamSynchronize");
    return seconds_between(begin, Clock::now());
  }

 private:
  int device_;
  cudaStream_t streams_[2] = {};
  void* host_[2] = {};
  void* there_[2] = {};
};

}  // namespace

std::unique_ptr<CopyPeer> make_copy_peer(int device, std::int64_t largest) {
  return std::make_unique<CudaCopies>(device, largest);
}

}  // namespace zg::bench
