// The file operations that write a checkpoint. They are virtual so that tests can make one fail, or record
// all. Each returns 0 or an errno, unless stated otherwise. Any thread.
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
  // Creates a new file and reserves this size for it, if the file system can do that.
  virtual int create(const std::string& path, std::int64_t bytes, int& fd);
  // Returns the number of bytes written, which may be fewer than asked, or minus an errno.
  virtual std::int64_t write(int fd, const void* data, std::int64_t bytes, std::int64_t offset);
  virtual int sync(int fd);
  virtual int close(int fd);
  virtual int sync_directory(const std::string& path);
  virtual int rename(const std::string& from, const std::string& to);
  virtual int remove(const std::string& path);  // a file, or an empty directory
  virtual int sync_drive(io::Engine& io, int drive);
};

// The operating system's file operations.
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
  // Sets whether writes bypass the page cache, if the file system can do that. Direct writes must begin, end
  // and lie in memory at multiples of 4096. No write may be under way.
  void set_direct(bool on);
  void sync_and_close();

 private:
  void check(int error, const char* what) const;
  Files& files_;
  const std::string path_;
  int fd_ = -1;
  std::atomic<bool> direct_ = false;
};

// Makes a directory and its missing parents, and makes all their names durable: otherwise a loss of power may
// lose the directory with all files that were synced in it. Throws Error(kIo).
void make_directories(Files& files, const std::string& path);
// Removes the directory of a checkpoint, or the remains of one: the files that this program has written (see
// is_of_checkpoint), and the directory if nothing else is in it. A link in its place is not followed. Returns
// which file could not be removed, and why; empty: all are gone.
std::string remove_checkpoint_files(Files& files, const std::string& path);
// Lets `write` fill a new directory, which then atomically replaces `path`: whoever opens it, even after a
// crash, finds either the old files or the new ones, never a mixture. Files of the old directory that the new
// one lacks are kept, except a model's weights (model.safetensors, its shards and their index). If the
// directories cannot be exchanged (a mount point, folders in it), the files are replaced one after the other.
// If `write` throws, all is left as it was. Until the exchange the new directory has a temporary name
// (base/file.hpp). Throws Error(kIo).
void replace_directory(const std::string& path,
                       const std::function<void(const std::string& directory)>& write);
[[noreturn]] void throw_io(const std::string& path, const std::string& what, int error);

}  // namespace zg
