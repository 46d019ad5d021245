// Compiled for AVX2 (see CMakeLists.txt). Include nothing but xxHash here: the linker keeps one copy of each
// inline function for the whole program, and that could be the one compiled here for AVX2.
#if defined(__x86_64__)
#define XXH_INLINE_ALL
#define XXH_VECTOR XXH_AVX2
#include <xxhash.h>

#include "io/checksum.hpp"

namespace zg::io {
std::uint64_t checksum_avx2(const void* data, std::size_t bytes) {
  return XXH3_64bits(data, bytes);
}
}  // namespace zg::io
#endif
