#include "data/records.hpp"

#include <algorithm>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/json.hpp"
#include "ziggurat/base/printable.hpp"

namespace zg {
namespace {

constexpr std::string_view kBlanks = " \t\r\n";
constexpr std::int64_t kMostValues = 256'000'000;  // of a record, which may be a book of tokens

std::size_t behind_string(std::string_view text, std::size_t i) {  // i: behind the first quote
  for (; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      return i + 1;
    }
  }
  return text.npos;
}

// NaN, Infinity and -Infinity, outside of texts, become null. Whether there were any.
bool replace_nan(std::string_view text, std::string& out) {
  out.clear();
  bool found = false;
  for (std::size_t i = 0; i < text.size();) {
    if (text[i] == '"') {
      const std::size_t end = std::min(behind_string(text, i + 1), text.size());
      out += text.substr(i, end - i), i = end;
      continue;
    }
    std::size_t length = 0;
    for (const std::string_view word : {"NaN", "Infinity", "-Infinity"})
      if (text.substr(i, word.size()) == word) length = word.size();
    if (length > 0) {
      out += "null", i += length, found = true;
    } else {
      out += text[i++];
    }
  }
  return found;
}

}  // namespace

std::size_t object_bytes(std::string_view text) {
  std::int64_t depth = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') {
      i = behind_string(text, i + 1);
      if (i == text.npos) return i;
      --i;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if ((c == '}' || c == ']') && --depth == 0) {
      return i + 1;
    }
  }
  return text.npos;
}

std::size_t RecordReader::whole(std::string_view text) const {
  if (kind_ == DataKind::kLines) return text.rfind('\n') + 1;
  std::size_t end = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t begin = text.find('{', at);
    if (begin == text.npos) break;
    const std::size_t bytes = object_bytes(text.substr(begin));
    if (bytes == text.npos) break;
    at = end = begin + bytes;
  }
  return end;
}

std::vector<Record> RecordReader::take(std::string_view piece) {
  return kind_ == DataKind::kLines ? take_lines(piece) : take_list(piece);
}

std::vector<Record> RecordReader::take_lines(std::string_view piece) {
  std::vector<Record> records;
  while (!piece.empty()) {
    const std::size_t end = std::min(piece.find('\n'), piece.size());
    const std::string_view line = piece.substr(0, end);
    piece.remove_prefix(std::min(end + 1, piece.size()));
    ++lines_;
    if (line.find_first_not_of(kBlanks) == line.npos) continue;
    ++records_;
    records.push_back({line, lines_, fmt::format("{}:{}", path_, lines_)});
  }
  return records;
}

void RecordReader::fail(const std::string& what) const {
  throw Error(Errc::kUsage, fmt::format("{}:{}", path_, lines_ + 1), what,
              "a list of objects is expected: [{\"text\": ...}, {\"text\": ...}]");
}

// What stands between the records.
void RecordReader::take_mark(char c) {
  const auto expect = [&](bool right, State next, const char* expected) {
    if (!right) fail(fmt::format("found '{}' behind record {}, {} expected", c, records_, expected));
    state_ = next;
  };
  if (state_ == State::kBegin) return expect(c == '[', State::kFirst, "'['");
  if (state_ == State::kFirst && c == ']') return expect(true, State::kEnded, "");
  if (state_ == State::kBehind)
    return expect(c == ',' || c == ']', c == ',' ? State::kNext : State::kEnded, "',' or ']'");
  if (state_ == State::kEnded) fail("goes on behind the list's end");
  fail(fmt::format("record {} begins with '{}'; an object is expected", records_ + 1, c));
}

std::vector<Record> RecordReader::take_list(std::string_view piece) {
  std::vector<Record> records;
  for (std::size_t i = 0; i < piece.size();) {
    const char c = piece[i];
    if (kBlanks.find(c) != kBlanks.npos) {
      lines_ += c == '\n', ++i;
      continue;
    }
    if (c != '{' || (state_ != State::kFirst && state_ != State::kNext)) {
      take_mark(c), ++i;
      continue;
    }
    const std::size_t bytes = object_bytes(piece.substr(i));
    if (bytes == piece.npos)
      fail(fmt::format("record {}, which begins here, does not end: the file is cut, or a quote is missing",
                       records_ + 1));
    const std::string_view text = piece.substr(i, bytes);
    ++records_;
    records.push_back({text, lines_ + 1, fmt::format("{}:{}, record {}", path_, lines_ + 1, records_)});
    lines_ += std::count(text.begin(), text.end(), '\n');
    state_ = State::kBehind, i += bytes;
  }
  return records;
}

void RecordReader::finish() const {
  if (kind_ == DataKind::kList && state_ != State::kEnded)
    fail(fmt::format("ends behind record {}, ']' expected: the file is cut", records_));
}

nlohmann::json parse_record(const Record& record, const std::string& hint) {
  const JsonBounds bounds{.values = kMostValues, .first_line = record.line};
  if (record.text.find("NaN") != record.text.npos || record.text.find("Infinity") != record.text.npos) {
    std::string text;
    if (replace_nan(record.text, text)) return parse_json(text, record.name, hint, bounds);
  }
  return parse_json(record.text, record.name, hint, bounds);
}

}  // namespace zg
