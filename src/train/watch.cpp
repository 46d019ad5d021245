#include "train/watch.hpp"

#include <algorithm>

namespace zg {
namespace {

// "rank 2 waits for ranks 0, 1 in gather of layer 3 of 40". Names the known ranks that have made
// fewer calls on the axis.
std::string meetings_of(const StepExecutor& rank, const std::vector<const StepExecutor*>& ranks) {
  std::string text;
  for (int i = 0; i < kCommAxes; ++i) {
    const auto axis = static_cast<CommAxis>(i);
    const StepExecutor::Meeting mine = rank.meeting(axis);
    if (!mine.inside) continue;
    std::vector<int> missing;
    if (mine.from >= 0) missing.push_back(mine.from);
    for (const int member : members_of(rank.place(), axis, mine.weights)) {
      if (mine.from >= 0) break;
      const auto other = std::find_if(ranks.begin(), ranks.end(),
                                      [&](const auto* r) { return r->place().rank() == member; });
      if (other != ranks.end() && (*other)->meeting(axis).calls < mine.calls) missing.push_back(member);
    }
    text += fmt::format("rank {}{} in {}\n", rank.place().rank(),
                        missing.empty() ? " is" : " waits for " + text_of(missing), mine.what);
  }
  return text;
}

}  // namespace

WatchedPart part_of(std::vector<const StepExecutor*> ranks) {
  return {.name = "ranks", .state = [all = std::move(ranks)] {
            std::string text;
            for (const StepExecutor* rank : all) {
              const std::string meetings = meetings_of(*rank, all);
              text += meetings.empty()
                          ? fmt::format("rank {}: {}\n", rank->place().rank(), rank->whereabouts())
                          : meetings;
            }
            return text;
          }};
}

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
