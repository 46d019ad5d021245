// CUDA as a test sees it: everything runs, on the host, later. Streams are threads, device memory is memory
// that can be mapped and unmapped, kernels are those of kernels/cuda over their emulation. What is asked for
// is counted and, on request, logged; calls can be made to fail; misuse that CUDA would refuse, or would let
// pass and go wrong by, is found.
//
// A StreamHandle of it is an emulation::Queue: kernels launched on it run in the order of the stream. What a
// Queue is given otherwise runs there as a kernel would; when it throws, the device has failed, as after an
// illegal access of a kernel: nothing that was enqueued runs any more, and every call but those that give
// back throws.
//
// Not modelled: that the host cannot touch device memory, the order in which a real device would run streams
// (any that their waits allow can come up: see most_delay_us), and joins that a capture lacks at its end.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "kernels/cuda/emulation/emulation.hpp"
#include "tests/cuda/fake_memory.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::test {

struct FakeOptions {
  int devices = 1;
  std::int64_t memory = std::int64_t{1} << 30;  // of each device
  std::int64_t granule = std::int64_t{2} << 20;
  int major = 9, minor = 0;
  int multiprocessors = 4;
  int driver_version = 13000, runtime_version = 13000;
  int numa_node = -1;
  bool wait_values = true;
  bool lazy_kernels =
      false;  // each kernel is loaded when it is launched first, as CUDA does unless told not to
  // Before each piece of work a stream sleeps for a random time of at most so long.
  int most_delay_us = 0;
  std::uint64_t seed = 1;
};

class FakeRuntime final : public cuda::Runtime {
 public:
  explicit FakeRuntime(const FakeOptions& options = {});
  // Asserts that nothing leaks and no misuse was found.
  ~FakeRuntime() override;

  // Calls so far, by the names of cuda::Runtime's functions; "kernel" for what was given to a stream's queue.
  std::int64_t calls(const std::string& name) const;
  std::int64_t calls() const;  // all of them
  void keep_log(bool keep);
  std::vector<std::string> log() const;  // "fill(stream 0, 255, 4096 bytes)"

  // The n-th call from now (1: the next) of this name throws. What only gives back does not fail.
  void fail(const std::string& name, std::int64_t nth, Errc code = Errc::kDevice);
  void break_device(const std::string& words);
  // While it holds them, copies between host and device do not run, and streams stand still behind them.
  void hold_copies(bool hold) { holds_copies_.store(hold); }
  void set_other_use(int device, std::int64_t bytes) { memory_.set_other_use(device, bytes); }
  std::int64_t pinned() const { return memory_.pinned(); }
  FakeMemory::Place place(const void* at, std::int64_t bytes) const { return memory_.place(at, bytes); }

  // NVIDIA's libraries load what computes this problem, if they have not yet. CUDA may wait for the whole
  // device to load something, while calls of other threads wait for that: it is misuse while a stream of the
  // current device waits for a word that is not set. (Kernels of our own are loaded before, unless
  // lazy_kernels.)
  void load(const std::string& problem);

  // Work of a library, which runs on the stream, where it uses this memory of the stream's device. To be
  // enqueued by a thread whose current device that is.
  void enqueue_library(const char* name, cuda::StreamHandle stream,
                       const std::vector<std::pair<const void*, std::int64_t>>& uses,
                       std::function<void()> run);
  int current_device() const { return current(); }
  bool ends() const { return broken_.load() || stops_.load(); }

  // What was made and not given back; of a device that has failed, its memory may go with it.
  std::vector<std::string> leaks() const;
  // Misuse so far, which also threw where the call can. Whoever takes it answers for it.
  std::vector<std::string> take_mistakes();

