#include "data/document_index.hpp"

#include <algorithm>

#include "data/file_kind.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {

DocumentIndex::DocumentIndex(InputFile file, const Format& format, std::int64_t tokens)
    : file_(std::move(file)), format_(format), tokens_(tokens) {}

std::shared_ptr<const DocumentIndex> DocumentIndex::open_docs(const std::string& path, std::int64_t tokens) {
  InputFile file = open_data(path, "the documents' places (tools/prepare.py writes them beside the tokens)");
  const std::int64_t bytes = file.bytes();
  if (bytes % 8 != 0 || bytes < 8) {
    throw Error(Errc::kUsage, path,
                fmt::format("has {} bytes; 8 for each document and 8 more are expected", bytes),
                "make the tokens and their .docs anew, together");
  }
  auto index = std::make_shared<const DocumentIndex>(std::move(file), Format{.count = bytes / 8 - 1}, tokens);
  const std::int64_t n = index->count(), end = index->starts(n, 0).front();
  if (end == tokens && (n == 0 ? tokens == 0 : index->starts(0, 0).front() == 0)) return index;
  throw Error(Errc::kUsage, path,
              fmt::format("says that {} documents end at token {}; there are {} tokens", n, end, tokens),
              "make the tokens and their .docs anew, together");
}

std::vector<std::int64_t> DocumentIndex::numbers(std::int64_t at, std::int64_t first, std::int64_t n) const {
  std::vector<std::int64_t> found(static_cast<std::size_t>(n));
  file_.read(found.data(), 8 * n, at + 8 * first);
  return found;
}

std::vector<std::int64_t> DocumentIndex::starts(std::int64_t first, std::int64_t n) const {
  ZG_ASSERT(first >= 0 && n >= 0 && first <= count() - n, "documents [{}, {} + {}) of {}", first, first, n,
            count());
  const auto fail = [&](std::int64_t i, const std::string& what) {
    throw Error(Errc::kUsage, path(), fmt::format("says that document {} begins at {}", first + i, what),
                "the file was damaged, or changed while it was read");
  };
  std::vector<std::int64_t> found = numbers(format_.at, first, n + 1);
  if (format_.places_at >= 0) {
    for (std::size_t i = 0; i < found.size(); ++i) {
      const std::int64_t before = i > 0 ? found[i - 1] : 0;
      if (found[i] < before || found[i] > format_.sequences)
        fail(static_cast<std::int64_t>(i), fmt::format("sequence {} of {}", found[i], format_.sequences));
    }
    const std::int64_t begin = found.front(), end = std::min(found.back() + 1, format_.sequences);
    const std::vector<std::int64_t> places = numbers(format_.places_at, begin, end - begin);
    for (std::int64_t& s : found)
      s = s == format_.sequences ? tokens_ : places[static_cast<std::size_t>(s - begin)] / format_.width;
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (found[i] < (i > 0 ? found[i - 1] : 0) || found[i] > tokens_)
      fail(static_cast<std::int64_t>(i), fmt::format("token {} of {}", found[i], tokens_));
  }
  return found;
}

std::int64_t DocumentIndex::first_from(std::int64_t token) const {
  std::int64_t low = 0, high = count();
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (starts(middle, 0).front() >= token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace zg
