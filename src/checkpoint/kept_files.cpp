// Files of drives that outlive their runs.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/checkpoint/pins.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

constexpr const char* kForEnd = "-for";
constexpr std::int64_t kLongestPath = 4096 + 1;  // with a newline

std::string absolute(const std::string& path) {
  std::error_code error;
  const fs::path whole = fs::weakly_canonical(fs::absolute(path, error), error);
  return error ? path : whole.string();
}

bool ends_in(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && std::string_view(text).substr(text.size() - end.size()) == end;
}

// The directory of checkpoints that a file is kept for; empty: unknown.
std::string purpose_of(const KeptFile& file) {
  try {
    std::string text = read_text_file(file.path() + kForEnd, "what a drive's file is kept for", kLongestPath);
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  } catch (const Error&) {
    return {};
  }
}

// The marker's path, an empty file in the directory of the checkpoints. It shows that the directory is the
// one that the kept file was kept for, not another one at the same path.
std::string marker_of(const KeptFile& file, const std::string& directory_of_checkpoints) {
  return directory_of_checkpoints + "/" + file.name;
}

// Whether the directory of checkpoints that a kept file names still exists, and is the same directory.
bool is_known(const KeptFile& file, const std::string& purpose) {
  std::error_code error;
  return !purpose.empty() && fs::is_regular_file(marker_of(file, purpose), error);
}

std::int64_t size_of_file(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 ? std::int64_t{info.st_blocks} * 512 : 0;
}

// Whether a run that lives has the file open as its tier.
bool is_in_use(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return errno != ENOENT;
  const bool locked = try_lock(fd, FileLock::kShared) != 0;
  (void)::close(fd);
  return locked;
}

// A drive's directory, and the directories of processes in it.
std::vector<std::string> directories_of(const std::string& drive) {
  std::vector<std::string> all{drive};
  std::error_code error;
  for (fs::directory_iterator at(drive, error), end; !error && at != end; at.increment(error)) {
    std::error_code unknown;
    // A link that another user has put there leads to files that are not this drive's.
    if (at->path().filename().string().rfind(kProcessDirectory, 0) == 0 &&
        at->symlink_status(unknown).type() == fs::file_type::directory)
      all.push_back(at->path());
  }
  return all;
}

// Files in a drive's directories whose names begin with "ziggurat-" and end in `end_of_name`.
std::vector<KeptFile> files_in(const std::string& drive, std::string_view end_of_name) {
  std::vector<KeptFile> all;
  for (const std::string& directory : directories_of(drive)) {
    std::error_code error;
    for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error)) {
      const std::string name = at->path().filename();
      if (name.rfind("ziggurat-", 0) == 0 && ends_in(name, end_of_name)) all.push_back({directory, name});
    }
  }
  return all;
}

}  // namespace

std::vector<KeptFile> kept_by(const std::string& directory) {
  std::vector<KeptFile> all;
  for (const CheckpointEntry& entry : list_checkpoints(directory)) {
    for (const PinnedState& pins : pins_in(entry.path))
      all.insert(all.end(), pins.files.begin(), pins.files.end());
  }
  return all;
}

std::string keep_file(Files& files, const std::string& path, const std::string& directory_of_checkpoints) {
  const KeptFile kept{fs::path(path).parent_path(), fs::path(path).stem().string() + kKeptEnd};
  const auto write = [&](const std::string& name, const std::string& text) {
    (void)files.remove(name);  // left by an attempt that failed
    NewFile file(files, name, static_cast<std::int64_t>(text.size()));
    file.write(text.data(), static_cast<std::int64_t>(text.size()), 0);
    file.sync_and_close();
  };
  write(marker_of(kept, directory_of_checkpoints), "");
  if (const int error = files.sync_directory(directory_of_checkpoints); error != 0)
    throw_io(directory_of_checkpoints, "cannot be brought to the drive", error);
  write(kept.path() + kForEnd, absolute(directory_of_checkpoints) + "\n");
  if (const int error = files.rename(path, kept.path()); error != 0)
    throw_io(path, "cannot get its name " + kept.path(), error);
  return kept.name;
}

