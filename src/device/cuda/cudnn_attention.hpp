// Attention by cuDNN: its fused scaled-dot-product attention, on our packed layout without copies. Results
// and shapes are as in Ops::attention (ziggurat/device/ops.hpp), but cuDNN decides the order of sums.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "device/cuda/runtime.hpp"
#include "ziggurat/base/dtype.hpp"
#include "ziggurat/kernels/types.hpp"

namespace zg::cuda {

struct CudnnProblem {
  AttentionShape shape;
  DType dtype = DType::kBF16;           // bf16 or f16
  std::int64_t ld_qkv = 0, ld_o = 0;    // leading dimensions in elements
  std::int64_t ld_do = 0, ld_dqkv = 0;  // ... for the backward pass
  bool deterministic = true;            // whether the backward pass is deterministic
  bool operator==(const CudnnProblem&) const = default;
};

// Device pointers of a call. lse [batch * heads, time]: log-sum-exp (natural logarithm) of the scaled scores,
// as in our own kernels.
struct CudnnForward {
  const void* qkv = nullptr;
  void* o = nullptr;
  float* lse = nullptr;
  void* workspace = nullptr;
};
struct CudnnBackward {
  const void *qkv = nullptr, *o = nullptr;
  const float* lse = nullptr;
  const void* d_o = nullptr;
  void* dqkv = nullptr;
  void* workspace = nullptr;
};

// Works on the device that was current in the thread that created it. Calls may come from any thread with the
// same current device, one at a time. cuDNN plans a problem at its first call (a second or so), and keeps the
// plan. A problem that cuDNN refuses throws Error(kDevice) with cuDNN's message.
class CudnnAttention {
 public:
  virtual ~CudnnAttention() = default;

  // cuDNN's version; 91900 is 9.19.0.
  virtual std::int64_t version() const = 0;
  // Whether cuDNN has plans for the forward and the backward; if not, `why` (unless null) gets the reason.
  // Leading dimensions and all pointers must be multiples of 16 bytes.
  virtual bool supports(const CudnnProblem& problem, std::string* why) = 0;
  // Device memory for a call, 256-byte aligned. On sm_90 a deterministic backward takes
  // batch * heads * time^2 elements.
  virtual std::int64_t forward_workspace_bytes(const CudnnProblem& problem) = 0;
  virtual std::int64_t backward_workspace_bytes(const CudnnProblem& problem) = 0;

  virtual void forward(StreamHandle stream, const CudnnProblem& problem, const CudnnForward& at) = 0;
  virtual void backward(StreamHandle stream, const CudnnProblem& problem, const CudnnBackward& at) = 0;
};

// Null, with the reason in `why` (unless null), if this build or this machine has no cuDNN. To be called
// before other threads start: it may set an environment variable (CUDNN_FRONTEND_CUDART_LIB_NAME).
std::unique_ptr<CudnnAttention> make_cudnn_attention(std::string* why);

// The objection of cuDNN's frontend to the problem on GPUs of a compute capability (90: 9.0); needs no such
// GPU. Empty: none. Throws Error(kDevice) if the library is missing.
std::string cudnn_objection(const CudnnProblem& problem, int capability);

}  // namespace zg::cuda
