// Determines the kind of a data file, from its first bytes together with the extension of its name. So a file
// with an unusual name is still read correctly, and files of other programs are refused with their kind.
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
// Whether the extension of the name already tells the kind, so that log lines need not mention it.
bool named_so(const std::string& path, DataKind kind);

// Opens a data file of the user. Throws Error(kUsage) for a Git LFS pointer in its place.
InputFile open_data(const std::string& path, const std::string& what);

// Throws Error(kUsage) for files of other kinds, with the command that converts them, and for texts in UTF-16
// or UTF-32.
DataKind kind_of_data(const std::string& path);

// Throws Error(kUsage) if a file that should have only tokens begins like a file of another program.
void check_raw_tokens(const InputFile& file);

// Length in bytes of a UTF-8 byte order mark at the begin of the file: 3 or 0.
std::int64_t mark_bytes(const InputFile& file);

// Throws Error(kUsage) for a zero byte in a text's piece, which begins at byte `offset` of the file.
void check_no_zeros(std::string_view piece, const std::string& path, std::int64_t offset);

}  // namespace zg
