// How much of what drives offer does a training step use when the drives are what bounds it? Training on
// drives of memory whose speed is programmed, so that what they offered is known exactly: eta is the bytes
// that a window of steps moved over the bytes that the drives could have moved in it (full_speed_seconds()).
// Each cell (scenario x host budget x clipping) compares what the configuration gives by itself with fixed
// queue depths.
// --help has the rest.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/store_support.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/store/dry_run.hpp"
#include "ziggurat/train/machine.hpp"
#include "ziggurat/train/trainer.hpp"

namespace {

using nlohmann::ordered_json;
using zg::Clock;
using zg::bench::median;
using zg::io::RamModel;

constexpr const char* kHelp = R"(What it prints, one row a cell:
  io s      seconds that the step's NVMe bytes take on the programmed drives: half duplex read + written bytes
            over the sum of the drives' mean rates, full duplex the larger of the two
  step s    seconds that the step took
  stall     share of it in which nothing was computed, since bytes were waited for
  eta       bytes moved / bytes that the drives offered in just that window, stalls and changes taken out; what
            was in flight at its ends counts where it ended, so a short window may come out above 1
  best      the fixed depth (aio.queue_depth=N) with the highest eta
  ratio     eta of the default / eta of the best fixed depth; 1: nothing was left to tune
  time      step s of the fastest fixed depth / step s of the default. Another depth has the plan keep other room
            free (tiers.read_ahead), and so moves other bytes: a higher eta may be a slower step
  halves    the seconds that the two halves of a step need / step s. Each half (up to the head, and from it on)
            needs the longer of its NVMe bytes at the drives' speed and of its compute as it was measured on this
            processor. Near 1 beside a low eta: the processor binds one of the halves. Read-ahead moves some bytes
            from one half to the other, so 1 is no exact limit
  any       the same with the fewest NVMe bytes before the head that any decisions could reach: what the half
            reads that was there before it, and what it writes that is needed after it, less all memory. The
            second half counts its compute alone. No policy makes a step shorter than this
Columns without another name are of the default: what the configuration gives when "aio" names nothing but
the back end. Where stall is small the processor is what bounds the step, and eta says nothing of the drives.

Scenarios:
)";
constexpr const char* kExamples = R"(
Each measurement is a run of its own; in a round every setting has its turn, so that all see the same
machine; medians are over the rounds. The model and its data are made on the spot; a configuration file that
is named goes on top, and --set on top of that.

Examples:
  bench_drive_bound --tiny                                   does it work? A few seconds
  bench_drive_bound --scenario half --host 96,640 --depths 8,32,128 --rounds 1 --steps 4
  bench_drive_bound --scenario stalls --clip none --set tiers.read_ahead=0.5
  bench_drive_bound --rounds 5 --out bench/results/NAME.json
)";

struct Scenario {
  std::string name, text;
  std::vector<RamModel> drives;
};

RamModel drive_of(double gigabytes_per_second) {
  return {.bytes_per_second = gigabytes_per_second * 1e9, .latency_seconds = 0.5e-3};
}

std::vector<Scenario> make_scenarios() {
  RamModel duplex = drive_of(1.5), stalls = drive_of(1.5), changes = drive_of(1.5);
  duplex.duplex = true;
  stalls.stall_every_seconds = 2, stalls.stall_seconds = 0.3;
  changes.change_every_seconds = 3, changes.change_factor = 3;
  return {{"half", "one half-duplex drive of 1.5 GB/s, latency 0.5 ms (as of all)", {drive_of(1.5)}},
          {"duplex", "the same, full duplex", {duplex}},
          {"two", "two drives of 1.0 and 0.5 GB/s", {drive_of(1.0), drive_of(0.5)}},
          {"four",
           "four drives of 0.6, 0.45, 0.3 and 0.15 GB/s",
           {drive_of(0.6), drive_of(0.45), drive_of(0.3), drive_of(0.15)}},
          {"stalls", "half duplex, and nothing for 0.3 s every 2 s", {stalls}},
          {"changes", "half duplex, and every 3 s a third of the speed, or all of it again", {changes}}};
}

struct Options {
  std::vector<std::string> files, overrides, scenarios, clips{"1.0", "none"};
  std::vector<std::int64_t> hosts;  // MiB; empty: as the size of the model asks
  std::vector<int> depths{4, 8, 16, 32, 64, 128, 256};
  std::int64_t layers = 12, width = 768, vocab = 8192, tokens = 64, device = 160;
  std::int64_t rounds = 3, steps = 6, warmup = 2;
  double rate_factor = 1;  // of all drives
  bool tiny = false;
  std::string out, directory;
};

