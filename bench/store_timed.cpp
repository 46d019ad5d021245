// How well a timed run (timed_run.hpp) foretells the time of the store itself. Random programs that look like
// training steps run through both: real moves between host memory and drives of memory whose bandwidth is
// set, with compute as a sleep and updates that take no time.
//
//   bench_store_timed [--programs 200] [--rounds 3] [--step-seconds 1] [--seed 1] [--gains 40]
//
// The ratio of the drives' time to compute is between 0.3 and 3, for half of the programs between 0.8 and
// 1.3. --gains: so many of the programs run with one more drive, too.
//
// A step of the store is slower than foretold by as much as the machine wakes its threads late, so the same
// sleeps without a store are timed in the same rounds ("alone"): a step can be no faster than they are.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <random>
#include <thread>

#include "bench/store_support.hpp"
#include "ziggurat/io/depth.hpp"
#include "ziggurat/store/dry_run.hpp"
#include "ziggurat/store/timed_run.hpp"

namespace zg::bench {
namespace {

constexpr std::int64_t kSegment = 2 * kMiB;
constexpr std::int64_t kSmall = 4096;  // of tensors that stay at the host
constexpr int kWarmUp = 2, kSteps = 2;

struct Options {
  int programs = 200, rounds = 3, gains = 40;
  double step_seconds = 1;
  std::uint64_t seed = 1;
};

// A step of a few layers and a head.
struct Shape {
  int drives = 1;
  std::vector<double> forward;  // seconds by layer; backward takes twice as long
  double head = 0;              // seconds
  std::vector<int> state;       // segments by layer, the head's last
  std::vector<int> weights;     // segments by layer on the drives; 0: small ones at the host
  bool activations = false;     // a segment of each layer, written forwards, read backwards
  bool early = false;           // updates follow the gradients; else they come before the next forward
  double host = 0, read_ahead = 0, io_share = 0;
};

Shape random_shape(std::mt19937_64& random, const Options& o) {
  const auto real = [&](double least, double most) {
    return std::uniform_real_distribution<double>(least, most)(random);
  };
  const auto whole = [&](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  Shape s;
  s.drives = whole(1, 3);
  const int layers = whole(3, 10);
  const bool on_drives = whole(0, 2) == 0;
  double sum = 0;
  for (int l = 0; l < layers; ++l) {
    s.forward.push_back(real(0.5, 1.5));
    s.state.push_back(whole(2, 8));
    s.weights.push_back(on_drives ? whole(1, 3) : 0);
    sum += 3 * s.forward.back();
  }
  s.state.push_back(whole(2, 20));
  s.head = real(0.5, 6);
  sum += s.head;
  for (double& seconds : s.forward) seconds *= o.step_seconds / sum;
  s.head *= o.step_seconds / sum;
  s.activations = whole(0, 2) == 0;
  s.early = whole(0, 1) == 0;
  s.host = real(0.3, 0.8), s.read_ahead = real(0.15, 0.3);
  s.io_share = whole(0, 1) == 0 ? real(0.8, 1.3) : std::exp(real(std::log(0.3), std::log(3.0)));
  return s;
}

struct Op {
  double seconds = 0;
  bool update = false;
};

// The tensors and the program of a shape.
struct Step {
  explicit Step(const Shape& s) : table(s.drives) {
    const int layers = static_cast<int>(s.forward.size());
    for (int l = 0; l <= layers; ++l) {
      const int on_drives = l < layers ? s.weights[static_cast<std::size_t>(l)] : 0;
      weights.push_back(on_drives > 0 ? add("weight", l, kSegment, on_drives, Tier::kNvme)
                                      : add("weight", l, kSmall, 1, Tier::kHost));
      gradients.push_back(add("gradient", l, kSmall, 1, Tier::kHost));
      state.push_back(add("state", l, kSegment, s.state[static_cast<std::size_t>(l)], Tier::kNvme));
      if (s.activations && l < layers) activations.push_back(add("activation", l, kSegment, 1, Tier::kNvme));
    }
    for (SegmentId id = 0; id < table.segment_count(); ++id)
      initialise.add_op(std::vector<AccessStep>{{id, Tier::kHost, Access::kOverwrite}});
    initialise.finish(table.segment_count());
    const auto forward = [&](int l) {
      std::vector<AccessStep> a = all_of(weights, l, Access::kRead);
      if (s.activations)
        a.push_back({activations[static_cast<std::size_t>(l)], Tier::kHost, Access::kOverwrite});
      op(a, {s.forward[static_cast<std::size_t>(l)]});
    };
    const auto update = [&](int l) {
      const SegmentId first = state[static_cast<std::size_t>(l)];
      for (int i = 0; i < s.state[static_cast<std::size_t>(l)]; ++i) {
        std::vector<AccessStep> a = {{gradients[static_cast<std::size_t>(l)], Tier::kHost, Access::kRead},
                                     {first + i, Tier::kHost, Access::kWrite}};
        if (i == 0) {
          for (const AccessStep& w : all_of(weights, l, Access::kWrite)) a.push_back(w);
        }
        op(a, {0, true});
      }
    };
    if (!s.early) update(layers), update(0);
    for (int l = 0; l < layers; ++l) {
      if (!s.early && l + 1 < layers) update(l + 1);
      forward(l);
    }
    op({{weights.back(), Tier::kHost, Access::kRead}, {gradients.back(), Tier::kHost, Access::kWrite}},
       {s.head});
    for (int l = layers - 1; l >= 0; --l) {
      std::vector<AccessStep> a = all_of(weights, l, Access::kRead);
      a.push_back({gradients[static_cast<std::size_t>(l)], Tier::kHost, Access::kWrite});
      if (s.activations)
        a.push_back({activations[static_cast<std::size_t>(l)], Tier::kHost, Access::kRead, true});
      op(a, {2 * s.forward[static_cast<std::size_t>(l)]});
      if (s.early && l + 1 < layers) update(l + 1);
    }
    if (s.early) update(0), update(layers);
    program.finish(table.segment_count());
    std::int64_t large = 0, largest = 0;
    for (std::int32_t i = 0; i < program.op_count(); ++i) {
      std::int64_t held = 0;
      for (const AccessStep& a : program.op(i)) held += table.segment(a.segment).charge;
      largest = std::max(largest, held);
    }
    for (SegmentId id = 0; id < table.segment_count(); ++id)
      large += table.segment(id).lowest == Tier::kNvme ? table.segment(id).charge : 0;
    const std::int64_t small = table.total_charge(Tier::kHost) - large;
    memory = std::max(static_cast<std::int64_t>(s.host * static_cast<double>(large)), 4 * largest) /
                 kSegment * kSegment +
             small;
    resident = std::max(memory - static_cast<std::int64_t>(s.read_ahead * static_cast<double>(memory)),
                        2 * largest + small);
  }

  TensorTable table;
  Program initialise{"initialise"}, program{"step"};
  std::vector<Op> ops;
  std::int64_t memory = 0, resident = 0;

 private:
  SegmentId add(const char* what, int layer, std::int64_t bytes, int segments, Tier lowest) {
    const TensorId id = table.add({.name = fmt::format("{}.{}", what, layer),
                                   .dtype = DType::kU8,
                                   .count = bytes * segments,
                                   .lowest = lowest,
                                   .segment_elements = bytes});
    return table.tensor(id).first_segment;
  }
  std::vector<AccessStep> all_of(const std::vector<SegmentId>& first, int layer, Access access) const {
    std::vector<AccessStep> all;
    const SegmentId begin = first[static_cast<std::size_t>(layer)];
    const std::int32_t count = table.tensor(table.segment(begin).tensor).segments;
    for (SegmentId id = begin; id < begin + count; ++id) all.push_back({id, Tier::kHost, access});
    return all;
  }
  void op(const std::vector<AccessStep>& accesses, const Op& work) {
    program.add_op(accesses, static_cast<std::int64_t>(1e6 * work.seconds));
    ops.push_back(work);
  }

  std::vector<SegmentId> weights, gradients, state, activations;  // first segments, by layer
};

Budgets budgets_of(std::int64_t host) {
  return {.device = kSmall, .host = host};
}

// Bytes that a step reads and writes on the drives.
double moved(const Step& step, std::vector<DecidedProgram>* decided) {
  Residency residency(step.table, budgets_of(step.resident));
  ZG_ASSERT(!dry_run(residency, step.initialise), "a program that finds no room");
  for (int i = 0; i < kWarmUp; ++i)
    ZG_ASSERT(!dry_run(residency, step.program), "a program that finds no room");
  LinkBytes bytes;
  for (int i = 0; i <= kSteps; ++i) {
    DecidedProgram one(residency, step.program);
    bytes = one.traffic();
    if (decided != nullptr) decided->push_back(std::move(one));
  }
  return static_cast<double>(bytes.nvme_read() + bytes.nvme_write());
}

double foretold(const Step& step, double bandwidth, int depth) {
  std::vector<DecidedProgram> decided;
  (void)moved(step, &decided);
  TimedMachine m;
  m.capacities = {1};  // of the drives' time
  for (const Link link : {kNvmeRead, kNvmeWrite}) m.links[link].per_byte = {{0, 1 / bandwidth}};
  m.memory = budgets_of(step.memory);
  m.prefetch_depth = depth;
  m.drives_take_turns = true;
  m.drive_window = step.table.drives() * io::kMostBytesInFlight;
  m.streams = 2;
  m.goes_on = {false, true};
  std::vector<TimedOp> ops;
  for (const Op& op : step.ops) ops.push_back({op.update ? 1 : 0, {op.seconds, {}}});
  std::vector<TimedProgram> timed;
  for (const DecidedProgram& one : decided) timed.push_back({&one, ops});
  const TimedResult r = timed_run(step.table, m, timed);
  return (r.ends.back() - r.ends.front()) / kSteps;
}

void sleep(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// The program on a store.
class Real {
 public:
  Real(const Step& step, double bandwidth, int depth) : step_(step) {
    io::EngineOptions engine;
    engine.backend = io::Backend::kRam;
    engine.require = true;
    const int drives = step.table.drives();
    engine.ram.bytes_per_second = bandwidth / drives;
    io_ = io::make_engine(engine, std::vector<io::DriveOptions>(static_cast<std::size_t>(drives),
                                                                {.bytes = step.table.drive_bytes()}));
    device_ = make_host_device(kSmall, nullptr);
    host_ = make_host_arena("host memory", step.memory);
    TensorStore::Options options;
    options.table = &step.table;
    options.device = device_.get();
    options.host = host_.get();
    options.io = io_.get();
    options.budgets = budgets_of(step.resident);
    options.prefetch_depth = depth;
    options.verify = false;
    options.drive_shares.assign(static_cast<std::size_t>(drives), 1);
    store_ = std::make_unique<TensorStore>(options);
    run(step.initialise, &step.program);
    for (int i = 0; i < kWarmUp; ++i) run(step.program, &step.program);
  }
  ~Real() {
    run(step_.program, nullptr);
    optimizer_.synchronize();
    store_->run(nullptr, nullptr);
  }
  double seconds() {
    run(step_.program, &step_.program);
    const auto begin = Clock::now();
    for (int i = 0; i < kSteps; ++i) run(step_.program, &step_.program);
    return seconds_between(begin, Clock::now()) / kSteps;
  }

 private:
  void run(const Program& program, const Program* next) {
    store_->run(&program, next);
    for (std::int32_t i = 0; i < program.op_count(); ++i) {
      const Op op = &program == &step_.program ? step_.ops[static_cast<std::size_t>(i)] : Op{};
      HostStream& stream = op.update ? optimizer_ : compute_;
      store_->acquire_op(&stream, leases_);
      stream.enqueue("work", [seconds = op.seconds] {
        if (seconds > 0) sleep(seconds);
      });
      const Event done = stream.record();
      for (Lease& lease : leases_) lease.release_after(stream, done);
    }
    compute_.synchronize();
  }

  const Step& step_;
  std::unique_ptr<io::Engine> io_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Arena> host_;
  HostStream compute_{"compute", HostStream::Mode::kThread},
      optimizer_{"optimizer", HostStream::Mode::kThread};
  std::unique_ptr<TensorStore> store_;
  std::vector<Lease> leases_;
};

double alone(const Step& step) {
  HostStream compute("compute", HostStream::Mode::kThread);
  const auto begin = Clock::now();
  for (const Op& op : step.ops) {
    if (op.seconds > 0) compute.enqueue("work", [seconds = op.seconds] { sleep(seconds); });
  }
  compute.synchronize();
  return seconds_between(begin, Clock::now());
}

// The share of pairs that both put into the same order, less the share of those that they do not.
double kendall_tau(const std::vector<double>& a, const std::vector<double>& b) {
  double same = 0, pairs = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const double sign = (a[i] - a[j]) * (b[i] - b[j]);
      same += sign > 0 ? 1 : sign < 0 ? -1 : 0, ++pairs;
    }
  }
  return pairs > 0 ? same / pairs : 1;
}

struct Measured {
  double foretold = 0, seconds = 0, mad = 0, alone = 0;
};

Measured measure(const Step& step, double bandwidth, const Options& o) {
  constexpr int kDepth = 64;
  Measured m;
  m.foretold = foretold(step, bandwidth, kDepth);
  Real real(step, bandwidth, kDepth);
  std::vector<double> seconds, slept;
  for (int r = 0; r < o.rounds; ++r) {
    seconds.push_back(real.seconds());
    slept.push_back(alone(step));
  }
  m.seconds = median(seconds), m.mad = mad(seconds), m.alone = median(slept);
  return m;
}

void run(const Options& o) {
  std::mt19937_64 random(o.seed);
  nlohmann::json json = {{"bench", "store_timed"},
                         {"programs", o.programs},
                         {"rounds", o.rounds},
                         {"seed", o.seed},
                         {"step_seconds", o.step_seconds}};
  json.update(provenance());
  std::vector<double> foretold_seconds, measured_seconds, errors, late, gain_errors;
  std::fprintf(stderr, "%7s %6s %8s %8s %8s %8s %8s\n", "drives", "ratio", "foretold", "measured", "MAD",
               "alone", "error");
  for (int p = 0; p < o.programs; ++p) {
    Shape shape = random_shape(random, o);
    const Step step(shape);
    const double bytes = moved(step, nullptr);
    // A program that moves nothing says nothing of drives.
    const double bandwidth =
        std::max(bytes, static_cast<double>(kSegment)) / (shape.io_share * o.step_seconds);
    const Measured m = measure(step, bandwidth, o);
    const double error = m.foretold / m.seconds - 1;
    foretold_seconds.push_back(m.foretold), measured_seconds.push_back(m.seconds);
    errors.push_back(std::abs(error)), late.push_back(m.alone / o.step_seconds - 1);
    std::fprintf(stderr, "%7d %6.2f %8.4f %8.4f %8.4f %8.4f %+7.1f%%\n", shape.drives, shape.io_share,
                 m.foretold, m.seconds, m.mad, m.alone, 100 * error);
    nlohmann::json one = {{"drives", shape.drives},
                          {"ratio", shape.io_share},
                          {"foretold", m.foretold},
                          {"measured", m.seconds},
                          {"mad", m.mad},
                          {"alone", m.alone},
                          {"layers", shape.forward.size()},
                          {"early", shape.early}};
    if (p < o.gains) {
      Shape more = shape;
      ++more.drives;
      const Step with(more);
      const Measured n = measure(with, bandwidth * more.drives / shape.drives, o);
      const double foretold_gain = 1 - n.foretold / m.foretold, gain = 1 - n.seconds / m.seconds;
      gain_errors.push_back(std::abs(foretold_gain - gain));
      one["gain_foretold"] = foretold_gain, one["gain_measured"] = gain;
      std::fprintf(stderr, "        one more drive: foretold %.1f%% less, measured %.1f%%\n",
                   100 * foretold_gain, 100 * gain);
    }
    json["results"].push_back(one);
  }
  const auto within = [&](double most) {
    return static_cast<double>(
               std::count_if(errors.begin(), errors.end(), [&](double e) { return e <= most; })) /
           static_cast<double>(errors.size());
  };
  json["error"] = {{"median", median(errors)},
                   {"p90", quantile(errors, 0.9)},
                   {"most", quantile(errors, 1)},
                   {"within_3_percent", within(0.03)},
                   {"within_5_percent", within(0.05)}};
  json["kendall_tau"] = kendall_tau(foretold_seconds, measured_seconds);
  json["alone_late"] = {{"median", median(late)}, {"p90", quantile(late, 0.9)}};
  if (!gain_errors.empty())
    json["gain_error"] = {{"median", median(gain_errors)}, {"p90", quantile(gain_errors, 0.9)}};
  json["load_at_end"] = first_line("/proc/loadavg", "");
  std::printf("%s\n", json.dump().c_str());
}

}  // namespace
}  // namespace zg::bench

int main(int argc, char** argv) {
  zg::bench::Options o;
  CLI::App app{"How well does a timed run foretell the store's time?"};
  app.add_option("--programs", o.programs)->check(CLI::Range(1, 10000));
  app.add_option("--rounds", o.rounds, "of two steps; the median counts")->check(CLI::Range(1, 1000));
  app.add_option("--step-seconds", o.step_seconds, "compute of a step")->check(CLI::PositiveNumber);
  app.add_option("--seed", o.seed);
  app.add_option("--gains", o.gains, "programs that also run with one more drive")
      ->check(CLI::Range(0, 10000));
  CLI11_PARSE(app, argc, argv);
  try {
    zg::bench::run(o);
  } catch (const zg::Error& e) {
    std::fprintf(stderr, "bench_store_timed: %s\n", e.what());
    return e.exit_code();
  }
}
