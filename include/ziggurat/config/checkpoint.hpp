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

  bool regular() const { return every > 0 || every_seconds > 0; }
  bool asked() const { return regular() || on_interrupt; }
};

}  // namespace zg
