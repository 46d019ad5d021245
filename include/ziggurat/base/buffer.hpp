// Host memory, aligned to 4096 bytes for direct I/O and vector code. A Buffer owns it; move-only.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace zg {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::int64_t bytes) { reserve(bytes); }
  char* data() const { return data_.get(); }
  std::int64_t size() const { return size_; }
  // Makes the buffer hold at least `bytes`. Growing loses its content. Throws std::bad_alloc.
  void reserve(std::int64_t bytes) {
    if (bytes <= size_) return;
    const std::int64_t rounded = (bytes + 4095) / 4096 * 4096;
    data_.reset(static_cast<char*>(std::aligned_alloc(4096, static_cast<std::size_t>(rounded))));
    size_ = data_ ? rounded : 0;
    if (!data_) throw std::bad_alloc();
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> data_;
  std::int64_t size_ = 0;
};

}  // namespace zg
