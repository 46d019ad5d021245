#include "train/watch.hpp"

namespace zg {

// Transfers in flight count as waiting even if no thread waits for them: a drive that does not answer is a
// stall, also when it only writes back.
WatchedPart part_of(const io::Engine& io) {
  return {.name = "io",
          .state = [&io] { return io.state(); },
          .progress =
              [&io] {
                std::int64_t bytes = 0;
                for (int d = 0; d < io.drive_count(); ++d) {
                  const io::LinkCounters c = io.counters(d);
                  bytes += c.read_bytes + c.write_bytes;
                }
                return static_cast<std::uint64_t>(bytes);
              },
          .waiting =
              [&io] {
                for (int d = 0; d < io.drive_count(); ++d) {
                  if (io.report(d).in_flight > 0) return true;
                }
                return false;
              }};
}

WatchedPart part_of(const TensorStore& store) {
  return {.name = "store",
          .state = [&store] { return store.state(); },
          .progress = [&store] { return store.progress(); },
          .waiting = [&store] { return store.waiting() > 0; }};
}

WatchedPart part_of(const StepExecutor& engine) {
  return {.name = "engine",
          .state = [&engine] { return engine.state(); },
          .progress = [&engine] { return engine.progress(); },
          .waiting = [&engine] { return engine.waiting(); }};
}

}  // namespace zg
