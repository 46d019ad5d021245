// The measured rates of one drive of several.
#pragma once

namespace zg {

// Bytes per second while all drives work at once.
struct DriveRates {
  double read = 0, write = 0;  // one way at a time, of blocks that were written before
  double mixed = 0;            // both ways together; extents are spread by this rate
  double first_write = 0;      // of blocks that were never written
};

}  // namespace zg
