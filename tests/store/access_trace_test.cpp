// Trace files: what comes back, and what is said of files that are wrong.
#include "ziggurat/store/access_trace.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>

#include "store/trace_support.hpp"
#include "support/errors.hpp"
#include "support/files.hpp"
#include "support/seed.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/store/replay.hpp"

namespace zg::test {
namespace {

namespace fs = std::filesystem;

class TraceFile : public ::testing::Test {
 protected:
  void write(const std::string& text) const { write_file(path_, text); }
  std::string read() const { return read_text_file(path_, "a trace"); }

  // The message must name the file, the place in it, and say these words.
  void expect_refused(const std::string& place, const std::string& said) const {
    const Error e = error_of([&] { load_trace(path_); });
    EXPECT_EQ(e.code(), Errc::kUsage);
    EXPECT_EQ(e.where().rfind(path_, 0), 0u) << e.where();
    EXPECT_HAS(e.where(), place);
    EXPECT_HAS(e.message(), said);
    EXPECT_LT(std::string(e.what()).size(), 500u);
  }

  const TempDir directory_;
  const std::string path_ = directory_ / "t.trace";
};

bool same(const Program& a, const Program& b) {
  return a.name() == b.name() && a.hash() == b.hash() && a.op_count() == b.op_count() &&
         a.access_count() == b.access_count();
}

void expect_same(const AccessTrace& a, const AccessTrace& b) {
  EXPECT_EQ(a.budgets.device, b.budgets.device);
  EXPECT_EQ(a.budgets.host, b.budgets.host);
  EXPECT_EQ(a.sequence, b.sequence);
  EXPECT_EQ(a.table.drives(), b.table.drives());
  EXPECT_EQ(a.table.device_granule(), b.table.device_granule());
  EXPECT_EQ(a.table.segment_count(), b.table.segment_count());
  ASSERT_EQ(a.table.tensor_count(), b.table.tensor_count());
  for (TensorId id = 0; id < a.table.tensor_count(); ++id) {
    const TensorSpec &x = a.table.tensor(id).spec, &y = b.table.tensor(id).spec;
    EXPECT_EQ(x.name, y.name);
    EXPECT_EQ(x.dtype, y.dtype);
    EXPECT_EQ(x.count, y.count);
    EXPECT_EQ(x.role, y.role);
    EXPECT_EQ(x.lowest, y.lowest);
    EXPECT_EQ(x.segment_elements, y.segment_elements);
    EXPECT_EQ(x.priority, y.priority);
    EXPECT_EQ(x.versions, y.versions);
  }
  ASSERT_EQ(a.programs.size(), b.programs.size());
  for (std::size_t i = 0; i < a.programs.size(); ++i) EXPECT_TRUE(same(a.programs[i], b.programs[i])) << i;
}

TEST_F(TraceFile, ComesBackAsItWas) {
  const std::uint64_t seed = test_seed(4201);
  SCOPED_TRACE(seed);
  Random random(seed);
  constexpr Role kRoles[] = {Role::kWeight, Role::kGradient, Role::kOptimizerState, Role::kActivation,
                             Role::kOther};
  constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16,
                               DType::kI64, DType::kI32, DType::kU16, DType::kU8};
  constexpr Tier kLowest[] = {Tier::kDevice, Tier::kHost, Tier::kNvme};
  for (int trial = 0; trial < 30; ++trial) {
    AccessTrace trace;
    trace.table = TensorTable(below(random, 3), 4096 * (1 + below(random, 3)));
    const int tensors = 1 + below(random, 12);
    for (int i = 0; i < tensors; ++i) {
      const std::int64_t count = 1 + below(random, 5000);
      trace.table.add({.name = fmt::format("t\"{}\\ \xC3\xA9\n", i),
                       .dtype = kDTypes[below(random, 8)],
                       .count = count,
                       .role = kRoles[below(random, 5)],
                       .lowest = kLowest[below(random, 3)],
                       .segment_elements = below(random, 2) == 0 ? 0 : 1 + below(random, 900),
                       .priority = below(random, 7) - 3,
                       .versions = 1 + below(random, 2)});
    }
    trace.budgets = {below(random, 1 << 30), std::int64_t{1} << 45};
    const auto given = random_given(random, trace.table.segment_count());
    for (int p = 0, n = 1 + below(random, 3); p < n; ++p) {
      trace.programs.push_back(
          random_program(random, fmt::format("p{}", p), trace.table, given, {.ops = 15}));
    }
    for (int i = 0, n = 1 + below(random, 20); i < n; ++i) {
      trace.sequence.push_back(below(random, static_cast<int>(trace.programs.size())));
    }
    save_trace(trace, path_);
    expect_same(trace, load_trace(path_));
    if (testing::Test::HasFailure()) return;
  }
}

// The granule of a GPU's memory decides what fits. Older files do not name it; there it is a page.
TEST_F(TraceFile, SaysWhatTheDeviceGivesItsMemoryInUnlessItIsPages) {
  constexpr std::int64_t kGranule = 2 << 20;
  AccessTrace trace = equal_trace(2, {at_device(0), at_device(1)});
  save_trace(trace, path_);
  EXPECT_HAS_NOT(read(), "granule");
  EXPECT_EQ(load_trace(path_).table.device_granule(), kPage);
  EXPECT_FALSE(replay(load_trace(path_), {2 * kPage, 2 * kPage}, default_policy()).obstacle);
  trace.table = equal_table(1, 2, kPage, Tier::kNvme, kGranule);
  save_trace(trace, path_);
  const AccessTrace loaded = load_trace(path_);
  EXPECT_EQ(loaded.table.device_granule(), kGranule);
  EXPECT_EQ(replay(loaded, {2 * kGranule, 2 * kPage}, default_policy()).peak.device, 2 * kGranule);
  const ReplayResult less = replay(loaded, {kGranule - kPage, 2 * kPage}, default_policy());
  ASSERT_TRUE(less.obstacle);
  EXPECT_EQ(less.obstacle->tier, Tier::kDevice);
  EXPECT_EQ(less.obstacle->needed, kGranule);
}

TEST_F(TraceFile, IsWrittenWholeOrNotAtAll) {
  const AccessTrace trace = equal_trace(3, scan(3, Access::kRead));
  save_trace(trace, path_);
  EXPECT_FALSE(fs::exists(path_ + ".part"));
  EXPECT_THROW(save_trace(trace, directory_ / "none/t.trace"), Error);
  fs::create_directory(directory_ / "folder");
  EXPECT_THROW(save_trace(trace, directory_ / "folder"), Error);
  EXPECT_FALSE(fs::exists(directory_ / "folder.part"));
}

TEST_F(TraceFile, CutAnywhereIsRefused) {
  save_trace(equal_trace(3, scan(3, Access::kRead)), path_);
  const std::string whole = read();
  for (std::size_t length = 1; length + 1 < whole.size(); ++length) {
    write(whole.substr(0, length));
    expect_refused("t.trace", "is no JSON: line ");
    if (testing::Test::HasFailure()) {
      ADD_FAILURE() << "after " << length << " bytes";
      return;
    }
  }
}

struct Damage {
  const char* name;
  const char *from, *to;  // in a good file
  const char *place, *said;
};
void PrintTo(const Damage& damage, std::ostream* out) {
  *out << damage.name;
}

class DamagedTrace : public TraceFile, public ::testing::WithParamInterface<Damage> {};

TEST_P(DamagedTrace, IsRefusedWithItsPlace) {
  write(
      R"({"format": "ziggurat access trace", "version": 1, "drives": 1, "budgets": {"device": 4096, "host": 8192},
 "tensors": [["a", "f32", 1024, "weight", "nvme", 0, 0], ["b", "bf16", 100, "other", "host", 50, 0]],
 "programs": [{"name": "p", "ops": [[0, "hr", 1, "do!"], [2, "dw"]]}],
 "sequence": [[0, 3]]})");
  const AccessTrace good = load_trace(path_);
  ASSERT_EQ(good.table.segment_count(), 3);
  ASSERT_EQ(good.sequence.size(), 3u);
  const Damage& damage = GetParam();
  std::string text = read();
  const std::size_t at = text.find(damage.from);
  ASSERT_NE(at, std::string::npos);
  write(text.replace(at, std::string(damage.from).size(), damage.to));
  expect_refused(damage.place, damage.said);
}

