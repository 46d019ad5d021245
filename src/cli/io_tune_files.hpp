// The files that io-tune measures on: how large they may be, and what is left of those of killed runs.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace zg::cli {

// One of the paths, as it stands.
struct TunePlace {
  std::string path = {};  // resolved
  std::string filesystem = {}, device = {};
  std::uint64_t volume = 0;  // equal for paths on one file system
  std::int64_t free_bytes = 0, total_bytes = 0;
  bool direct = false;             // O_DIRECT works
  std::string direct_reason = {};  // why not
};
// Throws Error(kUsage) for what is no writable directory.
TunePlace look_at(const std::string& path);

struct TuneSize {
  std::int64_t bytes = 0;  // of the file on each path
  std::string note;        // why they are fewer than asked for; empty if they are not
};
// At most `asked` (0: 4 GiB or a quarter of what is free, if that is less) on each path, such that of every
// disk 5%, and 1 GiB, stay free. Throws Error(kIo) where less than 64 MiB (or `asked`, if that is less) would
// remain.
TuneSize size_for(const std::vector<TunePlace>& places, std::int64_t asked);
inline constexpr std::int64_t kTuneSizeStep = 16 << 20;  // sizes are multiples: the largest block

// DIR/ziggurat-io-tune-<16 hexadecimal digits>.tmp: preallocated, locked while this lives, removed with it.
class TuneFile {
 public:
  // Throws Error(kIo) when the space cannot be had.
  TuneFile(const std::string& directory, std::int64_t bytes);
  ~TuneFile();
  TuneFile(TuneFile&& other) noexcept;
  TuneFile& operator=(TuneFile&&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int fd_ = -1;
};

// Removes the files of runs that are dead, by exact name and only where nobody holds their lock; what it
// removed.
std::vector<std::string> reclaim_tune_files(const std::string& directory);
bool is_tune_file_name(const std::string& name);

}  // namespace zg::cli
