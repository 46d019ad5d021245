#include "ziggurat/base/thread.hpp"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <system_error>
#include <vector>

#include "ziggurat/base/failure.hpp"

namespace zg {

void name_this_thread(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

void lower_priority_of_this_thread() {
  // <linux/ioprio.h>, which older systems lack: IOPRIO_WHO_PROCESS, and level 7 of IOPRIO_CLASS_BE. 0 stands
  // for the calling thread in both calls. A refusal by the system affects only speed.
  constexpr int kOneThread = 1, kLastBestEffort = 2 << 13 | 7;
  (void)::setpriority(PRIO_PROCESS, 0, 10);
  (void)::syscall(SYS_ioprio_set, kOneThread, 0, kLastBestEffort);
}

NamedThread::NamedThread(std::string name, std::function<void()> body) {
  try {
    thread_ = std::thread([name, run = std::move(body)] {
      name_this_thread(name);
      run();
    });
  } catch (const std::system_error& e) {
    throw thread_error(name, e.code().value());
  }
}

void try_threads(const std::string& name, int count) {
  std::atomic<bool> may_end{false};
  std::vector<NamedThread> threads;
  struct Release {  // before the threads are joined, where one cannot be started, too
    std::atomic<bool>& flag;
    ~Release() {
      flag = true;
      flag.notify_all();
    }
  } const release{may_end};
  for (int i = 0; i < count; ++i) threads.emplace_back(name, [&] { may_end.wait(false); });
}

}  // namespace zg