// A model that is trained in a moment, with budgets too small for it and drives slow enough to bound it.
void make_tiny(Options& o) {
  o.layers = 2, o.width = 64, o.vocab = 512, o.tokens = 16;
  o.device = 1;
  o.rate_factor = 0.02;
  o.rounds = 1, o.steps = 2, o.warmup = 1;
  o.depths = {8};
  if (o.hosts.empty()) o.hosts = {1};
}

struct Cell {
  const Scenario* scenario;
  std::int64_t host;
  std::string clip;
};

struct Setting {
  int depth = 0;  // 0: the default
  std::string name() const { return depth == 0 ? "default" : fmt::format("depth {}", depth); }
};

// NVMe bytes of a step as its plan decides them: those before the head, and those from it on.
struct Halves {
  double read[2] = {0, 0}, written[2] = {0, 0};
  double least_read = 0, least_written = 0;  // before the head, whatever is decided
  double needed(int half, bool duplex) const {
    return duplex ? std::max(read[half], written[half]) : read[half] + written[half];
  }
};

// Steps of one run, between two looks at the clock.
struct Window {
  double seconds = 0, step = 0, stall = 0, io = 0, eta = 0;
  // Seconds that the halves of a step need, and with any decisions; and their share of `step`.
  double halves = 0, any = 0, of_halves = 0, of_any = 0;
  double read_bytes = 0, write_bytes = 0, offered_bytes = 0;
  zg::StallTimes causes;
  zg::Phases phases;  // of a step
  Halves bytes;
};

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "zg-drive-bound-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw zg::Error(zg::Errc::kIo, name, zg::errno_text(errno));
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

void write_tokens(const Options& o) {
  std::vector<std::uint16_t> tokens(1 << 18);
  const zg::NamedRandom random(1, "tokens");
  for (std::size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<std::uint16_t>(random.below(i, static_cast<std::uint64_t>(o.vocab)));
  zg::write_file_atomically(o.directory + "/tokens.bin",
                            std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2));
}

// What every run has; files of the user's go on top of it.
void write_base(const Options& o) {
  ordered_json j;
  j["model"] = {
      {"arch", "gpt2"},    {"vocab_size", o.vocab}, {"n_positions", std::max<std::int64_t>(o.tokens, 64)},
      {"n_embd", o.width}, {"n_layer", o.layers},   {"n_head", std::max<std::int64_t>(1, o.width / 64)}};
  j["data"] = {{"train", o.directory + "/tokens.bin"}, {"seq_len", o.tokens}, {"validation", 0}};
  j["steps"] = 1000000;
  j["train_batch_size"] = 1;
  j["optimizer"] = {{"type", "AdamW"}, {"params", {{"lr", 1e-4}}}};
  j["bf16"] = {{"enabled", true}};
  j["output"] = {{"dir", o.directory}};
  zg::write_file_atomically(o.directory + "/drive_bound.json", j.dump(2));
}

std::vector<RamModel> drives_of(const Options& o, const Cell& cell) {
  std::vector<RamModel> drives = cell.scenario->drives;
  for (RamModel& drive : drives) drive.bytes_per_second *= o.rate_factor;
  return drives;
}

// The cell's part of the configuration and the setting's; no path is looked at.
std::vector<std::string> overrides_of(const Options& o, const Cell& cell, const Setting& setting) {
  auto drives = ordered_json::array();
  for (const RamModel& m : drives_of(o, cell)) {
    drives.push_back({{"path", fmt::format("drive{}", drives.size())},
                      {"ram",
                       {{"bytes_per_second", m.bytes_per_second},
                        {"latency_seconds", m.latency_seconds},
                        {"duplex", m.duplex},
                        {"stall_every_seconds", m.stall_every_seconds},
                        {"stall_seconds", m.stall_seconds},
                        {"change_every_seconds", m.change_every_seconds},
                        {"change_factor", m.change_factor}}}});
  }
  std::vector<std::string> all = {fmt::format("tiers.device={}MiB", o.device),
                                  fmt::format("tiers.host={}MiB", cell.host), "tiers.nvme=" + drives.dump(),
                                  "gradient_clipping=" + (cell.clip == "none" ? "0" : cell.clip),
                                  "aio.backend=ram"};
  if (setting.depth > 0) all.push_back(fmt::format("aio.queue_depth={}", setting.depth));
  all.insert(all.end(), o.overrides.begin(), o.overrides.end());
  return all;
}

