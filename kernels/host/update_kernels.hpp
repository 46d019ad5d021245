// Between update.cpp, which cuts an update into runs of whole blocks, and the passes of one optimizer each
// (update_adam.cpp, ...), which compute them.
#pragma once
#include <cstdint>

#include "kernels/host/update.hpp"
#include "kernels/host/update_constants.hpp"

namespace zg::host {

template <class S>
struct UpdateJob {
  UpdateArrays arrays;
  std::int64_t blocks = 0;  // of kQuantBlock elements, all whole
  const UpdateConstants<S>* constants = nullptr;
  RandomKey random;
  std::int64_t step = 0;
  std::int64_t first_block = 0;  // where in its parameter the run begins
};
template <class S>
using UpdateKernel = void (*)(const UpdateJob<S>& job);

// A pass for each way to keep the state. Null where there is none (a double is only kept whole).
template <class S>
struct UpdateKernels {
  UpdateKernel<S> of[2][3] = {};  // [MasterFormat][MomentFormat]
};

template <class S>
UpdateKernels<S> adam_kernels(bool decoupled);
template <class S>
UpdateKernels<S> sgd_kernels(bool momentum, bool nesterov);
template <class S>
UpdateKernels<S> lion_kernels();
// Weights that are a copy of their master (MasterFormat::kFull), made anew.
UpdateKernel<float> weight_kernel();

}  // namespace zg::host
