#include "ziggurat/base/system.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

// Written by a signal handler, which may use nothing but lock-free atomics.
std::atomic<int> interrupt_count{0};
static_assert(std::atomic<int>::is_always_lock_free);

extern "C" void on_interrupt(int) {
  if (interrupt_count.fetch_add(1) >= 1) _exit(130);
}

}  // namespace

void install_interrupt_handler() {
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() {
  return interrupt_count.load() > 0;
}
void request_interrupt() {
  interrupt_count = 1;
}

std::string read_text_file(const std::string& path, const std::string& what) {
  struct stat st {};
  if (stat(path.c_str(), &st) != 0)
    throw Error(Errc::kUsage, path, what + " cannot be read: " + errno_text(errno));
  if (S_ISDIR(st.st_mode)) throw Error(Errc::kUsage, path, what + " is expected here, this is a directory");
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) throw Error(Errc::kUsage, path, what + " cannot be read: " + errno_text(errno));
  return text.str();
}

void write_file_atomically(const std::string& path, const std::string& content) {
  const std::string temporary = path + ".part";
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) throw Error(Errc::kIo, temporary, "cannot be created: " + errno_text(errno));
  std::size_t done = 0;
  while (done < content.size()) {
    const ssize_t n = ::write(fd, content.data() + done, content.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const int error = n < 0 ? errno : EIO;
      ::close(fd);
      ::unlink(temporary.c_str());
      throw Error(Errc::kIo, path, "cannot be written: " + errno_text(error));
    }
    done += static_cast<std::size_t>(n);
  }
  if (::fsync(fd) != 0 || ::close(fd) != 0 || ::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary.c_str());
    throw Error(Errc::kIo, path, "cannot be written: " + errno_text(error));
  }
}

}  // namespace zg
