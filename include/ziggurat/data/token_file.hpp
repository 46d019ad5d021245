// Files of tokens. Immutable after construction: any thread may call any const function.
#pragma once
#include <cstdint>
#include <string>

#include "ziggurat/base/dtype.hpp"
#include "ziggurat/base/file.hpp"

namespace zg {

// A file of uint16 or uint32 tokens. It is read on demand rather than mapped, so memory does not grow with
// the file, and a drive's error is thrown as an Error. The file holds raw tokens (as nanoGPT's and Megatron's
// .bin), or begins with llm.c's header, which is recognised and skipped: 256 int32, of which the first three
// are {20240520, 1, tokens} for uint16 and {20240801, 7, tokens} for uint32.
class TokenFile {
 public:
  // `dtype` is kU16, or kI32 for uint32. Throws Error(kUsage) for a file that is missing or empty, whose size
  // is no whole number of tokens, or whose header contradicts the rest.
  TokenFile(const std::string& path, DType dtype);
  const std::string& path() const { return file_.path(); }
  DType dtype() const { return dtype_; }
  std::int64_t size() const { return count_; }
  bool has_header() const { return header_bytes_ > 0; }
  // Writes tokens [first, first + n) to out [n]. A uint32 above 2^31 - 1 comes out negative. Throws
  // Error(kIo) for a drive's error, and for a file that has become shorter.
  void read(std::int64_t first, std::int64_t n, std::int32_t* out) const;

 private:
  InputFile file_;
  DType dtype_;
  std::int64_t header_bytes_ = 0, count_ = 0;
};

}  // namespace zg
