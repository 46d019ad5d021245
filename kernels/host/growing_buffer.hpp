// Memory that only grows, aligned to cache lines. Owned by one thread. Its contents are lost when it grows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace zg::host {

template <class T>
class GrowingBuffer {
 public:
  T* at_least(std::int64_t count) {
    if (count > count_) {
      memory_.reset();
      count_ = 0;
      memory_.reset(static_cast<T*>(
          ::operator new (static_cast<std::size_t>(count) * sizeof(T), std::align_val_t{kAlign})));
      count_ = count;
    }
    return memory_.get();
  }

 private:
  static constexpr std::size_t kAlign = 64;
  struct Free {
    void operator()(T* p) const { ::operator delete (p, std::align_val_t{kAlign}); }
  };
  std::unique_ptr<T, Free> memory_;
  std::int64_t count_ = 0;
};

}  // namespace zg::host