  int driver_version() override;
  int runtime_version() override;
  int device_count() override;
  cuda::DeviceInfo device_info(int device) override;
  void use_device(int device) override;
  cuda::MemoryInfo memory_info() override;
  cuda::StreamHandle create_stream(bool urgent) override;
  void destroy_stream(cuda::StreamHandle stream) override;
  cuda::EventHandle create_event() override;
  void destroy_event(cuda::EventHandle event) override;
  void record(cuda::EventHandle event, cuda::StreamHandle stream) override;
  bool query(cuda::EventHandle event) override;
  void synchronize() override;
  void synchronize(cuda::StreamHandle stream) override;
  void wait(cuda::StreamHandle stream, cuda::EventHandle event) override;
  void wait_value(cuda::StreamHandle stream, const std::uint32_t* word, std::uint32_t value) override;
  void copy(cuda::StreamHandle stream, void* to, const void* from, std::int64_t bytes,
            cuda::Direction direction) override;
  void copy_peer(cuda::StreamHandle stream, void* to, int to_device, const void* from, int from_device,
                 std::int64_t bytes) override;
  void fill(cuda::StreamHandle stream, void* at, int byte, std::int64_t bytes) override;
  void fill_rows(cuda::StreamHandle stream, void* at, std::int64_t pitch, int byte, std::int64_t width,
                 std::int64_t rows) override;
  cuda::PhysicalHandle create_physical(std::int64_t bytes) override;
  void release_physical(cuda::PhysicalHandle physical) override;
  void* reserve_addresses(std::int64_t bytes) override;
  void free_addresses(void* at, std::int64_t bytes) override;
  void map(void* at, std::int64_t bytes, cuda::PhysicalHandle physical) override;
  void map_each(void* at, std::int64_t each, std::span<const cuda::PhysicalHandle> physical) override;
  void unmap(void* at, std::int64_t bytes) override;
  void register_host(void* at, std::int64_t bytes) override;
  void unregister_host(void* at) override;
  void* allocate_host(std::int64_t bytes) override;
  void release_host(void* at) override;
  void begin_capture(cuda::StreamHandle stream) override;
  cuda::GraphHandle end_capture(cuda::StreamHandle stream) override;
  void launch(cuda::GraphHandle graph, cuda::StreamHandle stream) override;
  void destroy_graph(cuda::GraphHandle graph) override;
  void push_range(const char* name) override;
  void pop_range() override;

 private:
  class Stream;
  struct Range {
    const void* at;
    std::int64_t bytes;
  };
  struct Work {
    std::function<void()> run;
    std::vector<Range> uses;  // checked when it is enqueued, and known while it is under way
    bool marks = false;       // that the work before it is done, and is none itself
  };
  struct Point;    // of a stream
  struct Capture;  // what is enqueued meanwhile
  struct Graph {
    std::vector<Work> work;
  };
  struct EventState {
    int device = 0;
    std::shared_ptr<Point> point;  // of the latest record; none: never recorded
  };
  enum class Kind { kAsks, kGivesBack };

  // Counts, logs, and throws what fail() or break_device() said.
  void called(const char* name, Kind kind, const std::string& arguments = {});
  // Runs the call; Misuse is kept, and thrown as CUDA's refusal unless the call only gives back.
  template <class Body>
  auto guarded(const char* name, Kind kind, const std::string& arguments, const Body& body)
      -> decltype(body());
  void mistake(const char* name, const std::string& what);

  int current() const;
  Stream& stream_of(cuda::StreamHandle stream) const;  // throws Misuse
  EventState& event_of(cuda::EventHandle event);
  void kernel(Stream& stream, std::function<void()> run);
  void enqueue(Stream& stream, Work work);
  void enqueue_and_wait(Stream& stream, Work work);
  // Returns when it is reached, the device has failed, or all ends, the stream that waits included.
  void await(Point& point, const Stream* stream = nullptr);
  static Work mark(FakeRuntime* self, std::shared_ptr<Point> point);
  std::vector<std::shared_ptr<Point>> mark_all();
  void check_nobody_awaits_the_host() const;  // under the mutex
  void check_not_broken(const char* name) const;

  const FakeOptions options_;
  FakeMemory memory_;
  mutable std::mutex mutex_;          // of all below
  std::condition_variable progress_;  // a point was reached, or all ends
  std::map<std::string, std::int64_t> counts_;
  std::map<std::string, std::map<std::int64_t, Errc>> faults_;  // by the number of the call
  bool keeps_log_ = false;
  std::vector<std::string> log_, mistakes_;
  std::string broken_by_;
  std::atomic<bool> broken_{false}, stops_{false}, holds_copies_{false};
  std::map<cuda::StreamHandle, std::unique_ptr<Stream>> streams_;
  std::map<cuda::EventHandle, EventState> events_;
  std::map<cuda::GraphHandle, Graph> graphs_;
  std::set<std::string> loaded_;
  struct Awaited {
    const std::uint32_t* word;
    std::uint32_t value;
    int device;  // of the stream that waits
    auto operator<=>(const Awaited&) const = default;
  };
  std::multiset<Awaited> awaited_;
  std::int64_t next_stream_ = 0;
  std::uintptr_t next_handle_ = 16;  // of events and graphs: never used again
};

}  // namespace zg::test
