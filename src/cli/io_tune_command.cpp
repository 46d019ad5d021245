// `ziggurat io-tune`: finds the settings at which drives are fastest, and reports how sure the result is.
#include <signal.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/commands.hpp"
#include "cli/flags.hpp"
#include "cli/io_tune_files.hpp"
#include "cli/io_tune_meter.hpp"
#include "cli/io_tune_report.hpp"
#include "cli/io_tune_state.hpp"
#include "ziggurat/base/cores.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/probe.hpp"

namespace zg::cli {
namespace {

constexpr std::int64_t kMostMemory = kGiB;

struct Flags {
  std::vector<std::string> paths, backends;
  double seconds = 120;
  std::string size, goal = "both", output = ".", report, state, write_limit = "256GiB";
  std::uint64_t seed = 1;
  bool fresh = false, json = false;
};

io::TuneGoal goal_of(const std::string& name) {
  return name == "read" ? io::TuneGoal::kRead : name == "write" ? io::TuneGoal::kWrite : io::TuneGoal::kBoth;
}

// The size given by a flag. Throws Error(kUsage) if it is less than `least`.
std::int64_t size_in(const char* flag, const std::string& text, std::int64_t least) {
  const auto bytes = parse_bytes(text);
  if (bytes && *bytes >= least) return *bytes;
  throw Error(Errc::kUsage, fmt::format("{} {}", flag, text),
              bytes ? fmt::format("is less than {}", format_bytes(least)) : std::string("is no size"),
              fmt::format("say for example {} 4GiB", flag));
}

// The back ends that work on every path, in the order of the first path's probe: the fastest first.
std::vector<io::Backend> backends_for(const Flags& f, const std::vector<TunePlace>& places) {
  const auto wanted = [&](io::Backend b) {
    const auto& names = f.backends;
    return b != io::Backend::kRam &&
           (names.empty() || std::find(names.begin(), names.end(), io::name_of(b)) != names.end());
  };
  std::vector<io::Backend> works;
  std::string reasons;
  for (std::size_t i = 0; i < places.size(); ++i) {
    for (const io::BackendProbe& probe : io::probe_backends(places[i].path)) {
      if (!wanted(probe.backend)) continue;
      if (probe.works && i == 0) works.push_back(probe.backend);
      if (probe.works) continue;
      std::erase(works, probe.backend);
      reasons +=
          fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", io::name_of(probe.backend), probe.reason);
    }
  }
  if (!reasons.empty() && !works.empty()) log::info("left out: {}", reasons);
  for (const std::string& name : f.backends) {
    if (std::any_of(works.begin(), works.end(), [&](io::Backend b) { return name == io::name_of(b); }))
      continue;
    throw Error(Errc::kIo, "--backend " + name,
                reasons.empty() ? "is not there" : "does not work: " + reasons,
                "leave it away, or see ziggurat probe DIR");
  }
  if (works.empty()) throw Error(Errc::kIo, places[0].path, "no back end works: " + reasons);
  return works;
}

std::vector<TunePlace> places_of(const Flags& f) {
  std::vector<TunePlace> places;
  for (const std::string& path : f.paths) {
    (void)io::probe_path(path, 0);  // throws if something is wrong with it
    for (const std::string& file : remove_tune_leftovers(path))
      log::info("removed {}, left by a killed run", file);
    TunePlace place = look_at(path);
    for (const TunePlace& other : places) {
      if (other.path == place.path)
        throw Error(Errc::kUsage, "--path " + path, "is given twice", "name each directory once");
    }
    places.push_back(std::move(place));
  }
  return places;
}

TuneSettings settings_of(const std::vector<TunePlace>& places, std::int64_t size, const std::string& goal) {
  const MachineProbe machine = probe_machine();
  utsname system{};
  const bool known = uname(&system) == 0;
  TuneSettings s{.machine = fmt::format("{}, {} cores", machine.cpu, machine.cores),
                 .kernel = known ? system.release : "unknown",
                 .paths = {},
                 .size = size,
                 .goal = goal};
  for (const TunePlace& p : places) s.paths.push_back({p.path, p.filesystem, p.device});
  return s;
}

io::TuneSpace space_for(const std::vector<io::Backend>& backends, std::size_t paths, std::int64_t size,
                        double seconds) {
  io::TuneSpace space = io::TuneSpace::usual(backends, static_cast<int>(usable_cores().size()));
  space.paths = static_cast<int>(paths);
  space.memory_bytes = std::min(kMostMemory, available_memory() / 4);
  space.file_bytes = size;
  // The time of one measurement: a queue that takes longer to drain could not be measured in it.
  space.max_drain_seconds = std::clamp(seconds / 480, 0.1, 1.0);
  return space;
}

std::string date_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  char text[64];
  return std::string(text, std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M", &parts));
}

class TuneRun {
 public:
  explicit TuneRun(const Flags& flags);
  int run();

