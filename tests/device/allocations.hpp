// Counts what this program allocates with new, for tests of what must not allocate in its steady state.
#pragma once
#include <cstdint>

namespace zg::test {

std::int64_t allocations_of_this_thread();

}  // namespace zg::test
