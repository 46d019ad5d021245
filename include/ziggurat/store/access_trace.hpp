// A record of a store's accesses, by which policies and budgets can be compared without moving a byte.
//
// Its file is one JSON object, written with one line for each tensor and each operation:
//
//   {"format": "ziggurat access trace", "version": 1,
//    "drives": 1, "budgets": {"device": 8388608, "host": 16777216},
//    "tensors": [
//     ["block.0.weight", "bf16", 7087872, "weight", "nvme", 0, 0],
//     ...],
//    "programs": [
//     {"name": "step", "ops": [
//      [12, "dr", 40, "dr", 41, "do"],
//      ...]}],
//    "sequence": [[0, 1], [1, 99]]}
//
// "device_granule" stands beside the budgets: the granule of device memory (Arena::granule()), up to which
// the bytes of a segment are rounded when they are charged to the device's budget; 4096 if it is left out.
//
// A tensor is a list: name, type, elements, role (weight, gradient, optimizer state, activation, other), the
// lowest tier that it may be demoted to (device, host, nvme), elements of a segment (0: one segment),
// priority, and its versions on NVMe (1 if left out).
//
// Segments are numbered across all tensors, in their order. An operation is a flat list of segments, each
// followed by its access: d(evice) or h(ost), then r(ead), w(rite: read and modify) or o(verwrite), then ! if
// the content is dead afterwards. A program may have "times", one number for each operation
// (Program::add_op); without them all are 1.
//
// The sequence is made of pairs: the index of a program, and how often it runs before the next pair. Keys of
// other names are ignored.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "ziggurat/base/file.hpp"
#include "ziggurat/store/program.hpp"
#include "ziggurat/store/residency.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

struct AccessTrace {
  TensorTable table{0};
  Budgets budgets;                     // of the store that it was recorded from
  std::vector<Program> programs;       // finished, and all different
  std::vector<std::int32_t> sequence;  // indices into programs, in the order in which they ran
};

// Runs of programs that a trace may have, one with another.
inline constexpr std::int64_t kMostTraceRuns = 1 << 24;

// Writes a temporary file and renames it. Throws Error(kIo), and Error(kUsage) for a trace with more values,
// or a file with more bytes, than load_trace() takes.
void save_trace(const AccessTrace& trace, const std::string& path, std::int64_t largest = kLargestTextFile);
// Throws Error(kUsage) that names the file and the place in it, what was found and what is expected.
AccessTrace load_trace(const std::string& path);

}  // namespace zg
