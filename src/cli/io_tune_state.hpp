// The state file of io-tune. It consists of JSON lines: the first holds the settings, each other line a
// sample, in the order of measurement.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "ziggurat/io/tune.hpp"

namespace zg::cli {

// The settings of a measurement. Samples are comparable only if these are equal.
struct TuneSettings {
  struct Path {
    std::string path, filesystem, device;
  };
  std::string machine, kernel;
  std::vector<Path> paths;
  std::int64_t size = 0;  // size of each file
  std::string goal;
};

// The JSON form in the state file and in the report.
nlohmann::ordered_json json_of(const std::vector<TuneSettings::Path>& paths);
nlohmann::ordered_json json_of(const io::TunePoint& point);
nlohmann::ordered_json json_of(const io::TuneSide& side);

class TuneState {
 public:
  // Opens and locks the file, and reads its samples; `fresh` discards them. An incomplete last line is
  // removed (cut_off()). Throws Error(kUsage) if the file is no state file, cannot be opened, or is in use.
  TuneState(std::string path, bool fresh);
  ~TuneState();
  TuneState(const TuneState&) = delete;
  TuneState& operator=(const TuneState&) = delete;

  const std::string& path() const { return path_; }
  bool is_new() const { return !has_header_; }
  const TuneSettings& settings() const { return settings_; }  // invalid for a new file
  const std::vector<io::TuneRecord>& records() const { return records_; }
  bool cut_off() const { return cut_off_; }  // the last line was incomplete

  // Writes the first line of a new file. For any other file, throws Error(kUsage), which lists all
  // differences, if its settings differ.
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
