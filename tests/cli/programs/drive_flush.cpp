// To be preloaded: flushes of a drive's file that fail or take long. In the process of a launcher whose number
// is ZG_TEST_FAILING_PROCESS all but the first fail, as a drive that has lost what it was given says so. Each
// takes ZG_TEST_FLUSH_SECONDS longer.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

bool is_of_a_drive(int fd) {
  char link[64], path[4096];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 5) return false;
  path[length] = 0;
  const char* const end = path + length - 5;
  return std::strcmp(end, ".tier") == 0 || std::strcmp(end, ".kept") == 0;
}

}  // namespace

extern "C" int fdatasync(int fd) {
  static std::atomic<int> flushes{0};
  const char* const seconds = std::getenv("ZG_TEST_FLUSH_SECONDS");
  if (seconds != nullptr && is_of_a_drive(fd)) sleep(static_cast<unsigned>(std::atoi(seconds)));
  const char* const failing = std::getenv("ZG_TEST_FAILING_PROCESS");
  const char* const mine = std::getenv("OMPI_COMM_WORLD_RANK");
  if (failing != nullptr && mine != nullptr && std::strcmp(failing, mine) == 0 && is_of_a_drive(fd) &&
      flushes.fetch_add(1) > 0) {
    errno = EIO;
    return -1;
  }
  return static_cast<int>(syscall(SYS_fdatasync, fd));
}
