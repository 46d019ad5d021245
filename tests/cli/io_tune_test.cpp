// io-tune: what lies around the search. Sizes, files, the state file and the reports as parts; then the
// program.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <set>

#include "cli/fixture.hpp"
#include "cli/io_tune_files.hpp"
#include "cli/io_tune_report.hpp"
#include "cli/io_tune_state.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::cli_test {
namespace {

using cli::TunePlace;
using io::Backend;
using io::TunePoint;

TunePlace disk(std::int64_t free, std::int64_t total, std::uint64_t volume = 1) {
  return {.path = "/disk", .volume = volume, .free_bytes = free, .total_bytes = total, .direct = true};
}

TEST(IoTuneSize, LeavesRoomOnEveryDisk) {
  EXPECT_EQ(cli::size_for({disk(100 * kGiB, 200 * kGiB)}, 0).bytes, 4 * kGiB);
  EXPECT_EQ(cli::size_for({disk(12 * kGiB, 20 * kGiB)}, 0).bytes, 3 * kGiB);           // a quarter
  EXPECT_EQ(cli::size_for({disk(100 * kGiB, 200 * kGiB)}, 8 * kGiB).bytes, 8 * kGiB);  // as asked
  EXPECT_EQ(cli::size_for({disk(100 * kGiB, 200 * kGiB)}, 8 * kGiB).note, "");
  const cli::TuneSize less = cli::size_for({disk(12 * kGiB, 200 * kGiB)}, 8 * kGiB);
  EXPECT_EQ(less.bytes, 2 * kGiB);  // 5% of 200 GiB stay free
  EXPECT_HAS(less.note, "10.00 GiB shall stay so");
  EXPECT_EQ(cli::size_for({disk(3 * kGiB, 4 * kGiB)}, 8 * kGiB).bytes, 2 * kGiB);  // 1 GiB does
  // Two paths on one disk share it; the tightest of several decides.
  EXPECT_EQ(cli::size_for({disk(12 * kGiB, 20 * kGiB), disk(12 * kGiB, 20 * kGiB)}, 0).bytes, 1536 * kMiB);
  EXPECT_EQ(cli::size_for({disk(100 * kGiB, 200 * kGiB, 1), disk(2 * kGiB, 4 * kGiB, 2)}, 4 * kGiB).bytes,
            kGiB);
}

TEST(IoTuneSize, RefusesADiskThatIsNearlyFull) {
  const auto e = test::thrown_by([] { cli::size_for({disk(kGiB + 63 * kMiB, 16 * kGiB)}, 0); });
  ASSERT_TRUE(e);
  EXPECT_EQ(e->exit_code(), 1);
  for (const char* part :
       {"/disk", "1.06 GiB of 16.00 GiB are free", "1.00 GiB shall stay so", "64.0 MiB are needed"})
    EXPECT_HAS(e->what(), part);
  EXPECT_TRUE(test::thrown_by([] { cli::size_for({disk(100 * kMiB, 200 * kGiB)}, 32 * kMiB); }));
  EXPECT_EQ(cli::size_for({disk(kGiB + 40 * kMiB, 16 * kGiB)}, 32 * kMiB).bytes, 32 * kMiB);
}

class IoTuneFiles : public CliTest {};

TEST_F(IoTuneFiles, OnlyThoseOfTheDeadAreReclaimed) {
  const std::string dead = "ziggurat-io-tune-0123456789abcdef.tmp";
  const Strings others{"ziggurat-io-tune-0123456789abcde.tmp",   "ziggurat-io-tune-0123456789abcdeg.tmp",
                       "ziggurat-io-tune-0123456789ABCDEF.tmp",  "xziggurat-io-tune-0123456789abcdef.tmp",
                       "ziggurat-io-tune-0123456789abcdef.tmp2", "ziggurat-io-tune-.tmp"};
  write(dead, "x");
  for (const std::string& name : others) write(name, "x");
  fs::create_directories(path("ziggurat-io-tune-1111111111111111.tmp"));
  fs::create_symlink(path("text.txt"), path("ziggurat-io-tune-2222222222222222.tmp"));
  const cli::TuneFile living(directory_, kMiB);
  EXPECT_TRUE(cli::is_tune_file_name(fs::path(living.path()).filename()));
  EXPECT_EQ(fs::file_size(living.path()), static_cast<std::uintmax_t>(kMiB));
  // The engine locks what it measures; that is no obstacle, and no protection either.
  const int engine = open(living.path().c_str(), O_RDONLY | O_CLOEXEC);
  EXPECT_EQ(flock(engine, LOCK_EX | LOCK_NB), 0);
  close(engine);

  EXPECT_EQ(cli::remove_tune_leftovers(directory_), Strings{path(dead)});
  EXPECT_TRUE(fs::exists(living.path()));
  for (const std::string& name : others) EXPECT_TRUE(fs::exists(path(name))) << name;
  EXPECT_TRUE(fs::exists(path("ziggurat-io-tune-1111111111111111.tmp")));
  EXPECT_TRUE(fs::exists(path("text.txt")));
}

TEST_F(IoTuneFiles, AFileGoesWithItsObjectAndIsReclaimedAfterAKill) {
  std::string name;
  {
    const cli::TuneFile file(directory_, kMiB);
    name = file.path();
  }
  EXPECT_FALSE(fs::exists(name));
  const pid_t child = fork();
  if (child == 0) {
    static const cli::TuneFile file(directory_, kMiB);
    raise(SIGKILL);
  }
  EXPECT_EQ(test::end_of(child), -SIGKILL);
  EXPECT_EQ(cli::remove_tune_leftovers(directory_).size(), 1u);
}

cli::TuneSettings settings() {
  return {.machine = "a processor, 2 cores",
          .kernel = "6.1",
          .paths = {{"/mnt/a", "ext4", "/dev/sda"}},
          .size = kGiB,
          .goal = "both"};
}

io::TuneRecord record(int depth, int round = -1) {
  io::TuneRecord r{.point = {Backend::kLibaio, kMiB, depth, 1}, .round = round};
  r.sample.read = {2.5e9 + depth, 0.125, 1e-3, 2e-3};
  r.sample.write = {1.5e9 + depth, 0.25, 3e-3, 4e-3};
  return r;
}

class IoTuneState : public CliTest {
 protected:
  std::string file() const { return path("state.jsonl"); }
  std::optional<Error> open_error(bool fresh = false) const {
    return test::thrown_by([&] { cli::TuneState(file(), fresh); });
  }
};

TEST_F(IoTuneState, TakesOverWhatWasWritten) {
  {
    cli::TuneState state(file(), false);
    EXPECT_TRUE(state.is_new());
    state.match(settings());
    state.append(record(4));
    state.append(record(8, 3));
  }
  cli::TuneState state(file(), false);
  EXPECT_FALSE(state.is_new());
  EXPECT_FALSE(state.cut_off());
  state.match(settings());
  ASSERT_EQ(state.records().size(), 2u);
  const io::TuneRecord& r = state.records()[1];
  EXPECT_EQ(r.point, record(8).point);
  EXPECT_EQ(r.round, 3);
  EXPECT_EQ(r.sample.read.bytes_per_second, 2.5e9 + 8);
  EXPECT_EQ(r.sample.write.cpu_seconds_per_gb, 0.25);
  EXPECT_EQ(r.sample.write.p50, 3e-3);
  EXPECT_EQ(r.sample.read.p99, 2e-3);
}

TEST_F(IoTuneState, AHalfWrittenLineIsLeftOutWhereverItEnds) {
  {
    cli::TuneState state(file(), false);
    state.match(settings());
    state.append(record(4));
    state.append(record(8));
  }
  const std::string whole = read("state.jsonl");
  for (std::size_t n = 0; n < whole.size(); n += 7) {
    write("state.jsonl", whole.substr(0, n));
    const auto lines = std::count(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(n), '\n');
    {
      cli::TuneState state(file(), false);
      EXPECT_EQ(state.is_new(), lines == 0) << n;
      EXPECT_EQ(state.records().size(), static_cast<std::size_t>(std::max<std::ptrdiff_t>(0, lines - 1)))
          << n;
      EXPECT_EQ(state.cut_off(), n > 0 && whole[n - 1] != '\n') << n;
      state.match(settings());
      state.append(record(16));
    }
    const cli::TuneState again(file(), false);  // what was added begins a line of its own
    EXPECT_FALSE(again.cut_off());
    EXPECT_EQ(again.records().back().point.queue_depth, 16);
  }
}

TEST_F(IoTuneState, OtherSettingsAreRefusedWithWhatDiffers) {
  {
    cli::TuneState state(file(), false);
    state.match(settings());
    state.append(record(4));
  }
  cli::TuneSettings other = settings();
  other.kernel = "6.2";
  other.size = 2 * kGiB;
  other.paths[0].device = "/dev/sdb";
  {
    cli::TuneState state(file(), false);
    const auto e = test::thrown_by([&] { state.match(other); });
    ASSERT_TRUE(e);
    EXPECT_EQ(e->exit_code(), 2);
    for (const char* part : {"6.1", "6.2", "1.00 GiB", "2.00 GiB", "/dev/sda", "/dev/sdb", "--fresh"})
      EXPECT_HAS(e->what(), part);
    EXPECT_HAS_NOT(e->what(), "machine");
  }
  cli::TuneState state(file(), true);
  EXPECT_TRUE(state.is_new());
  state.match(other);
  EXPECT_EQ(lines_of(read("state.jsonl")).size(), 1u);
}

TEST_F(IoTuneState, FilesOfOthersAreLeftAlone) {
  for (const char* text : {"precious", "precious\n", "{\"model\": 1}\n"}) {
    for (const bool fresh : {false, true}) {
      write("state.jsonl", text);
      EXPECT_TRUE(open_error(fresh));
      EXPECT_EQ(read("state.jsonl"), text);
    }
  }
  {
    fs::remove(file());
    cli::TuneState state(file(), false);
    state.match(settings());
    state.append(record(4));
  }
  const std::string good = read("state.jsonl");
  ASSERT_FALSE(open_error());
  for (const char* depth : {"0", "-4", "4.5", "4294967300", "1e400", "[[4]]"}) {
    std::string text = good;
    const std::string known = "\"queue_depth\":4";
    write("state.jsonl", text.replace(text.find(known), known.size(), known.substr(0, 14) + depth));
    ASSERT_TRUE(open_error()) << depth;
    EXPECT_EQ(open_error()->exit_code(), 2);
    EXPECT_EQ(read("state.jsonl"), text);
  }
  write("state.jsonl", "{\"ziggurat_io_tune\":99}\n");
  ASSERT_TRUE(open_error());
  EXPECT_HAS(open_error()->what(), "version 99");
}

TEST_F(IoTuneState, OneRunAtATime) {
  const cli::TuneState state(file(), false);
  ASSERT_TRUE(open_error());
  EXPECT_HAS(open_error()->what(), "in use by another run");
}

// A small parser of HTML: tags balance, attributes are quoted and unique, text has no bare & or <.
void expect_well_formed(const std::string& page) {
  std::vector<std::string> open;
  std::size_t at = page.find("<html");
  ASSERT_NE(at, std::string::npos);
  while (at < page.size()) {
    if (page[at] == '&') {
      const std::size_t end = page.find(';', at);
      ASSERT_LT(end - at, 8u) << page.substr(at, 40);
    }
    if (page[at++] != '<') continue;
    std::size_t end = at;
    int quotes = 0, equals = 0;
    for (; end < page.size() && (quotes % 2 == 1 || page[end] != '>'); ++end) {
      quotes += page[end] == '"';
      equals += page[end] == '=' && quotes % 2 == 0;
      ASSERT_NE(page[end], '<') << page.substr(at, 80);
    }
    ASSERT_LT(end, page.size()) << page.substr(at, 80);
    const std::string tag = page.substr(at, end - at);
    const std::string name = tag.substr(0, tag.find_first_of(" /", 1));
    EXPECT_EQ(quotes, 2 * equals) << tag;
    if (tag[0] == '/') {
      ASSERT_FALSE(open.empty()) << tag;
      ASSERT_EQ(open.back(), tag.substr(1)) << page.substr(at - 100, 120);
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end + 1;
  }
  EXPECT_TRUE(open.empty());
}

// A search over a formula, for the reports.
struct Found {
  io::TuneSpace space = io::TuneSpace::usual({Backend::kUring, Backend::kThreads}, 2);
  cli::TuneSettings where = settings();
  io::TuneOutcome outcome;
  explicit Found(io::TuneGoal goal = io::TuneGoal::kBoth) {
    space.file_bytes = 4 * kGiB;
    double now = 0;
    outcome = io::tune({.space = space, .goal = goal},
                       {.measure =
                            [&](const TunePoint& p, int) {
                              now += 0.5;
                              if (p.block_size == 256 * kKiB && p.queue_depth == 64)
                                throw Error(Errc::kIo, "<drive> & \"co\"", "no <such> queue");
                              const double d = p.queue_depth * p.queues;
                              io::TuneSample s;
                              s.read.bytes_per_second =
                                  (p.backend == Backend::kUring ? 3e9 : 2.8e9) * d / (d + 3);
                              s.write.bytes_per_second = 0.5 * s.read.bytes_per_second;
                              return std::optional(s);
                            },
                        .seconds = [&] { return now; }});
    where.paths[0].path = "/mnt/<a> & b";
  }
  cli::TuneReport report(io::TuneGoal goal = io::TuneGoal::kBoth) const {
    return {.outcome = outcome,
            .space = space,
            .goal = goal,
            .settings = where,
            .ended = "the order is stable",
            .seconds = 60,
            .written_bytes = kGiB,
            .date = "2026-01-01",
            .version = "ziggurat"};
  }
  const TunePoint& chosen() const {
    return outcome.candidates.at(static_cast<std::size_t>(outcome.chosen)).point;
  }
};

TEST(IoTuneReport, TheAioSectionHasTheTypesThatBothReadersWant) {
  const io::TuneSpace space;
  EXPECT_EQ(
      cli::aio_section(space, {Backend::kUring, kMiB, 32, 1}),
      R"({"block_size": 1048576, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": false, )"
      R"("overlap_events": true, "backend": "io_uring", "queues": 1})");
  using nlohmann::json;
  const json queues = json::parse(cli::aio_section(space, {Backend::kLibaio, kMiB, 32, 4}));
  EXPECT_EQ(queues["intra_op_parallelism"], 4);
  EXPECT_EQ(queues["queues"], 4);
  EXPECT_EQ(queues["backend"], "libaio");
  EXPECT_TRUE(queues["single_submit"].is_boolean() && queues["overlap_events"].is_boolean());
  const json threads = json::parse(cli::aio_section(space, {Backend::kThreads, kMiB, 16, 1}));
  EXPECT_EQ(threads["intra_op_parallelism"], 16);
  EXPECT_EQ(threads["queues"], 1);
}

TEST(IoTuneReport, ThePageIsWellFormedAndNeedsNothingElse) {
  for (const io::TuneGoal goal : {io::TuneGoal::kBoth, io::TuneGoal::kWrite}) {
    const Found found(goal);
    const std::string page = report_html(found.report(goal));
    expect_well_formed(page);
    for (const char* external : {"http:", "https:", "src=", "href=", "url(", "@import", "<script"})
      EXPECT_HAS_NOT(page, external) << external;
    EXPECT_HAS(page, io::text_of(found.chosen()));
    EXPECT_HAS(page, fmt::format("&quot;queue_depth&quot;: {}", found.chosen().queue_depth));
    EXPECT_HAS(page, " chosen\"");
    EXPECT_HAS(page, "/mnt/&lt;a&gt; &amp; b");
    EXPECT_HAS(page, "no &lt;such&gt; queue");
    EXPECT_HAS(page, "prefers-color-scheme: dark");
    EXPECT_HAS(page, found.outcome.verdict);
  }
}

TEST(IoTuneReport, TheHeatTableMarksWhatWasChosenSkippedAndFailed) {
  const Found found;
  const std::string plain = heat_text(found.report(), false), colour = heat_text(found.report(), true);
  EXPECT_EQ(plain.find('\033'), std::string::npos);
  EXPECT_HAS(colour, "\033[48;5;");
  const double score = found.outcome.candidates.at(static_cast<std::size_t>(found.outcome.chosen)).median;
  EXPECT_HAS(plain, fmt::format("[{:.2f}]", score / 1e9));
  for (const char* part :
       {"io_uring, read", "io_uring, write", "io_uring, score", "threads, score", " 64 KiB", "16 MiB",
        "      - ", "      ! ", "failed: ", "skipped, for example: ", "2 queues"})
    EXPECT_HAS(plain, part) << part << plain;
}

TEST(IoTuneReport, SaysHowOftenWhichBeatWhich) {
  const Found found;
  const std::string text = confidence_text(found.report());
  const io::TuneComparison& comparison = found.outcome.comparisons.at(0);
  EXPECT_HAS(text, fmt::format("in {} of {} rounds", comparison.wins, comparison.rounds));
  EXPECT_HAS(text, found.outcome.verdict);
  const auto j = report_json(found.report());
  EXPECT_EQ(j["sure"], found.outcome.sure);
  EXPECT_EQ(j["aio"]["queue_depth"], found.chosen().queue_depth);
  EXPECT_EQ(j["chosen"]["backend"], "io_uring");
  EXPECT_GT(j["points"].size(), 20u);
  EXPECT_EQ(j["failed"].size(), 1u);
}

// The program itself, as short as it gets: what it finds in a second is no matter.
class IoTuneCommand : public CliTest {
 protected:
  static Strings command(const Strings& more = {}) {
    return Strings{"io-tune", "--path", ".", "--size", "32MiB", "--backend", "threads", "--json"} + more;
  }
  void expect_no_file() const {
    for (const auto& entry : fs::directory_iterator(directory_))
      EXPECT_FALSE(cli::is_tune_file_name(entry.path().filename())) << entry.path();
  }
};

TEST_F(IoTuneCommand, TunesReportsAndGoesOn) {
  const Outcome first = run(command({"--seconds", "2"}));
  ASSERT_EQ(first.code, 0) << first.err;
  const auto found = nlohmann::json::parse(first.out);
  EXPECT_TRUE(found["aio"]["block_size"].is_number_integer()) << first.out;
  EXPECT_EQ(found["aio"]["backend"], "threads");
  EXPECT_TRUE(found["aio"]["overlap_events"].is_boolean());
  EXPECT_GE(found["written_bytes"], 32 * kMiB);
  EXPECT_EQ(found["taken_over"], 0);
  EXPECT_HAS(first.err, "writes 256.00 GiB at most");
  expect_well_formed(read("io-tune.html"));
  expect_no_file();
  const auto measured = lines_of(read("io-tune.jsonl")).size() - 1;
  ASSERT_GE(measured, 1u);

  const Outcome other = run(command({"--seconds", "2", "--for", "read"}));
  EXPECT_EQ(other.code, 2);
  EXPECT_HAS(message_of(other), "--for was both and is read") << other.err;

  const Outcome second = run(command({"--seconds", "1"}));
  ASSERT_EQ(second.code, 0) << second.err;
  EXPECT_HAS(second.err, fmt::format("{} measurements of an earlier run are taken over", measured));
  EXPECT_GE(nlohmann::json::parse(second.out)["taken_over"], 1);
  const auto lines = lines_of(read("io-tune.jsonl"));
  std::set<std::string> points;
  for (const std::string& line : lines) {
    const auto j = nlohmann::json::parse(line);
    if (!j.contains("round")) continue;  // the first line
    const std::string point = fmt::format("{} {} {} {}", j["block_size"].dump(), j["queue_depth"].dump(),
                                          j["queues"].dump(), j["round"].dump());
    EXPECT_TRUE(points.insert(point).second) << line;
  }
}

TEST_F(IoTuneCommand, CtrlCLeavesAReportAndNoFile) {
  const Outcome o =
      run(Launch{.arguments = command({"--seconds", "60"}), .interrupt_at = "will be written in all"});
  EXPECT_TRUE(o.interrupted);
  EXPECT_EQ(o.code, 130) << o.err;
  EXPECT_HAS(message_of(o), "the same command goes on") << o.err;
  EXPECT_EQ(nlohmann::json::parse(o.out)["ended"], "interrupted");
  expect_well_formed(read("io-tune.html"));
  expect_no_file();
}

TEST_F(IoTuneCommand, StopsBeforeItsWriteLimit) {
  const Outcome o = run(command({"--seconds", "60", "--write-limit", "48MiB"}));
  EXPECT_EQ(o.code, 0) << o.err;
  const auto j = nlohmann::json::parse(o.out);
  EXPECT_EQ(j["ended"], "--write-limit 48MiB was reached");
  EXPECT_LE(j["written_bytes"], 48 * kMiB);
}

TEST_F(IoTuneCommand, MistakesAreNamed) {
  write("file", "x");
  const struct {
    Strings arguments;
    const char* part;
  } cases[] = {
      {{"io-tune"}, "--path"},
      {{"io-tune", "--path", "absent"}, "absent"},
      {{"io-tune", "--path", "file"}, "is no directory"},
      {{"io-tune", "--path", ".", "--path", "."}, "is given twice"},
      {{"io-tune", "--path", ".", "--size", "lots"}, "--size lots"},
      {{"io-tune", "--path", ".", "--size", "1MiB"}, "less than 16.0 MiB"},
      {{"io-tune", "--path", ".", "--backend", "tape"}, "--backend"},
      {{"io-tune", "--path", ".", "--seconds", "0"}, "--seconds"},
      {{"io-tune", "--path", ".", "--state", "text.txt"}, "no state file"},
      {{"io-tune", "--path", ".", "--report", "absent/x.html"}, "absent/x.html"},
      {{"io-tune", "--path", ".", "--size", "64MiB", "--write-limit", "32MiB"}, "--write-limit"},
  };
  for (const auto& c : cases) {
    const Outcome o = run(c.arguments);
    EXPECT_EQ(o.code, 2) << o.err;
    EXPECT_HAS(message_of(o), c.part) << o.err;
    expect_no_file();
  }
}

}  // namespace
}  // namespace zg::cli_test
