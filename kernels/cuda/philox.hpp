// Philox4x32-10 on the device: the same numbers as ziggurat/base/philox.hpp.
#pragma once
#include "kernels/cuda/launch.hpp"

namespace zg::cuda {

__device__ __forceinline__ uint4 philox4x32_10(uint4 counter, uint2 key) {
  constexpr unsigned kM0 = 0xD2511F53u, kM1 = 0xCD9E8D57u, kW0 = 0x9E3779B9u, kW1 = 0xBB67AE85u;
  ZG_UNROLL
  for (int round = 0; round < 10; ++round) {
    const unsigned high0 = __umulhi(kM0, counter.x), high1 = __umulhi(kM1, counter.z);
    counter =
        make_uint4(high1 ^ counter.y ^ key.x, kM1 * counter.z, high0 ^ counter.w ^ key.y, kM0 * counter.x);
    key.x += kW0;
    key.y += kW1;
  }
  return counter;
}

}  // namespace zg::cuda
