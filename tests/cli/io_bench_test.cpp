// `ziggurat io-bench` as its users see it: what it prints, refuses and leaves behind.
#include <algorithm>

#include "cli/fixture.hpp"

namespace zg::cli_test {
namespace {

using nlohmann::json;

class IoBench : public CliTest {
 protected:
  IoBench() { fs::create_directories(path("drive")); }
  // Small and shallow, unless the flags say something else.
  Outcome bench(const Strings& flags) const {
    Strings words{"io-bench"};
    const Strings defaults[] = {{"--size", "8MiB"}, {"--block-size", "64KiB"}, {"--queue-depth", "4"}};
    for (const Strings& d : defaults) {
      if (std::find(flags.begin(), flags.end(), d[0]) == flags.end()) words = words + d;
    }
    const Outcome o = run(words + flags);
    EXPECT_TRUE(fs::is_empty(path("drive")));
    return o;
  }
  // All of stdout, as one object.
  json result(const Strings& flags) const {
    const Outcome o = bench(flags + Strings{"--json"});
    EXPECT_EQ(o.code, 0) << o.err;
    return json::parse(o.out);
  }
};

const Strings kShort{"--seconds", "0.05", "--ramp", "0.01"};

TEST_F(IoBench, PrintsOneBlockThatSaysAll) {
  const Outcome o = bench(kShort + Strings{"--path", "drive", "--op", "mixed", "--verify", "on"});
  EXPECT_EQ(o.code, 0) << o.err;
  for (const char* part : {"io-bench   mixed, sequential, 64.0 KiB blocks", "8.0 MiB", "engine     ",
                           "throughput ", "requests/s", "read   p50", "write  p50", "p99 ", "max ",
                           "s per GB", "verified ", "written, preparation included"}) {
    EXPECT_HAS(o.out, part) << part << " is missing:\n" << o.out;
  }
}

TEST_F(IoBench, JsonIsOneObjectInSiUnits) {
  for (const std::string op : {"read", "write", "mixed", "copy"}) {
    const json j =
        result(Strings{"--path", "drive", "drive", "--op", op, "--seconds", "0", "--verify", "on"});
    EXPECT_EQ(j.at("op"), op);
    EXPECT_EQ(j.at("pattern"), "sequential");
    EXPECT_EQ(j.at("block_size"), 65536);
    EXPECT_EQ(j.at("queue_depth"), 4);
    EXPECT_EQ(j.at("queues"), 1);
    EXPECT_NE(j.at("backend"), "auto");
    EXPECT_FALSE(j.at("engine").get<std::string>().empty());
    // One pass over two files.
    const std::int64_t bytes = 2 * (8 << 20);
    EXPECT_EQ(j.at("bytes"), bytes);
    const double seconds = j.at("seconds");
    EXPECT_GT(seconds, 0);
    EXPECT_NEAR(j.at("bytes_per_second").get<double>(), static_cast<double>(bytes) / seconds, 1);
    EXPECT_NEAR(j.at("requests_per_second").get<double>(), static_cast<double>(bytes) / 65536 / seconds,
                1e-3);
    EXPECT_NEAR(j.at("cpu_seconds_per_gb").get<double>(), j.at("cpu_seconds").get<double>() / 0.016777216,
                1e-6);
    std::int64_t sum = 0;
    for (const char* half : {"read", "write"}) {
      const json& h = j.at(half);
      sum += h.at("bytes").get<std::int64_t>();
      EXPECT_EQ(h.at("bytes"), h.at("requests").get<std::int64_t>() * 65536);
      const json& l = h.at("latency_seconds");
      EXPECT_EQ(h.at("requests") > 0, l.at("max") > 0.0);
      EXPECT_LE(l.at("p50"), l.at("p99"));
      EXPECT_LE(l.at("p99"), l.at("p999"));
      EXPECT_LE(l.at("p999"), l.at("max"));
      EXPECT_LT(l.at("max"), 100.0);
      EXPECT_LE(l.at("mean"), l.at("max"));
    }
    EXPECT_EQ(sum, bytes);
    const std::int64_t written = j.at("write").at("bytes");
    EXPECT_EQ(j.at("written_bytes"), op == "copy" ? bytes : bytes + written);  // one file is not prepared
    ASSERT_EQ(j.at("paths").size(), 2u);
    for (const json& p : j.at("paths")) {
      EXPECT_EQ(p.at("path"), "drive");
      EXPECT_GT(p.at("bytes_per_second"), 0.0);
      EXPECT_TRUE(p.contains("depth"));
    }
    EXPECT_EQ(j.at("verified"), true);
    EXPECT_EQ(j.at("interrupted"), false);
  }
}

TEST_F(IoBench, FlagsReachTheEngine) {
  const json j = result(
      kShort + Strings{"--backend", "ram", "--pattern", "random", "--block-size", "8KiB", "--seed", "9"});
  EXPECT_EQ(j.at("backend"), "ram");
  EXPECT_EQ(j.at("pattern"), "random");
  EXPECT_EQ(j.at("block_size"), 8192);
  EXPECT_NEAR(j.at("seconds").get<double>(), 0.05, 1e-6);
  EXPECT_EQ(j.at("verified"), false);
  const json threads = result(kShort + Strings{"--path", "drive", "--backend", "threads", "--threads", "3"});
  EXPECT_EQ(threads.at("backend"), "threads");
  EXPECT_HAS(threads.at("engine").get<std::string>(), "3 threads");
}

TEST_F(IoBench, AnInterruptedRunPrintsWhatItHas) {
  const Outcome o = run(Launch{.arguments = {"io-bench", "--path", "drive", "--size", "4MiB", "--ramp", "0",
                                             "--seconds", "100", "--json"},
                               .interrupt_at = "temporary file"});
  EXPECT_TRUE(o.interrupted);
  EXPECT_EQ(o.code, 130) << o.err;
  const json j = json::parse(o.out);
  EXPECT_EQ(j.at("interrupted"), true);
  EXPECT_LT(j.at("seconds"), 100.0);
  EXPECT_TRUE(fs::is_empty(path("drive")));
}

TEST_F(IoBench, ACopySaysHowFastItWas) {
  write("data.bin", std::string(9 << 20, 'x'));
  for (const Strings& from : {Strings{}, Strings{"--file", "data.bin"}}) {
    const Outcome o = bench(from + Strings{"--path", "drive", "--op", "copy", "--verify", "on"});
    EXPECT_EQ(o.code, 0) << o.err;
    for (const char* part : {"io-bench   copy, sequential", "/s copied\n", "read   p50", "write  p50",
                             "verified ", "data.bin: ", "drive: "}) {
      if (from.empty() && std::string(part) == "data.bin: ") continue;
      EXPECT_HAS(o.out, part);
    }
    if (!from.empty()) {
      EXPECT_HAS(o.out, "8.0 MiB of data.bin to a new file in drive");
    }
  }
  EXPECT_EQ(fs::file_size(path("data.bin")), std::uintmax_t{9 << 20});
}

// A file of the user's: read as it is, written only when it may be.
TEST_F(IoBench, AnExistingFileIsMeasured) {
  std::string content;
  for (int i = 0; i < (8 << 20); ++i) content += static_cast<char>(i * 7 + i / 4099);
  write("data.bin", content);
  const json read = result(Strings{"--file", "data.bin", "--seconds", "0", "--verify", "on"});
  EXPECT_EQ(read.at("bytes"), 8 << 20);
  EXPECT_EQ(read.at("written_bytes"), 0);
  EXPECT_TRUE(this->read("data.bin") == content);
  for (const std::string op : {"write", "mixed"}) {
    write("data.bin", content);
    const Outcome refused = bench({"--file", "data.bin", "--op", op});
    EXPECT_EQ(refused.code, 2) << refused.err;
    EXPECT_HAS(message_of(refused), "--overwrite") << refused.err;
    EXPECT_TRUE(this->read("data.bin") == content);
    const json j =
        result(Strings{"--file", "data.bin", "--op", op, "--overwrite", "--seconds", "0", "--verify", "on"});
    EXPECT_EQ(j.at("written_bytes"), j.at("write").at("bytes"));  // it is not prepared
    EXPECT_EQ(fs::file_size(path("data.bin")), std::uintmax_t{8 << 20});
    EXPECT_FALSE(this->read("data.bin") == content);
  }
}

TEST_F(IoBench, MistakesAreNamedBeforeAnythingIsWritten) {
  write("file.bin", std::string(1 << 20, 'x'));
  const Strings on_drive{"--path", "drive"};
  const struct {
    Strings flags;
    const char* place;
    const char* said;
  } cases[] = {
      {{}, "io-bench", "--path DIR or --file FILE"},
      {{"--path", "none"}, "none", "No such file or directory"},
      {{"--path", "file.bin"}, "file.bin", "is no directory"},
      {{"--file", "none"}, "--file none", "No such file or directory"},
      {{"--file", "drive"}, "--file drive", "is a directory"},
      {{"--file", "file.bin", "--path", "drive"}, "--file", "--path"},
      {{"--file", "file.bin"}, "--size", "asks for 8.0 MiB, file.bin has 1.0 MiB"},
      {{"--file", "file.bin", "--backend", "ram"}, "--file", "ram has no files"},
      {on_drive + Strings{"--op", "erase"}, "--op", "found erase, expected read, write, mixed or copy"},
      {on_drive + Strings{"--op", "copy", "--seconds", "2"}, "--seconds", "found 2, and a copy is one pass"},
      {on_drive + Strings{"--op", "copy", "--pattern", "random"}, "--pattern", "goes through the file"},
      {{"--file", "file.bin", "--op", "copy"}, "--op copy", "found 1 --file and 0 --path"},
      {on_drive + Strings{"drive", "drive", "--op", "copy"}, "--op copy", "found 0 --file and 3 --path"},
      {on_drive + Strings{"--op", "copy", "--file", "none"}, "--file none", "No such file or directory"},
      {on_drive + Strings{"--op", "copy", "--file", "file.bin"}, "--size",
       "asks for 8.0 MiB, file.bin has 1.0 MiB"},
      {on_drive + Strings{"--pattern", "zigzag"}, "--pattern", "expected sequential or random"},
      {on_drive + Strings{"--backend", "aio"}, "--backend", "found aio, expected auto, io_uring"},
      {on_drive + Strings{"--block-size", "5000"}, "--block-size", "found 5000, expected a multiple of 4096"},
      {on_drive + Strings{"--block-size", "1M"}, "--block-size", "1M is 1000000 bytes; say 1MiB for 1048576"},
      {on_drive + Strings{"--block-size", "8e18"}, "--block-size", "expected at most 1.00 GiB"},
      {on_drive + Strings{"--block-size", "much"}, "--block-size", "found much, expected a size"},
      {on_drive + Strings{"--block-size", "16MiB"}, "--size", "less than a block of 16.0 MiB"},
      {on_drive + Strings{"--size", "1000TiB"}, "--size", "free"},
      {{"--path", "drive", "drive", "--size", "500TiB"}, "--size", "for each of 2 files"},
      {{"--backend", "ram", "--size", "1000TiB"}, "--size", "memory has"},
      {on_drive + Strings{"--queue-depth", "0"}, "--queue-depth",
       "found 0, expected a whole number, 1 to 4096"},
      {on_drive + Strings{"--queues", "x"}, "--queues", "found x"},
      {on_drive + Strings{"--seconds", "nan"}, "--seconds", "found nan, expected a number"},
      {on_drive + Strings{"--verify", "yes"}, "--verify", "found yes, expected on or off"},
      {on_drive + Strings{"--registered", "1"}, "--registered", "found 1, expected on or off"},
  };
  for (const auto& c : cases) {
    const Outcome o = bench(c.flags);
    EXPECT_EQ(o.code, 2) << o.err;
    EXPECT_EQ(o.out, "");
    const std::string message = message_of(o);
    EXPECT_HAS(message, c.place);
    EXPECT_HAS(message, c.said);
  }
}

TEST_F(IoBench, HelpTeaches) {
  const Outcome o = run(Strings{"io-bench", "--help"});
  EXPECT_EQ(o.code, 0);
  for (const char* part : {"Examples:", "--block-size", "4GiB", "How to read the result", "fio --name"}) {
    EXPECT_HAS(o.out, part) << part;
  }
}

}  // namespace
}  // namespace zg::cli_test
