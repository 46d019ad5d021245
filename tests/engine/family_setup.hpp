// Runs of the tiny models of families.hpp.
#pragma once
#include <string>
#include <utility>

#include "engine/ranks_distance.hpp"
#include "support/families.hpp"

namespace zg::test {

inline TinySetup setup_of_family(const std::string& family, DType dtype = DType::kF64) {
  TinySetup s;
  s.model = FamilyFile(family).config();
  s.dtype = dtype;
  s.layout.micro_batch = {2, 24};
  s.layout.micro_batches = 2;
  s.layout.state_segment_bytes = 20000;
  s.eval_micro_batches = 3;
  return s;
}

// Two drives below as little memory as there can be.
inline TinySetup on_drives(TinySetup s) {
  s.layout.drives = 2, s.room = Room::kSmallest;
  return s;
}

}  // namespace zg::test
