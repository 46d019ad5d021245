#include "tests/cuda/fake_runtime.hpp"

#include <fmt/format.h>

#include <cstring>

#include "tests/cuda/fake_stream.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::test {
namespace {

// As CUDA does, each thread acts on device 0 until it chooses.
thread_local int t_device = 0;
thread_local int t_ranges = 0;

const char* text_of(cuda::Direction direction) {
  switch (direction) {
    case cuda::Direction::kToDevice:
      return "to the device";
    case cuda::Direction::kToHost:
      return "to the host";
    case cuda::Direction::kOnDevice:
      return "on the device";
  }
  return "?";
}

void move(void* to, const void* from, std::int64_t bytes) {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

}  // namespace

FakeRuntime::FakeRuntime(const FakeOptions& options)
    : options_(options), memory_(options.devices, options.memory, options.granule) {
  t_device = 0;
}

FakeRuntime::~FakeRuntime() {
  const std::vector<std::string> left = leaks(), wrong = take_mistakes();
  {
    std::lock_guard lock(mutex_);
    stops_ = true;
    progress_.notify_all();
  }
  streams_.clear();
  ZG_ASSERT(left.empty(), "not given back: {}", fmt::join(left, "; "));
  ZG_ASSERT(wrong.empty(), "misuse of CUDA: {}", fmt::join(wrong, "; "));
}

std::int64_t FakeRuntime::calls(const std::string& name) const {
  std::lock_guard lock(mutex_);
  const auto it = counts_.find(name);
  return it == counts_.end() ? 0 : it->second;
}

std::int64_t FakeRuntime::calls() const {
  std::lock_guard lock(mutex_);
  std::int64_t all = 0;
  for (const auto& [name, n] : counts_) all += n;
  return all;
}

void FakeRuntime::keep_log(bool keep) {
  std::lock_guard lock(mutex_);
  keeps_log_ = keep;
  log_.clear();
}

std::vector<std::string> FakeRuntime::log() const {
  std::lock_guard lock(mutex_);
  return log_;
}

void FakeRuntime::fail(const std::string& name, std::int64_t nth, Errc code) {
  std::lock_guard lock(mutex_);
  faults_[name][counts_[name] + nth] = code;
}

void FakeRuntime::break_device(const std::string& words) {
  std::lock_guard lock(mutex_);
  if (broken_by_.empty()) broken_by_ = words;
  broken_ = true;
  progress_.notify_all();
}

std::vector<std::string> FakeRuntime::leaks() const {
  std::vector<std::string> all = memory_.leaks(broken_ ? FakeMemory::Of::kHost : FakeMemory::Of::kAll);
  std::lock_guard lock(mutex_);
  for (const auto& [handle, stream] : streams_) all.push_back(stream->name());
  if (!events_.empty()) all.push_back(fmt::format("{} events", events_.size()));
  if (!graphs_.empty()) all.push_back(fmt::format("{} graphs", graphs_.size()));
  return all;
}

std::vector<std::string> FakeRuntime::take_mistakes() {
  std::lock_guard lock(mutex_);
  return std::exchange(mistakes_, {});
}

void FakeRuntime::check_not_broken(const char* name) const {
  if (broken_) throw Error(Errc::kDevice, name, fmt::format("CUDA refused it: {}", broken_by_));
}

void FakeRuntime::called(const char* name, Kind kind, const std::string& arguments) {
  std::lock_guard lock(mutex_);
  const std::int64_t n = ++counts_[name];
  if (keeps_log_) log_.push_back(fmt::format("{}({})", name, arguments));
  if (kind == Kind::kGivesBack) return;
  check_not_broken(name);
  const auto faults = faults_.find(name);
  if (faults == faults_.end()) return;
  const auto fault = faults->second.find(n);
  if (fault == faults->second.end()) return;
  throw Error(fault->second, name, "CUDA refused it: a fault that the test asked for");
}

void FakeRuntime::mistake(const char* name, const std::string& what) {
  std::lock_guard lock(mutex_);
  mistakes_.push_back(fmt::format("{}: {}", name, what));
}

template <class Body>
auto FakeRuntime::guarded(const char* name, Kind kind, const std::string& arguments, const Body& body)
    -> decltype(body()) {
  called(name, kind, arguments);
  try {
    return body();
  } catch (const FakeMemory::Misuse& misuse) {
    mistake(name, misuse.what);
    if (kind == Kind::kAsks)
      throw Error(Errc::kDevice, name, fmt::format("CUDA refused it: invalid argument ({})", misuse.what));
    return decltype(body())();
  }
}

int FakeRuntime::current() const {
  return t_device < options_.devices ? t_device : 0;
}

FakeRuntime::Stream& FakeRuntime::stream_of(cuda::StreamHandle stream) const {
  std::lock_guard lock(mutex_);
  const auto it = streams_.find(stream);
  if (it == streams_.end()) throw FakeMemory::Misuse{"there is no such stream"};
  return *it->second;
}

FakeRuntime::EventState& FakeRuntime::event_of(cuda::EventHandle event) {
  const auto it = events_.find(event);
  if (it == events_.end()) throw FakeMemory::Misuse{"there is no such event"};
  return it->second;
}

int FakeRuntime::driver_version() {
  return options_.driver_version;
}
int FakeRuntime::runtime_version() {
  return options_.runtime_version;
}
int FakeRuntime::device_count() {
  return options_.devices;
}

cuda::DeviceInfo FakeRuntime::device_info(int device) {
  return guarded("device_info", Kind::kAsks, std::to_string(device), [&] {
    if (device < 0 || device >= options_.devices) throw FakeMemory::Misuse{"there is no such device"};
    const std::string why = options_.wait_values ? cuda::why_no_wait_values(options_.lazy_kernels, nullptr)
                                                 : "this device cannot";
    return cuda::DeviceInfo{.name = fmt::format("Fake GPU {}", device),
                            .pci = fmt::format("0000:{:02x}:00.0", device + 1),
                            .major = options_.major,
                            .minor = options_.minor,
                            .multiprocessors = options_.multiprocessors,
                            .numa_node = options_.numa_node,
                            .memory = options_.memory,
                            .granule = options_.granule,
                            .copy_engines = 2,
                            .wait_values = why.empty(),
                            .why_no_wait_values = why};
  });
}

void FakeRuntime::use_device(int device) {
  guarded("use_device", Kind::kAsks, std::to_string(device), [&] {
    if (device < 0 || device >= options_.devices) throw FakeMemory::Misuse{"there is no such device"};
    t_device = device;
  });
}

cuda::MemoryInfo FakeRuntime::memory_info() {
  called("memory_info", Kind::kAsks);
  return memory_.info(current());
}

cuda::StreamHandle FakeRuntime::create_stream(bool urgent) {
  called("create_stream", Kind::kAsks, urgent ? "urgent" : "");
  std::lock_guard lock(mutex_);
  const std::int64_t number = next_stream_++;
  auto stream = std::make_unique<Stream>(*this, number, current(), options_.most_delay_us, options_.seed);
  const cuda::StreamHandle handle = stream->handle();
  streams_[handle] = std::move(stream);
  return handle;
}

void FakeRuntime::destroy_stream(cuda::StreamHandle handle) {
  guarded("destroy_stream", Kind::kGivesBack, "", [&] {
    Stream& stream = stream_of(handle);
    const bool idle = stream.idle() || broken_;
    std::unique_ptr<Stream> gone;
    {
      std::lock_guard lock(mutex_);
      gone = std::move(streams_.at(handle));
      streams_.erase(handle);
    }
    gone.reset();  // what is left is not run
    if (!idle) throw FakeMemory::Misuse{"its work is not done"};
  });
}

cuda::EventHandle FakeRuntime::create_event() {
  called("create_event", Kind::kAsks);
  std::lock_guard lock(mutex_);
  const auto event = reinterpret_cast<cuda::EventHandle>(next_handle_ += 16);
  events_[event] = {.device = current(), .point = nullptr};
  return event;
}

void FakeRuntime::destroy_event(cuda::EventHandle event) {
  guarded("destroy_event", Kind::kGivesBack, "", [&] {
    std::lock_guard lock(mutex_);
    event_of(event);
    events_.erase(event);
  });
}

void FakeRuntime::record(cuda::EventHandle event, cuda::StreamHandle handle) {
  guarded("record", Kind::kAsks, "", [&] {
    Stream& stream = stream_of(handle);
    auto point = std::make_shared<Point>();
    point->capture = stream.capture;
    {
      std::lock_guard lock(mutex_);
      EventState& state = event_of(event);
      if (state.device != stream.device()) throw FakeMemory::Misuse{"the event is another device's"};
      state.point = point;
    }
    if (point->capture == nullptr) stream.push(mark(this, point));
  });
}

bool FakeRuntime::query(cuda::EventHandle event) {
  return guarded("query", Kind::kAsks, "", [&] {
    std::lock_guard lock(mutex_);
    const EventState& state = event_of(event);
    if (state.point == nullptr) return true;
    if (state.point->capture != nullptr) throw FakeMemory::Misuse{"the event is a part of a capture"};
    return state.point->reached;
  });
}

void FakeRuntime::await(Point& point, const Stream* stream) {
  std::unique_lock lock(mutex_);
  while (!point.reached && !ends() && (stream == nullptr || !stream->stops()))
    progress_.wait_for(lock, std::chrono::milliseconds(1));
}

FakeRuntime::Work FakeRuntime::mark(FakeRuntime* self, std::shared_ptr<Point> point) {
  return {.run =
              [self, point = std::move(point)] {
                std::lock_guard lock(self->mutex_);
                point->reached = true;
                self->progress_.notify_all();
              },
          .uses = {},
          .marks = true};
}

// Behind all that the streams of the current device have to do.
std::vector<std::shared_ptr<FakeRuntime::Point>> FakeRuntime::mark_all() {
  std::vector<std::shared_ptr<Point>> points;
  std::lock_guard lock(mutex_);
  for (const auto& [handle, stream] : streams_) {
    if (stream->device() != current()) continue;
    auto point = std::make_shared<Point>();
    stream->push(mark(this, point));
    points.push_back(std::move(point));
  }
  return points;
}

void FakeRuntime::synchronize() {
  guarded("synchronize", Kind::kAsks, "", [&] {
    {
      std::lock_guard lock(mutex_);
      for (const auto& [handle, stream] : streams_) {
        if (stream->device() == current() && stream->capture != nullptr)
          throw FakeMemory::Misuse{"a stream is being captured"};
      }
    }
    for (const auto& point : mark_all()) await(*point);
    std::lock_guard lock(mutex_);
    check_not_broken("synchronize");
  });
}

void FakeRuntime::synchronize(cuda::StreamHandle handle) {
  guarded("synchronize_stream", Kind::kAsks, "", [&] {
    const auto point = std::make_shared<Point>();
    Stream& stream = stream_of(handle);
    if (stream.capture != nullptr) throw FakeMemory::Misuse{"the stream is being captured"};
    stream.push(mark(this, point));
    await(*point);
    std::lock_guard lock(mutex_);
    check_not_broken("synchronize_stream");
  });
}

void FakeRuntime::wait(cuda::StreamHandle handle, cuda::EventHandle event) {
  guarded("wait", Kind::kAsks, "", [&] {
    Stream& stream = stream_of(handle);
    std::shared_ptr<Point> point;
    {
      std::lock_guard lock(mutex_);
      point = event_of(event).point;
    }
    if (point == nullptr) return;
    if (point->capture != nullptr) {  // from here on, the stream is captured too
      if (point->capture->ended) throw FakeMemory::Misuse{"the event is a part of an ended capture"};
      if (stream.capture == nullptr) point->capture->joined.push_back(&stream);
      if (stream.capture != nullptr && stream.capture != point->capture)
        throw FakeMemory::Misuse{"the event is a part of another capture"};
      stream.capture = point->capture;
      return;
    }
    if (stream.capture != nullptr) throw FakeMemory::Misuse{"a captured stream waits for work outside"};
    stream.push({.run = [this, point, &stream] { await(*point, &stream); }, .uses = {}});
  });
}

void FakeRuntime::wait_value(cuda::StreamHandle handle, const std::uint32_t* word, std::uint32_t value) {
  guarded("wait_value", Kind::kAsks, std::to_string(value), [&] {
    Stream& stream = stream_of(handle);
    if (!options_.wait_values) throw FakeMemory::Misuse{"this device cannot wait for values"};
    if (memory_.place(word, sizeof(*word)).kind != FakeMemory::Kind::kPinned)
      throw FakeMemory::Misuse{"the word is not in pinned memory"};
    const auto done = [word, value] {
      return std::atomic_ref(*const_cast<std::uint32_t*>(word)).load(std::memory_order_acquire) == value;
    };
    const auto run = [this, done, &stream, key = Awaited{word, value, stream.device()}] {
      while (!done() && !ends() && !stream.stops())
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      std::lock_guard lock(mutex_);
      if (const auto it = awaited_.find(key); it != awaited_.end()) awaited_.erase(it);
    };
    if (stream.capture == nullptr) {
      std::lock_guard lock(mutex_);
      awaited_.insert({word, value, stream.device()});
    }
    enqueue(stream, {.run = run, .uses = {{word, sizeof(*word)}}});
  });
}

void FakeRuntime::enqueue(Stream& stream, Work work) {
  for (const Range& range : work.uses) memory_.place(range.at, range.bytes);
  if (stream.capture != nullptr) {
    stream.capture->work.push_back(std::move(work));
    return;
  }
  for (const Range& range : work.uses) memory_.begin_use(range.at, range.bytes);
  stream.push(std::move(work));
}

void FakeRuntime::enqueue_and_wait(Stream& stream, Work work) {
  if (stream.capture != nullptr)
    throw FakeMemory::Misuse{"a copy of host memory that is not pinned cannot be captured"};
  enqueue(stream, std::move(work));
  const auto point = std::make_shared<Point>();
  stream.push(mark(this, point));
  await(*point);
  std::lock_guard lock(mutex_);
  check_not_broken("copy");
}

void FakeRuntime::load(const std::string& problem) {
  guarded("load", Kind::kAsks, problem, [&] {
    std::lock_guard lock(mutex_);
    if (loaded_.insert(problem).second) check_nobody_awaits_the_host();
  });
}

void FakeRuntime::check_nobody_awaits_the_host() const {
  for (const auto& [word, value, device] : awaited_) {
    if (device != current()) continue;
    const auto now = std::atomic_ref(*const_cast<std::uint32_t*>(word)).load(std::memory_order_acquire);
    if (now != value)
      throw FakeMemory::Misuse{"CUDA may wait for the device, where a stream waits for the host"};
  }
}

void FakeRuntime::kernel(Stream& stream, std::function<void()> run) {
  // A kernel's name is not known here; its type and those of its arguments tell most kernels apart.
  if (options_.lazy_kernels) load(run.target_type().name());
  guarded("kernel", Kind::kAsks, stream.name(), [&] {
    if (stream.device() != current()) throw FakeMemory::Misuse{"the stream is another device's"};
    enqueue(stream, {.run = std::move(run), .uses = {}});
  });
}

void FakeRuntime::enqueue_library(const char* name, cuda::StreamHandle handle,
                                  const std::vector<std::pair<const void*, std::int64_t>>& uses,
                                  std::function<void()> run) {
  guarded(name, Kind::kAsks, "", [&] {
    Stream& stream = stream_of(handle);
    if (stream.device() != current()) throw FakeMemory::Misuse{"the stream is another device's"};
    Work work{.run = std::move(run), .uses = {}};
    for (const auto& [at, bytes] : uses) {
      const FakeMemory::Place place = memory_.place(at, bytes);
      if (place.kind != FakeMemory::Kind::kDevice)
        throw FakeMemory::Misuse{"what it uses is no device memory"};
      if (place.device != stream.device())
        throw FakeMemory::Misuse{"what it uses is another device's memory"};
      work.uses.push_back({at, bytes});
    }
    enqueue(stream, std::move(work));
  });
}

void FakeRuntime::copy(cuda::StreamHandle handle, void* to, const void* from, std::int64_t bytes,
                       cuda::Direction direction) {
  const std::string arguments = fmt::format("{} bytes {}", bytes, text_of(direction));
  guarded("copy", Kind::kAsks, arguments, [&] {
    Stream& stream = stream_of(handle);
    const FakeMemory::Place there = memory_.place(to, bytes), here = memory_.place(from, bytes);
    if (bytes == 0) return;
    const auto check = [](const char* what, const FakeMemory::Place& place, bool device) {
      if ((place.kind == FakeMemory::Kind::kDevice) != device)
        throw FakeMemory::Misuse{
            fmt::format("what is copied {} is {}", what, device ? "no device memory" : "device memory")};
    };
    check("to", there, direction != cuda::Direction::kToHost);
    check("from", here, direction != cuda::Direction::kToDevice);
    const auto *a = static_cast<const char*>(to), *b = static_cast<const char*>(from);
    if (a < b + bytes && b < a + bytes) throw FakeMemory::Misuse{"the two overlap"};
    const auto run = [=, this] {
      while (holds_copies_.load() && !ends()) std::this_thread::sleep_for(std::chrono::microseconds(20));
      move(to, from, bytes);
    };
    Work work{.run = run, .uses = {{to, bytes}, {from, bytes}}};
    const bool pageable =
        there.kind == FakeMemory::Kind::kPageable || here.kind == FakeMemory::Kind::kPageable;
    pageable ? enqueue_and_wait(stream, std::move(work)) : enqueue(stream, std::move(work));
  });
}

void FakeRuntime::copy_peer(cuda::StreamHandle handle, void* to, int to_device, const void* from,
                            int from_device, std::int64_t bytes) {
  const std::string arguments = fmt::format("{} bytes from {} to {}", bytes, from_device, to_device);
  guarded("copy_peer", Kind::kAsks, arguments, [&] {
    Stream& stream = stream_of(handle);
    if (bytes == 0) return;
    if (memory_.place(to, bytes).device != to_device || memory_.place(from, bytes).device != from_device)
      throw FakeMemory::Misuse{"the memory is not on that device"};
    enqueue(stream, {.run = [=] { move(to, from, bytes); }, .uses = {{to, bytes}, {from, bytes}}});
  });
}

void FakeRuntime::fill(cuda::StreamHandle stream, void* at, int byte, std::int64_t bytes) {
  guarded("fill", Kind::kAsks, fmt::format("{}, {} bytes", byte, bytes), [&] {
    if (bytes == 0) return;
    if (memory_.place(at, bytes).kind != FakeMemory::Kind::kDevice)
      throw FakeMemory::Misuse{fmt::format("{}, {} bytes, is no device memory", at, bytes)};
    const auto run = [=] { std::memset(at, byte, static_cast<std::size_t>(bytes)); };
    enqueue(stream_of(stream), {.run = run, .uses = {{at, bytes}}});
  });
}

void FakeRuntime::fill_rows(cuda::StreamHandle stream, void* at, std::int64_t pitch, int byte,
                            std::int64_t width, std::int64_t rows) {
  guarded("fill_rows", Kind::kAsks, fmt::format("{}, {} rows of {} bytes", byte, rows, width), [&] {
    if (rows == 0 || width == 0) return;
    if (width > pitch) throw FakeMemory::Misuse{"rows wider than their pitch"};
    const std::int64_t all = (rows - 1) * pitch + width;
    if (memory_.place(at, all).kind != FakeMemory::Kind::kDevice)
      throw FakeMemory::Misuse{fmt::format("{}, {} bytes, is no device memory", at, all)};
    const auto run = [=] {
      for (std::int64_t r = 0; r < rows; ++r)
        std::memset(static_cast<char*>(at) + r * pitch, byte, static_cast<std::size_t>(width));
    };
    enqueue(stream_of(stream), {.run = run, .uses = {{at, all}}});
  });
}

void FakeRuntime::begin_capture(cuda::StreamHandle handle) {
  guarded("begin_capture", Kind::kAsks, "", [&] {
    Stream& stream = stream_of(handle);
    if (stream.capture != nullptr) throw FakeMemory::Misuse{"the stream is being captured already"};
    stream.capture = std::make_shared<Capture>();
    stream.capture->origin = &stream;
  });
}

// A capture ends also where no graph comes of it.
cuda::GraphHandle FakeRuntime::end_capture(cuda::StreamHandle handle) {
  std::shared_ptr<Capture> capture;
  const auto end = [&](Stream& stream) {
    capture = std::exchange(stream.capture, nullptr);
    capture->ended = true;
    for (Stream* joined : capture->joined) joined->capture = nullptr;
  };
  try {
    return guarded("end_capture", Kind::kAsks, "", [&] {
      Stream& stream = stream_of(handle);
      if (stream.capture == nullptr) throw FakeMemory::Misuse{"the stream is not being captured"};
      if (stream.capture->origin != &stream) throw FakeMemory::Misuse{"the capture began on another stream"};
      end(stream);
      std::lock_guard lock(mutex_);
      check_nobody_awaits_the_host();  // it takes device memory
      const auto graph = reinterpret_cast<cuda::GraphHandle>(next_handle_ += 16);
      graphs_[graph] = {std::move(capture->work)};
      return graph;
    });
  } catch (...) {
    const auto it = streams_.find(handle);
    if (it != streams_.end() && it->second->capture != nullptr) end(*it->second);
    throw;
  }
}

void FakeRuntime::launch(cuda::GraphHandle graph, cuda::StreamHandle handle) {
  guarded("launch", Kind::kAsks, "", [&] {
    Stream& stream = stream_of(handle);
    std::vector<Work> work;
    {
      std::lock_guard lock(mutex_);
      const auto it = graphs_.find(graph);
      if (it == graphs_.end()) throw FakeMemory::Misuse{"there is no such graph"};
      work = it->second.work;
    }
    for (Work& one : work) enqueue(stream, std::move(one));
  });
}

void FakeRuntime::destroy_graph(cuda::GraphHandle graph) {
  guarded("destroy_graph", Kind::kGivesBack, "", [&] {
    std::lock_guard lock(mutex_);
    if (graphs_.erase(graph) == 0) throw FakeMemory::Misuse{"there is no such graph"};
  });
}

cuda::PhysicalHandle FakeRuntime::create_physical(std::int64_t bytes) {
  return guarded("create_physical", Kind::kAsks, fmt::format("{} bytes", bytes),
                 [&] { return memory_.create(current(), bytes); });
}
void FakeRuntime::release_physical(cuda::PhysicalHandle physical) {
  guarded("release_physical", Kind::kGivesBack, "", [&] { memory_.release(physical); });
}
void* FakeRuntime::reserve_addresses(std::int64_t bytes) {
  return guarded("reserve_addresses", Kind::kAsks, fmt::format("{} bytes", bytes),
                 [&] { return memory_.reserve(bytes); });
}
void FakeRuntime::free_addresses(void* at, std::int64_t bytes) {
  guarded("free_addresses", Kind::kGivesBack, fmt::format("{} bytes", bytes),
          [&] { memory_.free_addresses(at, bytes); });
}
void FakeRuntime::map(void* at, std::int64_t bytes, cuda::PhysicalHandle physical) {
  guarded("map", Kind::kAsks, fmt::format("{} bytes", bytes), [&] { memory_.map(at, bytes, physical); });
}
void FakeRuntime::map_each(void* at, std::int64_t each, std::span<const cuda::PhysicalHandle> physical) {
  guarded("map_each", Kind::kAsks, fmt::format("{} of {} bytes", physical.size(), each), [&] {
    auto* const begin = static_cast<char*>(at);
    for (std::size_t i = 0; i < physical.size(); ++i) {
      try {
        memory_.map(begin + static_cast<std::int64_t>(i) * each, each, physical[i]);
      } catch (...) {
        while (i > 0) memory_.unmap(begin + static_cast<std::int64_t>(--i) * each, each);
        throw;
      }
    }
  });
}
void FakeRuntime::unmap(void* at, std::int64_t bytes) {
  guarded("unmap", Kind::kAsks, fmt::format("{} bytes", bytes), [&] { memory_.unmap(at, bytes); });
}
void FakeRuntime::register_host(void* at, std::int64_t bytes) {
  guarded("register_host", Kind::kAsks, fmt::format("{} bytes", bytes),
          [&] { memory_.register_host(at, bytes); });
}
void FakeRuntime::unregister_host(void* at) {
  guarded("unregister_host", Kind::kGivesBack, "", [&] {
    for (const auto& point : mark_all()) await(*point);
    memory_.unregister_host(at);
  });
}
void* FakeRuntime::allocate_host(std::int64_t bytes) {
  return guarded("allocate_host", Kind::kAsks, fmt::format("{} bytes", bytes),
                 [&] { return memory_.allocate_host(bytes); });
}
void FakeRuntime::release_host(void* at) {
  guarded("release_host", Kind::kGivesBack, "", [&] { memory_.release_host(at); });
}

void FakeRuntime::push_range(const char* name) {
  called("push_range", Kind::kGivesBack, name);
  ++t_ranges;
}
void FakeRuntime::pop_range() {
  guarded("pop_range", Kind::kGivesBack, "", [&] {
    if (t_ranges == 0) throw FakeMemory::Misuse{"no range is open on this thread"};
    --t_ranges;
  });
}

}  // namespace zg::test
