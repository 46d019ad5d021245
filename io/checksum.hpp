// The implementations of checksum() (volume.hpp) for different vector units. All give the same value.
#pragma once
#include <cstddef>
#include <cstdint>

namespace zg::io {

// Each has a source of its own, compiled for its instruction set.
std::uint64_t checksum_portable(const void* data, std::size_t bytes);
#if defined(__x86_64__)
std::uint64_t checksum_avx2(const void* data, std::size_t bytes);
std::uint64_t checksum_avx512(const void* data, std::size_t bytes);
#endif

}  // namespace zg::io
