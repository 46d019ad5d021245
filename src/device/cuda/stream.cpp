#include "device/cuda/stream.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "ziggurat/base/cores.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::cuda {
namespace {

constexpr std::int64_t kWordPage = 4096;
// The thread looks without pause for so long after something was done, then at intervals: an operation takes
// hundreds of microseconds, and a core should not be burnt for the last few.
constexpr std::chrono::microseconds kEager{20}, kInterval{20};

}  // namespace

void Mark::give_back() {
  owner_->give_mark(this);
}

Completions::Completions(Runtime& runtime, int device, std::string name)
    : runtime_(runtime), device_(device) {
  thread_ = NamedThread(std::move(name), [this] { run(); });
}

Completions::~Completions() {
  {
    std::lock_guard lock(mutex_);
    ZG_ASSERT(tracks_.empty(), "{} streams outlive their device", tracks_.size());
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
  ZG_ASSERT(free_marks_.size() == marks_.size(), "{} events outlive their device",
            marks_.size() - free_marks_.size());
  for (const auto& mark : marks_) runtime_.destroy_event(mark->handle());
  for (std::uint32_t* page : word_pages_) runtime_.release_host(page);
}

void Completions::bind(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  {
    std::lock_guard lock(mutex_);
    bind_to_ = cpus;
  }
  changed_.notify_all();
}

Track* Completions::add_track() {
  std::lock_guard lock(mutex_);
  tracks_.push_back(std::make_unique<Track>());
  return tracks_.back().get();
}

void Completions::remove_track(Track* track) {
  std::lock_guard lock(mutex_);
  ZG_ASSERT(track->entries.empty());
  std::erase_if(tracks_, [&](const auto& t) { return t.get() == track; });
}

void Completions::push(Track& track, Track::Entry entry) {
  std::lock_guard lock(mutex_);
  track.entries.push_back(std::move(entry));
  changed_.notify_all();
}

void Completions::note_work(Track& track) {
  std::lock_guard lock(mutex_);
  if (track.busy) return;
  track.busy = true;
  track.busy_since = Clock::now();
}

double Completions::busy_seconds(const Track& track) const {
  std::lock_guard lock(mutex_);
  return track.busy_seconds + (track.busy ? seconds_between(track.busy_since, Clock::now()) : 0);
}

Mark* Completions::take_mark() {
  {
    std::lock_guard lock(marks_mutex_);
    if (!free_marks_.empty()) {
      Mark* const mark = free_marks_.back();
      free_marks_.pop_back();
      return mark;
    }
  }
  auto made = std::make_unique<Mark>(*this, runtime_.create_event());
  std::lock_guard lock(marks_mutex_);
  marks_.push_back(std::move(made));
  free_marks_.reserve(marks_.size());  // giving back allocates nothing
  return marks_.back().get();
}

void Completions::give_mark(Mark* mark) {
  std::lock_guard lock(marks_mutex_);
  free_marks_.push_back(mark);
}

std::uint32_t* Completions::take_word() {
  std::lock_guard lock(marks_mutex_);
  if (free_words_.empty()) {
    auto* const page = static_cast<std::uint32_t*>(runtime_.allocate_host(kWordPage));
    word_pages_.push_back(page);
    for (std::int64_t i = 0; i < kWordPage / 4; ++i) free_words_.push_back(page + i);
  }
  std::uint32_t* const word = free_words_.back();
  free_words_.pop_back();
  std::atomic_ref<std::uint32_t>(*word).store(0, std::memory_order_relaxed);
  return word;
}

void Completions::give_word(std::uint32_t* word) {
  std::lock_guard lock(marks_mutex_);
  free_words_.push_back(word);
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

bool Completions::is_done(const Track::Entry& entry) {
  if (drained_ || entry.point.done()) return true;
  if (!entry.sets || failed()) return false;  // who sets it comes before it in the track
  try {
    return runtime_.query(static_cast<Mark*>(entry.point.mark())->handle());
  } catch (...) {
    if (failure_ == nullptr) failure_ = std::current_exception();
    failed_.store(true, std::memory_order_release);
    return false;
  }
}

bool Completions::advance(Track& track, std::vector<Track::Entry>& done) {
  const std::size_t before = done.size();
  const DeviceMark* reached = nullptr;  // by an entry that is about to set its event
  while (!track.entries.empty()) {
    Track::Entry& entry = track.entries.front();
    const bool with_it = reached != nullptr && entry.point.mark() == reached;
    if (!with_it && !is_done(entry)) break;
    if (entry.sets) reached = entry.point.mark();
    done.push_back(std::move(entry));
    track.entries.pop_front();
  }
  if (track.busy && track.entries.empty() && done.size() > before) {
    track.busy = false;
    track.busy_seconds += seconds_between(track.busy_since, Clock::now());
  }
  return done.size() > before;
}

void Completions::run() {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // sleeps of 20 us are not to take 70
  try {
    runtime_.use_device(device_);
  } catch (...) {
    fail(std::current_exception());
  }
  std::vector<Track::Entry> done;
  Clock::time_point last = Clock::now();
  std::unique_lock lock(mutex_);
  while (true) {
    const auto waits = [](const auto& t) { return !t->entries.empty(); };
    changed_.wait(lock, [&] {
      return stop_ || !bind_to_.empty() || std::any_of(tracks_.begin(), tracks_.end(), waits);
    });
    if (stop_) return;
    // What fails here costs time at most: whoever asked for binding was told that it is possible.
    if (!bind_to_.empty()) (void)bind_this_thread(std::exchange(bind_to_, {}));
    if (failed() && !drained_) {
      // What was enqueued before may still run, and must have ended before its memory is somebody else's.
      lock.unlock();
      try {
        std::lock_guard drain(drain_mutex_);
        runtime_.synchronize();
      } catch (...) {  // the failure itself
      }
      lock.lock();
      drained_ = true;
    }
    for (const auto& track : tracks_) advance(*track, done);
    lock.unlock();
    if (done.empty()) {
      if (Clock::now() - last < kEager) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(kInterval);
      }
    } else {
      for (Track::Entry& entry : done) {
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
  track_ = completions_.add_track();
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
  completions_.remove_track(track_);
  runtime_.destroy_stream(handle_);
}

StreamHandle CudaStream::begin_work() {
  runtime_.use_device(device_);
  if (!work_since_) completions_.note_work(*track_);
  work_since_ = true;
  return handle_;
}

Event CudaStream::point() {
  if (!work_since_) return last_;
  work_since_ = false;
  Mark* mark = nullptr;
  if (!failed()) {
    try {
      runtime_.use_device(device_);
      mark = completions_.take_mark();
      runtime_.record(mark->handle(), handle_);
    } catch (...) {
      completions_.fail(std::current_exception());
    }
  }
  last_ = completions_.pending();
  if (mark != nullptr) last_.attach(mark);
  completions_.push(*track_, {last_, nullptr, true});
  return last_;
}

Event CudaStream::record() {
  return point();
}

void CudaStream::callback(Task action) {
  const Event at = point();
  completions_.push(*track_, {at, std::move(action), false});
}

void CudaStream::wait(const Event& event) {
  if (event.done()) return;
  const auto* mark = dynamic_cast<const Mark*>(event.mark());
  if (mark != nullptr && mark->owner() == &completions_) {
    attempt([&](StreamHandle stream) { runtime_.wait(stream, mark->handle()); });
    return;
  }
  if (!wait_values_) return event.wait();
  std::uint32_t* word = nullptr;
  attempt([&](StreamHandle stream) {
    word = completions_.take_word();
    runtime_.wait_value(stream, word, 1);
  });
  if (word == nullptr) return;  // the device failed
  // The word goes back when both have passed: the stream, and who sets it.
  event.on_done([word] { std::atomic_ref<std::uint32_t>(*word).store(1, std::memory_order_release); });
  callback([event, word, completions = &completions_] {
    event.on_done([word, completions] { completions->give_word(word); });
  });
}

void CudaStream::synchronize() {
  point().wait();
  // Actions before this point have run too: an empty one behind them says so.
  const Event after = completions_.pending();
  completions_.push(*track_, {last_, [after] { after.set(); }, false});
  after.wait();
  completions_.rethrow();
}

double CudaStream::busy_seconds() const {
  return completions_.busy_seconds(*track_);
}

}  // namespace zg::cuda
