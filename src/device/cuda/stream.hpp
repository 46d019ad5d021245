// Streams of a CUDA device, and the thread that learns when their work is done.
//
// One thread for each device (Completions) polls the oldest CUDA event of each stream, sets events and runs
// callbacks. No other thread waits for the device. CUDA's own host callbacks are not used: they block the
// stream, and may not call CUDA. A stream waits for another stream of its device by a CUDA event. For any
// other event it waits for a word of pinned memory that the host sets, if the GPU can do so, so that the
// issuing thread need not wait.
//
// CUDA calls that load kernels or take memory wait for all work of the device (first_uses.hpp). They must not
// be made while a stream waits for a word, since other threads' calls wait for them, possibly including the
// calls that would lead to setting the word. Completions::quiet() keeps the two apart.
//
// A failure of the device (an illegal access, a lost GPU) is permanent. All events that are pending then
// count as done, so that nothing hangs; work that is enqueued later is dropped; and every synchronize()
// throws the cause.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "device/cuda/runtime.hpp"
#include "kernels/cuda/kernels.hpp"
#include "ziggurat/base/thread.hpp"
#include "ziggurat/device/device.hpp"

namespace zg::cuda {

class Completions;

// A CUDA event, from the pool of its Completions.
class CudaEvent : public DeviceEvent {
 public:
  CudaEvent(Completions& owner, EventHandle handle) : owner_(&owner), handle_(handle) {}
  void give_back() override;
  EventHandle handle() const { return handle_; }
  Completions* owner() const { return owner_; }

 private:
  Completions* owner_;
  EventHandle handle_;
};

// The events and callbacks of one stream that are not done yet, in order. Owned by Completions; its mutex
// guards them.
struct InFlight {
  struct Entry {
    Event point;        // carries its CudaEvent; a default Event: all earlier work is done
    Task action;        // runs when the point is reached; may be null
    bool sets = false;  // this entry sets `point`; if not, an earlier entry does
    // When the point is reached, the stream's work begins or ends to wait for another stream.
    enum class Wait : std::uint8_t { kNone, kBegins, kEnds } wait = Wait::kNone;
  };
  std::deque<Entry> entries;
  bool busy = false;
  Clock::time_point busy_since;
  double busy_seconds = 0;
  Clock::time_point waits_since;
  double waited_seconds = 0;
};

class Completions {
 public:
  // name: the thread's name.
  Completions(Runtime& runtime, int device, std::string name);
  // All streams must have been removed.
  ~Completions();

  // Binds its thread to these CPUs. An empty list changes nothing.
  void bind(const std::vector<int>& cpus);

  InFlight* add_stream();
  void remove_stream(InFlight* in_flight);  // it must have no entries
  void push(InFlight& in_flight, InFlight::Entry entry);
  // Work was enqueued on the stream: it counts as busy until all its entries are done.
  void note_work(InFlight& in_flight);
  double busy_seconds(const InFlight& in_flight) const;
  double waited_seconds(const InFlight& in_flight) const;

  CudaEvent* take_event();
  Event pending() { return events_.pending(); }
  // Enqueues the stream's wait for a word of pinned memory; null: all words are in use.
  std::uint32_t* wait_for_word(StreamHandle stream);
  void set_word(std::uint32_t* word);   // ends the wait
  void give_word(std::uint32_t* word);  // was set, and the stream has passed it
  // Returns a lock when all words are set; while it is held, wait_for_word() blocks. A thread must not call
  // this while it holds a lock that is needed by a thread that sets a word.
  std::unique_lock<std::shared_mutex> quiet();

  void fail(std::exception_ptr cause);  // only the first cause is kept
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  void rethrow() const;  // the cause, if the device has failed
  // While the lock is held, this thread does not synchronize with the whole device.
  std::unique_lock<std::mutex> block_drain() { return std::unique_lock(drain_mutex_); }

 private:
  friend class CudaEvent;
  void give_event(CudaEvent* cuda_event);
  void run();
  // Moves the entries that are done to `done`; false if there were none.
  bool advance(InFlight& in_flight, std::vector<InFlight::Entry>& done);
  bool is_done(const InFlight::Entry& entry);

  Runtime& runtime_;
  const int device_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<InFlight>> streams_;
  bool stop_ = false;
  std::vector<int> bind_to_;
  std::atomic<bool> failed_{false};
  bool broken_ = false;   // the device has failed and no longer reports which work is done
  bool drained_ = false;  // set after broken_: the device runs no more work
  std::exception_ptr failure_;
  std::mutex drain_mutex_;         // held while the whole device is synchronized; mutex_ is not held then
  std::shared_mutex quiet_mutex_;  // shared: a wait for a word is being enqueued. Locked before pools_mutex_
  std::mutex pools_mutex_;  // guards the pools of events and words. May be taken under mutex_, not vice versa
  std::vector<std::unique_ptr<CudaEvent>> cuda_events_;
  std::vector<CudaEvent*> free_cuda_events_;
  std::uint32_t* words_ = nullptr;  // pinned
  std::vector<std::uint32_t*> free_words_;
  std::int64_t awaited_ = 0;  // words that streams wait for and nobody has set
  std::condition_variable none_awaited_;
  EventPool events_;
  NamedThread thread_;  // last, so that it is joined before the other members are destroyed
};

class CudaStream : public Stream {
 public:
  CudaStream(Runtime& runtime, Completions& completions, int device, std::string name, bool urgent,
             bool wait_values);
  ~CudaStream() override;

  // The handle (never null) for work that the caller enqueues now. Marks the stream as busy.
  StreamHandle begin_work();
  StreamHandle handle() const { return handle_; }
  bool failed() const { return completions_.failed(); }
  // Runs `work`, which enqueues on the stream. If it throws, the device has failed. Does nothing after a
  // failure.
  template <class F>
  void attempt(const F& work) {
    if (failed()) return;
    try {
      work(begin_work());
    } catch (...) {
      if (capturing_) throw;
      completions_.fail(std::current_exception());
    }
  }
  // While work is being captured into a CUDA graph, attempt() throws, and the device does not count as
  // failed.
  void set_capturing(bool capturing) { capturing_ = capturing; }
  bool capturing() const { return capturing_; }

  const std::string& name() const override { return name_; }
  Event record() override;
  void wait(const Event& event) override;
  void callback(Task action) override;
  void synchronize() override;
  double busy_seconds() const override;
  double waited_seconds() const override;

 private:
  void finish();  // waits until all work is done, without throwing
  Event point();  // a point after all work so far; the last point again if no work came since

  Runtime& runtime_;
  Completions& completions_;
  const int device_;
  std::string name_;
  const bool wait_values_;
  StreamHandle handle_;
  InFlight* in_flight_;
  Event last_;
  bool work_since_ = false, capturing_ = false;
};

}  // namespace zg::cuda
