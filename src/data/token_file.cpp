#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/data/token_file.hpp"

namespace zg {
namespace {

constexpr std::int64_t kLlmcHeaderBytes = 256 * 4;
constexpr std::int64_t kLargestFolio = 2 * kMiB;

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
std::int64_t header_bytes(const std::string& path, DType dtype, const void* data, std::int64_t bytes) {
  if (bytes < kLlmcHeaderBytes) return 0;
  std::int32_t header[3];
  std::memcpy(header, data, sizeof header);
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
  const std::int64_t tokens = (bytes - kLlmcHeaderBytes) / width_of(dtype);
  if (header[2] != tokens) {
    throw Error(Errc::kUsage, path, what + fmt::format("of {} tokens, and has {}", header[2], tokens));
  }
  return kLlmcHeaderBytes;
}

}  // namespace

TokenFile::TokenFile(const std::string& path, DType dtype) : path_(path), dtype_(dtype) {
  ZG_ASSERT(dtype == DType::kU16 || dtype == DType::kI32, "token dtype {}", name_of(dtype));
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw Error(Errc::kUsage, path, "a token file cannot be read: " + errno_text(errno));
  struct stat st {};
  const int failed = ::fstat(fd, &st) != 0 ? errno : 0;
  bytes_ = st.st_size;
  if (failed == 0 && S_ISREG(st.st_mode) && bytes_ > 0) {
    data_ = ::mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_READ, MAP_SHARED, fd, 0);
  }
  const int error = failed != 0 ? failed : data_ == MAP_FAILED ? errno : 0;
  ::close(fd);
  if (error != 0) {
    data_ = nullptr;
    throw Error(Errc::kUsage, path, "a token file cannot be mapped into memory: " + errno_text(error));
  }
  if (!S_ISREG(st.st_mode))
    throw Error(Errc::kUsage, path, "a token file is expected, this is no regular file");
  if (bytes_ == 0) throw Error(Errc::kUsage, path, "is empty; a token file is expected");
  try {
    header_bytes_ = header_bytes(path, dtype, data_, bytes_);
    if ((bytes_ - header_bytes_) % width_of(dtype) != 0 || bytes_ == header_bytes_) {
      throw Error(Errc::kUsage, path,
                  fmt::format("{} bytes are no whole number (above 0) of {} tokens", bytes_ - header_bytes_,
                              width_name(dtype)));
    }
  } catch (...) {
    ::munmap(data_, static_cast<std::size_t>(bytes_));
    throw;
  }
  count_ = (bytes_ - header_bytes_) / width_of(dtype);
  // Windows start anywhere, so read-ahead would fetch pages that nobody asked for, and keep them resident.
  // This is a hint, so errors do not matter.
  (void)::madvise(data_, static_cast<std::size_t>(bytes_), MADV_RANDOM);
}

TokenFile::~TokenFile() {
  ::munmap(data_, static_cast<std::size_t>(bytes_));
}

void TokenFile::read(std::int64_t first, std::int64_t n, std::int32_t* out) const {
  ZG_ASSERT(first >= 0 && n >= 0 && first <= count_ - n, "tokens [{}, {} + {}) of {}", first, first, n,
            count_);
  if (n == 0) return;
  const std::int64_t begin = header_bytes_ + first * width_of(dtype_), end = begin + n * width_of(dtype_);
  char* const base = static_cast<char*>(data_);
  const auto advise = [&](std::int64_t unit, int advice) {  // for all units of the file that the tokens touch
    const std::int64_t from = begin / unit * unit, to = std::min(round_up(end, unit), bytes_);
    (void)::madvise(base + from, static_cast<std::size_t>(to - from), advice);  // a hint
  };

  static const std::int64_t page = ::sysconf(_SC_PAGESIZE);
  if (end - begin > page) advise(page, MADV_WILLNEED);  // one request instead of one per page
  if (dtype_ == DType::kU16) {
    const auto* tokens = reinterpret_cast<const std::uint16_t*>(base + begin);
    std::copy(tokens, tokens + n, out);
  } else {
    // An id above 2^31 - 1 becomes negative, which no vocabulary has.
    std::memcpy(out, base + begin, static_cast<std::size_t>(end - begin));
  }
  // The pages stay in the system's cache, but no longer count as this process's memory. A page fault also
  // maps the pages around it (Linux: 64 KiB, or the whole folio of up to 2 MiB), so all that it may have
  // mapped is given back.
  advise(kLargestFolio, MADV_DONTNEED);
}

}  // namespace zg
