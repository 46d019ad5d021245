// XXH3 (64 bits, no seed, default secret) of more than 240 bytes, after the specification of xxHash: the
// same value as on the host.
//
// The input is divided into blocks of 1024 bytes, each of 16 stripes of 64. For each block, a sum over the
// block's stripes, which does not depend on earlier blocks, is added to eight accumulators; these are then
// scrambled, which depends on earlier blocks. So one kernel computes the sums of all blocks, a warp for each,
// and another kernel, of one warp, processes the sums in order.
#include "kernels/cuda/launch.hpp"

namespace zg::cuda {
namespace {

constexpr int kWarps = 8;  // warps of a CUDA block
constexpr std::int64_t kBlock = 1024, kStripe = 64;
constexpr int kLanes = 8;   // accumulators
constexpr int kAhead = 16;  // sums that checksum_walk loads at once
constexpr unsigned kAll = 0xffffffffu;

constexpr std::uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu,
                        kPrime64_3 = 0x165667B19E3779F9u, kPrime64_4 = 0x85EBCA77C2B2AE63u,
                        kPrime64_5 = 0x27D4EB2F165667C5u, kAvalanche = 0x165667919E3779F9u;

// The default secret of 192 bytes.
constexpr std::uint64_t kSecret[] = {
    0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u, 0x78e5c0cc4ee679cbu,
    0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u, 0xcb00c391bb52283cu, 0xa32e531b8b65d088u,
    0x4ef90da297486471u, 0xd8acdea946ef1938u, 0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au,
    0x647378d9c97e9fc8u, 0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
    0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu};

// The words of the secret that are used, as a kernel argument, which threads can index.
struct Keys {
  std::uint64_t stripes[24];       // stripe s, accumulator i: word s + i
  std::uint64_t scramble[kLanes];  // words from byte 128 on
  std::uint64_t last[kLanes];      // for the last stripe: words from byte 121 on
  std::uint64_t end[kLanes];       // words from byte 11 on
  std::uint64_t start[kLanes];     // the accumulators' first values
};

constexpr std::uint64_t word_at(int byte) {
  const int shift = 8 * (byte % 8);
  return shift == 0 ? kSecret[byte / 8] : kSecret[byte / 8] >> shift | kSecret[byte / 8 + 1] << (64 - shift);
}

constexpr Keys make_keys() {
  Keys k{};
  for (int i = 0; i < 24; ++i) k.stripes[i] = kSecret[i];
  for (int i = 0; i < kLanes; ++i) {
    k.scramble[i] = word_at(128 + 8 * i);
    k.last[i] = word_at(121 + 8 * i);
    k.end[i] = word_at(11 + 8 * i);
  }
  const std::uint64_t start[] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                 kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  for (int i = 0; i < kLanes; ++i) k.start[i] = start[i];
  return k;
}
constexpr Keys kKeys = make_keys();

// The value that is added to accumulator `lane % 8` for its word of a stripe and its neighbour's word.
__device__ __forceinline__ std::uint64_t gain(std::uint64_t word, std::uint64_t key) {
  const std::uint64_t mixed = word ^ key;
  return (mixed & 0xffffffffu) * (mixed >> 32) + __shfl_xor_sync(kAll, word, 1);
}

// The warp takes four stripes at a time, eight lanes for each.
__global__ void __launch_bounds__(32 * kWarps)
    checksum_sums(std::int64_t blocks, std::int64_t bytes, const std::uint64_t* data, const Keys keys,
                  std::uint64_t* sums) {
  constexpr int kGroups = 4, kRounds = 16 / kGroups;
  const int lane = static_cast<int>(threadIdx.x % 32), i = lane % kLanes, group = lane / kLanes;
  std::uint64_t key[kRounds];
  ZG_UNROLL
  for (int r = 0; r < kRounds; ++r) key[r] = keys.stripes[kGroups * r + group + i];
  const std::int64_t first = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  for (std::int64_t b = first; b < blocks; b += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t whole = (bytes - 1 - b * kBlock) / kStripe;  // stripes, of which 16 count here
    const std::uint64_t* const from = data + b * (kBlock / 8) + lane;
    std::uint64_t word[kRounds];
    ZG_UNROLL
    for (int r = 0; r < kRounds; ++r) word[r] = kGroups * r + group < whole ? from[32 * r] : 0;
    std::uint64_t sum = 0;
    ZG_UNROLL
    for (int r = 0; r < kRounds; ++r) {
      const std::uint64_t more = gain(word[r], key[r]);
      if (kGroups * r + group < whole) sum += more;
    }
    sum += __shfl_xor_sync(kAll, sum, 8);
    sum += __shfl_xor_sync(kAll, sum, 16);
    if (group == 0) sums[b * kLanes + i] = sum;
  }
}

// The exclusive or of the two halves of the 128-bit product.
__device__ __forceinline__ std::uint64_t folded(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t a0 = a & 0xffffffffu, a1 = a >> 32, b0 = b & 0xffffffffu, b1 = b >> 32;
  const std::uint64_t low = a0 * b0, cross = a1 * b0 + (low >> 32);
  const std::uint64_t middle = a0 * b1 + (cross & 0xffffffffu);
  return (a1 * b1 + (cross >> 32) + (middle >> 32)) ^ (middle << 32 | (low & 0xffffffffu));
}

// Every lane has the accumulator lane % 8. `sums` has the sums of all whole blocks and of the rest of the
// input.
__global__ void __launch_bounds__(32)
    checksum_walk(std::int64_t whole, std::int64_t bytes, const std::uint64_t* data, const Keys keys,
                  const std::uint64_t* sums, std::uint64_t* result) {
  const int i = static_cast<int>(threadIdx.x) % kLanes;
  const std::uint64_t scramble = keys.scramble[i];
  std::uint64_t acc = keys.start[i];
  const auto step = [&](std::uint64_t sum) {
    acc += sum;
    acc ^= acc >> 47;
    acc = (acc ^ scramble) * kPrime32_1;
  };
  std::int64_t b = 0;
  for (; b + kAhead <= whole; b += kAhead) {
    std::uint64_t ahead[kAhead];
    ZG_UNROLL
    for (int j = 0; j < kAhead; ++j) ahead[j] = sums[(b + j) * kLanes + i];
    ZG_UNROLL
    for (int j = 0; j < kAhead; ++j) step(ahead[j]);
  }
  for (; b < whole; ++b) step(sums[b * kLanes + i]);
  acc += sums[whole * kLanes + i];
  acc += gain(data[(bytes - kStripe) / 8 + i], keys.last[i]);
  const std::uint64_t other = __shfl_xor_sync(kAll, acc, 1);
  std::uint64_t sum = i % 2 == 0 ? folded(acc ^ keys.end[i], other ^ keys.end[i + 1]) : 0;
  sum += __shfl_xor_sync(kAll, sum, 2);
  sum += __shfl_xor_sync(kAll, sum, 4);
  if (threadIdx.x != 0) return;
  std::uint64_t h = sum + static_cast<std::uint64_t>(bytes) * kPrime64_1;
  h ^= h >> 37;
  h *= kAvalanche;
  *result = h ^ (h >> 32);
}

}  // namespace

std::int64_t checksum_scratch_bytes(std::int64_t bytes) {
  return ((bytes - 1) / kBlock + 1) * kLanes * 8;
}

void checksum(const Launch& on, std::int64_t bytes, const void* data, void* scratch, std::uint64_t* result) {
  const auto* const words = static_cast<const std::uint64_t*>(data);
  auto* const sums = static_cast<std::uint64_t*>(scratch);
  const std::int64_t whole = (bytes - 1) / kBlock, blocks = whole + 1;
  const std::int64_t wanted = (blocks + kWarps - 1) / kWarps, most = std::int64_t{8} * on.multiprocessors;
  const auto grid = static_cast<unsigned>(wanted < most ? wanted : most);
  launch("checksum_sums", checksum_sums, on, Shape{dim3(grid), dim3(32 * kWarps)}, blocks, bytes, words,
         kKeys, sums);
  launch("checksum_walk", checksum_walk, on, Shape{dim3(1), dim3(32)}, whole, bytes, words, kKeys, sums,
         result);
}

}  // namespace zg::cuda
