// In a file of its own: GCC 12 takes an inlined pair of these for a mismatch.
#include "support/count_allocations.hpp"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

namespace {

thread_local std::int64_t count = 0, failing = -1;
thread_local bool failed = false;
std::atomic<std::int64_t> count_of_all{0};

// Null when there is no memory, or this allocation was chosen to fail.
void* allocate(std::size_t bytes, std::size_t alignment) noexcept {
  count_of_all.fetch_add(1, std::memory_order_relaxed);
  if (count++ == failing) {
    failed = true;
    return nullptr;
  }
  if (alignment <= alignof(std::max_align_t)) return std::malloc(bytes == 0 ? 1 : bytes);
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

void* allocate_or_throw(std::size_t bytes, std::size_t alignment) {
  void* p = allocate(bytes, alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

std::size_t number(std::align_val_t alignment) {
  return static_cast<std::size_t>(alignment);
}

}  // namespace

// All forms are replaced, since new and delete must match: AddressSanitizer's own would not match ours.
void* operator new(std::size_t bytes) {
  return allocate_or_throw(bytes, 1);
}
void* operator new[](std::size_t bytes) {
  return allocate_or_throw(bytes, 1);
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate_or_throw(bytes, number(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return allocate_or_throw(bytes, number(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return allocate(bytes, 1);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return allocate(bytes, 1);
}
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate(bytes, number(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate(bytes, number(alignment));
}
void operator delete(void* p) noexcept {
  std::free(p);
}
void operator delete[](void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}
void operator delete[](void* p, std::size_t) noexcept {
  std::free(p);
}
void operator delete(void* p, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete[](void* p, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete(void* p, std::size_t, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept {
  std::free(p);
}

namespace zg::test {

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

}  // namespace zg::test
