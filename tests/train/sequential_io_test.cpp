// Files that threads read and write beside the caller: all bytes, in order, and the errors of either side.
#include "checkpoint/sequential_io.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <random>

#include "support/errors.hpp"
#include "support/files.hpp"

namespace zg {
namespace {

constexpr std::int64_t kChunk = 8192;

std::string bytes_of(std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(count));
  std::string bytes(count, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

struct Descriptor {
  explicit Descriptor(const std::string& path) : fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~Descriptor() { (void)::close(fd); }
  const int fd;
};

TEST(ReadAhead, GivesAllBytesOfAllRangesInTheirOrder) {
  const test::TempDir directory;
  const std::string first = bytes_of(100'003), second = bytes_of(40'000);
  test::write_file(directory / "first", first);
  test::write_file(directory / "second", second);
  const Descriptor a(directory / "first"), b(directory / "second");
  // Turns of two files, at any place, empty, of a chunk, and to the end of a file.
  const std::vector<FileRange> ranges{{a.fd, 4096, kChunk, "first"}, {b.fd, 1, 30'000, "second"},
                                      {a.fd, 77, 0, "first"},        {a.fd, 5001, 3, "first"},
                                      {a.fd, 8191, 91'812, "first"}, {b.fd, 0, 40'000, "second"},
                                      {b.fd, 39'999, 1, "second"}};
  std::string expected, found;
  std::size_t last = 0;
  for (const FileRange& range : ranges) {
    expected += (range.fd == a.fd ? first : second)
                    .substr(static_cast<std::size_t>(range.offset), static_cast<std::size_t>(range.bytes));
  }
  ReadAhead ahead(ranges, kChunk);
  std::int64_t in_range = 0;
  while (const auto chunk = ahead.next()) {
    in_range = chunk->range == last ? in_range : 0;
    last = chunk->range;
    EXPECT_EQ(chunk->offset, in_range);
    EXPECT_LE(chunk->bytes, kChunk);
    in_range += chunk->bytes;
    found.append(chunk->data, static_cast<std::size_t>(chunk->bytes));
  }
  EXPECT_TRUE(found == expected);
  EXPECT_FALSE(ahead.next().has_value());
}

TEST(ReadAhead, NamesAFileThatEndsTooEarlyAndEndsAtAnyMoment) {
  const test::TempDir directory;
  test::write_file(directory / "file", bytes_of(50'000));
  const Descriptor file(directory / "file");
  const std::vector<FileRange> ranges{{file.fd, 0, 40'000, "one"}, {file.fd, 20'000, 30'001, "two"}};
  ReadAhead ahead(ranges, kChunk);
  const Error error = test::error_of([&] {
    while (ahead.next()) {
    }
    return 0;
  });
  EXPECT_EQ(error.code(), Errc::kIo);
  EXPECT_EQ(error.where(), "two");
  EXPECT_HAS(error.message(), "cannot be read");
  ReadAhead unread(ranges, kChunk);
  ReadAhead begun(ranges, kChunk);
  EXPECT_TRUE(begun.next().has_value());
}

// The operating system's, with some that fail or write less.
struct Odd final : Files {
  enum class What { kNothing, kShort, kNoDirect, kFail } what = What::kNothing;
  std::atomic<int> writes = 0, direct = 0;
  int fails_at = 0;
  std::int64_t write(int fd, const void* data, std::int64_t bytes, std::int64_t offset) override {
    const int number = writes++;
    const bool is_direct = (::fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    direct += is_direct ? 1 : 0;
    if (what == What::kFail && number == fails_at) return -EIO;
    if (what == What::kNoDirect && is_direct) return -EINVAL;
    if (what == What::kShort && number % 3 == 1) bytes = (bytes + 1) / 2 + 1 - bytes % 2;
    return Files::write(fd, data, bytes, offset);
  }
};

TEST(SequentialWriter, WritesAllBytesInPartsOfAnySize) {
  const test::TempDir directory;
  for (const Odd::What what : {Odd::What::kNothing, Odd::What::kShort, Odd::What::kNoDirect}) {
    for (const std::size_t count : {0, 1, 8191, 8192, 8193, 16384, 200'001}) {
      SCOPED_TRACE(testing::Message() << count << " bytes, " << static_cast<int>(what));
      Odd files;
      files.what = what;
      std::string bytes = bytes_of(count);
      const std::string path =
          directory / (std::to_string(count) + "-" + std::to_string(static_cast<int>(what)));
      SequentialWriter writer(files, path, static_cast<std::int64_t>(count), kChunk);
      for (std::size_t at = 0, n = 1; at < count; at += n, n = n * 2 % 30'011)
        writer.append(bytes.data() + at, static_cast<std::int64_t>(n = std::min(n, count - at)));
      writer.finish();
      if (count > 0) {
        bytes[count / 2] = 'x';
        writer.replace("x", 1, static_cast<std::int64_t>(count / 2));
      }
      writer.sync_and_close();
      EXPECT_TRUE(test::read_file(path) == bytes);
      if (count > kChunk) {
        EXPECT_GT(files.direct, 0);
      }
    }
  }
}

TEST(SequentialWriter, ReportsTheWriteThatFailed) {
  const test::TempDir directory;
  const std::string bytes = bytes_of(100'000);
  for (int fails = 0; fails < 14; ++fails) {
    SCOPED_TRACE(fails);
    Odd files;
    files.what = Odd::What::kFail, files.fails_at = fails;
    const Error error = test::error_of([&] {
      SequentialWriter writer(files, directory / std::to_string(fails), 100'000, kChunk);
      writer.append(bytes.data(), 100'000);
      writer.finish();
      writer.replace("x", 1, 5);
      return 0;
    });
    EXPECT_EQ(error.code(), Errc::kIo);
    EXPECT_EQ(error.where(), directory / std::to_string(fails));
  }
}

}  // namespace
}  // namespace zg
