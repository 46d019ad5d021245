// Does the store hide transfers behind compute? A step over tensors, most of which are on a drive of memory
// whose bandwidth is set so that a step's transfers take a given share of its compute; compute is a sleep of
// a fixed time for each tensor. A step should take as long as the longer of the two, and who computes should
// not wait where that is compute.
//
//   bench_store_overlap [--rounds 5] [--steps 3] [--tensors 48] [--tensor 4MiB] [--compute-ms 6] [--busy]
//                       [--shares 0.5,0.8,1,2] [--only TEXT] [--dump]
//
// The sleeps end on a schedule, which moves by what calls of the store take and by nothing else: who wakes up
// late on a busy machine makes up for it. So compute takes exactly the sum of its times.
//
// Both ways to tell the store what comes: a step that is recorded (step_begin, step_end) and a static
// program. Reads alone, and with every third tensor written; at the host, and at the device. The drive is
// half duplex: transfer time is the bytes that cross its link over its bandwidth. Cases take turns. The
// memory of a program is less than there is, by the share that the trainer sets aside for what is on its way.
#include <sys/prctl.h>

#include <CLI/CLI.hpp>
#include <thread>

#include "bench/store_support.hpp"

namespace zg::bench {
namespace {

struct Options {
  int rounds = 5, steps = 3, tensors = 48;
  std::int64_t bytes = 4 * kMiB;
  double compute_seconds = 6e-3;
  bool busy = false, dump = false;
  std::vector<double> shares = {0.5, 0.8, 1, 2};
  std::string only;
};

constexpr double kReadAhead = 0.25;  // of a program's memory: what is on its way
constexpr int kHostTensors = 16, kDeviceTensors = 8;

void compute(const Options& o, Clock::time_point until) {
  if (o.busy) {
    while (Clock::now() < until) {
    }
  } else {
    std::this_thread::sleep_until(until);
  }
}

struct Step {
  double seconds = 0, stall = 0, transfer_bytes = 0;
};

// One case: a store of its own that takes steps.
class Run {
 public:
  Run(const Options& o, Tier tier, bool writes, bool program, double bandwidth)
      : o_(o), with_program_(program), tier_(tier) {
    io::EngineOptions engine;
    engine.backend = io::Backend::kRam;
    engine.require = true;
    engine.ram.bytes_per_second = bandwidth;
    const Budgets arenas{.device = (tier == Tier::kDevice ? kDeviceTensors : 1) * o.bytes,
                         .host = kHostTensors * o.bytes};
    const auto part = [&](std::int64_t bytes) {
      return program ? bytes - static_cast<std::int64_t>(kReadAhead * static_cast<double>(bytes)) : bytes;
    };
    bed_ = std::make_unique<Bed>(
        BedOptions{.tensors = o.tensors,
                   .bytes = o.bytes,
                   .arenas = arenas,
                   .budgets = {.device = tier == Tier::kDevice ? part(arenas.device) : arenas.device,
                               .host = part(arenas.host)},
                   .engine = &engine});
    bed_->fill();
    for (SegmentId id = 0; id < o.tensors; ++id) {
      accesses_.push_back({id, tier, writes && id % 3 == 0 ? Access::kWrite : Access::kRead, false});
      program_.add_op({&accesses_.back(), 1});
    }
    program_.finish(o.tensors);
    bed_->store->drain();
  }
  ~Run() {
    if (!started_) return;
    // To the end of what was announced.
    bed_->store->run(&program_, nullptr);
    operations(false);
    bed_->store->run(nullptr, nullptr);
  }

  // A turn begins: what others did meanwhile is no lateness.
  void begin_turn() { schedule_ = Clock::now(); }
  // Computes nothing, and looks at the contents.
  void verify() { (void)step(false, true); }
  Step step(bool computes = true, bool checks = false) {
    TensorStore& store = *bed_->store;
    const LinkBytes before = store.traffic();
    const double waited = store.waited_seconds();
    const auto begin = schedule_;
    on_schedule([&] {
      if (with_program_) {
        store.run(&program_, &program_);
        started_ = true;
      } else {
        store.step_begin();
      }
    });
    operations(computes, checks);
    if (!with_program_) on_schedule([&] { store.step_end(); });
    const LinkBytes moved = store.traffic() - before;
    return {seconds_between(begin, schedule_), store.waited_seconds() - waited,
            static_cast<double>(moved.nvme_read() + moved.nvme_write())};
  }
  std::string state() const { return bed_->store->state(); }

 private:
  template <class Call>
  void on_schedule(Call&& call) {
    const auto begin = Clock::now();
    call();
    schedule_ += Clock::now() - begin;
  }
  void operations(bool computes, bool checks = false) {
    for (const AccessStep& a : accesses_) {
      on_schedule([&] {
        leases_.clear();
        if (with_program_) {
          bed_->store->acquire_op(nullptr, leases_);
        } else {
          leases_.push_back(bed_->store->acquire(a.segment, a.tier, a.access));
        }
      });
      if (checks) Bed::check(leases_.front(), a.segment);
      if (computes) {
        schedule_ +=
            std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(o_.compute_seconds));
        compute(o_, schedule_);
      }
    }
    on_schedule([&] { leases_.clear(); });
  }

