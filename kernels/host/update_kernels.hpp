// The interface between update.cpp, which cuts an update into runs of whole blocks, and the passes that
// compute them, a file for each optimizer (update_adam.cpp, ...).
#pragma once
#include <cstdint>
#include <tuple>

#include "kernels/host/update.hpp"
#include "kernels/host/update_constants.hpp"

namespace zg::host {

template <class S>
struct UpdateJob {
  UpdateArrays arrays;
  std::int64_t blocks = 0;  // blocks of kQuantBlock elements each
  const UpdateConstants<S>* constants = nullptr;
  RandomKey random;
  std::int64_t step = 0;
  std::int64_t first_block = 0;  // index of the run's first block in the parameter
};
template <class S>
using UpdateKernel = void (*)(const UpdateJob<S>& job);

// A pass for each state format; null: not supported (doubles support only kFull).
template <class S>
struct UpdateKernels {
  UpdateKernel<S> of[2][3] = {};  // [MasterFormat][MomentFormat]
};

// The passes of an update rule, for state in f32 and in f64.
using UpdatePasses = std::tuple<UpdateKernels<float>, UpdateKernels<double>>;
UpdatePasses adam_passes(bool decoupled);
UpdatePasses sgd_passes(bool momentum, bool nesterov);
UpdatePasses lion_passes();
// Rewrites weights from their masters (MasterFormat::kFull).
UpdateKernel<float> weight_kernel();

}  // namespace zg::host
