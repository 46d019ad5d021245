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
  // first_keys: null unless shape.documents; sinks: null unless rule.sinks. Throw Error(kDevice).
  template <class T>
  void forward(const Launch& on, const AttentionShape& shape, const CausalAttention<T>& args);
  template <class T>
  void backward(const Launch& on, const AttentionShape& shape, const CausalAttentionBackward<T>& args);
  // Which attention is used, and the reason if kAuto does not choose cuDNN's.
  std::string describe() const;

 private:
  // Whether cuDNN computes the problem. Throws if it was asked for by name and cannot.
  bool by_cudnn(const CudnnProblem& problem);
  CudnnProblem problem(DType dtype, const AttentionShape& shape) const;

  const AttentionKernel wanted_;
  const bool deterministic_;
  std::unique_ptr<CudnnAttention> cudnn_;  // null: not wanted, or missing
  std::string why_;                        // the reason if kAuto chooses our own; else empty
  std::mutex mutex_;
  struct Choice {
    DType dtype;
    AttentionShape shape;
    bool by_cudnn;
  };
  std::vector<Choice> choices_;
};

template <class T>
void Attention::forward(const Launch& on, const AttentionShape& shape, const CausalAttention<T>& args) {
  if constexpr (sizeof(T) == 2) {
    CudnnProblem p = problem(dtype_of<T>, shape);
    if (by_cudnn(p)) {
      p.ld_qkv = args.qkv.ld;
      p.ld_o = args.o.ld;
      return cudnn_->forward(
          on.stream, p, {.qkv = args.qkv.data, .o = args.o.data, .lse = args.lse, .workspace = args.scratch});
    }
  }
  cuda::attention<T>(on, shape, args);
}

template <class T>
void Attention::backward(const Launch& on, const AttentionShape& shape,
                         const CausalAttentionBackward<T>& args) {
  if constexpr (sizeof(T) == 2) {
    CudnnProblem p = problem(dtype_of<T>, shape);
    if (by_cudnn(p)) {
      p.ld_qkv = args.qkv.ld;
      p.ld_o = args.o.ld;
      p.ld_do = args.d_o.ld;
      p.ld_dqkv = args.dqkv.ld;
      return cudnn_->backward(on.stream, p,
                              {.qkv = args.qkv.data,
                               .o = args.o.data,
                               .lse = args.lse,
                               .d_o = args.d_o.data,
                               .dqkv = args.dqkv.data,
                               .workspace = args.scratch});
    }
  }
  cuda::attention_backward<T>(on, shape, args);
}

}  // namespace zg::cuda
