#include "ziggurat/base/error.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ziggurat/base/printable.hpp"

namespace zg {
namespace {
std::string compose(const std::string& where, const std::string& what, const std::string& hint) {
  std::string text = where.empty() ? what : where + ": " + what;
  if (!hint.empty()) text += "\n  hint: " + hint;
  return text;
}
}  // namespace

Error::Error(Errc code, std::string where, std::string what, std::string hint)
    : std::runtime_error(printable(compose(where, what, hint))),
      code_(code),
      where_(std::move(where)),
      message_(printable(what)),
      hint_(printable(hint)) {}

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
