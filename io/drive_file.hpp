// The file behind one drive: preallocated, without a name (so that it goes with the process, however that
// ends, and two runs never meet), O_DIRECT where the filesystem takes it.
#pragma once
#include <cstdint>
#include <string>

#include "ziggurat/io/engine.hpp"

namespace zg::io {

class DriveFile {
 public:
  // Throws Error(kUsage) for a path that is no writable directory, Error(kIo) when it cannot hold the bytes.
  explicit DriveFile(const DriveOptions& options);
  DriveFile(DriveFile&& other) noexcept;
  DriveFile& operator=(DriveFile&&) = delete;
  ~DriveFile();

  int fd() const { return fd_; }
  std::int64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }
  double endurance_bytes() const { return endurance_bytes_; }
  // Why O_DIRECT is not in use; empty when it is.
  const std::string& buffered_because() const { return buffered_because_; }
  // Why the space is not reserved; empty when it is.
  const std::string& sparse_because() const { return sparse_because_; }

 private:
  void preallocate();
  std::string try_direct() const;

  std::string path_;
  std::int64_t bytes_ = 0;
  double endurance_bytes_ = 0;
  int fd_ = -1;
  std::string buffered_because_, sparse_because_;
};

// "ext4", "tmpfs", ... and the device, from /proc/self/mountinfo; "unknown" where that does not say.
struct Mount {
  std::string filesystem = "unknown", device = "unknown";
};
Mount mount_of(const std::string& path);
std::int64_t free_bytes_of(const std::string& path);

}  // namespace zg::io
