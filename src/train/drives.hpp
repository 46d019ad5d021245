// The drives of a run's NVMe tier: how large a file each gets, and how fast they are.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/io/engine.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {

inline constexpr std::int64_t kUnlimited = std::int64_t{1} << 60;
// As it is now, one for each drive. Throws Error(kIo).
std::vector<DriveSpace> space_of(const std::vector<io::DriveOptions>& drives);

// Throws Error(kMemory) when every drive has a stated size, and all together are too small for `bytes`.
void check_stated_sizes(const std::vector<io::DriveOptions>& drives, std::int64_t bytes);

// The drives with the sizes that their files get, whole pages and at least one, so that together they hold
// `bytes`. A stated size is the most that a drive gives; 0 leaves it open. Where there are several, each gets
// more than its part, since a faster one will hold more, but that takes no more than kTaken of what is free
// anywhere. Throws Error(kIo) that says what is free on each path when they cannot hold it all, and as
// check_stated_sizes() does. Pure: looks at nothing but its arguments.
std::vector<io::DriveOptions> drives_for(std::vector<io::DriveOptions> drives,
                                         const std::vector<DriveSpace>& space, std::int64_t bytes);
inline constexpr double kTaken = 0.9;

// Bytes per second while all drives work at once.
struct DriveRates {
  double read = 0, write = 0;  // one way alone, of blocks that were written before
  double mixed = 0;            // both ways together; what extents are spread by
  double first_write = 0;      // of a file's blocks that were never written
};
// Writes and reads the first bytes of every drive's file through the engine, for some three seconds, as a run
// uses them: with its depth, transfers of a block or more, registered memory in huge pages, and a mixture in
// which `read_share` of the bytes are read. What was there is lost. Throws Error(kIo) with the path when a
// transfer fails. Nobody else may use the drives meanwhile.
std::vector<DriveRates> measure_drives(io::Engine& engine, std::int64_t block_size, double read_share = 0.5);
// Of drives made of memory, as programmed (DriveOptions::ram, or else `common`): each one's bytes per second
// in the mean over a long time. Empty when one of them is as fast as memory, which is no number.
std::vector<double> programmed_rates(const std::vector<io::DriveOptions>& drives, const io::RamModel& common);

}  // namespace zg
