#include "ziggurat/base/thread.hpp"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace zg {

void name_this_thread(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

void lower_priority_of_this_thread() {
  // <linux/ioprio.h>, which older systems lack: IOPRIO_WHO_PROCESS, and level 7 of IOPRIO_CLASS_BE. 0 stands
  // for the calling thread in both calls. What a system refuses changes nothing but speed.
  constexpr int kOneThread = 1, kLastBestEffort = 2 << 13 | 7;
  (void)::setpriority(PRIO_PROCESS, 0, 10);
  (void)::syscall(SYS_ioprio_set, kOneThread, 0, kLastBestEffort);
}

NamedThread::NamedThread(std::string name, std::function<void()> body)
    : thread_([thread_name = std::move(name), run = std::move(body)] {
        name_this_thread(thread_name);
        run();
      }) {}

}  // namespace zg
