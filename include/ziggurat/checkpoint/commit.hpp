// Atomic creation and removal of checkpoints.
#pragma once
#include <cstdint>
#include <string>

#include "ziggurat/checkpoint/files.hpp"

namespace zg {

// Commits a checkpoint whose other files are on the drive already: writes the manifest, and renames the
// directory from `unfinished` to `path`. Throws Error(kIo).
void commit_checkpoint(Files& files, const std::string& unfinished, const std::string& path,
                       const std::string& manifest);
// Like discard_checkpoint(path), through `files`. Returns the error as text, empty where it succeeds.
std::string discard_checkpoint(Files& files, const std::string& path);
// Removes the checkpoints in the directory up to number `newest`, except the last `keep` of them and number
// `held`.
void remove_old_checkpoints(Files& files, const std::string& directory, std::int64_t newest,
                            std::int64_t keep, std::int64_t held = 0);

}  // namespace zg
