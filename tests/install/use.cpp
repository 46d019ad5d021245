// Writes a tensor in host memory and reads it on the device, with the installed headers and libraries alone.
#include <cstdio>
#include <cstring>

#include "ziggurat/store/store.hpp"

int main() {
  zg::TensorTable table(0);
  zg::TensorSpec spec;
  spec.name = "a";
  spec.count = 1000;
  spec.lowest = zg::Tier::kHost;
  table.add(spec);
  const auto device = zg::make_host_device(1 << 20, nullptr);
  const auto host = zg::make_host_arena("host memory", 1 << 20);
  zg::TensorStore::Options options;
  options.table = &table;
  options.device = device.get();
  options.host = host.get();
  options.budgets = {1 << 20, 1 << 20};
  zg::TensorStore store(options);
  {
    const zg::Lease lease = store.acquire(0, zg::Tier::kHost, zg::Access::kOverwrite);
    std::memset(lease.data(), 42, static_cast<std::size_t>(lease.bytes()));
  }
  const zg::Lease lease = store.acquire(0, zg::Tier::kDevice, zg::Access::kRead);
  const auto* bytes = static_cast<const char*>(lease.data());
  std::printf("%d\n", bytes[lease.bytes() - 1]);
  return lease.bytes() == 4000 && bytes[lease.bytes() - 1] == 42 ? 0 : 1;
}
