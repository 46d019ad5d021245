// Streams of a CUDA device, and the thread that learns when their work is done.
//
// Nothing on the host waits for the device but that thread (Completions): one for a device, which asks CUDA
// for the oldest event of each stream in turn. CUDA's own callbacks are not used: they hold up the stream,
// and may call nothing of CUDA. A stream waits for another of its device by CUDA's events, for anything else
// by a word of pinned memory that the host sets (where the GPU can), so that the rank thread goes on issuing.
//
// A device that failed (an illegal access, a lost GPU) fails for good. All that waits is then told at once
// that it is done, so that nothing hangs, what is enqueued later is dropped, and each synchronize() throws
// the cause.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/cuda/runtime.hpp"
#include "kernels/cuda/kernels.hpp"
#include "ziggurat/base/thread.hpp"
#include "ziggurat/device/device.hpp"

namespace zg::cuda {

class Completions;

// A CUDA event that is recorded; from a pool of its Completions.
class Mark : public DeviceMark {
 public:
  Mark(Completions& owner, EventHandle handle) : owner_(&owner), handle_(handle) {}
  void give_back() override;
  EventHandle handle() const { return handle_; }
  Completions* owner() const { return owner_; }

 private:
  Completions* owner_;
  EventHandle handle_;
};

// What one stream has under way. Owned by Completions, behind its mutex.
struct Track {
  struct Entry {
    Event point;        // with its mark; empty: everything before it is done
    Task action;        // null: the event is all
    bool sets = false;  // the event is to be set (it is this entry's, not the one before's)
  };
  std::deque<Entry> entries;
  bool busy = false;
  Clock::time_point busy_since;
  double busy_seconds = 0;
};

class Completions {
 public:
  Completions(Runtime& runtime, int device, std::string name);
  // All tracks are gone.
  ~Completions();

  // Its thread runs there from now on.
  void bind(const std::vector<int>& cpus);

  Track* add_track();
  void remove_track(Track* track);  // has no entries
  void push(Track& track, Track::Entry entry);
  // The stream was given work: it is busy until its entries are done.
  void note_work(Track& track);
  double busy_seconds(const Track& track) const;

  Mark* take_mark();
  Event pending() { return events_.pending(); }
  // A word of pinned memory, 0 until it is set to 1.
  std::uint32_t* take_word();
  void give_word(std::uint32_t* word);

  void fail(std::exception_ptr cause);  // the first one counts
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  void rethrow() const;  // if failed
  // While it is held, the device as a whole is not waited for.
  std::unique_lock<std::mutex> quiet() { return std::unique_lock(drain_mutex_); }

 private:
  friend class Mark;
  void give_mark(Mark* mark);
  void run();
  // Takes what is done out of the track; false: nothing was.
  bool advance(Track& track, std::vector<Track::Entry>& done);
  bool is_done(const Track::Entry& entry);

  Runtime& runtime_;
  const int device_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Track>> tracks_;
  bool stop_ = false;
  std::vector<int> bind_to_;
  std::atomic<bool> failed_{false};
  bool drained_ = false;  // after a failure: nothing runs any more
  std::exception_ptr failure_;
  std::mutex drain_mutex_;  // held while the device is waited for; mutex_ is not, then
  std::mutex marks_mutex_;  // of the two pools; taken with mutex_ held, never the other way round
  std::vector<std::unique_ptr<Mark>> marks_;
  std::vector<Mark*> free_marks_;
  std::vector<std::uint32_t*> word_pages_, free_words_;
  EventPool events_;
  NamedThread thread_;  // last: joined before the rest goes
};

class CudaStream : public Stream {
 public:
  CudaStream(Runtime& runtime, Completions& completions, int device, std::string name, bool urgent,
             bool wait_values);
  ~CudaStream() override;

  // For work that is enqueued now; a null handle is never given.
  StreamHandle begin_work();
  StreamHandle handle() const { return handle_; }
  bool failed() const { return completions_.failed(); }
  // Runs `work`, which enqueues; what it throws is the device's failure. Nothing after a failure.
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
  // What is enqueued is captured: a failure to do so is told who captures, and is not the device's.
  void set_capturing(bool capturing) { capturing_ = capturing; }

  const std::string& name() const override { return name_; }
  Event record() override;
  void wait(const Event& event) override;
  void callback(Task action) override;
  void synchronize() override;
  double busy_seconds() const override;

 protected:
  void finish();  // waits until all work is done; what failed was, or is being, reported

 private:
  Event point();  // where the stream is now: the last one, if nothing came since

  Runtime& runtime_;
  Completions& completions_;
  const int device_;
  std::string name_;
  const bool wait_values_;
  StreamHandle handle_;
  Track* track_;
  Event last_;
  bool work_since_ = false, capturing_ = false;
};

}  // namespace zg::cuda
