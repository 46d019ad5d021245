#include "ziggurat/base/file.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "support/errors.hpp"
#include "support/files.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

class BaseFile : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return directory_ / name; }
  const test::TempDir directory_;
};

// A pipe without a writer would block for ever; the others have no bytes that could be read.
TEST_F(BaseFile, OnlyRegularFilesAreRead) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  fs::create_symlink("loop", path("loop"));
  for (const auto& [name, what] :
       {std::pair(path("pipe"), "a pipe"), std::pair(directory_.path(), "a directory"),
        std::pair(std::string("/dev/null"), "a device"), std::pair(path("none"), "No such file"),
        std::pair(path("loop"), "symbolic links")}) {
    const Error error = test::error_of([&] { (void)read_text_file(name, "the configuration"); });
    EXPECT_EQ(error.code(), Errc::kUsage) << name;
    EXPECT_EQ(error.where(), name);
    EXPECT_HAS(error.message(), what);
    EXPECT_HAS(error.message(), "the configuration");
    EXPECT_FALSE(error.hint().empty()) << name;
  }
}

// The memory of a process is a regular file whose first bytes cannot be read, as if a drive had failed.
TEST_F(BaseFile, AReadErrorIsToldAndNoShorterText) {
  const Error error = test::error_of([] { (void)read_text_file("/proc/self/mem", "the text"); });
  EXPECT_EQ(error.code(), Errc::kIo);
  EXPECT_HAS(error.message(), "errno 5");
  const InputFile file("/proc/self/mem", "the text");
  char byte = 0;
  EXPECT_EQ(test::error_of([&] { file.read(&byte, 1, 0); }).code(), Errc::kIo);
}

TEST_F(BaseFile, AFileThatIsCutIsTold) {
  test::write_file(path("a"), "0123456789");
  const InputFile file(path("a"), "the text");
  char bytes[10];
  file.read(bytes, 10, 0);
  ASSERT_EQ(::truncate(path("a").c_str(), 4), 0);
  const Error error = test::error_of([&] { file.read(bytes, 10, 0); });
  EXPECT_EQ(error.code(), Errc::kIo);
  EXPECT_HAS(error.message(), "ends at byte 4");
  EXPECT_HAS(error.message(), "10 bytes");
  EXPECT_EQ(file.read_some(bytes, 10, 2), 2);
}

TEST_F(BaseFile, WhatIsReadWholeHasABound) {
  test::write_file(path("a"), std::string(5000, 'x'));
  EXPECT_EQ(read_text_file(path("a"), "the text", 5000).size(), 5000u);
  const Error error = test::error_of([&] { (void)read_text_file(path("a"), "the text", 4999); });
  EXPECT_EQ(error.code(), Errc::kUsage);
  EXPECT_HAS(error.message(), "5000 bytes");
  // Files that say that they have no bytes are read whole all the same.
  EXPECT_GT(read_text_file("/proc/self/status", "the status").size(), 100u);
}

TEST_F(BaseFile, LinksOfOthersAreNotFollowed) {
  test::write_file(path("victim"), "precious");
  // A name that anybody could foresee.
  fs::create_symlink("victim", path("a.part"));
  write_file_atomically(path("a"), "new");
  EXPECT_EQ(test::read_file(path("victim")), "precious");
  EXPECT_EQ(test::read_file(path("a")), "new");
  EXPECT_EQ(directory_.names(), (std::vector<std::string>{"a", "a.part", "victim"}));
  EXPECT_NE(temporary_name("a"), temporary_name("a"));
}

TEST_F(BaseFile, LeftoversOfKilledProcessesGo) {
  const std::string old = path("a.part-0123456789abcdef"), young = path("a.part-0123456789abcdee"),
                    locked = path("a.part-0123456789abcded"), mine = path("a.part-notes"),
                    other = path("b.part-0123456789abcdef");
  for (const std::string& name : {old, young, locked, mine, other}) {
    test::write_file(name, "x");
    if (name != young) {
      const timespec times[2] = {{1000, 0}, {1000, 0}};
      ASSERT_EQ(::utimensat(AT_FDCWD, name.c_str(), times, 0), 0);
    }
  }
  const int fd = ::open(locked.c_str(), O_RDONLY);
  ASSERT_EQ(::flock(fd, LOCK_EX | LOCK_NB), 0);
  write_file_atomically(path("a"), "new");
  ::close(fd);
  EXPECT_FALSE(fs::exists(old));
  for (const std::string& name : {young, locked, mine, other}) EXPECT_TRUE(fs::exists(name)) << name;
}

TEST_F(BaseFile, AnOutputAppearsWholeOrNotAtAll) {
  {
    OutputFile file(path("a"), 10);
    file.write_at(0, "01234", 5);
    EXPECT_FALSE(fs::exists(path("a")));
  }
  EXPECT_TRUE(directory_.is_empty());
  OutputFile first(path("a"), 0), second(path("a"), 0);  // two at once do not touch each other
  first.write_at(0, "first", 5), second.write_at(0, "second", 6);
  first.commit();
  EXPECT_EQ(test::read_file(path("a")), "first");
  second.sync();
  second.commit();
  EXPECT_EQ(test::read_file(path("a")), "second");
  EXPECT_EQ(directory_.names(), std::vector<std::string>{"a"});
}

TEST_F(BaseFile, LinesAreThoseOfTheFile) {
  const std::string longer(3 << 20, 'y');
  const std::vector<std::string> texts{
      "", "\n", "a", "a\n", "a\n\nb", longer + "\n" + longer, std::string(1 << 20, 'z') + "\nx"};
  for (const std::string& text : texts) {
    test::write_file(path("a"), text);
    const InputFile file(path("a"), "the lines");
    LineReader lines(file);
    std::string again, line;
    std::int64_t count = 0;
    while (lines.next(line)) again += line + "\n", ++count;
    EXPECT_EQ(lines.number(), count);
    EXPECT_TRUE(again == (text.empty() || text.back() == '\n' ? text : text + "\n")) << text.size();
  }
  test::write_file(path("a"), "short\n" + longer);
  const InputFile file(path("a"), "the lines");
  LineReader lines(file, 1 << 20);
  std::string line;
  EXPECT_TRUE(lines.next(line));
  const Error error = test::error_of([&] { (void)lines.next(line); });
  EXPECT_EQ(error.code(), Errc::kUsage);
  EXPECT_EQ(error.where(), path("a") + ":2");
}

}  // namespace
}  // namespace zg
