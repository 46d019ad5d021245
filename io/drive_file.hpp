// The file behind one drive, as its FileKind says: a tier's, preallocated in a locked directory and removed
// at the end (io/drive_lock.hpp); one without a name, that goes with the process; or one that exists already,
// whose size and name are left alone. O_DIRECT where the filesystem takes it.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "io/drive_lock.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg::io {

class DriveFile {
 public:
  // Throws Error(kUsage) for a path that is not what its kind needs, or that another run has; Error(kIo) when
  // it cannot hold the bytes. Then nothing is left behind.
  explicit DriveFile(const DriveOptions& options);

  int fd() const { return fd_.get(); }
  std::int64_t bytes() const { return bytes_; }
  // The directory, or the existing file.
  const std::string& path() const { return path_; }
  double endurance_bytes() const { return endurance_bytes_; }
  // Why O_DIRECT is not in use; empty when it is.
  const std::string& buffered_because() const { return buffered_because_; }
  // Why the space is not reserved; empty when it is.
  const std::string& sparse_because() const { return sparse_because_; }

 private:
  void preallocate();
  void lock_existing();
  void measure_existing();
  std::string try_direct() const;

  std::string path_;
  std::int64_t bytes_ = 0;
  double endurance_bytes_ = 0;
  std::unique_ptr<DriveLock> lock_;  // of a tier; ends after fd_
  OwnedFd existing_lock_;
  OwnedFd fd_;
  std::string buffered_because_, sparse_because_;
};

// "ext4", "tmpfs", ... and the device, from /proc/self/mountinfo; "unknown" where that does not say.
struct Mount {
  std::string filesystem = "unknown", device = "unknown";
};
Mount mount_of(const std::string& path);
std::int64_t free_bytes_of(const std::string& path);

}  // namespace zg::io
