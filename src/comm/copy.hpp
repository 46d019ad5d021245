// Copies of operands, which are larger than the caches.
#pragma once
#include <cstdint>

namespace zg::comm {

// Does nothing if `to` is `from`. Large copies bypass the caches: then the processor need not read the lines
// that it overwrites, which saves a third of the traffic. memcpy() decides this by the size of one call, but
// the total size of an operand's rows is what matters.
void copy(void* to, const void* from, std::int64_t bytes);

}  // namespace zg::comm
