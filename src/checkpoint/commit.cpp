#include "ziggurat/checkpoint/commit.hpp"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/checkpoint/directory_lock.hpp"
#include "ziggurat/checkpoint/format.hpp"
#include "ziggurat/checkpoint/pins.hpp"

namespace zg {

// The checkpoint exists from the rename on, and lasts from the last sync on. Before the rename everything in
// it is on the drive.
void commit_checkpoint(Files& files, const std::string& unfinished, const std::string& path,
                       const std::string& manifest) {
  NewFile file(files, unfinished + "/" + kManifestName, static_cast<std::int64_t>(manifest.size()));
  file.write(manifest.data(), static_cast<std::int64_t>(manifest.size()), 0);
  file.sync_and_close();
  if (const int error = files.sync_directory(unfinished); error != 0)
    throw_io(unfinished, "cannot be brought to the drive", error);
  if (const int error = files.rename(unfinished, path); error != 0)
    throw_io(unfinished, "cannot get its name " + path, error);
  const std::string parent = std::filesystem::path(path).parent_path();
  if (const int error = files.sync_directory(parent); error != 0)
    throw_io(parent, "cannot be brought to the drive", error);
}

void discard_checkpoint(const std::string& path) {
  std::error_code error;
  const std::string parent = std::filesystem::path(path).parent_path();
  const std::string directory = parent.empty() ? "." : parent;
  const auto is_in = [&](const std::vector<std::string>& paths) {
    return std::any_of(paths.begin(), paths.end(),
                       [&](const auto& one) { return std::filesystem::equivalent(one, path, error); });
  };
  std::vector<std::string> whole;
  for (const CheckpointEntry& entry : list_checkpoints(directory)) whole.push_back(entry.path);
  const bool unfinished = is_in(unfinished_checkpoints(directory));
  if (!unfinished && !is_in(whole)) {
    throw Error(Errc::kUsage, path, "is no checkpoint",
                "name a checkpoint's directory, e.g. runs/quickstart/checkpoints/0001-step-100");
  }
  const DirectoryLock lock("the directory of checkpoints", directory);
  Files& files = system_files();
  const std::string failed =
      unfinished ? remove_checkpoint_files(files, path) : discard_checkpoint(files, path);
  if (!failed.empty()) throw Error(Errc::kIo, path, "cannot be removed: " + failed);
}

std::string discard_checkpoint(Files& files, const std::string& path) {
  const std::string gone = path + kRemoved;
  std::vector<KeptFile> kept;
  try {
    for (const PinnedState& pins : pins_in(path))
      kept.insert(kept.end(), pins.files.begin(), pins.files.end());
  } catch (const Error&) {  // a run that starts on its drives finds them
  }
  if (const int error = files.rename(path, gone); error != 0) return path + ": " + errno_text(error);
  const std::string parent = std::filesystem::path(path).parent_path();
  if (const int error = files.sync_directory(parent.empty() ? "." : parent); error != 0)
    return parent + ": " + errno_text(error);
  for (const KeptFile& file : kept) {
    const std::string problem = release_kept(files, file);
    if (!problem.empty()) log::warning("{}", problem);
  }
  return remove_checkpoint_files(files, gone);
}

void remove_old_checkpoints(Files& files, const std::string& directory, std::int64_t newest,
                            std::int64_t keep, std::int64_t held) {
  std::int64_t kept = 0;
  for (const CheckpointEntry& entry : list_checkpoints(directory)) {
    if (entry.number > newest || ++kept <= keep || entry.number == held) continue;
    const std::string failed = discard_checkpoint(files, entry.path);
    if (!failed.empty()) log::warning("an old checkpoint cannot be removed: {}", failed);
  }
}

}  // namespace zg
