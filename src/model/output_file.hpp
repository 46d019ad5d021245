// A file that appears whole or not at all. Private to src/model.
#pragma once
#include <cstdint>
#include <string>

namespace zg::hf {

// The file is written as "<path>.part", which commit() renames. The destructor removes a file that was not
// committed. For one thread. All functions but the destructor throw Error(kIo) with the path and the system's
// reason.
class OutputFile {
 public:
  // `bytes` is the final size. It is reserved at once where the file system can do that, so that a full disk
  // is found before the work is done.
  OutputFile(std::string path, std::int64_t bytes);
  ~OutputFile();
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;

  const std::string& path() const { return path_; }
  void write_at(std::int64_t offset, const void* data, std::int64_t bytes);
  void sync();    // brings everything written to the drive, and closes the file
  void commit();  // puts the file in place; after sync(). The rename is durable after sync_directory()

 private:
  [[noreturn]] void fail(const char* what, int error) const;
  std::string path_, part_;
  int fd_ = -1;
};

// Makes renames in the directory durable. Throws Error(kIo).
void sync_directory(const std::string& path);

}  // namespace zg::hf
