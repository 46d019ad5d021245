// In a file of its own: GCC 12 takes an inlined pair of these for a mismatch.
#include "allocations.hpp"

#include <atomic>
#include <cstdlib>
#include <new>
#include <utility>

namespace {
thread_local std::int64_t count = 0, failing = -1;
thread_local bool failed = false;
std::atomic<std::int64_t> count_of_all{0};
}  // namespace

void* operator new(std::size_t bytes) {
  count_of_all.fetch_add(1, std::memory_order_relaxed);
  if (count++ == failing) {
    failed = true;
    throw std::bad_alloc();
  }
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

namespace zg::io::test {

std::int64_t allocations_of_this_thread() {
  return count;
}

std::int64_t allocations_of_all_threads() {
  return count_of_all.load(std::memory_order_relaxed);
}

void fail_allocation(std::int64_t n) {
  failing = count + n;
  failed = false;
}

bool allocation_failed() {
  failing = -1;
  return std::exchange(failed, false);
}

}  // namespace zg::io::test
