// Copies checkpoints of a run elsewhere, behind its training (checkpoint.export). Private to src/train.
//
// The run's first process has one. A thread copies one checkpoint at a time, which stays where it is until
// the copy is done: all ranks leave its versions pinned, and nobody removes it (Checkpointer). The thread has
// a lower priority than the threads that train, and its reads give way to theirs (Pace). A copy that fails is
// logged as a warning, and nothing of it stays; training goes on.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "ziggurat/base/thread.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/checkpoint/files.hpp"
#include "ziggurat/config/checkpoint.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg {

// What a copy reads from the run's drives: all that it can while no transfer of the run waits for them, else
// one byte for io::kFairShare of theirs, as the engine shares between its priorities; and a part in a second
// in any case.
class Pace {
 public:
  explicit Pace(const io::Engine* io) : io_(io) {}  // null: the run has no drives
  // Whether the copy, of which so many bytes are done, is to wait before it goes on.
  bool gives_way(std::int64_t done);

 private:
  const io::Engine* const io_;
  std::int64_t done_ = 0, part_ = 0;  // bytes of the copy, and of its last part
  std::int64_t moved_ = 0;            // by the engine, when that part was done
  Clock::time_point since_;
};

class Exporter {
 public:
  // `newest`: the number of the newest checkpoint that was copied; 0: none was. What is referred to outlives
  // this.
  Exporter(const CheckpointConfig::Export& exports, std::int64_t newest, Files& files, const io::Engine* io)
      : exports_(exports), copied_(newest), files_(files), io_(io) {}
  Exporter(const Exporter&) = delete;
  ~Exporter() { give_up(); }

  // The number of the checkpoint that is being copied; 0: none is. Any thread; of those below one calls.
  std::int64_t copies() const { return number_; }
  // There is a new checkpoint. Begins to copy it if it is its turn and none is being copied.
  void offer(const CheckpointEntry& checkpoint);
  // No other follows: waits for the copy under way, and copies this one if that was not done, with a line of
  // progress. `stop` is asked all the time; true ends the copying.
  void finish(const std::optional<CheckpointEntry>& last, const std::function<bool()>& stop);
  // Ends the copy under way, of which nothing stays.
  void give_up();

 private:
  void begin(const CheckpointEntry& checkpoint);
  void copy(const CheckpointEntry& checkpoint);
  bool wait(const std::function<bool()>& stop);
  void say_progress() const;

  const CheckpointConfig::Export exports_;
  std::atomic<std::int64_t> copied_;
  Files& files_;
  const io::Engine* const io_;
  std::string name_;  // of the checkpoint that is being copied
  Clock::time_point began_;
  std::atomic<std::int64_t> number_ = 0, done_ = 0, bytes_ = 0;
  std::atomic<bool> stop_ = false;
  NamedThread thread_;
};

}  // namespace zg
