#include "step/coded_runs.hpp"

#include <algorithm>

#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

// Gives the run its places from byte `at` on. Returns the byte after it.
std::int64_t place(Layout::CodedRun& run, const Model& model, std::int64_t at) {
  const auto size = static_cast<std::int64_t>(size_of(model.dtype()));
  run.places = run.code ? CodePlaces(*run.code, run.rows, run.cols, at)
                        : CodePlaces::of_elements(run.count() * size, at);
  return run.places.end;
}

}  // namespace

CodedRuns runs_of_files(const Model& model, const std::vector<std::optional<ParamCode>>& codes,
                        const Layout::TileTensors& t) {
  const std::vector<Param>& params = model.units()[static_cast<std::size_t>(t.unit)].params;
  CodedRuns made;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Param& p = params[i];
    const std::int64_t first = std::max(p.offset, t.first),
                       last = std::min(p.offset + p.count(), t.first + t.count);
    if (first >= last) continue;
    Layout::CodedRun run{static_cast<std::int32_t>(i), first - p.offset, (last - first) / p.cols, p.cols};
    if (codes[i]) {
      const std::int64_t first_row = run.first / p.cols;
      run.code = code_of_part(*codes[i], code_part(p, first_row, run.rows));
      ZG_ASSERT(run.code, "rows {} to {} of {} have no codes of their own", first_row, first_row + run.rows,
                p.name);
    }
    made.bytes = place(run, model, made.bytes);
    made.runs.push_back(run);
  }
  made.bytes = round_up(made.bytes, t.sharding.shards * CodePlaces::kAlign);
  return made;
}

CodedRuns runs_of_shards(const Model& model, const Layout::TileTensors& t) {
  const Unit& unit = model.units()[static_cast<std::size_t>(t.unit)];
  const std::int64_t tile_end = t.first + t.count, shards = t.sharding.shards;
  const std::int64_t elements = shards == 1 ? t.count : t.piece * t.sharding.replicas();
  CodedRuns made;
  std::vector<std::size_t> begins;  // the first run of each shard
  std::int64_t longest = 0;
  for (std::int64_t s = 0; s < shards; ++s) {
    const std::int64_t begin = t.first + s * elements, end = std::min(begin + elements, tile_end);
    std::int64_t bytes = 0;
    begins.push_back(made.runs.size());
    for (std::size_t i = 0; i < unit.params.size(); ++i) {
      const Param& p = unit.params[i];
      const std::int64_t first = std::max(p.offset, begin), last = std::min(unit.end_of(i), end);
      if (first >= last) continue;
      Layout::CodedRun run{static_cast<std::int32_t>(i), first - p.offset, 1, last - first};
      ZG_ASSERT_EQ(run.first % kQuantBlock, 0);
      if (!p.vector && !p.routes) run.code = ParamCode{.format = kFp8Weights};
      bytes = place(run, model, bytes);
      made.runs.push_back(run);
    }
    longest = std::max(longest, bytes);
  }
  begins.push_back(made.runs.size());
  for (std::size_t s = 0; s + 1 < begins.size(); ++s) {
    std::int64_t at = static_cast<std::int64_t>(s) * longest;
    for (std::size_t i = begins[s]; i < begins[s + 1]; ++i) at = place(made.runs[i], model, at);
  }
  made.first_run = begins[static_cast<std::size_t>(t.sharding.shard())];
  made.bytes = shards * longest;
  return made;
}

}  // namespace zg
