#include "io/checksum.hpp"

#include "ziggurat/io/volume.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zg::io {

std::uint64_t checksum_portable(const void* data, std::size_t bytes) {
  return XXH3_64bits(data, bytes);
}

std::uint64_t checksum(const void* data, std::int64_t size) {
  const auto bytes = static_cast<std::size_t>(size);
#if defined(__x86_64__)
  static const bool avx512 = __builtin_cpu_supports("avx512f") != 0,
                    avx2 = __builtin_cpu_supports("avx2") != 0;
  if (avx512) return checksum_avx512(data, bytes);
  if (avx2) return checksum_avx2(data, bytes);
#endif
  return checksum_portable(data, bytes);
}

}  // namespace zg::io
