#include "train/roofs.hpp"

#include "ziggurat/device/cuda.hpp"

namespace zg {

Roofs measure_roofs(const RunConfig& config) {
  const DeviceConfig& d = config.device;
  if (d.kind == DeviceConfig::Kind::kHost) return measure_roofs(config.dtype);
  // A separate device, since otherwise the memory used here would count in the peaks that the run reports.
  const auto device = make_cuda_device({.device = d.gpus.front(),
                                        .budget = kRoofMemory,
                                        .deterministic = d.deterministic,
                                        .tf32 = d.tf32,
                                        .pin = d.pin});
  Roofs roofs = measure_roofs(*device, config.dtype);
  // Rates of all GPUs together, which are assumed to be equal and to have separate links.
  for (double* rate : {&roofs.flops, &roofs.host_to_device, &roofs.device_to_host}) *rate *= d.ranks;
  return roofs;
}

}  // namespace zg
