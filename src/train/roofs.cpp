#include "train/roofs.hpp"

#include "ziggurat/device/cuda.hpp"

namespace zg {

Roofs measure_roofs(const RunConfig& config) {
  const DeviceConfig& d = config.device;
  if (d.kind == DeviceConfig::Kind::kHost) return measure_roofs(config.dtype);
  // A device of its own: the memory used here would otherwise count for the peaks that the run reports.
  const auto device = make_cuda_device({.device = d.gpus.front(),
                                        .budget = kRoofMemory,
                                        .deterministic = d.deterministic,
                                        .tf32 = d.tf32,
                                        .pin = d.pin});
  Roofs roofs = measure_roofs(*device, config.dtype);
  // Rates of all GPUs together, which are taken to be alike and to have links of their own.
  for (double* rate : {&roofs.flops, &roofs.host_to_device, &roofs.device_to_host}) *rate *= d.ranks;
  return roofs;
}

}  // namespace zg
