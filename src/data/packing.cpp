#include "data/packing.hpp"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/system.hpp"

namespace zg {
namespace {

// What of each document is packed with others: the rest behind its pieces of whole sequences.
struct Rests {
  std::vector<std::int64_t> documents, lengths;
};

Rests rests_of(std::span<const std::int64_t> starts, std::int64_t seq_len) {
  Rests rests;
  for (std::size_t d = 0; d + 1 < starts.size(); ++d) {
    const std::int64_t length = (starts[d + 1] - starts[d]) % seq_len;
    if (length < 2) continue;
    rests.documents.push_back(static_cast<std::int64_t>(d));
    rests.lengths.push_back(length);
  }
  return rests;
}

// Pieces that fill a sequence each. A document of one token has none, for it has no target.
std::int64_t whole_pieces(std::int64_t tokens, std::int64_t seq_len) {
  return tokens < 2 ? 0 : tokens / seq_len - (seq_len == 1 ? 1 : 0);
}

}  // namespace

std::vector<std::vector<std::size_t>> best_fit_decreasing(std::span<const std::int64_t> lengths,
                                                          std::int64_t room) {
  std::vector<std::size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return lengths[a] > lengths[b]; });
  std::vector<std::vector<std::size_t>> sequences;
  std::set<std::pair<std::int64_t, std::size_t>> open;  // room that is left, and the sequence
  for (const std::size_t piece : order) {
    const std::int64_t length = lengths[piece];
    ZG_ASSERT(length >= 1 && length <= room, "a piece of {} tokens in a sequence of {}", length, room);
    const auto best = open.lower_bound({length, 0});
    std::int64_t left = room;
    std::size_t sequence = sequences.size();
    if (best == open.end()) {
      sequences.emplace_back();
    } else {
      std::tie(left, sequence) = *best;
      open.erase(best);
    }
    sequences[sequence].push_back(piece);
    if (left > length) open.emplace(left - length, sequence);
  }
  return sequences;
}

PackedDocuments::PackedDocuments(std::shared_ptr<const DocumentIndex> index, std::int64_t first,
                                 std::int64_t n, std::int64_t seq_len)
    : index_(std::move(index)), first_(first), count_(n), seq_len_(seq_len) {
  const auto groups = static_cast<std::size_t>((n + kPackedTogether - 1) / kPackedTogether);
  ends_.reserve(groups);
  std::int64_t end = 0;
  for (std::size_t g = 0; g < groups; ++g) {
    const std::vector<std::int64_t> starts = starts_of_group(g);
    const std::int64_t before = end;
    for (std::size_t d = 0; d + 1 < starts.size(); ++d)
      end += whole_pieces(starts[d + 1] - starts[d], seq_len);
    const std::vector<std::int64_t> rests = rests_of(starts, seq_len).lengths;
    tokens_ += (end - before) * seq_len + std::accumulate(rests.begin(), rests.end(), std::int64_t{0});
    end += static_cast<std::int64_t>(best_fit_decreasing(rests, seq_len).size());
    ends_.push_back(end);
    if (interrupted()) throw Error(Errc::kInterrupted, index_->path(), "interrupted while it was packed");
  }
}

std::vector<std::int64_t> PackedDocuments::starts_of_group(std::size_t group) const {
  const std::int64_t begin = static_cast<std::int64_t>(group) * kPackedTogether;
  return index_->starts(first_ + begin, std::min(kPackedTogether, count_ - begin));
}

std::vector<DocumentPiece> PackedDocuments::sequence(std::int64_t i) const {
  ZG_ASSERT(i >= 0 && i < sequences(), "sequence {} of {}", i, sequences());
  const auto group =
      static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), i) - ends_.begin());
  if (group > 0) i -= ends_[group - 1];
  const std::vector<std::int64_t> starts = starts_of_group(group);
  for (std::size_t d = 0; d + 1 < starts.size(); ++d) {
    const std::int64_t whole = whole_pieces(starts[d + 1] - starts[d], seq_len_);
    if (i >= whole) {
      i -= whole;
      continue;
    }
    const std::int64_t first = starts[d] + i * seq_len_;
    return {{first, seq_len_, first + seq_len_ < starts[d + 1]}};
  }
  const Rests rests = rests_of(starts, seq_len_);
  std::vector<DocumentPiece> pieces;
  const auto packed = best_fit_decreasing(rests.lengths, seq_len_);
  if (i >= static_cast<std::int64_t>(packed.size())) {
    throw Error(Errc::kUsage, index_->path(), "has changed while the run was using it",
                "start the run again");
  }
  for (const std::size_t piece : packed[static_cast<std::size_t>(i)]) {
    const std::int64_t end = starts[static_cast<std::size_t>(rests.documents[piece]) + 1];
    pieces.push_back({end - rests.lengths[piece], rests.lengths[piece], false});
  }
  return pieces;
}

}  // namespace zg
