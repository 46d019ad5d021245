// What is worth host memory for good, when a program repeats.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/store/program.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

// The segments to keep at the host while `program` repeats, the most valuable first. The value of a segment
// is the NVMe bytes, read and written, that keeping it saves per byte held: once for each use that would have
// to fetch it, once for each time that it is modified and would have to be written back. A use soon after
// another one, with less used in between than the room that is left free, needs no fetch. Among segments of
// one value larger ones come first; what does not fit is passed over for what does.
//
// Left free is room for the largest working set of an operation, for the largest segment besides, and for
// what must be there at the same time since it may not sink to NVMe. Nothing is kept where that leaves
// nothing.
std::vector<SegmentId> keep_by_value(const TensorTable& table, const Program& program,
                                     std::int64_t host_bytes);

}  // namespace zg