zg::io::LinkCounters moved_by(const zg::io::Engine& io) {
  zg::io::LinkCounters sum;
  for (int d = 0; d < io.drive_count(); ++d) {
    const zg::io::LinkCounters c = io.counters(d);
    sum.read_bytes += c.read_bytes;
    sum.write_bytes += c.write_bytes;
  }
  return sum;
}

// The drives as the run has them: --set may have changed them.
std::vector<RamModel> drives_of(const zg::RunConfig& config) {
  std::vector<RamModel> drives;
  for (const zg::io::DriveOptions& drive : config.tiers.nvme)
    drives.push_back(drive.ram.value_or(config.tiers.ram));
  return drives;
}

// The bytes that were moved between two looks at the counters, over what the drives can and could.
Window window_of(const zg::RunConfig& config, const zg::io::LinkCounters& before,
                 const zg::io::LinkCounters& after, Clock::time_point from, Clock::time_point to) {
  Window w;
  w.seconds = zg::seconds_between(from, to);
  w.read_bytes = static_cast<double>(after.read_bytes - before.read_bytes);
  w.write_bytes = static_cast<double>(after.write_bytes - before.write_bytes);
  const std::vector<RamModel> drives = drives_of(config);
  double rate = 0;
  for (const RamModel& drive : drives) {
    rate += mean_bytes_per_second(drive);
    w.offered_bytes += drive.bytes_per_second * full_speed_seconds(drive, from, to);
  }
  const double needed =
      drives.front().duplex ? std::max(w.read_bytes, w.write_bytes) : w.read_bytes + w.write_bytes;
  w.io = needed / rate;
  w.eta = needed / w.offered_bytes;
  return w;
}

class HalvesOfStep final : public zg::DryRunObserver {
 public:
  HalvesOfStep(const zg::TensorTable& table, const zg::StepProgram& program)
      : table_(table), program_(program) {}
  std::optional<zg::NoRoom> before(std::int32_t op) override {
    if (program_.ops[static_cast<std::size_t>(op)].kind == zg::OpKind::kHead) half_ = 1;
    return std::nullopt;
  }
  void after(std::int32_t, std::span<const zg::Action> moves) override {
    for (const zg::Action& move : moves) {
      if (move.kind != zg::Action::Kind::kCopy) continue;
      const auto bytes = static_cast<double>(table_.segment(move.segment).charge);
      if (move.from == zg::Tier::kNvme) halves.read[half_] += bytes;
      if (move.tier == zg::Tier::kNvme) halves.written[half_] += bytes;
    }
  }
  Halves halves;

 private:
  const zg::TensorTable& table_;
  const zg::StepProgram& program_;
  int half_ = 0;
};

// What must be read and written before the head, at least, where `memory` bytes are above NVMe: they can hold
// so much of what the half reads when it begins, and of what it has written when it ends.
void find_least(const zg::TensorTable& table, const zg::StepProgram& step, std::int64_t memory,
                Halves& halves) {
  std::vector<zg::AccessStep> first(static_cast<std::size_t>(table.segment_count()), {.segment = -1}),
      last = first, after = first;
  std::vector<bool> written(first.size());
  bool second_half = false;
  for (std::int32_t op = 0; op < step.program.op_count(); ++op) {
    second_half = second_half || step.ops[static_cast<std::size_t>(op)].kind == zg::OpKind::kHead;
    for (const zg::AccessStep& a : step.program.op(op)) {
      const auto id = static_cast<std::size_t>(a.segment);
      zg::AccessStep& begin = second_half ? after[id] : first[id];
      if (begin.segment < 0) begin = a;
      if (second_half) continue;
      last[id] = a;
      if (a.access != zg::Access::kRead) written[id] = true;
    }
  }
  for (std::size_t id = 0; id < first.size(); ++id) {
    const zg::Segment& segment = table.segment(static_cast<zg::SegmentId>(id));
    if (first[id].segment < 0 || segment.lowest != zg::Tier::kNvme) continue;
    const auto bytes = static_cast<double>(segment.charge);
    if (first[id].access != zg::Access::kOverwrite) halves.least_read += bytes;
    const zg::AccessStep& next = after[id].segment >= 0 ? after[id] : first[id];
    if (written[id] && !last[id].last && next.access != zg::Access::kOverwrite) halves.least_written += bytes;
  }
  halves.least_read = std::max(0.0, halves.least_read - static_cast<double>(memory));
  halves.least_written = std::max(0.0, halves.least_written - static_cast<double>(memory));
}

