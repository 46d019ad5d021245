// The file operations by which a checkpoint comes to be, as a seam for tests: they fail one of them, or
// record all. Each returns 0 or an errno. Any thread.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "ziggurat/io/engine.hpp"

namespace zg {

class Files {
 public:
  virtual ~Files() = default;
  virtual int make_directory(const std::string& path);
  // A new file of this size, reserved where the file system can do that.
  virtual int create(const std::string& path, std::int64_t bytes, int& fd);
  // The bytes written, which may be fewer, or minus an errno.
  virtual std::int64_t write(int fd, const void* data, std::int64_t bytes, std::int64_t offset);
  virtual int sync(int fd);
  virtual int close(int fd);
  virtual int sync_directory(const std::string& path);
  virtual int rename(const std::string& from, const std::string& to);
  virtual int remove(const std::string& path);  // a file, or an empty directory
  virtual int sync_drive(io::Engine& io, int drive);
};

// The operating system's.
Files& system_files();

// A file that is written once. Throws Error(kIo) with path and cause.
class NewFile {
 public:
  NewFile(Files& files, std::string path, std::int64_t bytes);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  // Several threads at once.
  void write(const void* data, std::int64_t bytes, std::int64_t offset);
  // Whether writes go past the page cache, as far as the file system can do that. They then begin, end and
  // lie in memory at multiples of 4096. No write is under way.
  void set_direct(bool on);
  void sync_and_close();

 private:
  void check(int error, const char* what) const;
  Files& files_;
  const std::string path_;
  int fd_ = -1;
  std::atomic<bool> direct_ = false;
};

// Makes a directory, and those above it that are missing, and has all their names last: without that, a loss
// of power may take the directory with all that was brought to the drive in it. Throws Error(kIo).
void make_directories(Files& files, const std::string& path);
// Removes the directory of a checkpoint, or the remains of one: the files that this program has written (see
// is_of_checkpoint), and the directory if nothing else is in it. A link in its place is not followed. Returns
// what could not be removed, and why; empty: all is gone.
std::string remove_checkpoint_files(Files& files, const std::string& path);
// Lets `write` fill a new directory, which then takes the place of `path` at once: whoever opens it, after a
// crash too, finds what was there or what is new, never some of both. Other files than a model's weights
// (model.safetensors, its shards and their index) that lie there move along. Where directories cannot change
// places (a mount point, folders in it) the files do, one after the other. If `write` throws, all is left as
// it was. The new directory has a temporary name (base/file.hpp) until then. Throws Error(kIo).
void replace_directory(const std::string& path,
                       const std::function<void(const std::string& directory)>& write);
[[noreturn]] void throw_io(const std::string& path, const std::string& what, int error);

}  // namespace zg
