#include <algorithm>
#include <optional>
#include <vector>

#include "data/sources.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/system.hpp"

namespace zg {
namespace {

constexpr std::int64_t kDocumentsAtOnce = 4096;

// Counts what a mask leaves, in stretches that follow each other.
class MaskCounter {
 public:
  explicit MaskCounter(const MaskFile& mask, std::int64_t end) : mask_(mask), end_(end), block_(1 << 20) {}

  std::int64_t count(std::int64_t first, std::int64_t end) {
    std::int64_t kept = 0;
    while (first < end) {
      if (first < begin_ || first >= begin_ + filled_) fill(first);
      const std::int64_t to = std::min(end, begin_ + filled_);
      kept += std::count_if(block_.begin() + (first - begin_), block_.begin() + (to - begin_),
                            [](std::uint8_t byte) { return byte != 0; });
      first = to;
    }
    return kept;
  }

 private:
  void fill(std::int64_t first) {
    begin_ = first, filled_ = std::min(end_ - first, static_cast<std::int64_t>(block_.size()));
    mask_.read(begin_, filled_, block_.data());
    if (interrupted()) throw Error(Errc::kInterrupted, "data", "interrupted while its targets were counted");
  }

  const MaskFile& mask_;
  std::int64_t end_, begin_ = 0, filled_ = 0;
  std::vector<std::uint8_t> block_;
};

std::int64_t targets_of_documents(const Split& split) {
  std::int64_t targets = 0;
  std::optional<MaskCounter> mask;
  if (split.mask) mask.emplace(*split.mask, split.first + split.count);
  for (std::int64_t done = 0; done < split.document_count; done += kDocumentsAtOnce) {
    const std::int64_t n = std::min(kDocumentsAtOnce, split.document_count - done);
    const std::vector<std::int64_t> starts = split.documents->starts(split.first_document + done, n);
    for (std::size_t i = 0; i + 1 < starts.size(); ++i) {
      const std::int64_t first = starts[i] + 1, end = std::max(first, starts[i + 1]);
      targets += mask ? mask->count(first, end) : end - first;
    }
  }
  return targets;
}

}  // namespace

std::int64_t targets_of(const Split& split, bool packs) {
  if (split.count == 0) return 0;
  if (packs && split.documents) return targets_of_documents(split);
  if (!split.mask) return split.count - 1;
  const std::int64_t end = split.first + split.count;
  return MaskCounter(*split.mask, end).count(split.first + 1, end);
}

}  // namespace zg
