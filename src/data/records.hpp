// The records of a file of documents: JSON objects, one a line, or all in one list.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "data/file_kind.hpp"

namespace zg {

struct Record {
  std::string_view text;
  std::int64_t line = 0;  // of its first byte in the file, from 1
  std::string name;       // for errors: "file.jsonl:12", "file.json:1, record 3"
};

// Splits a file into records, piece by piece. For one thread.
class RecordReader {
 public:
  // `lines` and `records`: how many come before the first piece.
  RecordReader(DataKind kind, std::string path, std::int64_t lines, std::int64_t records)
      : kind_(kind), path_(std::move(path)), lines_(lines), records_(records) {
    if (records > 0) state_ = State::kBehind;
  }
  // The number of bytes after which an unfinished text may be cut; 0: nowhere yet.
  std::size_t whole(std::string_view text) const;
  // The records of the next piece, which must end where whole() says or at the file's end. Throws
  // Error(kUsage).
  std::vector<Record> take(std::string_view piece);
  // To be called at the file's end. Throws Error(kUsage) for a list that has not ended.
  void finish() const;
  std::int64_t lines() const { return lines_; }

 private:
  enum class State : std::uint8_t { kBegin, kFirst, kBehind, kNext, kEnded };

  std::vector<Record> take_lines(std::string_view piece);
  std::vector<Record> take_list(std::string_view piece);
  void take_mark(char c);
  [[noreturn]] void fail(const std::string& what) const;

  DataKind kind_;
  std::string path_;
  std::int64_t lines_, records_;
  State state_ = State::kBegin;
};

// The JSON value of a record. NaN and Infinity, which Python writes although they are not JSON, become null.
// Throws Error(kUsage) with `hint`.
nlohmann::json parse_record(const Record& record, const std::string& hint);

// The length in bytes of the JSON object at the begin of `text`; npos: the object does not end in `text`.
std::size_t object_bytes(std::string_view text);

}  // namespace zg
