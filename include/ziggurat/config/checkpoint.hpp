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
  std::int64_t keep = 1;      // newest checkpoints of the run that are kept
  bool on_interrupt = false;  // whether the run writes one before it ends early
  // Whether state that lies in the drives' files stays there, pinned, or is copied. kAuto: it is pinned where
  // that can be done.
  State state = State::kAuto;
  std::string path;                // the directory of all checkpoints
  std::vector<std::string> allow;  // keys that may differ from the checkpoint's, although bits depend on them
  // Copies of checkpoints elsewhere, made behind the training.
  struct Export {
    std::string path;        // their directory; empty: none are made
    std::int64_t every = 1;  // checkpoints from one that is copied to the next
    std::int64_t keep = 1;   // newest copies that are kept
  };
  Export exports = {};

  // The most checkpoints that are kept at the same time: one that is being copied stays until that is done.
  std::int64_t most_kept() const { return keep + (exports.path.empty() ? 0 : 1); }
  bool regular() const { return every > 0 || every_seconds > 0; }
  bool asked() const { return regular() || on_interrupt; }
};

}  // namespace zg
