// Recognises files of other programs by their first and last bytes.
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace zg {

struct OtherFile {
  std::string name;     // "a Parquet file"
  std::string convert;  // the command that converts it to a readable file, or other advice
};

// Recognises a file that begins with `head` and ends with `tail`; none if it is of no known kind. `text`: the
// file should be a text, so short signatures of bytes that no text has suffice. Otherwise it should have raw
// tokens, which may be any bytes, so only long signatures are accepted.
std::optional<OtherFile> other_file(const std::string& path, std::string_view head, std::string_view tail,
                                    bool text);

}  // namespace zg
