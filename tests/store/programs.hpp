// Random programs and what a dry run says of them, for the tests of the store.
#pragma once
#include <algorithm>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/store/program.hpp"
#include "ziggurat/store/residency.hpp"

namespace zg::test {

using Random = std::mt19937_64;

inline int below(Random& random, int bound) {
  return static_cast<int>(random() % static_cast<std::uint64_t>(bound));
}

// `count` tensors of one segment each, all of `bytes`.
inline TensorTable equal_table(int drives, int count, std::int64_t bytes = 4096, Tier lowest = Tier::kNvme,
                               std::int64_t device_granule = 4096) {
  TensorTable table(drives, device_granule);
  for (int i = 0; i < count; ++i) {
    table.add({.name = fmt::format("t{}", i), .dtype = DType::kU8, .count = bytes, .lowest = lowest});
  }
  return table;
}

// Granules of a device's memory: a page as at the host, a part of a segment, more than a segment.
inline std::int64_t some_granule(Random& random) {
  constexpr std::int64_t kGranules[] = {4096, 8192, 65536};
  return kGranules[below(random, 3)];
}

// Odd sizes, several segments a tensor, all sorts of lowest tiers.
inline TensorTable random_table(Random& random, int drives, int segments,
                                std::int64_t device_granule = 4096) {
  TensorTable table(drives, device_granule);
  while (table.segment_count() < segments) {
    const int parts = std::min(1 + below(random, 3), segments - table.segment_count());
    const std::int64_t elements = 700 + below(random, 3000);
    const int low = below(random, 10);
    const std::int64_t count = elements * parts - below(random, 600);
    table.add({.name = fmt::format("t{}", table.tensor_count()),
               .dtype = DType::kF32,
               .count = count,
               .lowest = low == 0   ? Tier::kDevice
                         : low == 1 ? Tier::kHost
                                    : Tier::kNvme,
               .segment_elements = parts == 1 ? 0 : elements,
               .versions = 1 + below(random, 2)});
  }
  return table;
}

struct ProgramShape {
  int ops = 30;
  int max_accesses = 4;
  int last_percent = 10;
};

// A program that never reads what was not written, if the segments in `given` have content at its start; they
// have content at its end, too. `content`, if wanted: what has content at the end, given what had it before.
inline Program random_program(Random& random, const std::string& name, const TensorTable& table,
                              const std::vector<bool>& given, const ProgramShape& shape) {
  Program program(name);
  const int n = table.segment_count();
  std::vector<bool> valid = given;
  std::vector<SegmentId> ids(static_cast<std::size_t>(n));
  std::iota(ids.begin(), ids.end(), 0);
  for (int op = 0; op < shape.ops; ++op) {
    std::shuffle(ids.begin(), ids.end(), random);
    std::vector<AccessStep> accesses;
    for (int i = 0, count = std::min(n, 1 + below(random, shape.max_accesses)); i < count; ++i) {
      const SegmentId id = ids[static_cast<std::size_t>(i)];
      const auto at = static_cast<std::size_t>(id);
      AccessStep a{id, below(random, 2) == 0 ? Tier::kDevice : Tier::kHost, Access::kOverwrite, false};
      if (table.segment(id).lowest == Tier::kDevice) a.tier = Tier::kDevice;
      if (valid[at]) {
        const int kind = below(random, 8);
        a.access = kind < 4 ? Access::kRead : kind < 7 ? Access::kWrite : Access::kOverwrite;
      }
      a.last = below(random, 100) < shape.last_percent;
      valid[at] = !a.last;
      accesses.push_back(a);
    }
    program.add_op(accesses, below(random, 4));
  }
  for (SegmentId id = 0; id < n; ++id) {
    if (given[static_cast<std::size_t>(id)] && !valid[static_cast<std::size_t>(id)]) {
      program.add_op(std::vector<AccessStep>{
          {id, table.segment(id).lowest == Tier::kDevice ? Tier::kDevice : Tier::kHost, Access::kOverwrite,
           false}});
    }
  }
  program.finish(n);
  return program;
}

inline std::vector<bool> random_given(Random& random, int n) {
  std::vector<bool> given(static_cast<std::size_t>(n));
  for (auto&& g : given) g = below(random, 2) == 0;
  return given;
}

// The order of decisions a store makes when `programs` run one after the other (each announcing the next)
// with `depth` operations of prefetch. Returns what did not fit, if anything.
template <class Decided>
std::optional<NoRoom> decide_all(Residency& residency, const std::vector<const Program*>& programs,
                                 std::int64_t depth, Decided&& decided) {
  std::int64_t done = 0;
  for (std::size_t i = 0; i < programs.size(); ++i) {
    const Program* current = programs[i];
    const Program* next = i + 1 < programs.size() ? programs[i + 1] : nullptr;
    residency.set_future(current, next);
    const std::int64_t total = std::int64_t{current->op_count()} + (next != nullptr ? next->op_count() : 0);
    for (std::int64_t op = 0; op < current->op_count(); ++op) {
      for (; done < std::min(total, op + 1 + depth); ++done) {
        const bool ahead = done >= current->op_count();
        const auto index = static_cast<std::int32_t>(ahead ? done - current->op_count() : done);
        std::vector<Action> actions;
        if (auto failure = residency.decide(ahead ? 1 : 0, index, actions)) return failure;
        decided(ahead ? *next : *current, index, actions);
      }
    }
    done -= current->op_count();
  }
  return std::nullopt;
}

}  // namespace zg::test
