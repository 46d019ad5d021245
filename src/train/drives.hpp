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

// Chooses the sizes of the drives' files, in whole pages and at least one, so that together they hold
// `bytes`. A stated size is the most that a drive gives; 0: none is stated. Each of several drives gets more
// than an equal share, since a faster drive will hold more, but this extra uses at most kTaken of any file
// system's free space. Throws Error(kIo), with the free space on each path, if the drives cannot hold
// `bytes`, and the error of check_stated_sizes(). A pure function.
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
// The programmed rates of drives that are simulated in memory (DriveOptions::ram, or else `common`): each
// drive's long-term mean, in bytes per second. Empty if one of them has no speed limit.
std::vector<double> programmed_rates(const std::vector<io::DriveOptions>& drives, const io::RamModel& common);

}  // namespace zg
