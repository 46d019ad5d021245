// Small traces for the tests of replays and policies.
#pragma once
#include <vector>

#include "store/programs.hpp"
#include "ziggurat/store/access_trace.hpp"

namespace zg::test {

inline constexpr std::int64_t kPage = 4096;

inline AccessStep at_host(SegmentId id, Access access = Access::kRead, bool last = false) {
  return {id, Tier::kHost, access, last};
}
inline AccessStep at_device(SegmentId id, Access access = Access::kRead, bool last = false) {
  return {id, Tier::kDevice, access, last};
}

// One operation for each access.
inline Program program_of(const std::vector<AccessStep>& accesses, std::int32_t segments) {
  Program program("trace");
  for (const AccessStep& a : accesses) program.add_op(std::vector<AccessStep>{a});
  program.finish(segments);
  return program;
}

inline AccessTrace trace_of(TensorTable table, const std::vector<AccessStep>& accesses) {
  AccessTrace trace;
  trace.table = std::move(table);
  trace.programs.push_back(program_of(accesses, trace.table.segment_count()));
  trace.sequence = {0};
  return trace;
}

inline AccessTrace equal_trace(std::int32_t segments, const std::vector<AccessStep>& accesses) {
  return trace_of(equal_table(1, segments), accesses);
}

inline std::vector<AccessStep> scan(std::int32_t segments, Access access) {
  std::vector<AccessStep> accesses;
  for (SegmentId id = 0; id < segments; ++id) accesses.push_back(at_host(id, access));
  return accesses;
}

struct Mix {
  int write_percent = 0, overwrite_percent = 0;
};
inline std::vector<AccessStep> random_accesses(Random& random, std::int32_t segments, int count,
                                               const Mix& mix) {
  std::vector<AccessStep> accesses;
  for (int i = 0; i < count; ++i) {
    const int dice = below(random, 100);
    accesses.push_back(at_host(below(random, segments), dice < mix.write_percent ? Access::kWrite
                                                        : dice < mix.write_percent + mix.overwrite_percent
                                                            ? Access::kOverwrite
                                                            : Access::kRead));
  }
  return accesses;
}

}  // namespace zg::test
