// A named thread with one owner: joined by its destructor.
#pragma once
#include <functional>
#include <string>
#include <thread>

namespace zg {

// Names the calling thread for ps and debuggers. At most 15 characters are kept.
void name_this_thread(const std::string& name);

// Lowers the priority of the calling thread, and of threads that it starts, for processors and drives, if the
// system supports that: a nice value of 10, and the lowest I/O priority that cannot starve.
void lower_priority_of_this_thread();

// Tests whether the system allows this process `count` more threads at once; throws like NamedThread if not.
// For use before libraries that end the process if they cannot start a thread.
void try_threads(const std::string& name, int count);

class NamedThread {
 public:
  NamedThread() = default;
  // Throws Error(kMemory), with the limits on threads, if the system refuses another thread.
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