INSTANTIATE_TEST_SUITE_P(
    All, DamagedTrace,
    ::testing::Values(
        Damage{"NoTrace", "ziggurat access trace", "something", "t.trace", "is no trace"},
        Damage{"Version", "\"version\": 1", "\"version\": 2", "version", "found 2, expected 1"},
        Damage{"NoVersion", "\"version\"", "\"v\"", "version", "is missing"},
        Damage{"NotJson", "\"drives\": 1", "\"drives\" 1", "t.trace", "is no JSON: line 1, column 60"},
        Damage{"HugeBudget", "8192", "9223372036854775807", "budgets.host", "found 9223372036854775807"},
        Damage{"BytesOfAllVersions", "1024, \"weight\", \"nvme\", 0, 0",
               "100000000000000000, \"weight\", \"nvme\", 0, 0, 64", "tensors[0][2]", "bytes up to here"},
        Damage{"NameTwice", "\"b\", \"bf16\"", "\"a\", \"bf16\"", "tensors[1][0]",
               "found \"a\" a second time"},
        Damage{"NoName", "\"b\", \"bf16\"", "\"\", \"bf16\"", "tensors[1][0]", "is empty"},
        Damage{"NumberOfNoType", "\"drives\": 1", "\"drives\": 1e400", "t.trace", "is no JSON"},
        Damage{"Deep", "\"drives\": 1", "\"drives\": [[[[[[[[[1]]]]]]]]]", "t.trace", "nests objects"},
        Damage{"NoBudget", "\"host\": 8192", "\"hots\": 8192", "budgets.host", "is missing"},
        Damage{"NegativeBudget", "\"device\": 4096", "\"device\": -1", "budgets.device",
               "found -1, expected"},
        Damage{"BudgetIsText", "8192", "\"8KiB\"", "budgets.host", "found \"8KiB\", expected a whole number"},
        Damage{"Granule", "\"drives\": 1", "\"drives\": 1, \"device_granule\": 6000", "device_granule",
               "found 6000, expected a multiple of 4096"},
        Damage{"SmallGranule", "\"drives\": 1", "\"drives\": 1, \"device_granule\": 0", "device_granule",
               "found 0, expected a whole number"},
        Damage{"GranuleIsText", "\"drives\": 1", "\"drives\": 1, \"device_granule\": \"2MiB\"",
               "device_granule", "found \"2MiB\", expected a whole number"},
        Damage{"Drives", "\"drives\": 1", "\"drives\": 1.5", "drives", "found 1.5"},
        Damage{"NoTensors",
               R"([["a", "f32", 1024, "weight", "nvme", 0, 0], ["b", "bf16", 100, "other", "host", 50, 0]])",
               "[]", "tensors", "is empty"},
        Damage{"TensorsAreNoList",
               R"([["a", "f32", 1024, "weight", "nvme", 0, 0], ["b", "bf16", 100, "other", "host", 50, 0]])",
               "{}", "tensors", "found {}, expected a list"},
        Damage{"TooFewValues", ", 50, 0]", ", 50]", "tensors[1]", "found 6 values, expected 7 or 8"},
        Damage{"Versions", "50, 0]", "50, 0, 65]", "tensors[1][7]",
               "found 65, expected a whole number, 1 to 64"},
        Damage{"Type", "\"bf16\"", "\"fp8\"", "tensors[1][1]", "found \"fp8\", expected one of f64, f32"},
        Damage{"Role", "\"other\"", "\"others\"", "tensors[1][3]",
               "found \"others\", expected one of weight"},
        Damage{"Tier", "\"nvme\"", "\"disk\"", "tensors[0][4]",
               "found \"disk\", expected one of device, host, nvme"},
        Damage{"NoElements", "1024", "0", "tensors[0][2]", "found 0, expected a whole number"},
        Damage{"TooLarge", "1024", "9000000000000000000", "tensors[0][2]", "found 9000000000000000000"},
        Damage{"BeyondInt64", "1024", "18446744073709551615", "tensors[0][2]", "found 18446744073709551615"},
        Damage{"TooManySegments", "1024, \"weight\", \"nvme\", 0", "100000000, \"weight\", \"nvme\", 1",
               "tensors[0][5]", "segments more"},
        Damage{"Priority", "50, 0]", "50, 3000000000]", "tensors[1][6]", "found 3000000000"},
        Damage{"SegmentOutOfRange", "[2, \"dw\"]", "[3, \"dw\"]", "programs[0].ops[1]",
               "found 3, expected a whole number, 0 to 2"},
        Damage{"SegmentNegative", "[2, \"dw\"]", "[-1, \"dw\"]", "programs[0].ops[1]", "found -1"},
        Damage{"SegmentTwice", "1, \"do!\"", "0, \"do!\"", "programs[0].ops[0]", "names segment 0 twice"},
        Damage{"AccessOnNvme", "\"dw\"", "\"nw\"", "programs[0].ops[1]", "found \"nw\", expected an access"},
        Damage{"AccessUnknown", "\"dw\"", "\"dx\"", "programs[0].ops[1]", "found \"dx\""},
        Damage{"AccessTooLong", "\"do!\"", "\"do!!\"", "programs[0].ops[0]", "found \"do!!\""},
        Damage{"OddValues", "[2, \"dw\"]", "[2]", "programs[0].ops[1]", "found 1 values, expected pairs"},
        Damage{"EmptyOp", "[2, \"dw\"]", "[]", "programs[0].ops[1]", "found 0 values"},
        Damage{"EmptyProgram", R"([[0, "hr", 1, "do!"], [2, "dw"]])", "[]", "programs[0].ops", "is empty"},
        Damage{"ProgramWithoutName", "\"name\"", "\"nam\"", "programs[0].name", "is missing"},
        Damage{"TooFewTimes", "\"name\": \"p\"", "\"name\": \"p\", \"times\": [1]", "programs[0].times",
               "found 1 values, expected one for each of 2 operations"},
        Damage{"NegativeTime", "\"name\": \"p\"", "\"name\": \"p\", \"times\": [1, -1]",
               "programs[0].times[1]", "found -1"},
        Damage{"SequenceOutOfRange", "[[0, 3]]", "[[1, 3]]", "sequence[0]",
               "found 1, expected a whole number, 0 to 0"},
        Damage{"SequenceZeroTimes", "[[0, 3]]", "[[0, 0]]", "sequence[0]", "found 0"},
        Damage{"SequenceTooLong", "[[0, 3]]", "[[0, 99999999]]", "sequence[0]", "found 99999999"},
        Damage{"SequenceEmpty", "[[0, 3]]", "[]", "sequence", "is empty"},
        Damage{"SequenceFlat", "[[0, 3]]", "[0, 3]", "sequence[0]", "found 0, expected a program"}),
    [](const auto& param) { return std::string(param.param.name); });

