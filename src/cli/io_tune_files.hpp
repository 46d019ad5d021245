// The files on which io-tune measures: their size, their lifetime, and the removal of files that killed runs
// left behind.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace zg::cli {

// The file system of one of the paths.
struct TunePlace {
  std::string path = {};  // resolved
  std::string filesystem = {}, device = {};
  std::uint64_t volume = 0;  // equal for paths on one file system
  std::int64_t free_bytes = 0, total_bytes = 0;
  bool direct = false;             // O_DIRECT works
  std::string direct_reason = {};  // why O_DIRECT does not work
};
// Throws Error(kUsage) when `path` is no writable directory.
TunePlace look_at(const std::string& path);

struct TuneSize {
  std::int64_t bytes = 0;  // size of the file on each path
  std::string note;        // why it is less than asked for; empty if it is not
};
// The size of the file on each path: `asked` bytes, or less, so that 5% of every file system and at least 1
// GiB stay free. With `asked` 0: the smaller of 4 GiB and a quarter of the free space. Throws Error(kIo) when
// less than 64 MiB (or `asked`, if that is less) would be left for a file.
TuneSize size_for(const std::vector<TunePlace>& places, std::int64_t asked);
inline constexpr std::int64_t kTuneSizeStep = 16 << 20;  // sizes are multiples of the largest block

// DIR/ziggurat-io-tune-<16 hexadecimal digits>.tmp: preallocated, locked while this object lives, and removed
// with it.
class TuneFile {
 public:
  // Throws Error(kIo) when there is not enough space.
  TuneFile(const std::string& directory, std::int64_t bytes);
  ~TuneFile();
  TuneFile(TuneFile&& other) noexcept;
  TuneFile& operator=(TuneFile&&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int fd_ = -1;
};

// Removes the files of killed runs: files with a TuneFile's name whose lock no process holds. Returns their
// paths.
std::vector<std::string> remove_tune_leftovers(const std::string& directory);
bool is_tune_file_name(const std::string& name);

}  // namespace zg::cli