 private:
  std::int64_t choose_size() const;
  void announce() const;
  void search();
  std::string why_ended() const;
  void print(const TuneReport& report) const;

  const Flags& f_;
  const std::int64_t write_limit_;
  const io::TuneGoal goal_;
  std::vector<TunePlace> places_;
  std::string report_file_;
  std::unique_ptr<TuneState> state_;
  std::int64_t size_ = 0;
  TuneSettings settings_;
  io::TuneOptions options_;
  Watchdog watchdog_;
  BenchWatch watch_;
  std::unique_ptr<DriveMeter> meter_;
  io::TuneOutcome outcome_;
  bool nothing_new_ = false;
};

TuneRun::TuneRun(const Flags& flags)
    : f_(flags),
      write_limit_(size_in("--write-limit", flags.write_limit, kTuneSizeStep)),
      goal_(goal_of(flags.goal)),
      places_(places_of(flags)),
      watchdog_({.file = flags.output + "/state.txt"}),
      watch_(watchdog_, "io-tune") {
  watchdog_.dump_on_signal(SIGUSR1);
  report_file_ = f_.report.empty() ? f_.output + "/io-tune.html" : f_.report;
  const std::string state_file = f_.state.empty() ? f_.output + "/io-tune.jsonl" : f_.state;
  if (f_.report.empty() || f_.state.empty()) {
    std::error_code error;
    std::filesystem::create_directories(f_.output, error);
    if (error) throw Error(Errc::kUsage, "--output " + f_.output, error.message(), "name another directory");
  }
  const auto folder = std::filesystem::absolute(report_file_).parent_path().string();
  if (access(folder.c_str(), W_OK) != 0)  // checked before the measurements, not after them
    throw Error(Errc::kUsage, report_file_, "the report cannot be written there: " + errno_text(errno),
                "name another file with --report");
  state_ = std::make_unique<TuneState>(state_file, f_.fresh);
  // Looks for leftover files again: files of a run that was killed a moment ago can be removed only when its
  // process is gone, which is certain once the state file is locked.
  places_ = places_of(f_);
  if (state_->cut_off()) log::info("{}: the last line was half written, and is left out", state_file);
  size_ = choose_size();
  if (size_ > write_limit_)
    throw Error(Errc::kUsage, "--write-limit " + f_.write_limit,
                fmt::format("does not let {} be filled", format_bytes(size_)), "measure on less with --size");
  settings_ = settings_of(places_, size_, f_.goal);
  state_->match(settings_);
  options_ = {.space = space_for(backends_for(f_, places_), places_.size(), size_, f_.seconds),
              .goal = goal_,
              .seconds = f_.seconds,
              .seed = f_.seed,
              .known = state_->records()};
}

// The size given by --size; else the size of the earlier run, if there is still room; else the default.
std::int64_t TuneRun::choose_size() const {
  if (!f_.size.empty()) {
    const TuneSize size = size_for(places_, size_in("--size", f_.size, kTuneSizeStep));
    if (!size.note.empty()) log::warning("{}", size.note);
    return size.bytes;
  }
  return size_for(places_, state_->is_new() ? 0 : state_->settings().size).bytes;
}

void TuneRun::announce() const {
  for (const TunePlace& p : places_) {
    log::info("{}: {} on {}, {} free; takes {}, writes {} at most", p.path, p.filesystem, p.device,
              format_bytes(p.free_bytes), format_bytes(size_),
              format_bytes(goal_ == io::TuneGoal::kRead ? size_ + 256 * kMiB : write_limit_));
    if (!p.direct)
      log::warning("{}: without O_DIRECT ({}): this measures memory as much as the drive", p.path,
                   p.direct_reason);
  }
  std::string backends;
  for (const io::Backend b : options_.space.backends)
    backends += fmt::format("{}{}", backends.empty() ? "" : ", ", io::name_of(b));
  log::info("searching {}; takes {} at most, Ctrl-C ends it with what is known by then", backends,
            format_seconds(f_.seconds));
  if (!options_.known.empty())
    log::info("{}: {} measurements of an earlier run are taken over", state_->path(), options_.known.size());
}

void TuneRun::search() {
  MeterOptions m{.places = places_,
                 .size = size_,
                 .write_limit = write_limit_,
                 .seconds = f_.seconds,
                 .goal = goal_,
                 .space = options_.space,
                 .watch = &watch_,
                 .record = [this](const io::TuneRecord& r) { state_->append(r); }};
  meter_ = std::make_unique<DriveMeter>(std::move(m));
  options_.expected_seconds = meter_->expected_seconds();
  // The samples of earlier runs may already be enough.
  const io::TuneMeter nothing{
      .measure = [](const io::TunePoint&, int) { return std::optional<io::TuneSample>(); },
      .seconds = [] { return 0.0; }};
  outcome_ = io::tune(options_, nothing);
  nothing_new_ = outcome_.end == io::TuneEnd::kStable;
  if (nothing_new_ || !meter_->prepare()) return;
  const io::TuneMeter meter{
      .measure = [this](const io::TunePoint& point, int round) { return meter_->measure(point, round); },
      .seconds = [this] { return meter_->seconds(); },
      .progress = [this](const io::TuneProgress& p) { meter_->set_progress(p); }};
  outcome_ = io::tune(options_, meter);
}

std::string TuneRun::why_ended() const {
  if (nothing_new_) return "the order was stable already: all was taken from the state file";
  if (outcome_.end == io::TuneEnd::kStable) return "the order is stable";
  if (meter_->reached_write_limit()) return fmt::format("--write-limit {} was reached", f_.write_limit);
  if (outcome_.end == io::TuneEnd::kStopped) return "interrupted";
  return "time is up";
}

void TuneRun::print(const TuneReport& report) const {
  if (f_.json) {
    auto j = report_json(report);
    j["report"] = report_file_;
    j["state"] = state_->path();
    std::printf("%s\n", j.dump(2).c_str());
    return;
  }
  const bool colour = isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr;
  std::string text = heat_text(report, colour) + confidence_text(report);
  text += fmt::format("\n{}; wrote {} in {}; report {}, state {}\n", report.ended,
                      format_bytes(report.written_bytes), format_seconds(report.seconds), report_file_,
                      state_->path());
  if (outcome_.found) {
    const auto& chosen = outcome_.candidates[static_cast<std::size_t>(outcome_.chosen)];
    text += fmt::format("\n\"aio\": {}\n", aio_section(options_.space, chosen.point));
  }
  std::fputs(text.c_str(), stdout);
}

int TuneRun::run() {
  announce();
  search();
  log::progress("");
  const TuneReport report{.outcome = outcome_,
                          .space = options_.space,
                          .goal = goal_,
                          .settings = settings_,
                          .ended = why_ended(),
                          .seconds = meter_->seconds(),
                          .written_bytes = meter_->written_bytes(),
                          .date = date_now(),
                          .version = "ziggurat 0.1.0"};
  write_file_atomically(report_file_, report_html(report));
  print(report);
  if (!interrupted()) return 0;
  std::fprintf(stderr,
               "ziggurat: interrupted\n  hint: the same command goes on from the %zu measurements in %s\n",
               state_->records().size(), state_->path().c_str());
  return 130;
}

constexpr const char* kFooter = R"(Examples:
  ziggurat io-tune --path /mnt/nvme0
  ziggurat io-tune --path /mnt/nvme0 --path /mnt/nvme1 --seconds 300 --output tuned
  ziggurat io-tune --path /mnt/nvme0 --for read --backend io_uring --json
How it searches: it measures each back end at a few points; with the best one a coarse grid of block size (64 KiB to
16 MiB) x queue depth (1 to 256), finer steps around the best point, and more queues; then the best few points again
and again, in random order, until it is clear which is ahead. The score is the bandwidth or, with --for both, the
harmonic mean of read and write bandwidth. Of the points within 1% of the fastest it chooses the one with the smallest
depth, then with the fewest queues, then with the least processor time. It says "not sure" when it is not; more
--seconds help.
Leaves io-tune.html (heat maps, the chosen point) and io-tune.jsonl (all measurements) in --output. The same command
takes over what io-tune.jsonl holds, so it goes on after an interruption; --fresh begins anew.
SIGUSR1 (kill -USR1 PID) makes it say how far it is, on stderr and in OUTPUT/state.txt.
Space: one file per path, removed at the end; of every disk 5%, and at least 1 GiB, stay free.
Wear: with --for both half of what is measured is writes. What is written is counted, and --write-limit ends the run.
The aio section that it prints goes into our configuration, and into DeepSpeed's, which ignores the keys that it does
not know.
Exit codes: 0 done, 1 a machine or I/O failure, 2 a mistake in the flags, 130 interrupted.)";

}  // namespace

