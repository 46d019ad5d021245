// The Unicode data that tokenizers need: general categories, white space, normal forms and lower case. Pure
// functions; any thread.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace zg::unicode {

// In the order of the generated table.
enum class Category : std::uint8_t {
  kLu,
  kLl,
  kLt,
  kLm,
  kLo,
  kMn,
  kMc,
  kMe,
  kNd,
  kNl,
  kNo,
  kPc,
  kPd,
  kPs,
  kPe,  // clang-format off
  kPi, kPf, kPo, kSm, kSc, kSk, kSo, kZs, kZl, kZp, kCc, kCf, kCs, kCo, kCn  // clang-format on
};

// A set of categories: bit i is category i.
using CategorySet = std::uint32_t;
constexpr CategorySet bit(Category c) {
  return CategorySet{1} << static_cast<unsigned>(c);
}
inline constexpr CategorySet kLetter = 0x1F, kMark = 0xE0, kNumber = 0x700, kPunctuation = 0x3F800,
                             kSymbol = 0x3C0000, kSeparator = 0x1C00000, kControl = 0x3E000000;

// The category of a code point, as a set of one.
CategorySet category_bit(char32_t code);
// The property White_Space.
bool is_space(char32_t code);
// Whether \w of a regular expression matches: letters, marks, decimal digits, connectors and joiners.
bool is_word(char32_t code);

// The normal forms. The text must be UTF-8.
enum class Form : std::uint8_t { kC, kD, kKC, kKD };
std::string normal_form(std::string_view text, Form form);
inline std::string nfc(std::string_view text) {
  return normal_form(text, Form::kC);
}
// The text in lower case, converted character by character. The text must be UTF-8.
std::string lowercase(std::string_view text);

}  // namespace zg::unicode
