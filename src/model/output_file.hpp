// A file that appears whole or not at all. Private to src/model.
#pragma once
#include <cstdint>
#include <string>

namespace zg::hf {

// Written aside as "<path>.part"; commit() renames it. The destructor removes what was not committed.
// One thread. All but the destructor throw Error(kIo) with the path and the system's reason.
class OutputFile {
 public:
  // `bytes`: the final size, reserved at once where the file system can, so that a full disk shows before the
  // work.
  OutputFile(std::string path, std::int64_t bytes);
  ~OutputFile();
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;

  const std::string& path() const { return path_; }
  void write_at(std::int64_t offset, const void* data, std::int64_t bytes);
  void sync();    // everything written is on the drive, and the file is closed
  void commit();  // after sync(); the directory itself is synced by sync_directory()

 private:
  [[noreturn]] void fail(const char* what, int error) const;
  std::string path_, part_;
  int fd_ = -1;
};

void sync_directory(const std::string& path);

}  // namespace zg::hf