void add_io_tune(CLI::App& app, int& exit_code) {
  auto f = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(
      "io-tune", "Find the I/O settings at which drives are fastest, and say how sure that is");
  command->add_option("--path", f->paths, "Directories on the drives to tune; several are tuned as one")
      ->required();
  command->add_option("--seconds", f->seconds, "Seconds that the whole search may take")
      ->check(real_number(1, 86400))
      ->capture_default_str();
  command->add_option("--size", f->size,
                      "Size of the file on each path (default: 4GiB, or a quarter of what is free if that is "
                      "less)");
  command->add_option("--for", f->goal, "What is to be fast: read, write or both")
      ->check(CLI::IsMember({"read", "write", "both"}))
      ->capture_default_str();
  command
      ->add_option("--backend", f->backends,
                   "Try only these back ends: io_uring, libaio, threads (default: all that work here)")
      ->check(CLI::IsMember({"io_uring", "libaio", "threads"}));
  command->add_option("--output", f->output, "Directory for io-tune.html and io-tune.jsonl")
      ->capture_default_str();
  command->add_option("--report", f->report, "File of the report, instead of OUTPUT/io-tune.html");
  command->add_option("--state", f->state, "File of the measurements, instead of OUTPUT/io-tune.jsonl");
  command->add_option("--write-limit", f->write_limit, "Most bytes that are written to each path")
      ->capture_default_str();
  command->add_option("--seed", f->seed, "Seed of the order within each round")->capture_default_str();
  command->add_flag("--fresh", f->fresh, "Forget the measurements of an earlier run (--state)");
  command->add_flag("--json", f->json, "Print one JSON object instead of tables");
  command->footer(kFooter);
  command->callback([f, &exit_code] { exit_code = TuneRun(*f).run(); });
}

}  // namespace zg::cli
