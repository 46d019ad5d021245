// A named thread with one owner: joined by its destructor.
#pragma once
#include <functional>
#include <string>
#include <thread>

namespace zg {

// Names the calling thread for ps and debuggers. At most 15 characters are kept.
void name_this_thread(const std::string& name);

// The calling thread, and those that it starts, get less of the processors and drives than others do, where
// the system knows such a difference: a nice value of 10, and the last of the priorities that never wait for
// ever.
void lower_priority_of_this_thread();

// Finds out whether the system gives this process so many more threads at once. Throws as NamedThread does
// where it does not: for libraries that end the process where they cannot start one.
void try_threads(const std::string& name, int count);

class NamedThread {
 public:
  NamedThread() = default;
  // Throws Error(kMemory), with the limits on threads, where the system starts no more.
  NamedThread(std::string name, std::function<void()> body);
  NamedThread(NamedThread&&) = default;
  NamedThread& operator=(NamedThread&& other) {
    join();
    thread_ = std::move(other.thread_);
    return *this;
  }
  ~NamedThread() { join(); }
  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

}  // namespace zg
