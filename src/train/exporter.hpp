// Copies checkpoints of a run elsewhere, while the run trains (checkpoint.export). Private to src/train.
//
// The run's first process has an exporter. Its thread copies one checkpoint at a time. Until the copy is
// done, all ranks leave the checkpoint's versions pinned, and it is not removed (Checkpointer). The thread
// has a lower priority than the threads that train, and its reads give way to the run's transfers (Pace). If
// a copy fails, a warning is logged, nothing of the copy stays, and training continues.
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

// Limits how fast a copy reads from the run's drives. While no transfer of the run waits for the drives,
// there is no limit. Otherwise the copy reads one byte for io::kFairShare bytes of the run, as the engine
// shares between its priorities, but at least one chunk in a second.
class Pace {
 public:
  explicit Pace(const io::Engine* io) : io_(io) {}  // null: the run has no drives
  // Whether the copy, of which `done` bytes are copied, must wait before its next chunk.
  bool gives_way(std::int64_t done);

 private:
  const io::Engine* const io_;
  std::int64_t done_ = 0, part_ = 0;  // bytes of the copy so far, and of its last chunk
  std::int64_t moved_ = 0;            // bytes that the engine had moved when that chunk was done
  Clock::time_point since_;
};

class Exporter {
 public:
  // `newest`: the number of the newest checkpoint that was copied; 0: none was. `files` and `io` outlive the
  // exporter.
  Exporter(const CheckpointConfig::Export& exports, std::int64_t newest, Files& files, const io::Engine* io)
      : exports_(exports), copied_(newest), files_(files), io_(io) {}
  Exporter(const Exporter&) = delete;
  ~Exporter() { give_up(); }

  // The number of the checkpoint that is being copied; 0: none is. Any thread may call it; one thread calls
  // the functions below.
  std::int64_t copies() const { return number_; }
  // Reports a new checkpoint. Begins to copy it if checkpoint.export.every says so and no copy is under way.
  void offer(const CheckpointEntry& checkpoint);
  // To be called after the last offer(). Waits for the copy under way, and copies `last` if that was not
  // done, with a line of progress. Polls `stop`; if it returns true, the copying ends.
  void finish(const std::optional<CheckpointEntry>& last, const std::function<bool()>& stop);
  // Ends the copy under way and removes what was copied of it.
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
  std::string name_;  // name of the checkpoint that is being copied
  Clock::time_point began_;
  std::atomic<std::int64_t> number_ = 0, done_ = 0, bytes_ = 0;
  std::atomic<bool> stop_ = false;
  NamedThread thread_;
};

}  // namespace zg
