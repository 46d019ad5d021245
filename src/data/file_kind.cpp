#include "data/file_kind.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <optional>

#include "data/other_files.hpp"
#include "data/records.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"

namespace zg {
namespace {

using namespace std::string_view_literals;

constexpr std::int64_t kHeadBytes = 1 << 20, kMostHeadBytes = 64 << 20;
constexpr std::string_view kMark = "\xef\xbb\xbf", kBlanks = " \t\r\n";
constexpr std::size_t kLinesLookedAt = 8;
// Keys by which a JSON object is a document, or is meant to become one.
constexpr std::array kKeys = {"text",   "tokens",     "input_ids",   "messages",
                              "prompt", "completion", "instruction", "conversations"};

std::string ending_of(const std::string& path) {
  std::string ending = std::filesystem::path(path).extension().string();
  std::transform(ending.begin(), ending.end(), ending.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return ending;
}
bool is_lines_ending(const std::string& ending) {
  return ending == ".jsonl" || ending == ".ndjson" || ending == ".jsonlines";
}

std::string read_head(const InputFile& file, std::int64_t most) {
  std::string head(static_cast<std::size_t>(std::min(most, file.bytes())), '\0');
  file.read(head.data(), static_cast<std::int64_t>(head.size()), 0);
  return head;
}

std::string read_tail(const InputFile& file) {
  std::string tail(4, '\0');
  if (file.bytes() >= 8) file.read(tail.data(), 4, file.bytes() - 4);
  return tail;
}

[[noreturn]] void refuse(const std::string& path, const OtherFile& other) {
  throw Error(Errc::kUsage, path,
              fmt::format("is {}; a text, documents (JSON lines or a list) or tokens (NAME.bin) are expected",
                          other.name),
              other.convert);
}

// Unicode in units of two or four bytes: by its mark, or by zeros on one side of each unit.
std::optional<std::string> wide_encoding(std::string_view head) {
  if (head.substr(0, 4) == "\xff\xfe\0\0"sv || head.substr(0, 4) == "\0\0\xfe\xff"sv) return "UTF-32";
  if (head.substr(0, 2) == "\xff\xfe" || head.substr(0, 2) == "\xfe\xff") return "UTF-16";
  std::array<std::size_t, 4> zeros{};
  for (std::size_t i = 0; i < head.size(); ++i) zeros[i % 4] += head[i] == '\0';
  const std::size_t quarter = head.size() / 4;
  const auto most = [&](std::size_t i) { return zeros[i] > quarter / 2; };
  const auto few = [&](std::size_t i) { return zeros[i] < quarter / 8 + 1; };
  if (quarter < 4) return {};
  if (few(0) && most(1) && most(2) && most(3)) return "UTF-32LE";
  if (few(3) && most(0) && most(1) && most(2)) return "UTF-32BE";
  if (few(0) && few(2) && most(1) && most(3)) return "UTF-16LE";
  if (few(1) && few(3) && most(0) && most(2)) return "UTF-16BE";
  return {};
}

std::string renamed(const std::string& path, const char* ending) {
  return std::filesystem::path(path).replace_extension(ending).string();
}

// The object that a text is, if it is one.
std::optional<nlohmann::json> object_of(std::string_view text) {
  try {
    nlohmann::json value = parse_record({text, 1, ""}, "");
    if (value.is_object()) return value;
  } catch (const Error&) {  // no JSON: the caller looks for other signs
  }
  return {};
}
bool is_known(const nlohmann::json& object) {
  return std::any_of(kKeys.begin(), kKeys.end(), [&](const char* key) { return object.contains(key); });
}

// What the first lines are, of which each that is whole counts.
struct FirstLines {
  std::size_t lines = 0, objects = 0, known = 0;

  FirstLines(std::string_view text, bool whole) {
    while (!text.empty() && lines < kLinesLookedAt) {
      const std::size_t end = text.find('\n');
      if (end == text.npos && !whole) break;
      const std::string_view line = text.substr(0, end);
      text.remove_prefix(end == text.npos ? text.size() : end + 1);
      if (line.find_first_not_of(kBlanks) == line.npos) continue;
      const auto object = object_of(line);
      ++lines, objects += object.has_value(), known += object && is_known(*object);
    }
  }
  bool are_objects() const { return objects > 0 && 2 * objects > lines; }
};

// What a text with no ending of documents is that begins with a bracket.
class Bracketed {
 public:
  Bracketed(const InputFile& file, std::string_view head, bool whole)
      : path_(file.path()), text_(head), whole_(whole) {}

  DataKind kind() const {
    const std::size_t first = text_.find_first_not_of(kBlanks);
    return ending_of(path_) == ".json" ? json(first) : other(first);
  }
  bool begins_list() const {
    const std::size_t first = text_.find_first_not_of(kBlanks);
    if (first == text_.npos || text_[first] != '[') return false;
    const std::size_t next = text_.find_first_not_of(kBlanks, first + 1);
    return next != text_.npos && text_[next] == '{';
  }

 private:
  DataKind json(std::size_t first) const {
    if (first != text_.npos && text_[first] == '[') return DataKind::kList;  // its reader says what is wrong
    if (first == text_.npos || text_[first] != '{') {
      throw Error(Errc::kUsage, path_, "is named .json, and begins with neither '{' nor '['",
                  "to train on it as a text, give it the name " + renamed(path_, ".txt"));
    }
    if (FirstLines(text_, whole_).are_objects()) return DataKind::kLines;
    throw Error(
        Errc::kUsage, path_,
        "is JSON of one object over several lines; an object a line, or one list of objects, is expected",
        fmt::format("jq -c . '{}' > '{}' writes an object a line; of a list inside the object named "
                    "\"data\", jq -c '.data[]' does",
                    path_, renamed(path_, ".jsonl")));
  }

  DataKind other(std::size_t first) const {
    if (first == text_.npos) return DataKind::kText;
    bool objects = false, known = false;
    DataKind kind = DataKind::kText;
    if (text_[first] == '{') {
      const FirstLines lines(text_, whole_);
      objects = lines.are_objects(), known = lines.known > 0, kind = DataKind::kLines;
    } else if (begins_list()) {
      const std::string_view from = text_.substr(text_.find('{'));
      const auto object = object_of(from.substr(0, object_bytes(from)));
      objects = object.has_value(), known = object && is_known(*object), kind = DataKind::kList;
    }
    if (objects && known) return kind;
    if (objects) {
      log::warning(
          "data: {} is {} without \"text\", \"tokens\" or \"input_ids\", and is trained on as one text",
          path_, kind == DataKind::kLines ? "a JSON object a line" : "a JSON list of objects");
    }
    return DataKind::kText;
  }

  std::string path_;
  std::string_view text_;
  bool whole_;
};

void refuse_tables(const std::string& path, const std::string& ending) {
  if (ending != ".csv" && ending != ".tsv") return;
  throw Error(
      Errc::kUsage, path,
      fmt::format("is a table ({}); a text, documents (JSON lines or a list) or tokens (NAME.bin) are "
                  "expected",
                  ending),
      fmt::format("python3 -c \"import pandas; pandas.read_csv('{}'{}).to_json('{}', "
                  "orient='records', lines=True)\" makes documents of it, whose text must be named "
                  "\"text\"; to train on it as a text, give it the name {}",
                  path, ending == ".tsv" ? ", sep='\\t'" : "", renamed(path, ".jsonl"),
                  renamed(path, ".txt")));
}

void refuse_wide_text(const std::string& path, std::string_view head) {
  const auto encoding = wide_encoding(head.substr(0, 4096));
  if (!encoding) return;
  throw Error(Errc::kUsage, path, fmt::format("is a text in {}; UTF-8 is expected", *encoding),
              fmt::format("iconv -f {} -t UTF-8 '{}' > '{}' converts it", *encoding, path,
                          renamed(path, ".utf8.txt")));
}

}  // namespace

const char* name_of(DataKind kind) {
  switch (kind) {
    case DataKind::kLines:
      return "documents, a JSON object a line";
    case DataKind::kList:
      return "documents, a JSON list of objects";
    case DataKind::kTokens:
      return "tokens";
    default:
      return "one text";
  }
}

bool named_so(const std::string& path, DataKind kind) {
  const std::string ending = ending_of(path);
  if (kind == DataKind::kLines) return is_lines_ending(ending);
  return kind == DataKind::kTokens || (kind == DataKind::kText && ending == ".txt");
}

InputFile open_data(const std::string& path, const std::string& what) {
  InputFile file(path, what);
  const std::string head = read_head(file, 64);
  if (head.rfind("version https://git-lfs", 0) == 0) refuse(path, *other_file(path, head, "", true));
  return file;
}

void check_raw_tokens(const InputFile& file) {
  const auto other = other_file(file.path(), read_head(file, 4096), read_tail(file), false);
  if (other) refuse(file.path(), *other);
}

std::int64_t mark_bytes(const InputFile& file) {
  return read_head(file, 3) == kMark ? 3 : 0;
}

void check_no_zeros(std::string_view piece, const std::string& path, std::int64_t offset) {
  const std::size_t zero = piece.find('\0');
  if (zero == piece.npos) return;
  throw Error(
      Errc::kUsage, path,
      fmt::format("has a zero byte at byte {}: it is no text", offset + static_cast<std::int64_t>(zero)),
      fmt::format("tokens are read from files named NAME.bin; stray zeros go by tr -d '\\000' < '{}' > "
                  "'{}'",
                  path, renamed(path, ".clean.txt")));
}

DataKind kind_of_data(const std::string& path) {
  const std::string ending = ending_of(path);
  if (ending == ".bin") return DataKind::kTokens;
  const InputFile file = open_data(path, "a text");
  std::string head = read_head(file, kHeadBytes);
  if (const auto other = other_file(path, head, read_tail(file), true)) refuse(path, *other);
  refuse_wide_text(path, head);
  check_no_zeros(std::string_view(head).substr(0, 4096), path, 0);
  refuse_tables(path, ending);
  const std::size_t begin = head.compare(0, 3, kMark) == 0 ? 3 : 0;
  const std::size_t first = head.find_first_not_of(kBlanks, begin);
  const bool bracket = first != head.npos && (head[first] == '{' || head[first] == '[');
  // The first record must be seen whole.
  if (bracket && !is_lines_ending(ending) && head.find('\n', first) == head.npos &&
      object_bytes(std::string_view(head).substr(first)) == head.npos)
    head = read_head(file, kMostHeadBytes);
  const bool whole = static_cast<std::int64_t>(head.size()) == file.bytes();
  const Bracketed bracketed(file, std::string_view(head).substr(std::min(begin, head.size())), whole);
  if (is_lines_ending(ending)) return bracketed.begins_list() ? DataKind::kList : DataKind::kLines;
  if (ending == ".json") {
    if (head.size() == begin) return DataKind::kText;  // empty, which its reader says
    return bracketed.kind();
  }
  return bracket ? bracketed.kind() : DataKind::kText;
}

}  // namespace zg
