// How each kind of failure is reported.
//
//   a bug                          ZG_ASSERT: always on, prints both operands, aborts
//   bad input, an unfit machine    throws zg::Error, at set-up or between steps: place, cause, hint
//   a failed transfer              sets a value in the ticket (io/engine.hpp), which the waiter must check
#pragma once
#include <fmt/core.h>

#include <stdexcept>
#include <string>

namespace zg {

enum class Errc {
  kUsage,        // a flag, a configuration key or a user's file is wrong
  kIo,           // the operating system refused or failed an I/O operation
  kMemory,       // a budget, or the machine's memory, is too small
  kDevice,       // a device failed
  kComm,         // another rank failed, or does not answer
  kNumeric,      // the training diverged: a loss or gradient is not finite
  kInterrupted,  // the user asked to stop
};

// An error: its place (file, key, drive), the cause (what was found and what was expected), and a hint how to
// mend it.
class Error : public std::runtime_error {
 public:
  Error(Errc code, std::string where, std::string what, std::string hint = {});
  Errc code() const { return code_; }
  const std::string& where() const { return where_; }
  const std::string& message() const { return message_; }
  const std::string& hint() const { return hint_; }
  // The exit code of the process: 2 for kUsage and kMemory, 130 for kInterrupted, else 1.
  int exit_code() const;

 private:
  Errc code_;
  std::string where_, message_, hint_;
};

// "No such file or directory (errno 2)".
std::string errno_text(int error);

[[noreturn]] void assertion_failed(const char* file, int line, const char* expression,
                                   const std::string& detail);

namespace detail {
template <class T>
std::string operand_text(const T& value) {
  if constexpr (fmt::is_formattable<T>::value) {
    return fmt::format("{}", value);
  } else if constexpr (std::is_enum_v<T>) {
    return fmt::format("{}", static_cast<long long>(value));
  } else {
    return "?";
  }
}
}  // namespace detail
}  // namespace zg

#define ZG_ASSERT(condition, ...)                                                            \
  do {                                                                                       \
    if (!(condition)) [[unlikely]]                                                           \
      ::zg::assertion_failed(__FILE__, __LINE__, #condition, ::fmt::format("" __VA_ARGS__)); \
  } while (false)

#define ZG_ASSERT_OP_(a, op, b)                                                                 \
  do {                                                                                          \
    const auto& zg_a_ = (a);                                                                    \
    const auto& zg_b_ = (b);                                                                    \
    if (!(zg_a_ op zg_b_)) [[unlikely]]                                                         \
      ::zg::assertion_failed(                                                                   \
          __FILE__, __LINE__, #a " " #op " " #b,                                                \
          ::zg::detail::operand_text(zg_a_) + " against " + ::zg::detail::operand_text(zg_b_)); \
  } while (false)
#define ZG_ASSERT_EQ(a, b) ZG_ASSERT_OP_(a, ==, b)
#define ZG_ASSERT_LE(a, b) ZG_ASSERT_OP_(a, <=, b)
#define ZG_ASSERT_LT(a, b) ZG_ASSERT_OP_(a, <, b)
#define ZG_ASSERT_GE(a, b) ZG_ASSERT_OP_(a, >=, b)
