// What a run does to files for its checkpoints, noted, and the states that a loss of power may leave after
// each operation: all that was synced is there, and of the rest any part, writes torn at sectors.
#pragma once
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "support/files.hpp"
#include "ziggurat/checkpoint/files.hpp"

namespace zg {

inline std::string parent_of(const std::string& path) {
  return std::filesystem::path(path).parent_path();
}

struct Op {
  enum class Kind {
    kMakeDirectory,
    kCreate,
    kWrite,
    kSync,
    kSyncDirectory,
    kRename,
    kRemove,
    kDriveWrite,
    kDriveSync
  };
  Kind kind;
  // kWrite, kSync: the path under which the file was created. kDriveWrite, kDriveSync: the drive's directory.
  std::string path, to;
  std::int64_t offset = 0;  // kCreate: the size
  std::string data;
  std::int64_t number = 0;  // in the order in which they began
  std::int64_t covers = 0;  // kDriveSync: the last one that had begun before it
};

inline bool is_sync(const Op& op) {
  return op.kind == Op::Kind::kSync || op.kind == Op::Kind::kSyncDirectory || op.kind == Op::Kind::kDriveSync;
}

// Any thread. With watch(), what a run writes to drives' files is noted, too, before each other operation and
// at each look(): by what has changed since, in pages. So those writes are known to have begun by then; which
// of them a flush has brought to the drive is what the flush after them says.
class CrashRecorder final : public Files {
 public:
  std::vector<Op> ops;
  std::map<std::string, std::string> drives;  // the contents of each, as they are now; by its directory
  std::map<std::string, std::string> began;   // as they were at the first look

  void watch(const std::vector<std::string>& directories) { watched_ = directories; }
  void look() {
    std::lock_guard lock(mutex_);
    for (const std::string& directory : watched_) {
      std::string now;
      for (const auto& entry : std::filesystem::directory_iterator(directory)) {
        const std::string end = entry.path().extension();
        if (end == ".tier" || end == ".kept") now = test::read_file(entry.path());
      }
      std::string& before = drives[directory];
      if (before.empty()) began[directory] = now;
      if (before.empty()) before = now;
      for (std::size_t at = 0; at < now.size(); at += kPage) {
        if (now.compare(at, kPage, before, at, kPage) == 0) continue;
        add({Op::Kind::kDriveWrite, directory, {}, static_cast<std::int64_t>(at), now.substr(at, kPage)});
      }
      before = std::move(now);
    }
  }

  int make_directory(const std::string& path) override {
    note({Op::Kind::kMakeDirectory, path, {}, 0, {}});
    return Files::make_directory(path);
  }
  int create(const std::string& path, std::int64_t bytes, int& fd) override {
    note({Op::Kind::kCreate, path, {}, bytes, {}});
    const int error = Files::create(path, bytes, fd);
    std::lock_guard lock(mutex_);
    paths_[fd] = path;
    return error;
  }
  std::int64_t write(int fd, const void* data, std::int64_t bytes, std::int64_t offset) override {
    note({Op::Kind::kWrite,
          path_of(fd),
          {},
          offset,
          std::string(static_cast<const char*>(data), static_cast<std::size_t>(bytes))});
    return Files::write(fd, data, bytes, offset);
  }
  int sync(int fd) override {
    note({Op::Kind::kSync, path_of(fd), {}, 0, {}});
    return Files::sync(fd);
  }
  int sync_directory(const std::string& path) override {
    note({Op::Kind::kSyncDirectory, path, {}, 0, {}});
    return Files::sync_directory(path);
  }
  int sync_drive(io::Engine& io, int drive) override {
    // What it covers was written before; the training goes on to write meanwhile.
    look();
    std::int64_t covers = 0;
    {
      std::lock_guard lock(mutex_);
      covers = last_;
    }
    const int error = Files::sync_drive(io, drive);
    std::lock_guard lock(mutex_);
    add({Op::Kind::kDriveSync, parent_of(io.file(drive)), {}, 0, {}, 0, covers});
    return error;
  }
  int rename(const std::string& from, const std::string& to) override {
    note({Op::Kind::kRename, from, to, 0, {}});
    std::lock_guard lock(mutex_);  // nobody looks at a file between its names
    return Files::rename(from, to);
  }
  int remove(const std::string& path) override {
    const int error = Files::remove(path);
    if (error == 0) note({Op::Kind::kRemove, path, {}, 0, {}});
    return error;
  }

