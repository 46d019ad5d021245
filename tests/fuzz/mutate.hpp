// Changes files at random, in the ways in which files are damaged and forged. What comes out is a pure
// function of the random numbers.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

namespace zg::fuzz {

using Json = nlohmann::ordered_json;

class Random {
 public:
  explicit Random(std::uint64_t seed) : bits_(seed) {}
  std::uint64_t bits() { return bits_(); }
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(bits_() % n); }
  bool chance(int percent) { return static_cast<int>(bits_() % 100) < percent; }
  // 1 in half of all draws, 2 in half of the rest, and so on up to `most`.
  int few(int most) {
    int n = 1;
    while (n < most && chance(50)) ++n;
    return n;
  }
  template <class List>
  const auto& of(const List& list) {
    return list[below(std::size(list))];
  }

 private:
  std::mt19937_64 bits_;
};

// The most bytes that an input has: so few that all of a text may stand in a message.
inline constexpr std::size_t kLargestInput = std::size_t{1} << 20;

// Bits, bytes and whole numbers of 1 to 8 bytes, pieces cut, doubled, inserted and swapped; numbers written
// as digits; lines; a splice with `other`, another input of the kind.
void mutate_bytes(std::string& bytes, const std::string& other, Random& random);

// Values replaced by values of another type and by edge values, keys removed, doubled and renamed, lists
// emptied and lengthened, deep nesting, long texts, escapes, paths. `other`: where values may come from, too.
// The text need not be JSON that a parser takes.
std::string mutated_json(const Json& root, const Json& other, Random& random);
// The same for a text. One that is no JSON is changed by bytes.
void mutate_json_text(std::string& text, const std::string& other, Random& random);

// The header of a safetensors file is JSON behind its length in 8 bytes: changed as JSON, with the length
// that fits in most cases; or the file as bytes.
void mutate_safetensors(std::string& bytes, const std::string& other, Random& random);

}  // namespace zg::fuzz
