// Compiled for AVX2 (see CMakeLists.txt). Nothing but xxHash may be included here: inline code of a standard
// header that is compiled for AVX2 could be the one that the linker keeps for the whole program.
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
