// A cache of pieces' tokens: words recur, so their tokens are looked up rather than computed again. Used by
// one thread at a time.
#pragma once
#include <cstdint>
#include <cstring>
#include <functional>
#include <string_view>
#include <vector>

namespace zg {

class PieceCache {
 public:
  static constexpr std::size_t kLongest = 31, kMostTokens = 10;

  // Appends the tokens of a piece. Calls compute(piece, out) if they are not in the cache.
  template <class Compute>
  void append(std::string_view piece, std::vector<std::int32_t>& out, const Compute& compute) {
    if (piece.size() > kLongest) return compute(piece, out);
    if (entries_.empty()) entries_.resize(kEntries);
    Entry& entry = entries_[std::hash<std::string_view>()(piece) % kEntries];
    if (entry.length != piece.size() || std::memcmp(entry.piece, piece.data(), piece.size()) != 0) {
      const std::size_t had = out.size();
      compute(piece, out);
      if (out.size() - had > kMostTokens) return;
      entry.length = static_cast<std::uint8_t>(piece.size());
      entry.tokens = static_cast<std::uint8_t>(out.size() - had);
      std::memcpy(entry.piece, piece.data(), piece.size());
      std::copy(out.begin() + static_cast<std::ptrdiff_t>(had), out.end(), entry.ids);
      return;
    }
    out.insert(out.end(), entry.ids, entry.ids + entry.tokens);
  }

 private:
  static constexpr std::size_t kEntries = 1 << 15;
  struct Entry {
    std::uint8_t length = 0, tokens = 0;  // a piece has at least one byte
    char piece[kLongest];
    std::int32_t ids[kMostTokens];
  };
  std::vector<Entry> entries_;  // direct-mapped: a piece's hash selects its entry, which it overwrites
};

}  // namespace zg
