#include "ziggurat/base/system.hpp"
#include "ziggurat/base/file.hpp"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "support/errors.hpp"
#include "support/files.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/failure.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/thread.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

class Files : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return directory_ / name; }
  std::size_t count() const { return directory_.names().size(); }
  const test::TempDir directory_;
};

TEST_F(Files, WritesAtomicallyAndReadsBack) {
  const std::string content("line\n\0with a zero byte", 22);
  write_file_atomically(path("a"), "old");
  write_file_atomically(path("a"), content);
  EXPECT_EQ(read_text_file(path("a"), "the file"), content);
  write_file_atomically(path("empty"), "");
  EXPECT_EQ(read_text_file(path("empty"), "the file"), "");
  EXPECT_EQ(count(), 2u);  // nothing temporary is left
}

TEST_F(Files, AFailedWriteLeavesTheOldFile) {
  // The target is a directory that is not empty: the rename must fail.
  std::filesystem::create_directories(path("target/inside"));
  const Error e = test::error_of([&] { write_file_atomically(path("target"), "new"); });
  EXPECT_EQ(e.code(), Errc::kIo);
  EXPECT_EQ(e.where(), path("target"));
  EXPECT_HAS(e.message(), "errno");
  EXPECT_TRUE(std::filesystem::is_directory(path("target/inside")));
  EXPECT_EQ(count(), 1u);
}

TEST_F(Files, MissingDirectoryIsNamed) {
  const Error e = test::error_of([&] { write_file_atomically(path("none/a"), "x"); });
  EXPECT_EQ(e.code(), Errc::kIo);
  EXPECT_HAS(e.what(), path("none/a"));
}

TEST_F(Files, ReadingWhatCannotBeRead) {
  for (const std::string& p : {path("none"), directory_.path()}) {
    const Error e = test::error_of([&] { read_text_file(p, "the run configuration"); });
    EXPECT_EQ(e.code(), Errc::kUsage);
    EXPECT_EQ(e.where(), p);
    EXPECT_HAS(e.message(), "the run configuration");
  }
}

TEST(Memory, ResidentBytesFollowWhatIsTouched) {
  const std::int64_t before = resident_bytes();
  ASSERT_GT(before, 0);
  std::vector<char> block(64 * kMiB);
  std::memset(block.data(), 1, block.size());
  EXPECT_GE(resident_bytes(), before + 48 * kMiB);
  EXPECT_GE(peak_resident_bytes(), before + 48 * kMiB);
  EXPECT_GT(available_memory(), 0);
}

TEST(Threads, AreNamedAndJoined) {
  char name[32] = {};
  bool ran = false;
  {
    NamedThread thread("a-name-that-is-too-long", [&] {
      pthread_getname_np(pthread_self(), name, sizeof name);
      ran = true;
    });
    NamedThread moved = std::move(thread);
  }
  EXPECT_TRUE(ran);
  EXPECT_STREQ(name, "a-name-that-is-");
}

TEST(InterruptDeathTest, FirstSignalSetsAFlagSecondEnds) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        install_interrupt_handler();
        if (interrupted()) std::_Exit(1);
        raise(SIGTERM);
        if (!interrupted()) std::_Exit(2);
        raise(SIGINT);
        std::_Exit(3);
      },
      testing::ExitedWithCode(130), "");
}

[[noreturn]] void hang_up_often() {
  install_interrupt_handler();
  raise(SIGPIPE);
  raise(SIGXFSZ);
  if (interrupted()) std::_Exit(1);
  for (int i = 0; i < 3; ++i) {
    raise(SIGHUP);
    raise(SIGXCPU);
  }
  if (!interrupted()) std::_Exit(2);
  raise(SIGTERM);  // the first demand
  std::_Exit(3);
}

TEST(InterruptDeathTest, HangUpsSetTheFlagAndEndNothing) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(hang_up_often(), testing::ExitedWithCode(3), "");
}

// Programs that are started get the handlers of the system, as the launcher of an MPI does.
TEST(InterruptDeathTest, StartedProgramsHaveNoneOfTheHandlers) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        install_interrupt_handler();
        execl("/bin/sh", "sh", "-c", "kill -PIPE $$; exit 3", nullptr);
      },
      testing::KilledBySignal(SIGPIPE), "");
}

TEST(FailureDeathTest, WhatNobodyCatchesIsOneSentence) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto thrown = [](const auto& what) {
    install_failure_handler();
    at_sudden_end([] { (void)!write(STDERR_FILENO, "cleaned\n", 8); });
    NamedThread thread("zg-test", [&] { throw what; });
    thread.join();
  };
  EXPECT_EXIT(thrown(std::bad_alloc()), testing::ExitedWithCode(2),
              "ziggurat: out of memory\n  hint: .*\ncleaned");
  EXPECT_EXIT(thrown(Error(Errc::kIo, "a", "is b", "do c")), testing::ExitedWithCode(1),
              "ziggurat: a: is b\n  hint: do c\ncleaned");
}

TEST(Failure, ExceptionsOfTheLibraryGetPlaceCauseAndHint) {
  const Error memory = error_from(std::bad_alloc());
  EXPECT_EQ(memory.exit_code(), 2);
  EXPECT_HAS(memory.hint(), "lower the budgets");
  EXPECT_EQ(error_from(std::length_error("vector")).exit_code(), 2);
  const std::error_code loop(ELOOP, std::generic_category()), full(ENOSPC, std::generic_category());
  const Error link = error_from(std::filesystem::filesystem_error("status", "some/path", loop));
  EXPECT_EQ(link.where(), "some/path");
  EXPECT_EQ(link.exit_code(), 2);
  EXPECT_HAS(link.message(), "symbolic links");
  EXPECT_EQ(error_from(std::filesystem::filesystem_error("copy", "some/path", full)).exit_code(), 1);
  const Error threads = error_from(std::system_error(EAGAIN, std::generic_category()));
  EXPECT_EQ(threads.exit_code(), 2);
  EXPECT_HAS(threads.message(), "cannot be started beside the ");
  EXPECT_HAS(threads.hint(), "raise what limits threads (");
  const Error same = error_from(Error(Errc::kInterrupted, "a", "b", "c"));
  EXPECT_EQ(same.exit_code(), 130);
  EXPECT_EQ(same.hint(), "c");
}

TEST(Log, LinesCarryTheirLevelAndTheThreshold) {
  testing::internal::CaptureStderr();
  log::set_level(log::Level::kWarning);
  log::info("hidden {}", 1);
  log::warning("shown {}", 2);
  log::set_level(log::Level::kInfo);
  log::info("with braces {}", "{}");
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_HAS_NOT(text, "hidden");
  EXPECT_HAS(text, "warning: shown 2\n");
  EXPECT_HAS(text, "info: with braces {}\n");
}

}  // namespace
}  // namespace zg
