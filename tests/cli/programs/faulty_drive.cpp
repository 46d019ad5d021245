// To be preloaded: a drive with faults, for processes of a launcher, which are named by their numbers.
//
//   ZG_TEST_FAILING_FLUSH=PROCESS  all flushes of a drive's file but the first fail
//   ZG_TEST_SLOW_FLUSH=PROCESS     each flush takes a second longer
//   ZG_TEST_FAILING_READ=PROCESS   all reads of a drive's file fail once a flush has begun there, which ends
//                                  a second after the first of these; one read of what follows the commit's
//                                  begin, by both ranks of the process, waits for the flush
#include <dlfcn.h>
#include <pthread.h>
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

bool is_this_process(const char* variable) {
  const char *const failing = std::getenv(variable), *const mine = std::getenv("OMPI_COMM_WORLD_RANK");
  return failing != nullptr && mine != nullptr && std::strcmp(failing, mine) == 0;
}

std::atomic<int> commits{0}, flushes{0}, failed_reads{0};
std::atomic<bool> waiting{false};
constexpr int kRanks = 2;  // of a process

// Whether the count rises above zero within a minute.
bool comes(const std::atomic<int>& count) {
  for (int waits = 0; count == 0 && waits < 6000; ++waits) usleep(10'000);
  return count > 0;
}

}  // namespace

// A commit has a thread of its own in each rank.
extern "C" int pthread_setname_np(pthread_t thread, const char* name) noexcept {
  if (std::strncmp(name, "zg-commit", 9) == 0) ++commits;
  using Call = int (*)(pthread_t, const char*);
  static const auto usual = reinterpret_cast<Call>(dlsym(RTLD_NEXT, "pthread_setname_np"));
  return usual(thread, name);
}

extern "C" ssize_t pread(int fd, void* data, std::size_t bytes, off_t offset) {
  if (commits >= kRanks && is_this_process("ZG_TEST_FAILING_READ") && is_of_a_drive(fd)) {
    if (!waiting.exchange(true)) comes(flushes);
    if (flushes > 0) {
      ++failed_reads;
      errno = EIO;
      return -1;
    }
  }
  return syscall(SYS_pread64, fd, data, bytes, offset);
}

extern "C" int fdatasync(int fd) {
  if (is_of_a_drive(fd)) {
    const int before = flushes.fetch_add(1);
    if (is_this_process("ZG_TEST_SLOW_FLUSH")) sleep(1);
    if (is_this_process("ZG_TEST_FAILING_READ") && comes(failed_reads)) sleep(1);
    if (before > 0 && is_this_process("ZG_TEST_FAILING_FLUSH")) {
      errno = EIO;
      return -1;
    }
  }
  return static_cast<int>(syscall(SYS_fdatasync, fd));
}