// Of a step in the steady state, which a few steps reach.
Halves halves_of(const zg::RunPlan& plan) {
  const zg::TensorTable& table = plan.layout->table;
  const zg::StepPrograms& programs = *plan.programs;
  zg::Residency residency(table, plan.resident);
  std::vector<zg::Action> ignored;
  const auto fits = [](const std::optional<zg::NoRoom>& failure) {
    if (failure) throw zg::Error(zg::Errc::kMemory, "plan", "finds no room in its own budgets", "report it");
  };
  fits(dry_run(residency, programs.initialize.program));
  residency.demote_all(ignored);
  fits(dry_run(residency, programs.first.program));
  Halves halves;
  for (int step = 0; step < 4; ++step) {
    HalvesOfStep counted(table, programs.step);
    fits(dry_run(residency, programs.step.program, &counted));
    halves = counted.halves;
  }
  find_least(table, programs.step, plan.budgets.device + plan.budgets.host, halves);
  return halves;
}

// Sets the seconds that the halves of a step need where the drives give `rate`. The updates run beside the
// half in which they are.
void find_seconds(Window& w, bool duplex, double rate, zg::UpdateTiming timing) {
  const bool deferred = timing == zg::UpdateTiming::kDeferred, early = timing == zg::UpdateTiming::kEarly;
  const double forward = std::max(w.phases.forward, deferred ? w.phases.optimizer : 0);
  const double backward = std::max(w.phases.backward, early ? w.phases.optimizer : 0);
  w.halves = std::max(w.bytes.needed(0, duplex) / rate, forward) +
             std::max(w.bytes.needed(1, duplex) / rate, backward);
  const double read = w.bytes.least_read, written = w.bytes.least_written;
  w.any = std::max((duplex ? std::max(read, written) : read + written) / rate, forward) + backward;
  w.of_halves = w.halves / w.step, w.of_any = w.any / w.step;
}

// A run of its own. No pause at the end of the window: the next step would already be fetched.
Window measure(const Options& o, const Cell& cell, const Setting& setting) {
  zg::ConfigSource source{{o.directory + "/drive_bound.json"}, overrides_of(o, cell, setting)};
  source.files.insert(source.files.end(), o.files.begin(), o.files.end());
  const zg::RunConfig config = zg::load_config(source, zg::this_machine());
  zg::Trainer trainer(config);
  std::vector<double> shares;
  for (const RamModel& drive : drives_of(config)) shares.push_back(mean_bytes_per_second(drive));
  trainer.start(shares);
  std::int64_t step = 0;
  while (step < o.warmup) (void)trainer.train_step(step++, zg::Then::kTrain);
  const zg::io::LinkCounters before = moved_by(*trainer.node().io());
  const auto from = Clock::now();
  double stall = 0;
  zg::StallTimes causes;
  zg::Phases phases;
  while (step < o.warmup + o.steps) {
    const zg::StepResult r = trainer.train_step(step++, zg::Then::kTrain);
    stall += r.stall;
    causes += r.stall_for;
    phases.forward += r.phases.forward / static_cast<double>(o.steps);
    phases.backward += r.phases.backward / static_cast<double>(o.steps);
    phases.optimizer += r.phases.optimizer / static_cast<double>(o.steps);
  }
  const auto to = Clock::now();
  Window w = window_of(config, before, moved_by(*trainer.node().io()), from, to);
  const auto steps = static_cast<double>(o.steps);
  w.io /= steps;
  w.step = w.seconds / steps;
  w.stall = stall / w.seconds;
  w.causes = causes;
  w.phases = phases;
  w.bytes = halves_of(trainer.plan());
  find_seconds(w, drives_of(config).front().duplex, w.offered_bytes / w.seconds,
               trainer.plan().programs->timing);
  return w;
}

