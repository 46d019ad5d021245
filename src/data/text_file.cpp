#include "data/text_file.hpp"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

constexpr std::size_t kLongestPiece = std::size_t{1} << 30;

std::string canonical(const std::string& path) {
  std::error_code error;
  const std::filesystem::path found = std::filesystem::weakly_canonical(path, error);
  return error ? path : found.string();
}

}  // namespace

TextFile::TextFile(const std::string& path) : kind_(kind_of_data(path)), file_(open_data(path, "a text")) {
  begin_ = mark_bytes(file_);
  if (size() == begin_) throw Error(Errc::kUsage, path, "is empty; a text is expected", "name another file");
}

nlohmann::json TextFile::stamp() const {
  return {{"path", canonical(path())},
          {"size", size()},
          {"mtime_ns", file_.mtime_ns()},
          {"read_as", name_of(kind_)}};
}

void TextFile::for_pieces(std::int64_t begin, std::int64_t end, std::int64_t text_begin, const Prefix& prefix,
                          const Use& use) const {
  std::string buffer;
  std::int64_t read_to = begin;
  while (read_to < end || !buffer.empty()) {
    const std::int64_t more = std::min(static_cast<std::int64_t>(kPieceBytes), end - read_to);
    const std::size_t had = buffer.size();
    buffer.resize(had + static_cast<std::size_t>(more));
    read(read_to, more, buffer.data() + had);
    check_no_zeros(std::string_view(buffer).substr(had), path(), read_to);
    read_to += more;
    const std::size_t whole = read_to == end ? buffer.size() : prefix(buffer);
    const std::int64_t offset = read_to - static_cast<std::int64_t>(buffer.size());
    if (whole == 0 && buffer.size() > kLongestPiece) {
      throw Error(Errc::kUsage, path(),
                  fmt::format("the {} from byte {} on cannot be cut, neither into documents nor into words",
                              format_bytes(static_cast<std::int64_t>(buffer.size())), offset),
                  "with this tokenizer give documents, a .jsonl file of {\"text\": ...}");
    }
    const TextPlace place{.where = path(), .offset = offset, .goes_on = offset > text_begin};
    if (whole > 0 && !use(std::string_view(buffer).substr(0, whole), place)) return;
    buffer.erase(0, whole);
    if (interrupted()) throw Error(Errc::kInterrupted, path(), "interrupted while it was tokenised");
  }
}

}  // namespace zg
