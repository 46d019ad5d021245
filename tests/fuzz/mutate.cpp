#include "fuzz/mutate.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace zg::fuzz {
namespace {

constexpr const char* kNumbers[] = {"0",
                                    "-1",
                                    "1",
                                    "2",
                                    "127",
                                    "128",
                                    "255",
                                    "256",
                                    "65535",
                                    "65536",
                                    "2147483647",
                                    "2147483648",
                                    "-2147483648",
                                    "4294967295",
                                    "4294967296",
                                    "281474976710656",
                                    "9007199254740993",
                                    "9223372036854775807",
                                    "9223372036854775808",
                                    "-9223372036854775808",
                                    "18446744073709551615",
                                    "18446744073709551616",
                                    "1e308",
                                    "1e400",
                                    "-1e308",
                                    "1e-320",
                                    "0.5",
                                    "-0.0",
                                    "1e18",
                                    "NaN",
                                    "Infinity",
                                    "00",
                                    "1.",
                                    "0x10"};
constexpr std::uint64_t kEdges[] = {0,
                                    1,
                                    0x7f,
                                    0x80,
                                    0xff,
                                    0x7fff,
                                    0xffff,
                                    0x10000,
                                    0x7fffffff,
                                    0x80000000,
                                    0xffffffff,
                                    0x1000000,
                                    1ull << 32,
                                    1ull << 48,
                                    (1ull << 63) - 1,
                                    1ull << 63,
                                    ~0ull,
                                    ~0ull - 7,
                                    (1ull << 56) / 16};
constexpr const char* kTexts[] = {"",
                                  ".",
                                  "..",
                                  "../x",
                                  "../../../x",
                                  "/etc/x",
                                  "/",
                                  "a/b",
                                  "a\\b",
                                  "~",
                                  "-",
                                  "\x1b[2J\x1b]0;x\x07",
                                  "\n",
                                  "a\nb",
                                  "\t ",
                                  "%s%n",
                                  "{}",
                                  "\xe2\x96\x81",
                                  "\xed\x9f\xbf",
                                  "\xf4\x8f\xbf\xbf",
                                  "null",
                                  "true",
                                  "auto",
                                  "0",
                                  "-1",
                                  "0123456789abcdef",
                                  "F32",
                                  "BF16",
                                  "U8",
                                  "float32",
                                  "(?:a?)?",
                                  "[^\\s]+|\\p{L}*",
                                  "(((((",
                                  "a{1,100000}",
                                  "[z-a]"};
constexpr const char* kRawTexts[] = {R"("\u0000")",
                                     R"("\ud800")",
                                     R"("\udc00\ud800")",
                                     "\"\xff\xfe\"",
                                     "\"a\x01\"",
                                     R"("\x")",
                                     "'a'",
                                     "\"",
                                     "tru",
                                     ",",
                                     "]",
                                     "}"};

std::size_t place_in(const std::string& bytes, Random& random) {
  // Half of all changes are near the beginning, where headers are.
  const std::size_t n = bytes.size() + 1;
  return random.chance(50) ? random.below(n) : random.below(std::min<std::size_t>(n, 96));
}

void write_number(std::string& bytes, Random& random) {
  const std::size_t width = std::size_t{1} << random.below(4);
  if (bytes.size() < width) return;
  std::size_t at = std::min(place_in(bytes, random), bytes.size() - width);
  if (random.chance(50)) at -= at % width;
  std::uint64_t value = random.of(kEdges);
  if (random.chance(25)) {  // near what it was
    value = 0;
    std::memcpy(&value, bytes.data() + at, width);
    value += random.chance(50) ? 1 : ~std::uint64_t{0};
  }
  std::memcpy(bytes.data() + at, &value, width);
}

// A number that is written as digits.
void write_digits(std::string& bytes, Random& random) {
  const auto is_digit = [&](std::size_t i) { return i < bytes.size() && bytes[i] >= '0' && bytes[i] <= '9'; };
  const std::size_t start = place_in(bytes, random);
  std::size_t at = start;
  while (at < bytes.size() && !is_digit(at)) ++at;
  std::size_t end = at;
  while (is_digit(end)) ++end;
  if (end > at) bytes.replace(at, end - at, random.of(kNumbers));
}

void change_line(std::string& bytes, Random& random) {
  const auto line_at = [&](std::size_t at) {
    const std::size_t before = at == 0 ? bytes.npos : bytes.rfind('\n', at - 1);
    const std::size_t begin = before == bytes.npos ? 0 : before + 1, end = bytes.find('\n', begin);
    return std::pair{begin, (end == bytes.npos ? bytes.size() : end + 1) - begin};
  };
  const auto [begin, count] = line_at(random.below(bytes.size() + 1));
  const std::string line = bytes.substr(begin, count);
  if (random.chance(40)) bytes.erase(begin, count);
  if (random.chance(60)) bytes.insert(line_at(random.below(bytes.size() + 1)).first, line);
}

void change_bytes(std::string& bytes, const std::string& other, Random& random) {
  const std::size_t at = place_in(bytes, random);
  const std::size_t most = std::min<std::size_t>(bytes.size() - std::min(at, bytes.size()), 64);
  const std::size_t count = most == 0 ? 0 : 1 + random.below(most);
  switch (random.below(11)) {
    case 0:
    case 1:
      if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ (1 << random.below(8)));
      break;
    case 2:
      if (at < bytes.size()) bytes[at] = static_cast<char>(random.bits());
      break;
    case 3:
      bytes.resize(random.chance(80) ? at : random.below(8));
      break;
    case 4:
      bytes.erase(at, count);
      break;
    case 5:
      bytes.insert(at, bytes.substr(at, count));
      break;
    case 6: {
      std::string fresh(1 + random.below(16), '\0');
      for (char& c : fresh) c = static_cast<char>(random.chance(30) ? 0 : random.bits());
      bytes.insert(at, random.chance(50) ? fresh : random.of(kTexts));
      break;
    }
    case 7:
      write_number(bytes, random);
      break;
    case 8:
      write_digits(bytes, random);
      break;
    case 9:
      change_line(bytes, random);
      break;
    default:  // a splice
      bytes = bytes.substr(0, at) + other.substr(std::min(other.size(), place_in(other, random)));
  }
}