ordered_json json_of(const std::vector<Window>& windows) {
  auto each = ordered_json::array();
  for (const Window& w : windows) {
    each.push_back({{"eta", w.eta},
                    {"seconds", w.seconds},
                    {"read_bytes", w.read_bytes},
                    {"write_bytes", w.write_bytes},
                    {"offered_bytes", w.offered_bytes},
                    {"stall_share", w.stall},
                    {"forward_s", w.phases.forward},
                    {"backward_s", w.phases.backward},
                    {"optimizer_s", w.phases.optimizer},
                    {"halves_s", w.halves},
                    {"of_halves", w.of_halves},
                    {"any_policy_s", w.any},
                    {"of_any_policy", w.of_any}});
    for (std::size_t i = 0; i < w.causes.seconds.size(); ++i)
      each.back()["stall_s"][zg::name_of(static_cast<zg::StallCause>(i))] = w.causes.seconds[i];
  }
  return {{"eta", median(windows, &Window::eta)},
          {"io_s_per_step", median(windows, &Window::io)},
          {"step_s", median(windows, &Window::step)},
          {"stall_share", median(windows, &Window::stall)},
          {"of_halves", median(windows, &Window::of_halves)},
          {"of_any_policy", median(windows, &Window::of_any)},
          {"half_bytes",
           {{"read", windows.front().bytes.read},
            {"written", windows.front().bytes.written},
            {"least_read", windows.front().bytes.least_read},
            {"least_written", windows.front().bytes.least_written}}},
          {"rounds", each}};
}

void print_header() {
  std::printf("%-8s %8s %5s | %7s %7s %6s | %11s %8s %10s %6s %6s | %6s %6s\n", "scenario", "host MiB",
              "clip", "io s", "step s", "stall", "eta default", "eta best", "best depth", "ratio", "time",
              "halves", "any");
}

// Every setting once a round. The row is printed, and all of it returned.
ordered_json run_cell(const Options& o, const Cell& cell, const std::vector<Setting>& settings) {
  std::vector<std::vector<Window>> windows(settings.size());
  for (std::int64_t round = 0; round < o.rounds; ++round) {
    for (std::size_t i = 0; i < settings.size(); ++i) {
      windows[i].push_back(measure(o, cell, settings[i]));
      std::fprintf(stderr, "  round %lld, %s: eta %.3f, step %.3f s\n", static_cast<long long>(round + 1),
                   settings[i].name().c_str(), windows[i].back().eta, windows[i].back().step);
    }
  }
  std::size_t best = 0;  // 0: no fixed depth was asked for
  for (std::size_t i = 1; i < settings.size(); ++i) {
    if (best == 0 || median(windows[i], &Window::eta) > median(windows[best], &Window::eta)) best = i;
  }
  double fastest = 0;
  for (std::size_t i = 1; i < settings.size(); ++i) {
    const double step = median(windows[i], &Window::step);
    if (fastest == 0 || step < fastest) fastest = step;
  }
  const double time = fastest > 0 ? fastest / median(windows[0], &Window::step) : 1;
  const double eta = median(windows[0], &Window::eta), best_eta = median(windows[best], &Window::eta);
  std::printf("%-8s %8lld %5s | %7.3f %7.3f %5.1f%% | %11.3f %8.3f %10s %6.3f %6.3f | %6.3f %6.3f\n",
              cell.scenario->name.c_str(), static_cast<long long>(cell.host), cell.clip.c_str(),
              median(windows[0], &Window::io), median(windows[0], &Window::step),
              100 * median(windows[0], &Window::stall), eta, best_eta,
              best == 0 ? "-" : std::to_string(settings[best].depth).c_str(),
              best_eta > 0 ? eta / best_eta : 0, time, median(windows[0], &Window::of_halves),
              median(windows[0], &Window::of_any));
  std::fflush(stdout);
  ordered_json j = {{"scenario", cell.scenario->name},
                    {"host_mib", cell.host},
                    {"gradient_clipping", cell.clip == "none" ? 0 : std::stod(cell.clip)},
                    {"eta_default", eta},
                    {"eta_best_fixed", best_eta},
                    {"best_fixed_depth", settings[best].depth},
                    {"default_of_best", best_eta > 0 ? eta / best_eta : 0},
                    {"fastest_step_of_default", time}};
  for (std::size_t i = 0; i < settings.size(); ++i) j["settings"][settings[i].name()] = json_of(windows[i]);
  return j;
}

// What was run, where, and on which commit of the tree that it was started in.
ordered_json provenance(int argc, char** argv) {
  std::string command = std::filesystem::path(argv[0]).filename();
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  ordered_json j = {{"benchmark", "drive_bound"}, {"command", command}};
  j.update(zg::bench::provenance());
  return j;
}

ordered_json settings_of(const Options& o) {
  return {{"layers", o.layers},           {"width", o.width},   {"vocab", o.vocab},  {"tokens", o.tokens},
          {"device_mib", o.device},       {"rounds", o.rounds}, {"steps", o.steps},  {"warmup", o.warmup},
          {"rate_factor", o.rate_factor}, {"files", o.files},   {"set", o.overrides}};
}

