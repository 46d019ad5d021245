// Page-aligned memory full of noise that no drive can compress, for benchmarks and probes. All of it is
// present, and it lies in huge pages if those are wanted and the system has them.
#pragma once
#include <cstdint>

namespace zg::io {

class NoiseMemory {
 public:
  // What the message says when there is no memory: who wanted it, "... of buffers", and what may help.
  struct Purpose {
    const char* where;
    const char* what;
    const char* hint;
  };
  // Throws Error(kMemory).
  NoiseMemory(std::int64_t bytes, bool huge_pages, const Purpose& purpose);
  ~NoiseMemory();
  NoiseMemory(const NoiseMemory&) = delete;
  NoiseMemory& operator=(const NoiseMemory&) = delete;
  char* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  void fill();

  const std::int64_t bytes_;
  void* mapping_ = nullptr;
  char* data_ = nullptr;
};

}  // namespace zg::io
