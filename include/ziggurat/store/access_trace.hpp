// What a store was asked for, so that policies and budgets can be compared without moving a byte.
//
// As a file: one JSON object, written with one line for each tensor and each operation.
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
// "device_granule", beside the budgets: what device memory is given in (Arena::granule()), so that a segment
// takes so many bytes of the device's budget, rounded up to it; 4096 if it is left out.
//
// A tensor is name, type, elements, role (weight, gradient, optimizer state, activation, other), the lowest
// tier that it may sink to (device, host, nvme), elements of a segment (0: one segment), priority, and its versions
// on NVMe (1 if it is left out).
// Segments are numbered through all tensors in their order. An operation is a flat list of segments, each
// followed by its access: d(evice) or h(ost), then r(ead), w(rite: read and modify) or o(verwrite), then ! if
// its content is dead afterwards. The sequence is made of pairs: index of a program, how often it runs before
// the next pair. A program may have "times", one number for each operation (Program::add_op); without, all are 1.
// Keys of other names are ignored.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "ziggurat/store/program.hpp"
#include "ziggurat/store/residency.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

struct AccessTrace {
  TensorTable table{0};
  Budgets budgets;                     // of the store that it was recorded from
  std::vector<Program> programs;       // finished; each step that was unlike those before
  std::vector<std::int32_t> sequence;  // indices into programs, in the order in which they ran
};

// Written aside and renamed. Throws Error(kIo).
void save_trace(const AccessTrace& trace, const std::string& path);
// Throws Error(kUsage) that names the file and the place in it, what was found and what is expected.
AccessTrace load_trace(const std::string& path);

}  // namespace zg
