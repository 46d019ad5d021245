#include "comm/copy.hpp"

#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace zg::comm {
namespace {

constexpr std::int64_t kLarge = 1 << 20;  // bytes; less stays in a cache, where its reader finds it

}  // namespace

void copy(void* to, const void* from, std::int64_t bytes) {
  if (bytes == 0 || to == from) return;
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
#if defined(__SSE2__)
  if (bytes >= kLarge) {
    constexpr std::int64_t kLine = 64;
    const std::int64_t head = -reinterpret_cast<std::intptr_t>(out) & (kLine - 1);
    std::memcpy(out, in, static_cast<std::size_t>(head));
    out += head, in += head, bytes -= head;
    for (; bytes >= kLine; out += kLine, in += kLine, bytes -= kLine) {
      _mm_prefetch(in + 8 * kLine, _MM_HINT_NTA);
      for (int i = 0; i < 4; ++i) {
        const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in) + i);
        _mm_stream_si128(reinterpret_cast<__m128i*>(out) + i, part);
      }
    }
    _mm_sfence();
  }
#endif
  std::memcpy(out, in, static_cast<std::size_t>(bytes));
}

}  // namespace zg::comm
