#include "support/process.hpp"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>

namespace zg::test {
namespace {

class Pipe {
 public:
  Pipe() {
    if (pipe2(ends_.data(), O_CLOEXEC) != 0)
      throw std::runtime_error(std::string("pipe2: ") + std::strerror(errno));
  }
  ~Pipe() {
    close_end(0);
    close_end(1);
  }
  explicit Pipe(const std::array<int, 2>& ends) : ends_(ends) {}
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  int read_end() const { return ends_[0]; }
  int write_end() const { return ends_[1]; }
  void close_end(std::size_t which) {
    if (ends_[which] >= 0) close(ends_[which]);
    ends_[which] = -1;
  }

 private:
  std::array<int, 2> ends_{-1, -1};
};

[[noreturn]] void become(const std::vector<char*>& argv, const Launch& launch, const Pipe& out,
                         const Pipe& err) {
  const int none = open("/dev/null", O_RDONLY);
  if (none < 0 || dup2(none, 0) < 0 || dup2(out.write_end(), 1) < 0 || dup2(err.write_end(), 2) < 0)
    _exit(126);
  if (!launch.directory.empty() && chdir(launch.directory.c_str()) != 0) _exit(126);
  if (launch.in_child) launch.in_child();
  execv(argv[0], argv.data());
  _exit(127);
}

// A pseudo-terminal, as the two ends of a pipe: what is written to the second one is read from the first.
std::array<int, 2> open_terminal() {
  std::array<int, 2> ends{posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC), -1};
  std::array<char, 128> name{};
  if (ends[0] >= 0 && grantpt(ends[0]) == 0 && unlockpt(ends[0]) == 0 &&
      ptsname_r(ends[0], name.data(), name.size()) == 0)
    ends[1] = open(name.data(), O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (ends[1] < 0) throw std::runtime_error(std::string("a pseudo-terminal: ") + std::strerror(errno));
  return ends;
}

// Appends what can be read to `text`; false at the end of the stream.
bool drain(int fd, std::string& text) {
  char buffer[4096];
  const ssize_t n = read(fd, buffer, sizeof buffer);
  if (n > 0) text.append(buffer, static_cast<std::size_t>(n));
  return n > 0 || (n < 0 && errno == EINTR);
}

}  // namespace

Outcome launch(const std::string& program, const Launch& launch) {
  std::vector<std::string> words{program};
  words.insert(words.end(), launch.arguments.begin(), launch.arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  Pipe out;
  Pipe err = launch.terminal ? Pipe(open_terminal()) : Pipe();
  const pid_t pid = fork();
  if (pid < 0) throw std::runtime_error(std::string("fork: ") + std::strerror(errno));
  if (pid == 0) become(argv, launch, out, err);
  out.close_end(1);
  err.close_end(1);

  Outcome outcome;
  const auto end = std::chrono::steady_clock::now() + launch.limit;
  bool out_open = true, err_open = true;
  while (out_open || err_open) {
    if (!outcome.timed_out && std::chrono::steady_clock::now() > end) {
      outcome.timed_out = true;
      kill(pid, SIGKILL);
    }
    std::array<pollfd, 2> fds{pollfd{out_open ? out.read_end() : -1, POLLIN, 0},
                              pollfd{err_open ? err.read_end() : -1, POLLIN, 0}};
    if (poll(fds.data(), fds.size(), 100) < 0 && errno != EINTR) break;
    if (fds[0].revents != 0) out_open = drain(out.read_end(), outcome.out);
    if (fds[1].revents != 0) err_open = drain(err.read_end(), outcome.err);
    if (!launch.interrupt_at.empty() && !outcome.interrupted &&
        (outcome.err.find(launch.interrupt_at) != std::string::npos ||
         outcome.out.find(launch.interrupt_at) != std::string::npos)) {
      outcome.interrupted = true;
      kill(pid, launch.signal);
    }
  }
  int status = 0;
  rusage usage{};
  while (wait4(pid, &status, 0, &usage) < 0 && errno == EINTR) {
  }
  outcome.peak_bytes = std::int64_t{usage.ru_maxrss} * 1024;  // given in KiB
  if (WIFEXITED(status)) outcome.code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) outcome.signal = WTERMSIG(status);
  return outcome;
}

int end_of(pid_t child) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) throw std::runtime_error(std::string("waitpid: ") + std::strerror(errno));
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

void forbid_calls(std::initializer_list<unsigned> calls, int error) {
  std::array<sock_filter, 11> rules{};
  std::size_t n = 0;
  const auto add = [&](const sock_filter& rule) { rules.at(n++) = rule; };
  add(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
  auto left = static_cast<unsigned char>(calls.size());  // each of them jumps over the others, to the error
  for (const unsigned call : calls) add(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, left--, 0));
  add(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  add(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)));
  const sock_fprog program{static_cast<unsigned short>(n), rules.data()};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    _exit(kCannotForbid);
}

}  // namespace zg::test
