// Packs documents into sequences: several whole documents in each, as many as fit.
//
// kPackedTogether neighbouring documents are packed at a time, so that memory does not grow with the data. A
// document longer than a sequence is cut: pieces of seq_len tokens are sequences of their own, and the rest
// at its end is packed like a short document. The packing is best-fit decreasing: the longest document first,
// each into the sequence with the least room that still has enough; among equals the earlier one first. A
// piece without a target (a document or a rest of one token) is left out.
//
// Immutable after construction: any thread may call.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "data/document_index.hpp"

namespace zg {

inline constexpr std::int64_t kPackedTogether = 1024;

// Tokens [first, first + length) of a file, all of one document. goes_on: the document has another token
// after them, which is the target of the last one.
struct DocumentPiece {
  std::int64_t first = 0, length = 0;
  bool goes_on = false;
};

// Groups pieces, given by their lengths (1 to `room`), into sequences. Returns the indices of each sequence's
// pieces.
std::vector<std::vector<std::size_t>> best_fit_decreasing(std::span<const std::int64_t> lengths,
                                                          std::int64_t room);

class PackedDocuments {
 public:
  // Packs documents [first, first + n).
  PackedDocuments(std::shared_ptr<const DocumentIndex> index, std::int64_t first, std::int64_t n,
                  std::int64_t seq_len);
  std::int64_t sequences() const { return ends_.empty() ? 0 : ends_.back(); }
  std::int64_t tokens() const { return tokens_; }  // in all sequences, without padding
  // The pieces of sequence `i`, in order.
  std::vector<DocumentPiece> sequence(std::int64_t i) const;

 private:
  std::vector<std::int64_t> starts_of_group(std::size_t group) const;

  std::shared_ptr<const DocumentIndex> index_;
  std::int64_t first_, count_, seq_len_, tokens_ = 0;
  std::vector<std::int64_t> ends_;  // for each group of documents: sequences of all groups up to it
};

}  // namespace zg
