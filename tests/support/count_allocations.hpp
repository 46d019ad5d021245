// Counts what this program allocates with new, for tests of what must not allocate in its steady state; and
// makes one fail, for tests of what must survive that. For programs that have count_allocations.cpp among
// their sources.
#pragma once
#include <cstdint>

namespace zg::test {

std::int64_t allocations_of_this_thread();
std::int64_t allocations_of_all_threads();

// The n-th allocation from now on this thread throws std::bad_alloc; those after it do not.
void fail_allocation(std::int64_t n);
// Whether that allocation came; if not, it is called off.
bool allocation_failed();

}  // namespace zg::test
