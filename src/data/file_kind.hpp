// What a file of data is. Its first bytes and the ending of its name say it together, so that a file under
// another name is read as what it is, and the files of other programs are refused by their kind.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "ziggurat/base/file.hpp"

namespace zg {

//   kText    one text
//   kLines   documents: a JSON object a line
//   kList    documents: one JSON list of objects
//   kTokens  NAME.bin
enum class DataKind : std::uint8_t { kText, kLines, kList, kTokens };

inline bool is_documents(DataKind kind) {
  return kind == DataKind::kLines || kind == DataKind::kList;
}
// "a text", "documents, a JSON object a line", ...
const char* name_of(DataKind kind);
// Whether the name's ending says no less than the file does: log lines leave out what is known from the name.
bool named_so(const std::string& path, DataKind kind);

// Opens a file of the user's data. A pointer of Git LFS in its place is an Error(kUsage).
InputFile open_data(const std::string& path, const std::string& what);

// Throws Error(kUsage) for files of other kinds, with the command that converts them, and for texts in UTF-16
// or UTF-32.
DataKind kind_of_data(const std::string& path);

// Throws Error(kUsage) where a file that is said to have tokens alone begins as a file of another program.
void check_raw_tokens(const InputFile& file);

// Bytes of UTF-8's byte order mark before a text: 3 or 0.
std::int64_t mark_bytes(const InputFile& file);

// Throws Error(kUsage) for a zero byte in a text's piece, which begins at byte `offset` of the file.
void check_no_zeros(std::string_view piece, const std::string& path, std::int64_t offset);

}  // namespace zg
