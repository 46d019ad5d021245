// In a file of its own: GCC 12 takes an inlined pair of these for a mismatch.
#include "allocations.hpp"

#include <cstdlib>
#include <new>

namespace {
thread_local std::int64_t count = 0;
}  // namespace

void* operator new(std::size_t bytes) {
  ++count;
  void* p = std::malloc(bytes == 0 ? 1 : bytes);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
// Whatever allocates must suit what frees; AddressSanitizer's own would not.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++count;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void operator delete(void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}

namespace zg::test {

std::int64_t allocations_of_this_thread() {
  return count;
}

}  // namespace zg::test
