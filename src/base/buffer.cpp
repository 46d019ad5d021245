#include "ziggurat/base/buffer.hpp"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

constexpr std::int64_t kPage = 4096, kHugePage = 2 * kMiB;

// Maps memory for one buffer. It does not come from the heap, since advice on heap memory would also apply to
// later allocations there. Null if there is no memory.
char* map(std::int64_t bytes) {
  void* const all = mmap(nullptr, static_cast<std::size_t>(bytes + kHugePage), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(all));
  const std::int64_t before = round_up(address, kHugePage) - address, behind = kHugePage - before;
  char* const begin = static_cast<char*>(all) + before;
  if (before > 0) (void)munmap(all, static_cast<std::size_t>(before));
  if (behind > 0) (void)munmap(begin + bytes, static_cast<std::size_t>(behind));
  // A system without huge pages refuses this; small pages work, too.
  (void)madvise(begin, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
  return begin;
}

}  // namespace

void Buffer::reserve(std::int64_t bytes) {
  if (bytes <= size_) return;
  const std::int64_t rounded = round_up(bytes, kPage), mapped = rounded >= kHugePage ? rounded : 0;
  data_.reset();  // frees the old memory before new memory is taken
  size_ = 0;
  char* const p = mapped > 0
                      ? map(rounded)
                      : static_cast<char*>(std::aligned_alloc(kPage, static_cast<std::size_t>(rounded)));
  if (p == nullptr) throw std::bad_alloc();
  data_ = std::unique_ptr<char, Free>(p, Free{mapped});
  size_ = rounded;
}

void Buffer::Free::operator()(char* p) const {
  if (mapped > 0) {
    (void)munmap(p, static_cast<std::size_t>(mapped));
  } else {
    std::free(p);
  }
}

}  // namespace zg
