#include "ziggurat/data/token_file.hpp"

#include <algorithm>

#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

constexpr std::int64_t kLlmcHeaderBytes = 256 * 4;
constexpr std::int64_t kNarrowAtOnce = 1 << 15;  // tokens of two bytes, which are widened

struct LlmcKind {
  std::int32_t magic, version;
  DType dtype;
};
constexpr LlmcKind kLlmcKinds[] = {{20240520, 1, DType::kU16}, {20240801, 7, DType::kI32}};

const char* width_name(DType dtype) {
  return dtype == DType::kU16 ? "uint16" : "uint32";
}

std::int64_t width_of(DType dtype) {
  return static_cast<std::int64_t>(size_of(dtype));
}

// Bytes of llm.c's header; 0 where there is none.
std::int64_t header_bytes(const InputFile& file, DType dtype) {
  const std::string& path = file.path();
  if (file.bytes() < kLlmcHeaderBytes) return 0;
  std::int32_t header[3];
  file.read(header, sizeof header, 0);
  const auto* kind = std::find_if(std::begin(kLlmcKinds), std::end(kLlmcKinds),
                                  [&](const LlmcKind& k) { return k.magic == header[0]; });
  if (kind == std::end(kLlmcKinds)) return 0;
  const std::string what = fmt::format("has llm.c's header (magic {}) ", header[0]);
  if (header[1] != kind->version) {
    throw Error(Errc::kUsage, path,
                what + fmt::format("of version {}; {} is read", header[1], kind->version));
  }
  if (kind->dtype != dtype) {
    throw Error(Errc::kUsage, path,
                what + fmt::format("of {} tokens, while {} is configured", width_name(kind->dtype),
                                   width_name(dtype)),
                fmt::format("set data.token_dtype to \"{}\"", width_name(kind->dtype)));
  }
  const std::int64_t tokens = (file.bytes() - kLlmcHeaderBytes) / width_of(dtype);
  if (header[2] != tokens) {
    throw Error(Errc::kUsage, path, what + fmt::format("of {} tokens, and has {}", header[2], tokens));
  }
  return kLlmcHeaderBytes;
}

}  // namespace

TokenFile::TokenFile(const std::string& path, DType dtype) : file_(path, "a token file"), dtype_(dtype) {
  ZG_ASSERT(dtype == DType::kU16 || dtype == DType::kI32, "token dtype {}", name_of(dtype));
  if (file_.bytes() == 0)
    throw Error(Errc::kUsage, path, "is empty; a token file is expected", "name another file");
  header_bytes_ = header_bytes(file_, dtype);
  const std::int64_t bytes = file_.bytes() - header_bytes_;
  if (bytes % width_of(dtype) != 0 || bytes == 0) {
    throw Error(Errc::kUsage, path,
                fmt::format("{} bytes are no whole number (above 0) of {} tokens", bytes, width_name(dtype)),
                "the right data.token_dtype (uint16 or uint32), or the whole file: it may have been cut");
  }
  count_ = bytes / width_of(dtype);
}

void TokenFile::read(std::int64_t first, std::int64_t n, std::int32_t* out) const {
  ZG_ASSERT(first >= 0 && n >= 0 && first <= count_ - n, "tokens [{}, {} + {}) of {}", first, first, n,
            count_);
  if (n == 0) return;
  const std::int64_t begin = header_bytes_ + first * width_of(dtype_);
  if (dtype_ != DType::kU16) {
    // An id above 2^31 - 1 becomes negative, which no vocabulary has.
    file_.read(out, n * width_of(dtype_), begin);
    return;
  }
  std::uint16_t narrow[kNarrowAtOnce];
  for (std::int64_t done = 0; done < n; done += kNarrowAtOnce) {
    const std::int64_t some = std::min(kNarrowAtOnce, n - done);
    file_.read(narrow, 2 * some, begin + 2 * done);
    std::copy(narrow, narrow + some, out + done);
  }
}

}  // namespace zg
