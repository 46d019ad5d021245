// The drives of a run's NVMe tier: the sizes of their files, and their rates.
#pragma once
#include <cstdint>
#include <vector>

#include "ziggurat/io/drive_rates.hpp"
#include "ziggurat/io/engine.hpp"
#include "ziggurat/train/run_plan.hpp"

namespace zg {

inline constexpr std::int64_t kUnlimited = std::int64_t{1} << 60;
// The current space of each drive's file system. Throws Error(kIo).
std::vector<DriveSpace> space_of(const std::vector<io::DriveOptions>& drives);

// Throws Error(kMemory) where all drives have stated sizes which together are less than `bytes`.
void check_stated_sizes(const std::vector<io::DriveOptions>& drives, std::int64_t bytes);

// The drives with the sizes of their files, in whole pages and at least one, so that together they hold
// `bytes`. A stated size is the most that a drive gives; 0: none is stated. Of several drives each gets more
// than its equal share, since a faster drive will hold more; but this extra uses at most kTaken of the free
// space of any file system. Throws Error(kIo), which says what is free on each path, where the drives cannot
// hold `bytes`, and the error of check_stated_sizes(). A pure function.
std::vector<io::DriveOptions> drives_for(std::vector<io::DriveOptions> drives,
                                         const std::vector<DriveSpace>& space, std::int64_t bytes);
inline constexpr double kTaken = 0.9;

// Measures the drives for some three seconds, by writing and reading the first bytes of every file through
// the engine as a run does: with its queue depth, transfers of a block or more, registered memory in huge
// pages, and a mixture in which `read_share` of the bytes are read. Its buffers take 64 MiB, or `most_memory`
// if that is less, but at least 4 MiB for each drive. The old bytes of the files are lost. Throws Error(kIo)
// with the path when a transfer fails. Nobody else may use the drives meanwhile.
std::vector<DriveRates> measure_drives(io::Engine& engine, std::int64_t block_size, double read_share = 0.5,
                                       std::int64_t most_memory = std::int64_t{64} << 20);
// The rates of drives that are simulated in memory, as programmed (DriveOptions::ram, or else `common`): the
// mean bytes per second of each over a long time. Empty if one of them has no speed limit.
std::vector<double> programmed_rates(const std::vector<io::DriveOptions>& drives, const io::RamModel& common);

}  // namespace zg
