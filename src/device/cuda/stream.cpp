#include "device/cuda/stream.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "ziggurat/base/cores.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::cuda {
namespace {

constexpr std::int64_t kWords = 4096;
// For kSpin after the last completion the thread polls without a pause, then at intervals: operations take
// hundreds of microseconds, and exact timing of their end is not worth a core.
constexpr std::chrono::microseconds kSpin{20}, kPollInterval{20};

}  // namespace

void CudaEvent::give_back() {
  owner_->give_event(this);
}

Completions::Completions(Runtime& runtime, int device, std::string name)
    : runtime_(runtime), device_(device) {
  thread_ = NamedThread(std::move(name), [this] { run(); });
}

Completions::~Completions() {
  {
    std::lock_guard lock(mutex_);
    ZG_ASSERT(streams_.empty(), "{} streams outlive their device", streams_.size());
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
  ZG_ASSERT(free_cuda_events_.size() == cuda_events_.size(), "{} events outlive their device",
            cuda_events_.size() - free_cuda_events_.size());
  for (const auto& cuda_event : cuda_events_) runtime_.destroy_event(cuda_event->handle());
  if (words_ != nullptr) runtime_.release_host(words_);
}

void Completions::bind(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  {
    std::lock_guard lock(mutex_);
    bind_to_ = cpus;
  }
  changed_.notify_all();
}

InFlight* Completions::add_stream() {
  std::lock_guard lock(mutex_);
  streams_.push_back(std::make_unique<InFlight>());
  return streams_.back().get();
}

void Completions::remove_stream(InFlight* in_flight) {
  std::lock_guard lock(mutex_);
  ZG_ASSERT(in_flight->entries.empty());
  std::erase_if(streams_, [&](const auto& t) { return t.get() == in_flight; });
}

void Completions::push(InFlight& in_flight, InFlight::Entry entry) {
  std::lock_guard lock(mutex_);
  in_flight.entries.push_back(std::move(entry));
  changed_.notify_all();
}

void Completions::note_work(InFlight& in_flight) {
  std::lock_guard lock(mutex_);
  if (in_flight.busy) return;
  in_flight.busy = true;
  in_flight.busy_since = Clock::now();
}

double Completions::waited_seconds(const InFlight& in_flight) const {
  std::lock_guard lock(mutex_);
  return in_flight.waited_seconds;
}

double Completions::busy_seconds(const InFlight& in_flight) const {
  std::lock_guard lock(mutex_);
  return in_flight.busy_seconds + (in_flight.busy ? seconds_between(in_flight.busy_since, Clock::now()) : 0);
}

CudaEvent* Completions::take_event() {
  {
    std::lock_guard lock(pools_mutex_);
    if (!free_cuda_events_.empty()) {
      CudaEvent* const cuda_event = free_cuda_events_.back();
      free_cuda_events_.pop_back();
      return cuda_event;
    }
  }
  auto made = std::make_unique<CudaEvent>(*this, runtime_.create_event());
  std::lock_guard lock(pools_mutex_);
  cuda_events_.push_back(std::move(made));
  free_cuda_events_.reserve(cuda_events_.size());  // giving back allocates nothing
  return cuda_events_.back().get();
}

void Completions::give_event(CudaEvent* cuda_event) {
  std::lock_guard lock(pools_mutex_);
  free_cuda_events_.push_back(cuda_event);
}

std::uint32_t* Completions::wait_for_word(StreamHandle stream) {
  const std::shared_lock no_quiet(quiet_mutex_);
  std::uint32_t* word = nullptr;
  {
    std::lock_guard lock(pools_mutex_);
    if (words_ == nullptr) {
      // All at once, while no stream waits: CUDA may wait for the device to pin memory.
      words_ = static_cast<std::uint32_t*>(runtime_.allocate_host(4 * kWords));
      for (std::int64_t i = 0; i < kWords; ++i) free_words_.push_back(words_ + i);
    }
    if (free_words_.empty()) return nullptr;
    word = free_words_.back();
    free_words_.pop_back();
    ++awaited_;
  }
  std::atomic_ref<std::uint32_t>(*word).store(0, std::memory_order_relaxed);
  try {
    runtime_.wait_value(stream, word, 1);
  } catch (...) {
    set_word(word);
    give_word(word);
    throw;
  }
  return word;
}

// Sets the word under the lock, so that a thread that destroys this after the stream has passed the wait must
// first wait in give_word() until this returns.
void Completions::set_word(std::uint32_t* word) {
  std::lock_guard lock(pools_mutex_);
  std::atomic_ref<std::uint32_t>(*word).store(1, std::memory_order_release);
  if (--awaited_ == 0) none_awaited_.notify_all();
}

void Completions::give_word(std::uint32_t* word) {
  std::lock_guard lock(pools_mutex_);
  free_words_.push_back(word);
}

// Waits without quiet_mutex_: a thread that enqueues a wait may hold locks that threads need to set words.
std::unique_lock<std::shared_mutex> Completions::quiet() {
  while (true) {
    {
      std::unique_lock lock(pools_mutex_);
      none_awaited_.wait(lock, [&] { return awaited_ == 0; });
    }
    std::unique_lock quiet(quiet_mutex_);
    std::lock_guard lock(pools_mutex_);
    if (awaited_ == 0) return quiet;
  }
}

void Completions::fail(std::exception_ptr cause) {
  {
    std::lock_guard lock(mutex_);
    if (failure_ == nullptr) failure_ = std::move(cause);
    failed_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

void Completions::rethrow() const {
  std::lock_guard lock(mutex_);
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

bool Completions::is_done(const InFlight::Entry& entry) {
  if (drained_ || entry.point.done()) return true;
  if (!entry.sets || broken_) return false;  // an earlier entry sets it
  const auto* const event = static_cast<CudaEvent*>(entry.point.device_event());
  if (event == nullptr) {  // it could not be recorded
    broken_ = true;
    return false;
  }
  try {
    return runtime_.query(event->handle());
  } catch (...) {
    if (failure_ == nullptr) failure_ = std::current_exception();
    failed_.store(true, std::memory_order_release);
    broken_ = true;
    return false;
  }
}

bool Completions::advance(InFlight& in_flight, std::vector<InFlight::Entry>& done) {
  const std::size_t before = done.size();
  // The last point that the caller will set: actions that wait for it may run, too.
  const DeviceEvent* reached = nullptr;
  while (!in_flight.entries.empty()) {
    InFlight::Entry& entry = in_flight.entries.front();
    const bool with_it = reached != nullptr && entry.point.device_event() == reached;
    if (!with_it && !is_done(entry)) break;
    if (entry.sets) reached = entry.point.device_event();
    if (entry.wait == InFlight::Entry::Wait::kBegins) in_flight.waits_since = Clock::now();
    if (entry.wait == InFlight::Entry::Wait::kEnds && in_flight.busy)
      in_flight.waited_seconds +=
          seconds_between(std::max(in_flight.waits_since, in_flight.busy_since), Clock::now());
    done.push_back(std::move(entry));
    in_flight.entries.pop_front();
  }
  if (in_flight.busy && in_flight.entries.empty() && done.size() > before) {
    in_flight.busy = false;
    in_flight.busy_seconds += seconds_between(in_flight.busy_since, Clock::now());
  }
  return done.size() > before;
}

void Completions::run() {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // the default slack would make sleeps of 20 us take 70
  try {
    runtime_.use_device(device_);
  } catch (...) {
    fail(std::current_exception());
  }
  std::vector<InFlight::Entry> done;
  Clock::time_point last = Clock::now();
  std::unique_lock lock(mutex_);
  while (true) {
    const auto waits = [](const auto& t) { return !t->entries.empty(); };
    changed_.wait(lock, [&] {
      return stop_ || !bind_to_.empty() || std::any_of(streams_.begin(), streams_.end(), waits);
    });
    if (stop_) return;
    // A failure costs speed at most, and whether threads can be bound was checked when binding was set up.
    if (!bind_to_.empty()) (void)bind_this_thread(std::exchange(bind_to_, {}));
    // After a failure elsewhere, work enqueued before ends as usual, and sets the events that streams wait
    // for. A device that has failed itself does not report that, and its memory must not be reused before.
    if (broken_ && !drained_) {
      lock.unlock();
      try {
        std::lock_guard drain(drain_mutex_);
        runtime_.synchronize();
      } catch (...) {  // the failure itself
      }
      lock.lock();
      drained_ = true;
    }
    for (const auto& in_flight : streams_) advance(*in_flight, done);
    lock.unlock();
    if (done.empty()) {
      if (Clock::now() - last < kSpin) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(kPollInterval);
      }
    } else {
      for (InFlight::Entry& entry : done) {
        if (entry.sets) entry.point.set();
        if (entry.action) entry.action();
      }
      done.clear();
      last = Clock::now();
    }
    lock.lock();
  }
}

CudaStream::CudaStream(Runtime& runtime, Completions& completions, int device, std::string name, bool urgent,
                       bool wait_values)
    : runtime_(runtime),
      completions_(completions),
      device_(device),
      name_(std::move(name)),
      wait_values_(wait_values) {
  runtime_.use_device(device_);
  handle_ = runtime_.create_stream(urgent);
  in_flight_ = completions_.add_stream();
}

void CudaStream::finish() {
  try {
    CudaStream::synchronize();
  } catch (...) {
  }
}

CudaStream::~CudaStream() {
  finish();
  last_ = {};
  completions_.remove_stream(in_flight_);
  runtime_.destroy_stream(handle_);
}

StreamHandle CudaStream::begin_work() {
  runtime_.use_device(device_);
  if (!work_since_) completions_.note_work(*in_flight_);
  work_since_ = true;
  return handle_;
}

Event CudaStream::point() {
  if (!work_since_) return last_;
  work_since_ = false;
  CudaEvent* cuda_event = nullptr;
  try {
    runtime_.use_device(device_);
    cuda_event = completions_.take_event();
    runtime_.record(cuda_event->handle(), handle_);
  } catch (...) {
    completions_.fail(std::current_exception());
    if (cuda_event != nullptr) std::exchange(cuda_event, nullptr)->give_back();
  }
  last_ = completions_.pending();
  if (cuda_event != nullptr) last_.attach(cuda_event);
  completions_.push(*in_flight_, {last_, nullptr, true});
  return last_;
}

Event CudaStream::record() {
  return point();
}

void CudaStream::callback(Task action) {
  const Event at = point();
  completions_.push(*in_flight_, {at, std::move(action), false});
}

void CudaStream::wait(const Event& event) {
  if (event.done()) return;
  const auto* cuda_event = dynamic_cast<const CudaEvent*>(event.device_event());
  if (cuda_event != nullptr && cuda_event->owner() == &completions_) {
    const Event before = point();
    completions_.push(*in_flight_, {before, nullptr, false, InFlight::Entry::Wait::kBegins});
    attempt([&](StreamHandle stream) { runtime_.wait(stream, cuda_event->handle()); });
    const Event passed = point();
    completions_.push(*in_flight_, {passed, nullptr, false, InFlight::Entry::Wait::kEnds});
    return;
  }
  if (!wait_values_) return event.wait();
  std::uint32_t* word = nullptr;
  attempt([&](StreamHandle stream) { word = completions_.wait_for_word(stream); });
  if (word == nullptr) return failed() ? void() : event.wait();
  // The word is returned when the stream has passed the wait and the host has set the word.
  event.on_done([word, completions = &completions_] { completions->set_word(word); });
  callback([event, word, completions = &completions_] {
    event.on_done([word, completions] { completions->give_word(word); });
  });
}

void CudaStream::synchronize() {
  point().wait();
  // Callbacks at this point must have run, too: an empty callback after them shows when.
  const Event after = completions_.pending();
  completions_.push(*in_flight_, {last_, [after] { after.set(); }, false});
  after.wait();
  completions_.rethrow();
}

double CudaStream::waited_seconds() const {
  return completions_.waited_seconds(*in_flight_);
}

double CudaStream::busy_seconds() const {
  return completions_.busy_seconds(*in_flight_);
}

}  // namespace zg::cuda
