// Copies of operands, which are larger than the caches.
#pragma once
#include <cstdint>

namespace zg::comm {

// Does nothing if `to` is `from`. Large copies are written past the caches: the processor need not read the
// lines that it overwrites, which is a third of the traffic. memcpy() decides for that by the size of one
// call, but what counts is the size of all the rows of an operand.
void copy(void* to, const void* from, std::int64_t bytes);

}  // namespace zg::comm
