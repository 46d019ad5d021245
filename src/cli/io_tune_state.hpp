// The state file of io-tune: JSON lines, first what was measured on what, then a line for each point as it
// came.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "ziggurat/io/tune.hpp"

namespace zg::cli {

// What must be the same for points to be comparable.
struct TuneSettings {
  struct Path {
    std::string path, filesystem, device;
  };
  std::string machine, kernel;
  std::vector<Path> paths;
  std::int64_t size = 0;  // of each file
  std::string goal;
};

class TuneState {
 public:
  // Opens and locks the file, and reads what is there; `fresh` discards that. A last line that was half
  // written is cut off, and said. Throws Error(kUsage) for a file that is none of ours, cannot be opened, or
  // is in use.
  TuneState(std::string path, bool fresh);
  ~TuneState();
  TuneState(const TuneState&) = delete;
  TuneState& operator=(const TuneState&) = delete;

  const std::string& path() const { return path_; }
  bool is_new() const { return !has_header_; }
  const TuneSettings& settings() const { return settings_; }  // unless it is new
  const std::vector<io::TuneRecord>& records() const { return records_; }
  bool cut_off() const { return cut_off_; }  // a half-written line was found

  // Writes the first line of a new file; of another throws Error(kUsage) with all that differs.
  void match(const TuneSettings& settings);
  // Throws Error(kIo).
  void append(const io::TuneRecord& record);

 private:
  void open_file(bool fresh);
  void load();
  void write_line(const std::string& line) const;

  const std::string path_;
  int fd_ = -1;
  bool has_header_ = false, cut_off_ = false;
  TuneSettings settings_;
  std::vector<io::TuneRecord> records_;
};

}  // namespace zg::cli
