// Which segments to pin at the host while a program repeats.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/store/program.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

// The segments to keep at the host while `program` repeats, the most valuable first. The value of a segment
// is the NVMe bytes, read and written, that keeping it saves in one run of the program, per byte held: one
// for each use before which it would be read, one for each time that it would be evicted dirty. A use that
// follows another one of the segment closely, with fewer bytes used in between than the reserve, would find
// it still at the host, and counts nothing. Of two segments of equal value the larger one comes first; a
// segment that does not fit is skipped, and smaller ones after it may still fit.
//
// The reserve is host memory that is left free: for the largest working set of an operation, for the largest
// segment besides, and for the segments that hold content at the same time and may not be demoted to NVMe.
// Where the reserve is all of host memory, nothing is kept.
std::vector<SegmentId> keep_by_value(const TensorTable& table, const Program& program,
                                     std::int64_t host_bytes);

}  // namespace zg