// --- JSON ----------------------------------------------------------------------------------------

// Stands in a tree for text that no tree has: RAW<number of it>.
constexpr std::string_view kMark = "@@RAW";

class JsonChanger {
 public:
  JsonChanger(Json root, const Json& other, Random& random)
      : root_(std::move(root)), other_(other), random_(random) {}

  std::string changed() {
    for (int n = random_.few(4); n > 0; --n) change();
    // Indented as people and programs do, or not: a hash may be about the text.
    std::string text = root_.dump(random_.chance(50) ? -1 : 1, ' ', false, Json::error_handler_t::replace);
    for (std::size_t i = raw_.size(); i-- > 0;) {
      const std::string mark = fmt::format("\"{}{}\"", kMark, i);
      const std::size_t at = text.find(mark);
      if (at != text.npos) text.replace(at, mark.size(), raw_[i]);
    }
    return text;
  }

 private:
  static Json& child(Json& of, std::size_t i) {
    return *std::next(of.begin(), static_cast<std::ptrdiff_t>(i));
  }
  // Values near the root are as likely as the values of long lists.
  Json& some(Json& root) {
    Json* at = &root;
    while (at->is_structured() && !at->empty() && !random_.chance(at == &root ? 8 : 25))
      at = &child(*at, random_.below(at->size()));
    return *at;
  }
  Json raw(std::string text) {
    raw_.push_back(std::move(text));
    return fmt::format("{}{}", kMark, raw_.size() - 1);
  }

