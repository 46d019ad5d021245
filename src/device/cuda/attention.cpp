#include "device/cuda/attention.hpp"

#include <algorithm>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"

namespace zg::cuda {
namespace {

bool wants_cudnn(AttentionKernel wanted, bool deterministic) {
  return wanted == AttentionKernel::kCudnn || (wanted == AttentionKernel::kAuto && !deterministic);
}

// The feature of the shape for which cuDNN is never used; empty: none.
std::string objection(const AttentionShape& s) {
  if (s.documents) return "it is not asked for masks of documents";
  if (s.rule.window > 0) return fmt::format("it is not asked for a window of {}", s.rule.window);
  if (s.rule.sinks) return "it is not asked for sinks";
  if (s.rule.softcap > 0) return fmt::format("it is not asked for scores capped at {}", s.rule.softcap);
  return {};
}

}  // namespace

Attention::Attention(AttentionKernel wanted, bool deterministic)
    : wanted_(wanted), deterministic_(deterministic) {
  if (wants_cudnn(wanted, deterministic))
    cudnn_ = make_cudnn_attention(&why_);
  else if (wanted == AttentionKernel::kAuto)
    why_ = "results are deterministic, for which cuDNN's backward takes memory by the square of the sequence";
  if (wanted != AttentionKernel::kCudnn || cudnn_ != nullptr) return;
  throw Error(Errc::kDevice, "cuda.attention", "is \"cudnn\", which is not there: " + why_,
              "install cuDNN 9 and build with its frontend's headers, or say \"auto\" or \"own\"");
}

Attention::Attention(AttentionKernel wanted, bool deterministic, std::unique_ptr<CudnnAttention> cudnn,
                     std::string why)
    : wanted_(wanted), deterministic_(deterministic), cudnn_(std::move(cudnn)), why_(std::move(why)) {}

CudnnProblem Attention::problem(DType dtype, const AttentionShape& shape) const {
  const std::int64_t ld_o = shape.result_columns(), ld_qkv = shape.qkv_columns();
  return {.shape = shape,
          .dtype = dtype,
          .ld_qkv = ld_qkv,
          .ld_o = ld_o,
          .ld_do = ld_o,
          .ld_dqkv = ld_qkv,
          .deterministic = deterministic_};
}

bool Attention::by_cudnn(const CudnnProblem& p) {
  if (cudnn_ == nullptr) return false;
  const AttentionShape& s = p.shape;
  std::lock_guard lock(mutex_);
  for (const Choice& known : choices_) {
    if (known.dtype == p.dtype && known.shape == s) return known.by_cudnn;
  }
  std::string why = objection(s);
  const bool takes = why.empty() && cudnn_->supports(p, &why);
  if (!takes && wanted_ == AttentionKernel::kCudnn) {
    throw Error(Errc::kDevice, "cuda.attention",
                fmt::format("is \"cudnn\", which does not take {} heads of {} ({}) over {} tokens: {}",
                            s.heads, s.head_size, name_of(p.dtype), s.time, why),
                "say \"auto\" or \"own\"");
  }
  if (!takes) log::info("attention by our own kernel: cuDNN does not take this shape ({})", why);
  choices_.push_back({p.dtype, s, takes});
  return takes;
}

std::int64_t Attention::scratch_bytes(DType dtype, const AttentionShape& shape) {
  const std::int64_t own = attention_scratch_bytes(dtype, shape, deterministic_);
  if (dtype != DType::kBF16 && dtype != DType::kF16) return own;
  const CudnnProblem p = problem(dtype, shape);
  if (!by_cudnn(p)) return own;
  return std::max(cudnn_->forward_workspace_bytes(p), cudnn_->backward_workspace_bytes(p));
}

std::string Attention::describe() const {
  if (cudnn_ == nullptr) return why_.empty() ? "own attention" : fmt::format("own attention ({})", why_);
  const std::int64_t v = cudnn_->version();
  return fmt::format("attention by cuDNN {}.{}.{} where it takes the shape", v / 10000, v / 100 % 100,
                     v % 100);
}

}  // namespace zg::cuda