 private:
  static constexpr std::size_t kPage = 4096;
  void note(Op op) {
    look();
    std::lock_guard lock(mutex_);
    add(std::move(op));
  }
  void add(Op op) {
    op.number = ++last_;
    ops.push_back(std::move(op));
  }
  std::string path_of(int fd) {
    std::lock_guard lock(mutex_);
    return paths_[fd];
  }
  std::mutex mutex_;
  std::int64_t last_ = 0;
  std::vector<std::string> watched_;
  std::map<int, std::string> paths_;
};

// Which of the operations before a crash are certain to have reached the drive.
inline std::vector<bool> certain(const std::vector<Op>& ops, std::size_t crash) {
  std::vector<bool> sure(crash, false);
  for (std::size_t i = 0; i < crash; ++i) {
    const Op& sync = ops[i];
    for (std::size_t k = 0; k < i; ++k) {
      const Op& op = ops[k];
      const bool of_file = op.kind == Op::Kind::kWrite, of_drive = op.kind == Op::Kind::kDriveWrite;
      const bool synced = sync.kind == Op::Kind::kSync ? of_file && op.path == sync.path
                          : sync.kind == Op::Kind::kDriveSync
                              ? of_drive && op.path == sync.path && op.number <= sync.covers
                          : sync.kind == Op::Kind::kSyncDirectory
                              ? !of_file && !of_drive && !is_sync(op) && parent_of(op.path) == sync.path
                              : false;
      if (synced) sure[k] = true;
    }
  }
  return sure;
}

// Files by directory and name, as a drive has them: a directory that was renamed keeps its files.
struct Disk {
  std::map<std::string, int> directories;  // by path; an identity
  std::map<std::pair<int, std::string>, std::string> files;
  std::map<std::string, std::pair<int, std::string>> created;  // by the path that the recorder knows
  std::map<std::string, std::string> drives;                   // contents of their files, by directory
  std::map<std::string, std::string> drive_names;              // of those that were renamed
};

// Carries out the operations that `happens` lets; `torn` lets the sectors of a write.
// `drives`: what lies on them before. `there`: other directories that are there before.
inline Disk replay(const std::vector<Op>& ops, std::size_t crash,
                   const std::function<bool(std::size_t)>& happens,
                   const std::function<bool(std::size_t)>& torn,
                   const std::map<std::string, std::string>& drives = {},
                   const std::vector<std::string>& there = {}) {
  constexpr std::size_t kSector = 512;
  Disk disk;
  disk.drives = drives;
  int next = 0;
  for (const std::string& directory : there) disk.directories[directory] = next++;
  for (const auto& [directory, data] : drives) disk.directories[directory] = next++;
  for (std::size_t i = 0; i < crash; ++i) {
    const Op& op = ops[i];
    const bool now = happens(i);
    const std::string parent = parent_of(op.path), name = std::filesystem::path(op.path).filename();
    const auto directory = disk.directories.find(parent);
    switch (op.kind) {
      case Op::Kind::kMakeDirectory:
        if (now) disk.directories[op.path] = next++;
        break;
      case Op::Kind::kCreate:
        if (!now || directory == disk.directories.end()) break;
        disk.created[op.path] = {directory->second, name};
        disk.files[{directory->second, name}] = std::string(static_cast<std::size_t>(op.offset), '\0');
        break;
      case Op::Kind::kWrite: {
        const auto file = disk.created.find(op.path);
        const auto at = file == disk.created.end() ? disk.files.end() : disk.files.find(file->second);
        if (at == disk.files.end()) break;
        for (std::size_t from = 0; from < op.data.size(); from += kSector) {
          const std::size_t n = std::min(kSector, op.data.size() - from);
          if (now || torn(i))
            at->second.replace(static_cast<std::size_t>(op.offset) + from, n, op.data, from, n);
        }
        break;
      }
      case Op::Kind::kDriveWrite: {
        std::string& drive = disk.drives[op.path];
        for (std::size_t from = 0; (now || torn(i)) && from < op.data.size(); from += kSector) {
          if (now || torn(i))
            drive.replace(static_cast<std::size_t>(op.offset) + from, kSector, op.data, from, kSector);
        }
        break;
      }
      case Op::Kind::kRename:
        if (now && disk.drives.count(parent) > 0)
          disk.drive_names[parent] = std::filesystem::path(op.to).filename();
        if (!now || disk.directories.count(op.path) == 0) break;
        disk.directories[op.to] = disk.directories[op.path];
        disk.directories.erase(op.path);
        break;
      case Op::Kind::kRemove:
        if (!now) break;
        if (directory != disk.directories.end()) disk.files.erase({directory->second, name});
        disk.directories.erase(op.path);
        break;
      case Op::Kind::kSync:
      case Op::Kind::kSyncDirectory:
      case Op::Kind::kDriveSync:
        break;
    }
  }
  return disk;
}

}  // namespace zg
