// Host memory, aligned to 4096 bytes for direct I/O and vector code. A Buffer owns it; move-only.
#pragma once
#include <cstdint>
#include <memory>

namespace zg {

// A buffer of 2 MiB or more begins at a multiple of 2 MiB and asks the kernel for huge pages (madvise).
// Direct I/O gives a drive one segment for each contiguous range of physical memory, so 8 MiB in pages of 4
// KiB are 2,048 segments; and generation, which reads all weights for each token, is slower by a fifth with
// small pages.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::int64_t bytes) { reserve(bytes); }
  char* data() const { return data_.get(); }
  std::int64_t size() const { return size_; }
  // Makes the buffer hold at least `bytes`. Growing loses its content. Throws std::bad_alloc.
  void reserve(std::int64_t bytes);

 private:
  struct Free {
    std::int64_t mapped;  // bytes of a mapping; 0: from the heap
    void operator()(char* p) const;
  };
  std::unique_ptr<char, Free> data_;
  std::int64_t size_ = 0;
};

}  // namespace zg
