#include "ziggurat/base/error.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ziggurat/base/printable.hpp"

namespace zg {
namespace {
// A message may quote a file, and the quoted text may be a megabyte long, so messages are shortened.
constexpr std::size_t kLongest = 8000, kKeptEnd = 1000;

std::string shortened(std::string text) {
  if (text.size() <= kLongest) return text;
  const auto begins = [&](std::size_t at) { return (static_cast<unsigned char>(text[at]) & 0xc0) != 0x80; };
  std::size_t first = kLongest - kKeptEnd, last = text.size() - kKeptEnd;
  for (int i = 0; i < 4 && !begins(first); ++i) --first;
  for (int i = 0; i < 4 && !begins(last); ++i) ++last;
  return fmt::format("{} [... {} bytes ...] {}", text.substr(0, first), last - first, text.substr(last));
}

// printable() makes texts longer, so the result is cut once more.
std::string shown(const std::string& text) {
  return shortened(printable(shortened(text)));
}

std::string compose(const std::string& where, const std::string& what, const std::string& hint) {
  std::string text = where.empty() ? what : where + ": " + what;
  if (!hint.empty()) text += "\n  hint: " + hint;
  return text;
}
}  // namespace

Error::Error(Errc code, std::string where, std::string what, std::string hint)
    : std::runtime_error(compose(shown(where), shown(what), shown(hint))),
      code_(code),
      where_(std::move(where)),
      message_(shown(what)),
      hint_(shown(hint)) {}

int Error::exit_code() const {
  if (code_ == Errc::kUsage || code_ == Errc::kMemory) return 2;
  return code_ == Errc::kInterrupted ? 130 : 1;
}

std::string errno_text(int error) {
  char buffer[256];
  return fmt::format("{} (errno {})", strerror_r(error, buffer, sizeof buffer), error);
}

void assertion_failed(const char* file, int line, const char* expression, const std::string& detail) {
  std::fprintf(stderr, "\n%s:%d: this is a bug in ziggurat: assertion failed: %s%s%s\n", file, line,
               expression, detail.empty() ? "" : ": ", detail.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace zg
