// What happens to extents when the drive's file does not keep what was promised: a disk that fills up in
// mid-run, a file that somebody cuts short, bits that change. Each is an error that names the extent, and
// never success.
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "support.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/volume.hpp"

namespace zg::io::test {
namespace {

constexpr std::int64_t kExtent = 128 * kKiB;

class Contents {
 public:
  Contents() : memory_(kExtent) {}
  char* of(int extent) const {
    memory_.fill(0, kExtent, static_cast<std::uint64_t>(extent) + 1);
    return memory_.data();
  }
  bool are(int extent, const Memory& other) const {
    return std::memcmp(of(extent), other.data(), static_cast<std::size_t>(kExtent)) == 0;
  }

 private:
  Memory memory_;
};

struct Extents {
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Volume> volume;
  std::vector<ExtentId> ids;
  Contents contents;

  Extents(const DriveOptions& drive, int count) {
    EngineOptions options;
    options.block_size = 64 * kKiB;
    engine = make_engine(options, {drive});
    volume = make_volume(*engine, {});
    for (int i = 0; i < count; ++i) ids.push_back(volume->create({fmt::format("tensor.{}", i), kExtent}));
  }
  ExtentResult write(int i) {
    return volume->write_and_wait({.extent = ids[static_cast<std::size_t>(i)], .data = contents.of(i)});
  }
  // The bytes are right, or the error is told.
  ExtentResult read(int i) {
    const Memory back(kExtent);
    const ExtentResult result =
        volume->read_and_wait({.extent = ids[static_cast<std::size_t>(i)], .data = back.data()});
    EXPECT_TRUE(!result.ok() || contents.are(i, back)) << i;
    return result;
  }
  std::string explain(int i, Op op, const ExtentResult& result) const {
    return volume->explain(ids[static_cast<std::size_t>(i)], op, result);
  }
};

// A file that is larger than its file system: only writing shows it.
TEST(FullDisk, InMidRunIsAnErrorAndWhatWasWrittenIsStillReadable) {
  const TempDir directory;
  if (mount("zg-test", directory.path().c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "may not mount";
  {
    const std::string file = directory.path() + "/sparse";
    std::ofstream(file).put('x');
    std::filesystem::resize_file(file, 16 * kExtent);
    Extents e({.path = file, .kind = FileKind::kExisting}, 16);
    std::vector<int> written;
    int failed = 0;
    for (int i = 0; i < 16; ++i) {
      const ExtentResult result = e.write(i);
      if (result.ok()) {
        written.push_back(i);
        continue;
      }
      ++failed;
      EXPECT_EQ(result.error, ENOSPC);
      const std::string text = e.explain(i, Op::kWrite, result);
      EXPECT_HAS(text, fmt::format("writing tensor.{}", i));
      EXPECT_HAS(text, file);
      EXPECT_HAS(text, "No space left on device");
      EXPECT_EQ(e.read(i).error, ENODATA);  // not what was there before, nor a part of the new
    }
    EXPECT_GE(written.size(), 6u);
    EXPECT_GE(failed, 8);
    for (const int i : written) EXPECT_TRUE(e.read(i).ok()) << i;
  }
  umount2(directory.path().c_str(), MNT_DETACH);
}

std::string data_file_in(const std::string& directory) {
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().extension() == ".tier") return entry.path().string();
  }
  return {};
}

TEST(ForeignHands, AFileCutShortIsAnErrorOrSoundNeverWrongBytes) {
  const TempDir directory;
  Extents e({.path = directory.path(), .bytes = 8 * kExtent}, 8);
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(e.write(i).ok());
  std::filesystem::resize_file(data_file_in(directory.path()), 4 * kExtent + kPage);
  int lost = 0;
  for (int i = 0; i < 8; ++i) {
    const ExtentResult result = e.read(i);
    if (result.ok()) continue;
    ++lost;
    EXPECT_EQ(result.error, EIO);  // ENODATA would say that the slot has no contents
    const std::string text = e.explain(i, Op::kRead, result);
    EXPECT_HAS(text, fmt::format("reading tensor.{}", i));
    EXPECT_HAS(text, "the file ends before it: was it cut short?");
  }
  EXPECT_EQ(lost, 4);
  // A later write makes the file longer; the hole in between is not taken for contents.
  ASSERT_TRUE(e.write(7).ok());
  EXPECT_TRUE(e.read(7).ok());
  int still_lost = 0;
  for (int i = 0; i < 7; ++i) still_lost += e.read(i).ok() ? 0 : 1;
  EXPECT_EQ(still_lost, 3);
}

// Any bit of the data file, changed behind the engine's back (O_DIRECT: its reads see it).
TEST(ForeignHands, AnyFlippedBitIsFoundAtTheNextRead) {
  constexpr int kExtents = 6;
  const NamedRandom random(printed_seed(), "bits");
  const TempDir directory;
  Extents e({.path = directory.path(), .bytes = kExtents * kExtent}, kExtents);
  for (int i = 0; i < kExtents; ++i) ASSERT_TRUE(e.write(i).ok());
  const int fd = open(data_file_in(directory.path()).c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  for (std::uint64_t round = 0; round < 300; ++round) {
    const std::uint64_t bit = random.below(round, static_cast<std::uint64_t>(kExtents * kExtent) * 8);
    const auto at = static_cast<off_t>(bit / 8);
    const auto flip = [&] {
      unsigned char byte = 0;
      ASSERT_EQ(pread(fd, &byte, 1, at), 1);
      byte = static_cast<unsigned char>(byte ^ (1u << (bit % 8)));
      ASSERT_EQ(pwrite(fd, &byte, 1, at), 1);
      ASSERT_EQ(fdatasync(fd), 0);
    };
    flip();
    int found = 0;
    for (int i = 0; i < kExtents; ++i) {
      const ExtentResult result = e.read(i);
      if (result.ok()) continue;
      ++found;
      EXPECT_EQ(result.error, EBADMSG);
      EXPECT_HAS(e.explain(i, Op::kRead, result), "checksum is wrong");
    }
    ASSERT_EQ(found, 1) << "bit " << bit;
    flip();
  }
  close(fd);
  for (int i = 0; i < kExtents; ++i) EXPECT_TRUE(e.read(i).ok());
}

}  // namespace
}  // namespace zg::io::test