  Json fresh() {
    switch (random_.below(9)) {
      case 0:
        return nullptr;
      case 1:
        return random_.chance(50);
      case 2:
        return Json::array();
      case 3:
        return Json::object();
      case 4:
        return raw(random_.of(kRawTexts));
      case 5:
        return random_.of(kTexts);
      case 6:
        return Json(some(root_));
      case 7: {
        Json other = other_;
        return Json(some(other));
      }
      default:
        return raw(random_.of(kNumbers));
    }
  }
  Json deep() {
    constexpr std::size_t kDepths[] = {3, 100, 127, 129, 1000, 20'000, 100'000};
    const std::size_t depth = random_.of(kDepths);
    std::string text;
    const bool object = random_.chance(40);
    for (std::size_t i = 0; i < depth; ++i) text += object ? "{\"a\":" : "[";
    text += "1";
    if (random_.chance(90)) text.append(depth, object ? '}' : ']');
    return raw(std::move(text));
  }
  std::string long_text() {
    constexpr std::size_t kLengths[] = {17, 300, 5000, 70'000};
    const char* const piece = random_.of(kTexts);
    const std::size_t length = random_.of(kLengths);
    std::string text;
    while (text.size() < length) text += *piece == '\0' ? "a" : piece;
    return text;
  }
  void change_text(std::string& text) {
    if (random_.chance(25)) {
      text = long_text();
    } else if (random_.chance(30)) {
      text.insert(random_.below(text.size() + 1), random_.of(kTexts));
    } else {
      change_bytes(text, random_.of(kTexts), random_);
    }
  }
  void change_number(Json& number) {
    const auto old = number.is_number_float() ? 0 : number.get<std::int64_t>();
    switch (random_.below(4)) {
      case 0:
        number = static_cast<std::int64_t>(static_cast<std::uint64_t>(old) + 1);
        break;
      case 1:
        number = static_cast<std::int64_t>(static_cast<std::uint64_t>(old) - 1);
        break;
      case 2:
        number = static_cast<std::int64_t>(0 - static_cast<std::uint64_t>(old));
        break;
      default:
        number = raw(random_.of(kNumbers));
    }
  }

  void change_list(Json& list) {
    const std::size_t n = list.size(), at = n > 0 ? random_.below(n) : 0;
    switch (random_.below(6)) {
      case 0:
        list = Json::array();
        break;
      case 1:
        if (n > 0) list.erase(at);
        break;
      case 2:
        list.push_back(fresh());
        break;
      case 3:
        if (n > 0) list.push_back(Json(list[at]));
        break;
      case 4:
        if (n > 0) std::swap(list[at], list[random_.below(n)]);
        break;
      default: {
        const Json one = n > 0 ? Json(list[at]) : fresh();
        if (one.size() > 64) return;
        constexpr std::size_t kCounts[] = {8, 100, 3000};
        for (std::size_t i = random_.of(kCounts); i > 0; --i) list.push_back(one);
      }
    }
  }
  void change_object(Json& object) {
    if (object.empty()) {
      object["a"] = fresh();
      return;
    }
    const std::size_t at = random_.below(object.size());
    const std::string key = std::next(object.begin(), static_cast<std::ptrdiff_t>(at)).key();
    const auto set_raw_key = [&](const std::string& text, Json value) {
      const std::string mark = raw(Json(text).dump(-1, ' ', false, Json::error_handler_t::replace));
      object[mark] = std::move(value);
    };
    switch (random_.below(6)) {
      case 0:
        object = Json::object();
        break;
      case 1:
        object.erase(key);
        break;
      case 2:
        set_raw_key(key, Json(child(object, at)));
        break;  // twice
      case 3:
        set_raw_key(key, fresh());
        break;
      case 4: {
        Json value = child(object, at);
        std::string name = key;
        object.erase(key);
        change_text(name);
        set_raw_key(name, std::move(value));
        break;
      }
      default:
        set_raw_key(random_.of(kTexts), fresh());
    }
  }

  void change() {
    Json& value = some(root_);
    if (random_.chance(25)) {
      Json next = random_.chance(8) ? deep() : fresh();
      value = std::move(next);
    } else if (value.is_string()) {
      auto& text = value.get_ref<std::string&>();
      if (text.compare(0, kMark.size(), kMark) != 0) change_text(text);
    } else if (value.is_number()) {
      change_number(value);
    } else if (value.is_array()) {
      change_list(value);
    } else if (value.is_object()) {
      change_object(value);
    } else {
      Json next = fresh();
      value = std::move(next);
    }
  }

  Json root_;
  const Json& other_;
  Random& random_;
  std::vector<std::string> raw_;
};

}  // namespace

void mutate_bytes(std::string& bytes, const std::string& other, Random& random) {
  for (int n = random.few(6); n > 0; --n) change_bytes(bytes, other, random);
  if (bytes.size() > kLargestInput) bytes.resize(kLargestInput);
}

std::string mutated_json(const Json& root, const Json& other, Random& random) {
  std::string text = JsonChanger(root, other, random).changed();
  if (random.chance(6)) mutate_bytes(text, text, random);
  if (text.size() > kLargestInput) text.resize(kLargestInput);
  return text;
}

void mutate_json_text(std::string& text, const std::string& other, Random& random) {
  if (random.chance(20)) return mutate_bytes(text, other, random);
  const Json root = Json::parse(text, nullptr, false, true);
  if (root.is_discarded()) return mutate_bytes(text, other, random);
  const Json beside = Json::parse(other, nullptr, false, true);
  text = mutated_json(root, beside.is_discarded() ? root : beside, random);
}

void mutate_safetensors(std::string& bytes, const std::string& other, Random& random) {
  std::uint64_t length = 0;
  if (bytes.size() >= 8) std::memcpy(&length, bytes.data(), 8);
  if (length + 8 > bytes.size() || length == 0 || random.chance(25))
    return mutate_bytes(bytes, other, random);
  std::string header = bytes.substr(8, length), data = bytes.substr(8 + length);
  mutate_json_text(header, header, random);
  while (random.chance(90) && header.size() % 8 != 0) header += ' ';
  if (random.chance(10) && !data.empty()) data.resize(random.below(data.size()));
  length = header.size();
  bytes = std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

}  // namespace zg::fuzz