std::vector<Cell> cells_of(const Options& o, const std::vector<Scenario>& scenarios) {
  std::vector<Cell> cells;
  for (const Scenario& scenario : scenarios) {
    const bool wanted = o.scenarios.empty() ||
                        std::find(o.scenarios.begin(), o.scenarios.end(), scenario.name) != o.scenarios.end();
    if (!wanted) continue;
    for (const std::int64_t host : o.hosts) {
      for (const std::string& clip : o.clips) cells.push_back({&scenario, host, clip});
    }
  }
  return cells;
}

void run(Options o, int argc, char** argv, const std::vector<Scenario>& scenarios) {
  const TemporaryDirectory directory;
  o.directory = directory.path();
  if (o.hosts.empty()) o.hosts = {96, 160, 320, 640};
  write_tokens(o);
  write_base(o);
  std::vector<Setting> settings(1);
  for (const int depth : o.depths) {
    if (depth > 0) settings.push_back({depth});
  }
  ordered_json all = provenance(argc, argv);
  all["settings"] = settings_of(o);
  all["cells"] = ordered_json::array();
  print_header();
  for (const Cell& cell : cells_of(o, scenarios)) {
    all["cells"].push_back(run_cell(o, cell, settings));
    // After every cell: what is there already outlives a run that is ended early.
    if (!o.out.empty()) zg::write_file_atomically(o.out, all.dump(1) + "\n");
  }
}

const CLI::Validator kClip(
    [](const std::string& text) {
      try {
        std::size_t end = 0;
        if (text == "none" || (std::stod(text, &end) > 0 && end == text.size())) return std::string();
      } catch (const std::exception&) {  // no number
      }
      return "found " + text + ", expected a number above 0, or none";
    },
    "NORM|none");

}  // namespace

int main(int argc, char** argv) {
  const std::vector<Scenario> scenarios = make_scenarios();
  std::vector<std::string> names;
  std::string help = kHelp;
  for (const Scenario& s : scenarios) {
    names.push_back(s.name);
    help += fmt::format("  {:<9} {}\n", s.name, s.text);
  }
  CLI::App app{"What share of what programmed drives offer does training use that is bound by them?"};
  app.footer(help + kExamples);
  Options o;
  // The sizes of --tiny are what others start from, whatever the order of the flags.
  o.tiny = std::any_of(argv + 1, argv + argc, [](const char* a) { return std::string_view(a) == "--tiny"; });
  if (o.tiny) make_tiny(o);
  app.add_option("config", o.files, "Files that go on top of the built-in configuration");
  app.add_option("--set", o.overrides, "KEY=VALUE of the configuration")->allow_extra_args(false);
  app.add_option("--scenario", o.scenarios, "Which (below); all unless named")
      ->delimiter(',')
      ->check(CLI::IsMember(names));
  app.add_option("--host", o.hosts, "Budgets of host memory in MiB (96,160,320,640)")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  app.add_option("--clip", o.clips, "gradient_clipping: a norm, or none")
      ->delimiter(',')
      ->check(kClip)
      ->capture_default_str();
  app.add_option("--depths", o.depths, "Fixed depths to compare with; 0: none")
      ->delimiter(',')
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  app.add_option("--rounds", o.rounds)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--steps", o.steps, "Of a window")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--warmup", o.warmup, "Steps before it")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--layers", o.layers)->capture_default_str();
  app.add_option("--width", o.width)->capture_default_str();
  app.add_option("--vocab", o.vocab)->check(CLI::Range(1, 65536))->capture_default_str();
  app.add_option("--tokens", o.tokens, "Of the one sequence of a step")->capture_default_str();
  app.add_option("--rate-factor", o.rate_factor,
                 "All drives are so many times as fast: less where this processor does not let them bind")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--device", o.device, "Budget of device memory in MiB")->capture_default_str();
  app.add_option("--out", o.out, "JSON file with all windows, where they were measured, and how");
  app.add_flag("--tiny", o.tiny, "A model of 2 layers x 64 on drives of a fiftieth of the speed");
  CLI11_PARSE(app, argc, argv);
  zg::log::set_level(zg::log::Level::kWarning);
  try {
    run(o, argc, argv, scenarios);
    return 0;
  } catch (const zg::Error& e) {
    std::fprintf(stderr, "bench_drive_bound: %s\n", e.what());
    return e.exit_code();
  }
}
