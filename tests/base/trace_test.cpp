#include "ziggurat/base/trace.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "support/errors.hpp"
#include "support/files.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"

namespace zg {
namespace {

TEST(Trace, WritesWhatPerfettoReads) {
  Trace trace;
  const int early = trace.lane("compute");
  trace.add(early, "before the start", Clock::now(), Clock::now());
  EXPECT_FALSE(trace.on());
  trace.start();
  const int read = trace.lane("nvme read");
  EXPECT_NE(read, early);
  EXPECT_EQ(trace.lane("compute"), early);
  const auto t = Clock::now();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int k = 0; k < 100; ++k)
        trace.add(read, "block", t, t + std::chrono::microseconds(1500 + i), 4096);
    });
  }
  for (auto& thread : threads) thread.join();
  trace.add(early, "gemm", t, t + std::chrono::milliseconds(2));

  const test::TempDir directory;
  const std::string path = directory / "trace.json";
  trace.save(path);
  const auto json = nlohmann::json::parse(read_text_file(path, "the trace"));
  std::map<std::string, int> spans;
  std::map<int, std::string> lanes;
  for (const auto& e : json.at("traceEvents")) {
    if (e.at("ph") == "X") {
      ++spans[e.at("name")];
      EXPECT_GE(e.at("ts").get<double>(), 0);
      if (e.at("name") == "gemm") {
        EXPECT_EQ(e.at("tid"), early);
        EXPECT_NEAR(e.at("dur").get<double>(), 2000, 0.001);
        EXPECT_FALSE(e.contains("args"));
      } else {
        EXPECT_EQ(e.at("args").at("bytes"), 4096);
      }
    } else if (e.at("name") == "thread_name") {
      lanes[e.at("tid")] = e.at("args").at("name");
    }
  }
  EXPECT_EQ(spans, (std::map<std::string, int>{{"block", 400}, {"gemm", 1}}));
  EXPECT_EQ(lanes.at(early), "compute");
  EXPECT_EQ(lanes.at(read), "nvme read");
  EXPECT_EQ(json.at("otherData").at("dropped_events"), "0");
}

// As on a full disk: the limit stands for it.
void save_beyond_the_limit(const std::string& path) {
  const rlimit small{.rlim_cur = 256 << 10, .rlim_max = 256 << 10};
  std::signal(SIGXFSZ, SIG_IGN);
  if (setrlimit(RLIMIT_FSIZE, &small) != 0) std::_Exit(1);
  Trace trace;
  trace.start();
  const int lane = trace.lane("compute");
  for (int i = 0; i < 20'000; ++i) trace.add(lane, "a span", Clock::now(), Clock::now());
  try {
    trace.save(path);
  } catch (const Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    std::_Exit(0);
  }
  std::_Exit(2);
}

TEST(TraceDeathTest, IsWrittenWholeOrNotAtAll) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const test::TempDir directory;
  const std::string path = directory / "trace.json";
  test::write_file(path, "the old one");
  EXPECT_EXIT(save_beyond_the_limit(path), testing::ExitedWithCode(0), "trace.json: .*File too large");
  EXPECT_EQ(test::read_file(path), "the old one");
  EXPECT_EQ(directory.names().size(), 1u);
}

TEST(Trace, TakesNoDevicesPlace) {
  const Error e = test::error_of([] { Trace().save("/dev/full"); });
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_HAS(e.message(), "this is a device");
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/full"));
}

TEST(Trace, AGroupHasLanesOfItsOwn) {
  Trace whole;
  Trace first(whole, "rank 0"), second(whole, "rank 1");
  second.start();
  EXPECT_TRUE(whole.on() && first.on() && second.on());
  const int lanes[] = {whole.lane("compute"), first.lane("compute"), second.lane("compute")};
  EXPECT_EQ(first.lane("compute"), lanes[1]);
  EXPECT_EQ(second.lane("operations"), 3);
  const auto t = Clock::now();
  whole.add(lanes[0], "w", t, t);
  first.add(lanes[1], "f", t, t);
  second.add(lanes[2], "s", t, t);
  const test::TempDir directory;
  const std::string path = directory / "trace.json";
  first.save(path);
  std::map<std::string, int> group_of;  // by span
  std::map<int, std::string> groups;
  const auto json = nlohmann::json::parse(read_text_file(path, "the trace"));
  for (const auto& e : json.at("traceEvents")) {
    if (e.at("ph") == "X") group_of[e.at("name")] = e.at("pid");
    if (e.at("name") == "process_name") groups[e.at("pid")] = e.at("args").at("name");
  }
  EXPECT_EQ(group_of, (std::map<std::string, int>{{"w", 1}, {"f", 2}, {"s", 3}}));
  EXPECT_EQ(groups, (std::map<int, std::string>{{1, "ziggurat"}, {2, "rank 0"}, {3, "rank 1"}}));
}

TEST(Trace, AnEmptyTraceIsValidJson) {
  Trace trace;
  trace.start();
  const test::TempDir directory;
  const std::string path = directory / "trace.json";
  trace.save(path);
  EXPECT_TRUE(nlohmann::json::accept(read_text_file(path, "the trace")));
}

TEST(Trace, AFileThatCannotBeWrittenIsNamed) {
  Trace trace;
  const Error e = test::error_of([&] { trace.save("/nonexistent/directory/trace.json"); });
  EXPECT_EQ(e.code(), Errc::kIo);
  EXPECT_EQ(e.where(), "/nonexistent/directory/trace.json");
}

}  // namespace
}  // namespace zg
