// What a demand waits behind a long write-back queue: latency of single reads while write-back of hundreds of
// megabytes is queued on the same drive, with priorities and with everything of one priority, in turns; and
// what priorities cost the write-back. Where nothing else is said, the default depth is in flight.
//
//   bench_io_priority [--path DIR] [--rounds 5] [--seconds 2]
//
// Without --path on a RAM drive of 2 GB/s and 100 us, half duplex.
#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "bench/measure.hpp"
#include "ziggurat/base/buffer.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/engine.hpp"

namespace {

using namespace zg;
using namespace zg::io;
using bench::median;
using bench::quantile;

constexpr std::int64_t kBack = 4 * kMiB, kRead = kMiB;
constexpr int kQueued = 64;  // write-backs waiting or under way: 256 MiB
constexpr std::int64_t kDrive = (kQueued + 1) * kBack;

// Keeps kQueued write-backs in the engine, each on a place of its own.
class WriteBack final : public Completion {
 public:
  WriteBack(Engine& engine, char* data, Priority priority)
      : engine_(engine), data_(data), priority_(priority) {
    for (int i = 0; i < kQueued; ++i) write(static_cast<std::uint64_t>(i));
  }
  void on_complete(Ticket, std::uint64_t tag, Result result) override {
    if (!result.ok()) failed_ = true;
    bytes_ += result.bytes;
    if (stop_ || failed_) {
      --left_;
    } else {
      write(tag);
    }
  }
  std::int64_t bytes() const { return bytes_; }
  void finish() {
    stop_ = true;
    while (left_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (failed_) throw Error(Errc::kIo, "write-back", "a write failed");
  }

 private:
  void write(std::uint64_t tag) {
    (void)engine_.submit({.op = Op::kWrite,
                          .priority = priority_,
                          .offset = static_cast<std::int64_t>(tag + 1) * kBack,
                          .data = data_,
                          .bytes = kBack,
                          .completion = this,
                          .tag = tag});
  }
  Engine& engine_;
  char* const data_;
  const Priority priority_;
  std::atomic<std::int64_t> bytes_{0};
  std::atomic<int> left_{kQueued};
  std::atomic<bool> stop_{false}, failed_{false};
};

struct Round {
  double p50 = 0, p99 = 0, write_rate = 0;
};

Round run(Engine& engine, char* memory, Priority back, double seconds) {
  WriteBack write_back(engine, memory + kRead, back);
  const auto begin = Clock::now();
  std::vector<double> latencies;
  while (seconds_between(begin, Clock::now()) < seconds) {
    const auto t = Clock::now();
    const Result r = engine.wait(engine.submit({.op = Op::kRead, .data = memory, .bytes = kRead}));
    if (!r.ok()) throw Error(Errc::kIo, "read", errno_text(r.error));
    latencies.push_back(seconds_between(t, Clock::now()));
    std::this_thread::sleep_for(std::chrono::milliseconds(4));
  }
  const double rate = static_cast<double>(write_back.bytes()) / seconds_between(begin, Clock::now());
  write_back.finish();
  return {quantile(latencies, 0.5), quantile(latencies, 0.99), rate};
}

}  // namespace

int main(int argc, char** argv) {
  std::string path;
  int rounds = 5;
  double seconds = 2;
  CLI::App app{"Latency of demand reads behind write-back, with and without priorities"};
  app.add_option("--path", path, "A directory on a drive (default: a RAM drive)");
  app.add_option("--rounds", rounds)->check(CLI::Range(1, 1000));
  app.add_option("--seconds", seconds, "of one turn")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  try {
    Buffer memory(kRead + kBack);
    std::fill_n(memory.data(), memory.size(), 'x');
    struct Way {
      const char* name;
      Priority write_back = Priority::kWriteBack;
      std::int64_t in_flight = 0;  // bytes; 0: the default
      std::vector<Round> rounds = {};
    };
    Way ways[] = {{.name = "one priority", .write_back = Priority::kDemand},
                  {.name = "priorities"},
                  {.name = "priorities, 32 MiB", .in_flight = kBytesInFlight}};
    for (int r = 0; r < rounds; ++r) {
      for (Way& way : ways) {
        EngineOptions options;
        options.backend = path.empty() ? Backend::kRam : Backend::kAuto;
        options.ram = {.bytes_per_second = 2e9, .latency_seconds = 100e-6};
        options.queue_depth = static_cast<int>(way.in_flight / options.block_size);
        const auto engine =
            make_engine(options, {{.path = path, .bytes = kDrive, .kind = FileKind::kScratch}});
        engine->register_memory(memory.data(), memory.size());
        // (A new file's first writes pay for its metadata.)
        (void)run(*engine, memory.data(), Priority::kWriteBack, 0.5);
        way.rounds.push_back(run(*engine, memory.data(), way.write_back, seconds));
        engine->unregister_memory(memory.data());
      }
    }
    nlohmann::json json = {{"bench", "io_priority"}, {"path", path}, {"rounds", rounds}};
    std::printf("%-26s %12s %12s %14s\n", "1 MiB demand reads", "p50", "p99", "write-back");
    for (const Way& way : ways) {
      const Round m{median(way.rounds, &Round::p50), median(way.rounds, &Round::p99),
                    median(way.rounds, &Round::write_rate)};
      std::printf("%-26s %12s %12s %14s\n", way.name, format_seconds(m.p50).c_str(),
                  format_seconds(m.p99).c_str(), format_rate(m.write_rate).c_str());
      json["results"].push_back({{"name", way.name},
                                 {"p50_seconds", m.p50},
                                 {"p99_seconds", m.p99},
                                 {"write_bytes_per_second", m.write_rate}});
    }
    std::printf("%s\n", json.dump().c_str());
  } catch (const Error& e) {
    std::fprintf(stderr, "bench_io_priority: %s\n", e.what());
    return e.exit_code();
  }
}
