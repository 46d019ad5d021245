// A text file of any size, read in pieces. Immutable after construction: any thread may call.
#pragma once
#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "data/file_kind.hpp"
#include "data/text_tokenizer.hpp"

namespace zg {

inline constexpr std::size_t kPieceBytes = 4 << 20;

class TextFile {
 public:
  // Throws Error(kUsage) for a file that is empty or no text.
  explicit TextFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  DataKind kind() const { return kind_; }
  bool documents() const { return is_documents(kind_); }
  std::int64_t begin() const { return begin_; }  // after the byte order mark, if there is one
  std::int64_t size() const { return file_.bytes(); }
  // The file's identity for the cache: if the stamp differs, the file has changed.
  nlohmann::json stamp() const;

  // Throws Error(kIo) for a drive's error, and for a file that has become shorter.
  void read(std::int64_t offset, std::int64_t n, char* out) const { file_.read(out, n, offset); }

  // Passes bytes [begin, end) to use(piece, place), in order. prefix(text) returns the number of bytes after
  // which an unfinished text may be cut; 0: nowhere yet, more must be read. `text_begin` is the begin of the
  // text that continues at `begin`. use() returns whether to continue.
  using Prefix = std::function<std::size_t(std::string_view)>;
  using Use = std::function<bool(std::string_view, const TextPlace&)>;
  void for_pieces(std::int64_t begin, std::int64_t end, std::int64_t text_begin, const Prefix& prefix,
                  const Use& use) const;

 private:
  DataKind kind_;
  InputFile file_;
  std::int64_t begin_ = 0;
};

}  // namespace zg
