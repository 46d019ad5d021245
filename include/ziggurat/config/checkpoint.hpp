// The section "checkpoint" of a configuration. A plain value.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace zg {

struct CheckpointConfig {
  enum class State : std::uint8_t { kAuto, kPin, kCopy };
  std::int64_t every = 0;     // steps between checkpoints; 0: none by steps
  double every_seconds = 0;   // seconds between checkpoints; 0: none by time
  std::int64_t keep = 1;      // how many of the run's newest checkpoints are kept
  bool on_interrupt = false;  // whether the run writes one before it ends early
  // Whether a checkpoint pins state that lies in the drives' files, or copies it. kAuto: it pins if possible.
  State state = State::kAuto;
  std::string path;                // the directory of all checkpoints
  std::vector<std::string> allow;  // keys that may differ from the checkpoint's although they change results
  // Copies of checkpoints in another place, made in the background while training goes on.
  struct Export {
    std::string path;        // directory of the copies; empty: none are made
    std::int64_t every = 1;  // every n-th checkpoint is copied
    std::int64_t keep = 1;   // how many of the newest copies are kept
  };
  Export exports = {};

  // The most checkpoints that exist at the same time: one that is being copied stays until its copy is done.
  std::int64_t most_kept() const { return keep + (exports.path.empty() ? 0 : 1); }
  bool regular() const { return every > 0 || every_seconds > 0; }
  bool asked() const { return regular() || on_interrupt; }
};

}  // namespace zg