  const Options& o_;
  bool with_program_, started_ = false;
  Tier tier_;
  std::vector<AccessStep> accesses_;
  Program program_{"step"};
  std::unique_ptr<Bed> bed_;
  std::vector<Lease> leases_;
  Clock::time_point schedule_{};
};

struct Case {
  std::string name;
  double share = 0, bandwidth = 0;
  std::unique_ptr<Run> run;
  std::vector<double> seconds, stall, transfer;
};

struct Kind {
  Tier tier;
  bool writes, program;
};

std::string name_of(const Kind& k) {
  return fmt::format("{}, {}, {}", k.program ? "program" : "recorded",
                     k.tier == Tier::kDevice ? "device" : "host", k.writes ? "1/3 written" : "reads");
}

// What a step moves, with a drive as fast as memory allows to keep it from mattering.
double bytes_of_step(const Options& o, const Kind& k) {
  const double plenty = 2 * static_cast<double>(o.tensors) * static_cast<double>(o.bytes) /
                        (o.compute_seconds * static_cast<double>(o.tensors));
  Run run(o, k.tier, k.writes, k.program, plenty);
  run.begin_turn();
  run.verify();
  for (int i = 0; i < 2; ++i) (void)run.step();
  std::vector<double> bytes;
  for (int i = 0; i < 3; ++i) bytes.push_back(run.step().transfer_bytes);
  return median(bytes);
}

void run(const Options& o) {
  nlohmann::json json = {{"bench", "store_overlap"},
                         {"rounds", o.rounds},
                         {"steps", o.steps},
                         {"tensors", o.tensors},
                         {"tensor_bytes", o.bytes},
                         {"compute_seconds", o.compute_seconds},
                         {"compute_is", o.busy ? "busy" : "sleep"},
                         {"host_bytes", kHostTensors * o.bytes},
                         {"device_bytes", kDeviceTensors * o.bytes}};
  json.update(provenance());
  std::fprintf(stderr, "%-32s %6s %10s %10s %10s %9s %8s %8s\n", "", "share", "compute", "transfer", "step",
               "MAD", "stall", "ratio");
  for (const Tier tier : {Tier::kHost, Tier::kDevice}) {
    for (const bool writes : {false, true}) {
      for (const bool program : {false, true}) {
        const Kind kind{tier, writes, program};
        if (!o.only.empty() && name_of(kind).find(o.only) == std::string::npos) continue;
        const double bytes = bytes_of_step(o, kind);
        std::vector<Case> cases;
        for (const double share : o.shares) {
          Case c{name_of(kind), share, bytes / (share * o.compute_seconds * o.tensors), nullptr, {}, {}, {}};
          c.run = std::make_unique<Run>(o, tier, writes, program, c.bandwidth);
          cases.push_back(std::move(c));
        }
        for (Case& c : cases) {
          c.run->begin_turn();
          c.run->verify();
          (void)c.run->step();
        }
        for (int r = 0; r < o.rounds; ++r) {
          for (Case& c : cases) {
            c.run->begin_turn();
            (void)c.run->step();  // it may have fetched ahead while others had their turn
            for (int s = 0; s < o.steps; ++s) {
              const Step step = c.run->step();
              c.seconds.push_back(step.seconds);
              c.stall.push_back(step.stall);
              c.transfer.push_back(step.transfer_bytes / c.bandwidth);
            }
          }
        }
        const double compute_seconds = o.compute_seconds * o.tensors;
        for (Case& c : cases) {
          const double step = median(c.seconds), stall = median(c.stall) / step;
          const double transfer = median(c.transfer), ratio = step / std::max(compute_seconds, transfer);
          std::fprintf(stderr, "%-32s %5.0f%% %8.1fms %8.1fms %8.1fms %7.1fms %7.2f%% %8.3f\n",
                       c.name.c_str(), 100 * c.share, 1e3 * compute_seconds, 1e3 * transfer, 1e3 * step,
                       1e3 * mad(c.seconds), 100 * stall, ratio);
          json["results"].push_back({{"name", c.name},
                                     {"share", c.share},
                                     {"bytes_per_second", c.bandwidth},
                                     {"compute_seconds", compute_seconds},
                                     {"transfer_seconds", transfer},
                                     {"step_seconds", step},
                                     {"mad_seconds", mad(c.seconds)},
                                     {"stall_seconds", median(c.stall)},
                                     {"stall_share", stall},
                                     {"ratio", ratio}});
          if (o.dump) std::fprintf(stderr, "%s\n", c.run->state().c_str());
        }
      }
    }
  }
  json["load_at_end"] = first_line("/proc/loadavg", "");
  std::printf("%s\n", json.dump().c_str());
}

}  // namespace
}  // namespace zg::bench

int main(int argc, char** argv) {
  zg::bench::Options o;
  std::string bytes = "4MiB";
  double milliseconds = 6;
  CLI::App app{"Does the store hide transfers behind compute?"};
  app.add_option("--rounds", o.rounds)->check(CLI::Range(1, 1000));
  app.add_option("--steps", o.steps, "counted steps of a turn")->check(CLI::Range(1, 1000));
  app.add_option("--tensors", o.tensors)->check(CLI::Range(24, 100000));
  app.add_option("--tensor", bytes, "bytes of each");
  app.add_option("--compute-ms", milliseconds, "for each tensor")->check(CLI::PositiveNumber);
  app.add_flag("--busy", o.busy, "compute by waiting busily instead of sleeping");
  app.add_option("--shares", o.shares, "transfer time over compute time")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  app.add_option("--only", o.only, "cases whose name has this in it");
  app.add_flag("--dump", o.dump, "print the store's state after each case");
  CLI11_PARSE(app, argc, argv);
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  o.compute_seconds = milliseconds * 1e-3;
  try {
    o.bytes = zg::bench::bytes_of("--tensor", bytes);
    zg::bench::run(o);
  } catch (const zg::Error& e) {
    std::fprintf(stderr, "bench_store_overlap: %s\n", e.what());
    return e.exit_code();
  }
}
