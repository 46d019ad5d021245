// Files of tokens. Immutable after construction: any thread may call any const function.
#pragma once
#include <cstdint>
#include <string>

#include "ziggurat/base/dtype.hpp"

namespace zg {

// A token file of uint16 or uint32, mapped into memory; pages that were read are given back, so that the
// process's resident memory does not grow with the file. Raw tokens (nanoGPT's and Megatron's .bin), or
// llm.c's: a header of 256 int32 {20240520, 1, tokens} before uint16, {20240801, 7, tokens} before uint32,
// which is recognised and skipped.
class TokenFile {
 public:
  // kU16, or kI32 for uint32. Throws Error(kUsage): missing, empty, odd size, a header that contradicts the
  // rest.
  TokenFile(const std::string& path, DType dtype);
  ~TokenFile();
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;
  const std::string& path() const { return path_; }
  DType dtype() const { return dtype_; }
  std::int64_t size() const { return count_; }
  // Tokens [first, first + n) as int32.
  void read(std::int64_t first, std::int64_t n, std::int32_t* out) const;

 private:
  std::string path_;
  DType dtype_;
  void* data_ = nullptr;
  std::int64_t bytes_ = 0, header_bytes_ = 0, count_ = 0;
};

}  // namespace zg