// Checkpoints know a file by its name, which is random, since a directory may have several paths.
std::string release_kept(Files& files, const KeptFile& file) {
  const std::string path = file.path(), purpose = purpose_of(file);
  if (!is_known(file, purpose) || is_in_use(path)) return "";
  try {
    const std::vector<KeptFile> needed = kept_by(purpose);
    if (std::any_of(needed.begin(), needed.end(), [&](const auto& one) { return one.name == file.name; }))
      return "";
  } catch (const Error& e) {
    return fmt::format("{} is not removed, since {} {}", path, e.where(), e.message());
  }
  if (const int failed = files.remove(path); failed != 0 && failed != ENOENT)
    return path + ": " + errno_text(failed);
  (void)files.remove(path + kForEnd);
  (void)files.sync_directory(file.directory);
  (void)files.remove(marker_of(file, purpose));
  return "";
}

void reclaim_kept(Files& files, const std::string& directory) {
  // Notes whose files are gone, under both names.
  for (const KeptFile& file : files_in(directory, std::string(kKeptEnd) + kForEnd)) {
    std::error_code unknown;
    const std::string note = file.path(), kept = note.substr(0, note.size() - std::strlen(kForEnd));
    const std::string tier = fs::path(kept).replace_extension(".tier");
    if (!fs::exists(kept, unknown) && !fs::exists(tier, unknown)) (void)files.remove(note);
  }
  for (const KeptFile& file : files_in(directory, kKeptEnd)) {
    const std::string path = file.path(), purpose = purpose_of(file);
    const std::int64_t bytes = size_of_file(path);
    std::error_code error;
    if (!is_known(file, purpose)) {
      log::warning("{} ({}) is kept for checkpoints in {}, which {}: if they are gone for good, remove it",
                   path, format_bytes(bytes), purpose.empty() ? "a directory that it does not name" : purpose,
                   fs::is_directory(purpose, error) ? "does not know it" : "is not there");
      continue;
    }
    if (const std::string failed = release_kept(files, file); !failed.empty()) {
      log::warning("{}", failed);
    } else if (!fs::exists(path, error)) {
      log::info("reclaimed {} in {}: no checkpoint in {} needs it", format_bytes(bytes), file.directory,
                purpose);
    }
  }
}

void free_unpinned(const std::vector<KeptFile>& files, const std::string& directory_of_checkpoints) {
  std::map<std::string, std::map<std::int64_t, std::int64_t>> pinned;  // by name: the ends by offset
  try {
    for (const CheckpointEntry& entry : list_checkpoints(directory_of_checkpoints)) {
      for (const PinnedState& pins : pins_in(entry.path)) {
        for (const PinnedSegment& segment : pins.segments) {
          for (const io::StoredPiece& p : segment.stored.pieces) {
            std::int64_t& end = pinned[pins.files[static_cast<std::size_t>(p.drive)].name][p.offset];
            end = std::max(end, p.offset + p.bytes);
          }
        }
      }
    }
  } catch (const Error& error) {
    log::debug("{}: {}", error.where(), error.message());
    return;
  }
  for (const KeptFile& file : files) {
    const int fd = ::open(file.path().c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct stat info {};
    std::int64_t end = 0;
    const auto punch = [&](std::int64_t to) {
      if (to > end) (void)::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, end, to - end);
    };
    if (fd >= 0 && ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && pinned.count(file.name) > 0 &&
        is_known(file, directory_of_checkpoints)) {
      for (const auto& [offset, piece_end] : pinned[file.name]) {
        punch(offset);
        end = std::max(end, piece_end);
      }
      punch(info.st_size);
    }
    if (fd >= 0) (void)::close(fd);
  }
}

bool is_kept_for(const KeptFile& file, const std::string& directory_of_checkpoints) {
  return purpose_of(file) == absolute(directory_of_checkpoints) && is_known(file, directory_of_checkpoints);
}

std::int64_t kept_bytes(const std::string& directory, const std::string& directory_of_checkpoints,
                        Kept which) {
  std::vector<KeptFile> needed;
  try {
    if (which == Kept::kUnneeded) needed = kept_by(directory_of_checkpoints);
  } catch (const Error&) {  // which files are needed is unknown
    return 0;
  }
  std::int64_t sum = 0;
  for (const KeptFile& file : files_in(directory, kKeptEnd)) {
    const bool is_needed =
        std::any_of(needed.begin(), needed.end(), [&](const KeptFile& one) { return one.name == file.name; });
    if (!is_needed && is_kept_for(file, directory_of_checkpoints)) sum += size_of_file(file.path());
  }
  return sum;
}

}  // namespace zg
