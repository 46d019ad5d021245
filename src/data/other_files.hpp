// Files of other programs, known by their first bytes.
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace zg {

struct OtherFile {
  std::string name;     // "a Parquet file"
  std::string convert;  // the command that makes something of it that can be read, or what to do
};

// What a file is that begins with `head` and ends with `tail`; none: nothing known. `text`: it is given as a
// text, of which bytes that no text has tell more; otherwise as raw tokens, which may be any bytes, so that
// only long marks count.
std::optional<OtherFile> other_file(const std::string& path, std::string_view head, std::string_view tail,
                                    bool text);

}  // namespace zg
