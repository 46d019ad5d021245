#include "ziggurat/base/failure.hpp"

#include <execinfo.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>

#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

constexpr const char* kNoMemory = "out of memory";
constexpr const char* kMemoryHint =
    "lower the budgets (tiers.device, tiers.host), free memory, or raise a limit on it (ulimit -v)";

std::array<std::atomic<void (*)()>, 8> cleaners{};
std::atomic<bool> ending{false};

// The number of threads of this process; 0 if the system does not report it.
int thread_count() {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("Threads:")) return std::atoi(line.c_str() + 8);
  }
  return 0;
}

// The control group's limit on processes and threads; "" if there is none, or it is not visible.
std::string pids_limit() {
  std::ifstream in("/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("0::") && line.find(":pids:") == line.npos) continue;
    const std::string group = line.substr(line.rfind(':') + 1);
    for (const std::string& file :
         {"/sys/fs/cgroup" + group + "/pids.max", "/sys/fs/cgroup/pids" + group + "/pids.max",
          std::string("/sys/fs/cgroup/pids.max"), std::string("/sys/fs/cgroup/pids/pids.max")}) {
      std::string most;
      if (std::ifstream(file) >> most && most != "max") return fmt::format("{} is {}", file, most);
    }
  }
  return {};
}

// The limits on threads that are set: one of them prevents one more thread.
std::string limits_on_threads() {
  std::string text;
  const auto add = [&](const std::string& limit) { text += (text.empty() ? "" : ", ") + limit; };
  rlimit limit{};
  if (::getrlimit(RLIMIT_NPROC, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    add(fmt::format("ulimit -u is {}", limit.rlim_cur));
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    add(fmt::format("ulimit -v is {}", format_bytes(static_cast<std::int64_t>(limit.rlim_cur))));
  if (const std::string pids = pids_limit(); !pids.empty()) add(pids);
  return text.empty() ? "kernel.threads-max or kernel.pid_max" : text;
}

Error error_from_system(const std::error_code& code, const std::string& where) {
  const int error = code.value();
  const bool known = code.category() == std::generic_category() || code.category() == std::system_category();
  if (!known) return {Errc::kIo, where, code.message()};
  if (error == ENOMEM) return {Errc::kMemory, where, kNoMemory, kMemoryHint};
  const bool of_user = error == EACCES || error == EPERM || error == ENOENT || error == ENOTDIR ||
                       error == EISDIR || error == ELOOP || error == ENAMETOOLONG || error == EROFS ||
                       error == EEXIST || error == EXDEV;
  if (of_user) {
    return {Errc::kUsage, where, "cannot be used: " + errno_text(error),
            "check the path and its permissions"};
  }
  const char* hint = error == ENOSPC || error == EDQUOT ? "make room there, or name another directory"
                     : error == EMFILE || error == ENFILE
                         ? "raise the limit of open files (ulimit -n)"
                         : "check the drive, and what limits this process (ulimit -a)";
  return {Errc::kIo, where, "the system refused it: " + errno_text(error), hint};
}

// Writes to stderr with system calls alone: memory may have run out.
void say(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(STDERR_FILENO, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(n));
  }
}

void say_no_memory() {
  for (const char* part : {"\nziggurat: ", kNoMemory, "\n  hint: ", kMemoryHint, "\n"}) say(part);
}

// Prints the current exception and returns its exit code; -1 if there is none, or none of a known type.
int say_current_exception() {
  const std::exception_ptr current = std::current_exception();
  if (current == nullptr) return -1;
  try {
    std::rethrow_exception(current);
  } catch (const std::bad_alloc&) {
    say_no_memory();
    return 2;
  } catch (const std::exception& e) {
    try {
      const Error error = error_from(e);
      say(fmt::format("\nziggurat: {}\n", error.what()));
      return error.exit_code();
    } catch (...) {
      say_no_memory();
      return 2;
    }
  } catch (...) {
    return -1;
  }
}

[[noreturn]] void on_terminate() {
  // Other threads that fail meanwhile wait for the end of the process.
  if (ending.exchange(true)) {
    while (true) ::pause();
  }
  const int exit_code = say_current_exception();
  if (exit_code >= 0) end_at_once(exit_code);
  say("\nziggurat: this is a bug in ziggurat: it ended itself without an exception\n");
  std::abort();
}

}  // namespace

Error thread_error(const std::string& name, int error) {
  const std::string what =
      fmt::format("cannot be started beside the {} of this process: {}", thread_count(), errno_text(error));
  if (error == EPERM || error == ENOSYS) {
    return {Errc::kUsage, "thread " + name, what,
            "it is forbidden, by a seccomp filter it seems: run with a profile that allows clone3 and clone"};
  }
  return {
      Errc::kMemory, "thread " + name, what,
      fmt::format("raise what limits threads ({}), or compute with fewer (--threads)", limits_on_threads())};
}

Error error_from(const std::exception& e) {
  if (const auto* known = dynamic_cast<const Error*>(&e)) return *known;
  if (dynamic_cast<const std::bad_alloc*>(&e) != nullptr) return {Errc::kMemory, "", kNoMemory, kMemoryHint};
  if (dynamic_cast<const std::length_error*>(&e) != nullptr) {
    return {Errc::kMemory, "", fmt::format("more was asked for than any memory holds ({})", e.what()),
            "a size in the configuration, or in the header of a file, is far too large"};
  }
  if (const auto* of_file = dynamic_cast<const std::filesystem::filesystem_error*>(&e))
    return error_from_system(of_file->code(), of_file->path1().string());
  const std::string_view text = e.what();
  if (const auto* of_system = dynamic_cast<const std::system_error*>(&e)) {
    // The standard library reports EAGAIN only for threads: std::thread and std::async.
    return of_system->code().value() == EAGAIN ? thread_error("of the standard library", EAGAIN)
                                               : error_from_system(of_system->code(), "the system");
  }
  if (text.find("pthread_create") != text.npos) return thread_error("of oneTBB", EAGAIN);
  return {Errc::kIo, "", e.what()};
}

void install_failure_handler() {
  std::set_terminate(&on_terminate);
  // Makes the C library load its unwinder now: it would otherwise load it at first use, and abort if there is
  // no memory for it then.
  void* frame = nullptr;
  (void)::backtrace(&frame, 1);
}

void at_sudden_end(void (*clean)()) {
  for (auto& place : cleaners) {
    void (*none)() = nullptr;
    if (place.compare_exchange_strong(none, clean)) return;
  }
  ZG_ASSERT(false, "more than {} functions for a sudden end", cleaners.size());
}

void end_at_once(int exit_code) {
  for (const auto& place : cleaners) {
    if (auto* const clean = place.load()) clean();
  }
  ::_exit(exit_code);
}

}  // namespace zg
