#include "ziggurat/base/thread.hpp"

#include <pthread.h>

namespace zg {

void name_this_thread(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

NamedThread::NamedThread(std::string name, std::function<void()> body)
    : thread_([thread_name = std::move(name), run = std::move(body)] {
        name_this_thread(thread_name);
        run();
      }) {}

}  // namespace zg
