// CUDA streams for libraries' work (ziggurat/device/cuda_access.hpp).
#pragma once
#include "device/cuda/runtime.hpp"
#include "kernels/cuda/kernels.hpp"
#include "ziggurat/device/cuda_access.hpp"

namespace zg::cuda {

class Queue final : public CudaQueue {
 public:
  Queue(Runtime& runtime, int device, int multiprocessors);
  ~Queue() override;
  CUstream_st* handle() const override { return handle_; }
  void copy(void* to, const void* from, std::int64_t bytes) override;
  void copy_from(int device, void* to, const void* from, std::int64_t bytes) override;
  void reduce(std::span<const void* const> operands, void* out, std::int64_t count, DType dtype,
              bool maximum) override;
  void mark() override { runtime_.record(event_, handle_); }
  bool reached() override { return runtime_.query(event_); }

 private:
  Runtime& runtime_;
  const int device_, multiprocessors_;
  StreamHandle handle_ = nullptr;
  EventHandle event_ = nullptr;
};

}  // namespace zg::cuda
