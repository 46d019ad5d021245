// The choice between cuDNN's attention and our own. It is made once for each shape, when its scratch is
// asked for, so that a run uses one of them throughout.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/cuda/cudnn_attention.hpp"
#include "kernels/cuda/kernels.hpp"
#include "ziggurat/device/cuda.hpp"

namespace zg::cuda {

class Attention {
 public:
  // Throws Error(kDevice) if kCudnn is wanted and cuDNN is missing. kAuto takes cuDNN only for results that
  // need not be deterministic: its deterministic backward takes memory quadratic in time.
  Attention(AttentionKernel wanted, bool deterministic);
  // With a given cuDNN (or null, and why), for tests.
  Attention(AttentionKernel wanted, bool deterministic, std::unique_ptr<CudnnAttention> cudnn,
            std::string why);

  // Scratch bytes of forward() or of backward(), whichever needs more.
  std::int64_t scratch_bytes(DType dtype, const AttentionShape& shape);
  // scratch: scratch_bytes(). first_keys: null unless shape.documents; sinks: null unless rule.sinks. Throw
  // Error(kDevice).
  template <class T>
  void forward(const Launch& on, const AttentionShape& shape, const T* qkv, std::int64_t ld_qkv, T* o,
               std::int64_t ld_o, Acc<T>* lse, void* scratch, const std::int32_t* first_keys, const T* sinks);
  template <class T>
  void backward(const Launch& on, const AttentionShape& shape, const T* qkv, std::int64_t ld_qkv, const T* o,
                std::int64_t ld_o, const Acc<T>* lse, const T* d_o, std::int64_t ld_do, T* dqkv,
                std::int64_t ld_dqkv, void* scratch, const std::int32_t* first_keys);
  // Which attention it is, and the reason where kAuto is not cuDNN's.
  std::string describe() const;

 private:
  // Whether cuDNN computes the problem. Throws if it was asked for by name and cannot.
  bool by_cudnn(const CudnnProblem& problem);
  CudnnProblem problem(DType dtype, const AttentionShape& shape) const;

  const AttentionKernel wanted_;
  const bool deterministic_;
  std::unique_ptr<CudnnAttention> cudnn_;  // null: not wanted, or missing
  std::string why_;                        // the reason where kAuto is our own; else empty
  std::mutex mutex_;
  struct Choice {
    DType dtype;
    AttentionShape shape;
    bool by_cudnn;
  };
  std::vector<Choice> choices_;
};

template <class T>
void Attention::forward(const Launch& on, const AttentionShape& shape, const T* qkv, std::int64_t ld_qkv,
                        T* o, std::int64_t ld_o, Acc<T>* lse, void* scratch, const std::int32_t* first_keys,
                        const T* sinks) {
  if constexpr (sizeof(T) == 2) {
    CudnnProblem p = problem(dtype_of<T>, shape);
    if (by_cudnn(p)) {
      p.ld_qkv = ld_qkv;
      p.ld_o = ld_o;
      return cudnn_->forward(on.stream, p, qkv, o, lse, scratch);
    }
  }
  cuda::attention<T>(on, shape, qkv, ld_qkv, o, ld_o, lse, first_keys, sinks);
}

template <class T>
void Attention::backward(const Launch& on, const AttentionShape& shape, const T* qkv, std::int64_t ld_qkv,
                         const T* o, std::int64_t ld_o, const Acc<T>* lse, const T* d_o, std::int64_t ld_do,
                         T* dqkv, std::int64_t ld_dqkv, void* scratch, const std::int32_t* first_keys) {
  if constexpr (sizeof(T) == 2) {
    CudnnProblem p = problem(dtype_of<T>, shape);
    if (by_cudnn(p)) {
      p.ld_qkv = ld_qkv;
      p.ld_o = ld_o;
      p.ld_do = ld_do;
      p.ld_dqkv = ld_dqkv;
      return cudnn_->backward(on.stream, p, qkv, o, lse, d_o, dqkv, scratch);
    }
  }
  cuda::attention_backward<T>(on, shape, qkv, ld_qkv, o, ld_o, lse, d_o, ld_do, dqkv, ld_dqkv, scratch,
                              first_keys);
}

}  // namespace zg::cuda
