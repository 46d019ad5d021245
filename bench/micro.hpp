// What the programs on Google Benchmark share: how they start, and a kernel beside loops that are its roof.
#pragma once
#include <benchmark/benchmark.h>

#include <CLI/CLI.hpp>
#include <functional>

#include "bench/measure.hpp"
#include "ziggurat/base/trace.hpp"

namespace zg::bench {

// Reads the program's own options, gives the rest to Google Benchmark, and calls `body`, which registers
// benchmarks and calls run_registered(). Returns the exit code.
template <class Body>
int micro_main(int argc, char** argv, CLI::App& app, const Body& body) {
  app.allow_extras();
  app.footer(
      "Flags of Google Benchmark, the values behind a =, among others:\n"
      "  --benchmark_filter=REGEX --benchmark_list_tests=true --benchmark_min_time=SECONDS\n"
      "  --benchmark_repetitions=N --benchmark_enable_random_interleaving=true\n"
      "  --benchmark_report_aggregates_only=true --benchmark_format=console|json|csv --benchmark_out=FILE");
  CLI11_PARSE(app, argc, argv);
  std::vector<std::string> rest = app.remaining();
  rest.insert(rest.begin(), argv[0]);
  std::vector<char*> words;
  for (std::string& word : rest) words.push_back(word.data());
  int count = static_cast<int>(words.size());
  words.push_back(nullptr);
  benchmark::Initialize(&count, words.data());
  if (benchmark::ReportUnrecognizedArguments(count, words.data())) return 2;
  const nlohmann::json from = provenance();
  for (const char* key : {"commit", "cpu"}) benchmark::AddCustomContext(key, from[key].get<std::string>());
  try {
    body();
    return 0;
  } catch (const Error& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    return e.exit_code();
  }
}

inline void run_registered() {
  if (benchmark::RunSpecifiedBenchmarks() == 0)
    throw Error(Errc::kUsage, "--benchmark_filter", "matches no benchmark");
}

// A loop that does nothing but reach a limit of the machine, over so many bytes or floating-point operations.
struct RoofLoop {
  std::string name;
  double work;
  std::function<void()> run;
};

// An iteration is a round: the kernel, whose time is the benchmark's, then each of the loops, so that all of
// them meet the same moments of a shared machine. The roof is the fastest of the loops; counters are of
// medians, and the label names the loop.
inline void against_roof(benchmark::State& state, double work, const std::function<void()>& kernel,
                         const std::vector<RoofLoop>& loops) {
  const auto seconds = [](const std::function<void()>& f) {
    const auto begin = Clock::now();
    f();
    return seconds_between(begin, Clock::now());
  };
  kernel();
  for (const RoofLoop& loop : loops) loop.run();
  std::vector<double> own;
  std::vector<std::vector<double>> theirs(loops.size());
  for (auto _ : state) {
    own.push_back(seconds(kernel));
    state.SetIterationTime(own.back());
    for (std::size_t i = 0; i < loops.size(); ++i) theirs[i].push_back(seconds(loops[i].run));
  }
  double roof = 0;
  for (std::size_t i = 0; i < loops.size(); ++i) {
    const double rate = loops[i].work / median(theirs[i]);
    if (rate > roof) state.SetLabel(loops[i].name);
    roof = std::max(roof, rate);
  }
  const double rate = work / median(own);
  state.counters["median_ns"] = 1e9 * median(own);
  state.counters["mad_ns"] = 1e9 * mad(own);
  state.counters["giga_per_s"] = 1e-9 * rate;
  state.counters["roof_giga_per_s"] = 1e-9 * roof;
  state.counters["share_of_roof"] = rate / roof;
}

}  // namespace zg::bench
