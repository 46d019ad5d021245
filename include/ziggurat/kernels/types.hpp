// Parameters that kernels and the op set share.
#pragma once
#include <cstdint>

namespace zg {

enum class Trans : bool { kNo, kYes };

struct AttentionShape {
  std::int64_t batch = 0, time = 0, heads = 0, kv_heads = 0, head_size = 0;
};

struct AdamParams {
  double lr = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  double weight_decay = 0;  // decoupled (AdamW) or added to the gradient (Adam)
  bool decoupled = true;
  bool bias_correction = true;
  std::int64_t step = 1;  // t of the bias correction, from 1
  double grad_scale = 1;  // the gradient is multiplied by this first (1/tokens, clip factor)
};

}  // namespace zg
