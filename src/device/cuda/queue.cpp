#include "device/cuda/queue.hpp"

#include "kernels/cuda/reduce.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::cuda {

Queue::Queue(Runtime& runtime, int device, int multiprocessors)
    : runtime_(runtime), device_(device), multiprocessors_(multiprocessors) {
  runtime_.use_device(device_);
  event_ = runtime_.create_event();
  try {
    handle_ = runtime_.create_stream(true);
  } catch (...) {
    runtime_.destroy_event(event_);
    throw;
  }
}

Queue::~Queue() {
  try {
    runtime_.use_device(device_);
    runtime_.synchronize(handle_);
  } catch (...) {  // the device has failed, and reports it
  }
  runtime_.destroy_event(event_);
  runtime_.destroy_stream(handle_);
}

void Queue::copy(void* to, const void* from, std::int64_t bytes) {
  if (bytes > 0 && to != from) runtime_.copy(handle_, to, from, bytes, Direction::kOnDevice);
}

void Queue::copy_from(int device, void* to, const void* from, std::int64_t bytes) {
  if (bytes > 0) runtime_.copy_peer(handle_, to, device_, from, device, bytes);
}

void Queue::reduce(std::span<const void* const> operands, void* out, std::int64_t count, DType dtype,
                   bool maximum) {
  ZG_ASSERT(!operands.empty() && operands.size() <= kMostOperands, "{} operands", operands.size());
  const Launch on{handle_, multiprocessors_, true};
  switch (dtype) {
    case DType::kF64:
      return cuda::reduce<double>(on, operands, out, count, maximum);
    case DType::kF32:
      return cuda::reduce<float>(on, operands, out, count, maximum);
    case DType::kF16:
      return cuda::reduce<fp16>(on, operands, out, count, maximum);
    case DType::kBF16:
      return cuda::reduce<bf16>(on, operands, out, count, maximum);
    default:
      ZG_ASSERT(false, "no reduction of {}", name_of(dtype));
  }
}

}  // namespace zg::cuda