// Sums of numbers each of which is in bounds.
TEST_F(TraceFile, NumbersThatOverflowTogetherAreRefused) {
  const std::string head =
      R"({"format": "ziggurat access trace", "version": 1, "drives": 1, "budgets": {"device": 4096, "host": 8192},
 "tensors": [["a", "f32", 1024, "weight", "nvme", 0, 0]], "sequence": [[0, 1]], "programs": [)";
  std::string ops = "[0, \"hr\"]", times = "1099511627776";
  for (int i = 0; i < 17; ++i) ops += ", " + ops, times += ", " + times;
  write(head + R"({"name": "p", "ops": [)" + ops + R"(], "times": [)" + times + "]}]}");
  expect_refused("programs[0].times[65536]", "in all, expected at most");
}

// Each program has an index over all segments: 70,000 of them would take hundreds of GB.
TEST_F(TraceFile, ManyProgramsOverManySegmentsAreRefused) {
  std::string text =
      R"({"format": "ziggurat access trace", "version": 1, "drives": 1, "budgets": {"device": 4096, "host": 8192},
 "tensors": [["a", "u8", 1000000, "weight", "nvme", 1, 0]], "sequence": [[0, 1]], "programs": [)";
  for (int i = 0; i < 70'000; ++i)
    text += fmt::format("{}{{\"name\": \"p\", \"ops\": [[0, \"hr\"]]}}", i == 0 ? "" : ", ");
  write(text + "]}");
  expect_refused("programs", "over 1000000 segments, expected at most");
}

// A line of a million accesses takes time that grows with them, not with their square.
TEST_F(TraceFile, AnOperationOfManyAccessesIsReadInTime) {
  std::string text =
      R"({"format": "ziggurat access trace", "version": 1, "drives": 1, "budgets": {"device": 4096, "host": 8192},
 "tensors": [["a", "u8", 300000, "weight", "nvme", 1, 0]], "sequence": [[0, 1]], "programs": [{"name": "p", "ops": [[)";
  for (int i = 0; i < 300'000; ++i) text += fmt::format("{}{}, \"hr\"", i == 0 ? "" : ", ", i);
  write(text + "]]}]}");
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(load_trace(path_).programs[0].access_count(), 300'000);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

TEST_F(TraceFile, WhatNobodyCouldLoadIsNotWritten) {
  const AccessTrace trace = equal_trace(2, {at_host(0)});
  const Error error = error_of([&] { save_trace(trace, path_, 100); });
  EXPECT_EQ(error.code(), Errc::kUsage);
  EXPECT_HAS(error.message(), "at most expected");
  EXPECT_FALSE(fs::exists(path_));
}

TEST_F(TraceFile, MissingOrAFolderIsRefused) {
  expect_refused("t.trace", "No such file or directory");
  fs::create_directory(path_);
  expect_refused("t.trace", "this is a directory");
}

}  // namespace
}  // namespace zg::test
