// Volumes over real engines: contents, versions, checksums, space, shares and errors.
#include "ziggurat/io/volume.hpp"

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "io/placement.hpp"
#include "support.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io::test {
namespace {

// What the engine must be able to do for some of these tests.
constexpr bool kEngineTakesAnySize = false;
constexpr bool kEngineHasPriorities = false;
constexpr bool kEngineCountsBusyTime = false;

constexpr std::int64_t kGrain = 16 * kKiB;

VolumeOptions small_pieces() {
  return {.grain = kGrain, .stripe = 2 * kGrain};
}

std::unique_ptr<Engine> ram_engine(const std::vector<std::int64_t>& bytes, const FaultModel& faults = {},
                                   const RamModel& model = {}) {
  EngineOptions options;
  options.backend = Backend::kRam;
  options.block_size = 64 * kKiB;
  options.queue_depth = 8;
  options.ram = model;
  options.faults = faults;
  std::vector<DriveOptions> drives;
  for (std::size_t i = 0; i < bytes.size(); ++i)
    drives.push_back({.path = fmt::format("/mnt/{}", static_cast<char>('a' + i)), .bytes = bytes[i]});
  return make_engine(options, drives);
}

// Gathers results by tag.
class Results final : public ExtentCompletion {
 public:
  void on_extent(ExtentId, std::uint64_t tag, ExtentResult result) override {
    std::lock_guard lock(mutex_);
    EXPECT_TRUE(results_.emplace(tag, result).second) << "completed twice";
    thread_ = std::this_thread::get_id();
    changed_.notify_all();
  }
  ExtentResult wait_for(std::uint64_t tag) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return results_.count(tag) > 0; });
    return results_[tag];
  }
  std::size_t count() {
    std::lock_guard lock(mutex_);
    return results_.size();
  }
  std::thread::id thread() {
    std::lock_guard lock(mutex_);
    return thread_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, ExtentResult> results_;
  std::thread::id thread_;
};

bool same_bytes(const Memory& a, const Memory& b, std::int64_t bytes) {
  return std::memcmp(a.data(), b.data(), static_cast<std::size_t>(bytes)) == 0;
}

std::int64_t used_bytes(const Volume& volume, int drives) {
  std::int64_t used = 0;
  for (int d = 0; d < drives; ++d) used += volume.space(d).used;
  return used;
}

// ---- Random use against a model, over memory and over files.

class VolumeModelTest : public testing::TestWithParam<Backend> {
 protected:
  static constexpr int kDrives = 3;
  static constexpr std::int64_t kDriveBytes = 6 * kMiB;
  void SetUp() override {
    EngineOptions options;
    options.backend = GetParam();
    options.block_size = 64 * kKiB;
    options.queue_depth = 8;
    options.faults = {.seed = 5, .short_rate = 0.1, .delay_rate = 0.02};
    std::vector<DriveOptions> drives;
    for (int d = 0; d < kDrives; ++d) {
      directories_.push_back(std::make_unique<TempDir>());
      drives.push_back({.path = directories_.back()->path(), .bytes = kDriveBytes});
    }
    engine_ = make_engine(options, drives);
    if (engine_->backend() != GetParam()) GTEST_SKIP() << engine_->describe();
    volume_ = make_volume(*engine_, small_pieces());
  }

  std::vector<std::unique_ptr<TempDir>> directories_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Volume> volume_;
};

// One thread's extents, and what they must hold.
class RandomUser {
 public:
  RandomUser(Volume& volume, std::uint64_t seed, int thread)
      : volume_(volume), random_(seed, fmt::format("user {}", thread)), thread_(thread) {}

  void step() {
    const std::int64_t what = roll(16);
    if (extents_.empty() || (what == 0 && extents_.size() < 12)) return create();
    Extent& extent = extents_[static_cast<std::size_t>(roll(static_cast<std::int64_t>(extents_.size())))];
    const int slot = static_cast<int>(roll(static_cast<std::int64_t>(extent.versions.size())));
    if (what == 1) return destroy(extent);
    if (what == 2) {
      volume_.invalidate(extent.id, slot);
      extent.versions[static_cast<std::size_t>(slot)] = -1;
    } else if (what < 9) {
      write(extent, slot);
    } else {
      read(extent, slot);
    }
    expect_versions(extent);
  }
  void end() {
    for (Extent& e : extents_) {
      for (std::size_t s = 0; s < e.versions.size(); ++s) read(e, static_cast<int>(s));
    }
    while (!extents_.empty()) destroy(extents_.back());
  }
  std::int64_t created() const { return created_; }
  std::int64_t read_bytes() const { return read_bytes_; }

 private:
  static constexpr std::int64_t kMost = 320 * kKiB;
  struct Extent {
    ExtentId id;
    std::int64_t bytes = 0;
    std::vector<std::int64_t> versions;  // also the key of the contents
  };
  std::int64_t roll(std::int64_t bound) {
    return static_cast<std::int64_t>(random_.below(n_++, static_cast<std::uint64_t>(bound)));
  }
  void create() {
    Extent e;
    e.bytes = kPage * (1 + roll(roll(2) == 0 ? 8 : kMost / kPage));
    if (kEngineTakesAnySize && roll(2) == 0) e.bytes -= roll(kPage);
    e.versions.assign(static_cast<std::size_t>(1 + roll(3)), -1);
    try {
      e.id = volume_.create({.name = fmt::format("extent {}", created_),
                             .bytes = e.bytes,
                             .slots = static_cast<int>(e.versions.size())});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Errc::kIo);
      return;
    }
    ++created_;
    extents_.push_back(e);
  }
  void destroy(Extent& extent) {
    volume_.destroy(extent.id);
    std::swap(extent, extents_.back());
    extents_.pop_back();
  }
  void write(Extent& e, int slot) {
    const std::int64_t version = ++version_ * 8 + thread_;
    memory_.fill(0, kMost, static_cast<std::uint64_t>(version));
    const ExtentResult result = volume_.write_and_wait({.extent = e.id,
                                                        .slot = slot,
                                                        .data = memory_.data(),
                                                        .priority = static_cast<Priority>(roll(kPriorities)),
                                                        .version = version});
    EXPECT_TRUE(result.ok()) << volume_.explain(e.id, Op::kWrite, result);
    e.versions[static_cast<std::size_t>(slot)] = version;
  }
  // Twice at once.
  void read(Extent& e, int slot) {
    const std::int64_t version = e.versions[static_cast<std::size_t>(slot)];
    Results results;
    const Memory* const into[] = {&memory_, &other_};
    for (const std::uint64_t i : {0, 1}) {
      volume_.read(
          {.extent = e.id, .slot = slot, .data = into[i]->data(), .completion = &results, .tag = i});
    }
    expected_.fill(0, kMost, static_cast<std::uint64_t>(version));
    for (const std::uint64_t i : {0, 1}) {
      const ExtentResult result = results.wait_for(i);
      EXPECT_EQ(result.error, version < 0 ? ENODATA : 0) << volume_.explain(e.id, Op::kRead, result);
      if (version < 0) continue;
      EXPECT_TRUE(same_bytes(*into[i], expected_, e.bytes)) << volume_.layout(e.id, slot);
      read_bytes_ += e.bytes;
    }
  }
  void expect_versions(const Extent& e) {
    const auto newest = std::max_element(e.versions.begin(), e.versions.end());
    EXPECT_EQ(volume_.newest(e.id), *newest < 0 ? -1 : newest - e.versions.begin());
    for (std::size_t s = 0; s < e.versions.size(); ++s)
      EXPECT_EQ(volume_.version(e.id, static_cast<int>(s)), e.versions[s]);
  }

  Volume& volume_;
  const NamedRandom random_;
  const int thread_;
  std::uint64_t n_ = 0;
  std::int64_t version_ = 0, created_ = 0, read_bytes_ = 0;
  std::vector<Extent> extents_;
  const Memory memory_{kMost}, other_{kMost}, expected_{kMost};
};

TEST_P(VolumeModelTest, FourThreadsOfRandomUseAgreeWithTheirModels) {
  const std::uint64_t seed = printed_seed();
  std::vector<std::unique_ptr<RandomUser>> users;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    users.push_back(std::make_unique<RandomUser>(*volume_, seed, t));
    threads.emplace_back([user = users.back().get()] {
      for (int i = 0; i < 400 && !testing::Test::HasFailure(); ++i) user->step();
      user->end();
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::int64_t created = 0, bytes = 0;
  for (const auto& user : users) {
    created += user->created();
    bytes += user->read_bytes();
  }
  EXPECT_GT(created, 40);
  EXPECT_GT(bytes, 10 * kMiB);
  EXPECT_EQ(used_bytes(*volume_, kDrives), 0);
  for (int d = 0; d < kDrives; ++d) EXPECT_EQ(volume_->space(d).largest, kDriveBytes);
}

INSTANTIATE_TEST_SUITE_P(Backends, VolumeModelTest,
                         testing::Values(Backend::kRam, Backend::kThreads, Backend::kUring),
                         [](const auto& test) {
                           return std::string(test.param == Backend::kUring ? "uring" : name_of(test.param));
                         });

// ---- Versions

class Fixture {
 public:
  explicit Fixture(std::unique_ptr<Engine> e, const VolumeOptions& options = small_pieces())
      : engine(std::move(e)), volume(make_volume(*engine, options)) {}
  ExtentResult write(ExtentId id, int slot, std::int64_t version) {
    memory.fill(0, memory.bytes(), static_cast<std::uint64_t>(version));
    return volume->write_and_wait({.extent = id, .slot = slot, .data = memory.data(), .version = version});
  }
  // True when the slot holds what write() put there.
  bool holds(ExtentId id, int slot, std::int64_t version) {
    std::memset(memory.data(), 0, static_cast<std::size_t>(memory.bytes()));
    if (!volume->read_and_wait({.extent = id, .slot = slot, .data = memory.data()}).ok()) return false;
    expected.fill(0, expected.bytes(), static_cast<std::uint64_t>(version));
    return same_bytes(memory, expected, volume->transfer_bytes(id));
  }
  const std::unique_ptr<Engine> engine;
  const std::unique_ptr<Volume> volume;
  const Memory memory{4 * kMiB}, expected{4 * kMiB};
};

TEST(Volume, SlotsKeepTheirVersions) {
  Fixture f(ram_engine({kMiB, kMiB}));
  const ExtentId id = f.volume->create({.name = "state", .bytes = 5 * kGrain, .slots = 2});
  EXPECT_EQ(f.volume->newest(id), -1);
  EXPECT_EQ(f.volume->transfer_bytes(id), 5 * kGrain);
  ASSERT_TRUE(f.write(id, 0, 7).ok());
  ASSERT_TRUE(f.write(id, 1, 8).ok());
  EXPECT_EQ(f.volume->newest(id), 1);
  EXPECT_TRUE(f.holds(id, 0, 7));
  EXPECT_TRUE(f.holds(id, 1, 8));
  ASSERT_TRUE(f.write(id, 0, 9).ok());
  EXPECT_EQ(f.volume->newest(id), 0);
  EXPECT_TRUE(f.holds(id, 1, 8));
  f.volume->invalidate(id, 0);
  EXPECT_EQ(f.volume->newest(id), 1);
  EXPECT_EQ(f.volume->version(id, 0), -1);
  EXPECT_FALSE(f.holds(id, 0, 9));
}

// Drive 0 fails from its fourth block on: slot 1 of `b` lies there, slot 0 on drive 1.
TEST(Volume, AFailedWriteEmptiesItsSlotAndNoOther) {
  Fixture f(ram_engine({kMiB, kMiB}, {.fail_after = 3}));
  const ExtentId a = f.volume->create({.name = "a", .bytes = kGrain});
  const ExtentId b = f.volume->create({.name = "b", .bytes = kGrain, .slots = 2});
  ASSERT_TRUE(f.write(a, 0, 1).ok());
  ASSERT_TRUE(f.write(b, 0, 1).ok());
  ASSERT_TRUE(f.write(b, 1, 2).ok());
  ASSERT_TRUE(f.holds(b, 1, 2));
  const ExtentResult result = f.write(b, 1, 3);
  EXPECT_EQ(result.error, EIO);
  EXPECT_EQ(result.drive, 0);
  EXPECT_EQ(f.volume->version(b, 1), -1);
  EXPECT_EQ(f.volume->newest(b), 0);
  EXPECT_TRUE(f.holds(b, 0, 1));
  EXPECT_EQ(f.volume->read_and_wait({.extent = b, .slot = 1, .data = f.memory.data()}).error, ENODATA);
}

TEST(Volume, AFailedReadLeavesTheContents) {
  Fixture f(ram_engine({kMiB}, {.seed = 3, .error_rate = 0.3}));
  const ExtentId id = f.volume->create({.name = "x", .bytes = kGrain});
  while (!f.write(id, 0, 4).ok()) {
  }
  int failed = 0;
  for (int i = 0; i < 50; ++i) failed += !f.holds(id, 0, 4);
  EXPECT_GT(failed, 0);
  EXPECT_LT(failed, 50);
  EXPECT_EQ(f.volume->version(id, 0), 4);
}

// ---- Errors

TEST(Volume, AFailedDriveIsNamedWithTheExtent) {
  Fixture f(ram_engine({kMiB, kMiB}, {.fail_after = 1}));
  f.volume->create({.name = "other", .bytes = 2 * kGrain});  // on drive 0
  const ExtentId id = f.volume->create({.name = "block.3.master", .bytes = 2 * kGrain});
  ASSERT_TRUE(f.write(id, 0, 1).ok());
  const ExtentResult result = f.volume->read_and_wait({.extent = id, .data = f.memory.data()});
  EXPECT_EQ(result.error, EIO);
  EXPECT_EQ(result.drive, 1);
  EXPECT_EQ(result.offset, 0);
  const DriveReport drive = f.engine->report(1);
  const std::string name = drive.path.empty() ? drive.name : fmt::format("{} ({})", drive.name, drive.path);
  EXPECT_EQ(f.volume->explain(id, Op::kRead, result),
            fmt::format("reading block.3.master: piece of 32.0 KiB at 0 of {}: Input/output error (errno 5)", name));
  EXPECT_EQ(f.volume->explain(id, Op::kWrite, {.error = EBADMSG, .drive = 1, .offset = 0}),
            fmt::format("writing block.3.master: piece of 32.0 KiB at 0 of {}: its checksum is wrong (the drive "
                        "returned other bytes than were written)",
                        name));
  EXPECT_EQ(f.volume->explain(id, Op::kRead, {.error = ENODATA}), "reading block.3.master: it has no contents");
}

TEST(Volume, AnEmptySlotIsAResultOnAnotherThread) {
  Fixture f(ram_engine({kMiB}));
  const ExtentId id = f.volume->create({.name = "x", .bytes = kGrain});
  Results results;
  f.volume->read({.extent = id, .data = f.memory.data(), .completion = &results, .tag = 5});
  const ExtentResult result = results.wait_for(5);
  EXPECT_EQ(result.error, ENODATA);
  EXPECT_EQ(result.drive, -1);
  EXPECT_NE(results.thread(), std::this_thread::get_id());
  ASSERT_TRUE(f.write(id, 0, 1).ok());
  EXPECT_TRUE(f.holds(id, 0, 1));
}

// All pages of all drives, by their first word (Memory::fill makes them differ).
struct Page {
  int drive = 0;
  std::int64_t offset = 0;
};
std::map<std::uint64_t, Page> pages_of(Engine& engine) {
  std::map<std::uint64_t, Page> pages;
  for (int d = 0; d < engine.drive_count(); ++d) {
    const Memory all(engine.drive_bytes(d));
    EXPECT_TRUE(engine.wait(engine.submit({.drive = d, .data = all.data(), .bytes = all.bytes()})).ok());
    for (std::int64_t at = 0; at < all.bytes(); at += kPage) {
      std::uint64_t word = 0;
      std::memcpy(&word, all.at(at), sizeof(word));
      pages[word] = {d, at};
    }
  }
  return pages;
}

TEST(Volume, AFlippedBitAnywhereIsFoundAtTheNextRead) {
  Fixture f(ram_engine({2 * kMiB, 2 * kMiB, 2 * kMiB}));
  // Holes of one grain, so that the extent lies in many pieces.
  std::vector<ExtentId> filling;
  for (int i = 0; i < 6 * 64; ++i) filling.push_back(f.volume->create({.name = "filling", .bytes = kGrain}));
  for (std::size_t i = 0; i < filling.size(); i += 2) f.volume->destroy(filling[i]);
  const std::int64_t bytes = 50 * kGrain;
  const ExtentId id = f.volume->create({.name = "x", .bytes = bytes});
  ASSERT_TRUE(f.write(id, 0, 99).ok());
  const std::map<std::uint64_t, Page> pages = pages_of(*f.engine);
  const NamedRandom random(printed_seed(), "bits");
  const Memory original(bytes), page(kPage);
  original.fill(0, bytes, 99);
  for (std::uint64_t n = 0; n < 400; ++n) {
    const auto bit = static_cast<std::int64_t>(random.below(n, static_cast<std::uint64_t>(bytes * 8)));
    const std::int64_t at = bit / 8 / kPage * kPage, inside = bit / 8 % kPage;
    std::uint64_t word = 0;
    std::memcpy(&word, original.at(at), sizeof(word));
    ASSERT_EQ(pages.count(word), 1u) << "the drives do not hold byte " << at;
    const Page where = pages.at(word);
    const auto put = [&](char mask) {
      std::memcpy(page.data(), original.at(at), kPage);
      *page.at(inside) = static_cast<char>(*page.at(inside) ^ mask);
      return f.engine->wait(f.engine->submit({.op = Op::kWrite,
                                              .drive = where.drive,
                                              .offset = where.offset,
                                              .data = page.data(),
                                              .bytes = kPage}));
    };
    ASSERT_TRUE(put(static_cast<char>(1 << bit % 8)).ok());
    const ExtentResult result = f.volume->read_and_wait({.extent = id, .data = f.memory.data()});
    ASSERT_EQ(result.error, EBADMSG) << "bit " << bit;
    EXPECT_EQ(result.drive, where.drive);
    EXPECT_LE(result.offset, where.offset);
    ASSERT_TRUE(put(0).ok());
    if (n % 50 == 0) {
      ASSERT_TRUE(f.holds(id, 0, 99));
    }
  }
}

TEST(Volume, WithoutVerificationBytesComeAsTheyAre) {
  VolumeOptions options = small_pieces();
  options.verify = false;
  Fixture f(ram_engine({kMiB}), options);
  const ExtentId id = f.volume->create({.name = "x", .bytes = kGrain});
  ASSERT_TRUE(f.write(id, 0, 1).ok());
  const Memory zeros(kPage);
  ASSERT_TRUE(
      f.engine->wait(f.engine->submit({.op = Op::kWrite, .data = zeros.data(), .bytes = kPage})).ok());
  EXPECT_TRUE(f.volume->read_and_wait({.extent = id, .data = f.memory.data()}).ok());
}

TEST(Volume, OddSizesAndAddresses) {
  if (!kEngineTakesAnySize) GTEST_SKIP() << "the engine takes whole pages only";
  Fixture f(ram_engine({kMiB, kMiB}));
  std::vector<std::pair<ExtentId, std::int64_t>> extents;
  for (const std::int64_t bytes : {std::int64_t{1}, kPage - 1, kPage + 1, kGrain - 1, kGrain + 1, 7 * kGrain + 123})
    extents.emplace_back(f.volume->create({.name = "odd", .bytes = bytes}), bytes);
  const Memory in(kMiB), out(kMiB);
  for (const std::int64_t shift : {0, 1, 8}) {
    for (std::size_t i = 0; i < extents.size(); ++i) {
      in.fill(0, in.bytes(), 10 + i);
      ASSERT_TRUE(f.volume->write_and_wait({.extent = extents[i].first, .data = in.at(shift)}).ok());
    }
    for (std::size_t i = 0; i < extents.size(); ++i) {
      const auto [id, bytes] = extents[i];
      std::memset(out.data(), 0x5A, static_cast<std::size_t>(out.bytes()));
      ASSERT_TRUE(f.volume->read_and_wait({.extent = id, .data = out.at(shift)}).ok());
      in.fill(0, in.bytes(), 10 + i);
      EXPECT_EQ(std::memcmp(in.at(shift), out.at(shift), static_cast<std::size_t>(bytes)), 0) << bytes;
      EXPECT_EQ(*out.at(shift + bytes), 0x5A) << "bytes behind the extent were changed";
      EXPECT_EQ(f.volume->transfer_bytes(id), round_up(bytes, kPage));
    }
  }
}

// ---- Space

TEST(Volume, SpaceIsAccountedForInGrains) {
  Fixture f(ram_engine({kMiB, kMiB + kPage}));  // a part of a grain is of no use
  EXPECT_EQ(f.volume->space(1).bytes, kMiB + kPage);
  EXPECT_EQ(f.volume->space(1).largest, kMiB);
  const ExtentId one = f.volume->create({.name = "one", .bytes = kGrain + kPage, .slots = 2});
  EXPECT_EQ(used_bytes(*f.volume, 2), 4 * kGrain);
  const ExtentId all = f.volume->create({.name = "all", .bytes = 2 * kMiB - 4 * kGrain});
  EXPECT_EQ(used_bytes(*f.volume, 2), 2 * kMiB);
  EXPECT_EQ(f.volume->space(0).largest, 0);
  try {
    f.volume->create({.name = "more", .bytes = kPage});
    ADD_FAILURE() << "created without room";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::kIo);
    EXPECT_NE(e.message().find("no room for 1 slot(s) of 16.0 KiB"), std::string::npos) << e.what();
    EXPECT_NE(e.message().find("0 B of 1.0 MiB"), std::string::npos) << e.what();
  }
  f.volume->destroy(one);
  EXPECT_EQ(used_bytes(*f.volume, 2), 2 * kMiB - 4 * kGrain);
  // Not all slots fit: none is kept.
  EXPECT_THROW(f.volume->create({.name = "three", .bytes = 2 * kGrain, .slots = 3}), Error);
  EXPECT_EQ(used_bytes(*f.volume, 2), 2 * kMiB - 4 * kGrain);
  f.volume->destroy(all);
  EXPECT_EQ(used_bytes(*f.volume, 2), 0);
  EXPECT_EQ(f.volume->space(0).largest, kMiB);
}

// Small and large extents, each written as often: bytes by shares, counted where they arrive.
TEST(Volume, UnevenSharesHoldInTheLongRun) {
  VolumeOptions options = small_pieces();
  options.shares = {1, 1, 2, 4};
  options.adapt = false;
  constexpr std::int64_t kEach = 128 * kMiB;
  Fixture f(ram_engine({kEach, kEach, kEach, kEach}), options);
  const NamedRandom random(printed_seed(), "sizes");
  for (std::uint64_t i = 0; i < 1000; ++i) {
    const auto grains = static_cast<std::int64_t>(1 + random.below(i, i % 2 == 0 ? 3 : 20));
    const ExtentId id = f.volume->create({.name = "x", .bytes = grains * kGrain});
    for (int n = 0; n < 2; ++n)
      ASSERT_TRUE(f.volume->write_and_wait({.extent = id, .data = f.memory.data()}).ok());
  }
  std::vector<double> written;
  for (int d = 0; d < 4; ++d) written.push_back(static_cast<double>(f.engine->counters(d).write_bytes));
  const double all = std::accumulate(written.begin(), written.end(), 0.0);
  const double expected[] = {0.125, 0.125, 0.25, 0.5};
  for (int d = 0; d < 4; ++d) {
    EXPECT_NEAR(written[static_cast<std::size_t>(d)] / all, expected[d], 0.01) << "drive " << d;
    EXPECT_NEAR(f.volume->space(d).share, expected[d], 1e-9);
    EXPECT_FALSE(f.volume->space(d).shares_are_learned);
  }
}

TEST(Volume, AFullDriveLeavesItsShareToTheOthers) {
  VolumeOptions options = small_pieces();
  options.shares = {1, 1, 6};
  Fixture f(ram_engine({kMiB, kMiB, 4 * kGrain}), options);
  std::vector<ExtentId> extents;
  for (int i = 0; i < 12; ++i) {
    extents.push_back(f.volume->create({.name = "x", .bytes = 11 * kGrain}));
    ASSERT_TRUE(f.write(extents.back(), 0, 100 + i).ok());
  }
  EXPECT_EQ(f.volume->space(2).used, 4 * kGrain);
  EXPECT_EQ(used_bytes(*f.volume, 3), 2 * kMiB + 4 * kGrain);  // to the last grain
  for (int i = 0; i < 12; ++i) EXPECT_TRUE(f.holds(extents[static_cast<std::size_t>(i)], 0, 100 + i));
}

TEST(Volume, OptionsThatMakeNoSenseAreRefused) {
  const auto engine = ram_engine({kMiB, kMiB});
  const auto refused = [&](const VolumeOptions& options) {
    try {
      make_volume(*engine, options);
      return false;
    } catch (const Error& e) {
      return e.code() == Errc::kUsage;
    }
  };
  EXPECT_TRUE(refused({.shares = {1}}));
  EXPECT_TRUE(refused({.shares = {1, -1}}));
  EXPECT_TRUE(refused({.shares = {0, 0}}));
  EXPECT_TRUE(refused({.shares = {1, NAN}}));
  EXPECT_TRUE(refused({.grain = 5000}));
  EXPECT_TRUE(refused({.grain = 0}));
  EXPECT_TRUE(refused({.stripe = 0}));
  EXPECT_FALSE(refused({.shares = {0, 1}}));
}

// ---- Placement

// Every extent of `bytes`, as it is written next; how many moved.
int rewrite(Placement& placement, std::vector<std::vector<Piece>>& extents, std::int64_t bytes) {
  int moved = 0;
  for (auto& pieces : extents) moved += placement.move(bytes, 0, pieces);
  return moved;
}

// No drive holds more than its share, but for what is not worth a move.
void expect_loads(const Placement& placement, int drives, double tolerance) {
  std::int64_t all = 0;
  for (int d = 0; d < drives; ++d) all += placement.used_bytes(d);
  for (int d = 0; d < drives; ++d) {
    const double share = placement.shares().shares()[static_cast<std::size_t>(d)];
    EXPECT_LE(static_cast<double>(placement.used_bytes(d)), share * (1 + tolerance) * static_cast<double>(all) + 1.2e6)
        << "drive " << d;
  }
}

TEST(Placement, ExtentsMoveOffADriveThatBecameSlowAndThenStay) {
  for (const std::int64_t bytes : {8 * kMiB, 2 * kMiB, 256 * kKiB}) {
    const auto engine = ram_engine({kGiB, kGiB, kGiB, kGiB});
    Placement placement(*engine, {});
    std::vector<std::vector<Piece>> extents(64);
    for (auto& pieces : extents) ASSERT_TRUE(placement.reserve(bytes, 0, pieces));
    EXPECT_EQ(rewrite(placement, extents, bytes), 0);
    expect_loads(placement, 4, 0.01);
    const auto sample = [&](std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) {
      for (int i = 0; i < 10; ++i)
        placement.sample(std::vector<DriveSample>{{a, 0.05}, {b, 0.05}, {c, 0.05}, {d, 0.05}});
    };
    sample(10'000'000, 10'000'000, 20'000'000, 40'000'000);
    EXPECT_GT(rewrite(placement, extents, bytes), 0);
    for (int i = 0; i < 3; ++i) rewrite(placement, extents, bytes);
    expect_loads(placement, 4, 0.1);
    sample(10'000'000, 10'000'000, 20'000'000, 4'000'000);
    for (int i = 0; i < 3; ++i) rewrite(placement, extents, bytes);
    expect_loads(placement, 4, 0.1);
    EXPECT_LE(rewrite(placement, extents, bytes), 4) << bytes;
    for (auto& pieces : extents) placement.release(pieces);
    for (int d = 0; d < 4; ++d) EXPECT_EQ(placement.largest_bytes(d), kGiB);
  }
}

TEST(Placement, WithoutRoomElsewhereAnExtentStays) {
  const auto engine = ram_engine({8 * kMiB, 8 * kMiB});
  Placement placement(*engine, {});
  std::vector<std::vector<Piece>> extents(2);
  for (auto& pieces : extents) ASSERT_TRUE(placement.reserve(8 * kMiB, 0, pieces));
  for (int i = 0; i < 10; ++i)
    placement.sample(std::vector<DriveSample>{{40'000'000, 0.05}, {4'000'000, 0.05}});
  EXPECT_EQ(rewrite(placement, extents, 8 * kMiB), 0);
  // As soon as there is some, its own space counts too.
  placement.release(extents[0]);
  EXPECT_EQ(rewrite(placement, extents, 8 * kMiB), 1);
  EXPECT_GE(placement.used_bytes(0), 7 * kMiB);
}

// Slots of one number take turns: all slots 0 together use all drives, and so do all slots 1.
TEST(Placement, EachSlotNumberIsSpreadByItself) {
  const auto engine = ram_engine({64 * kMiB, 64 * kMiB});
  Placement placement(*engine, {});
  std::int64_t held[2][2] = {};
  for (int i = 0; i < 40; ++i) {
    for (int slot = 0; slot < 2; ++slot) {
      std::vector<Piece> pieces;
      ASSERT_TRUE(placement.reserve(256 * kKiB, slot, pieces));
      for (const Piece& p : pieces) held[slot][p.drive] += p.bytes;
    }
  }
  for (int slot = 0; slot < 2; ++slot) EXPECT_EQ(held[slot][0], held[slot][1]) << "slot " << slot;
}

TEST(Placement, PiecesAreBoundedAndCoverTheExtent) {
  const auto engine = ram_engine({64 * kMiB, 64 * kMiB});
  Placement placement(*engine, {});
  for (const std::int64_t bytes : {std::int64_t{1}, 64 * kKiB, 9 * kMiB + 5, 50 * kMiB}) {
    std::vector<Piece> pieces;
    ASSERT_TRUE(placement.reserve(bytes, 0, pieces));
    std::int64_t at = 0;
    for (const Piece& p : pieces) {
      EXPECT_EQ(p.position, at);
      EXPECT_EQ(p.offset % placement.grain(), 0);
      EXPECT_LE(p.bytes, Placement::kMaxPiece);
      at += p.bytes;
    }
    EXPECT_EQ(at, bytes);
    placement.release(pieces);
  }
}

// ---- Transfers under way

TEST(Volume, TheDestructorWaitsForTransfersAndTheirCompletions) {
  Results results;
  const Memory memory(8 * kGrain);
  auto engine = ram_engine({kMiB, kMiB}, {}, {.latency_seconds = 0.02});
  auto volume = make_volume(*engine, small_pieces());
  for (std::uint64_t i = 0; i < 4; ++i) {
    const ExtentId id = volume->create({.name = "x", .bytes = 8 * kGrain});
    volume->write({.extent = id, .data = memory.data(), .completion = &results, .tag = i});
  }
  volume.reset();
  EXPECT_EQ(results.count(), 4u);
}

// Writes and reads in turn, each begun by the completion of the one before.
class Chain final : public ExtentCompletion {
 public:
  Chain(Volume& volume, ExtentId id, const Memory& memory) : volume_(volume), id_(id), memory_(memory) {}
  void on_extent(ExtentId id, std::uint64_t tag, ExtentResult result) override {
    EXPECT_EQ(id.index, id_.index);
    EXPECT_TRUE(result.ok()) << tag;
    ++completed_;
    if (tag < kLinks) next(tag + 1);
  }
  void next(std::uint64_t tag) {
    const ExtentTransfer t{.extent = id_, .data = memory_.data(), .completion = this, .tag = tag};
    tag % 2 == 0 ? volume_.write(t) : volume_.read(t);
  }
  static constexpr std::uint64_t kLinks = 400;
  std::uint64_t completed() const { return completed_; }

 private:
  Volume& volume_;
  const ExtentId id_;
  const Memory& memory_;
  std::uint64_t completed_ = 0;
};

TEST(Volume, CompletionsMayBeginTransfersAndTheDestructorWaitsForTheseToo) {
  const Memory memory(8 * kGrain);
  auto engine = ram_engine({kMiB, kMiB});
  auto volume = make_volume(*engine, small_pieces());
  Chain chain(*volume, volume->create({.name = "x", .bytes = 8 * kGrain}), memory);
  chain.next(0);
  volume.reset();
  EXPECT_EQ(chain.completed(), Chain::kLinks + 1);
}

TEST(Volume, APromotedTransferOvertakes) {
  if (!kEngineHasPriorities) GTEST_SKIP() << "the engine serves in the order of submission";
  Results results;
  auto engine = ram_engine({8 * kMiB}, {}, {.bytes_per_second = 50e6});
  auto volume = make_volume(*engine, small_pieces());
  const Memory memory(kMiB);
  std::vector<ExtentId> ids;
  for (std::uint64_t i = 0; i < 6; ++i) {
    ids.push_back(volume->create({.name = "x", .bytes = kMiB}));
    volume->write({.extent = ids[i],
                   .data = memory.data(),
                   .priority = Priority::kWriteBack,
                   .completion = &results,
                   .tag = i});
  }
  volume->promote(ids[5], 0, Priority::kDemand);
  EXPECT_TRUE(results.wait_for(5).ok());
  EXPECT_LT(results.count(), 4u);
  volume.reset();
  EXPECT_EQ(results.count(), 6u);
}

TEST(Volume, SharesAreLearnedFromTheDrives) {
  if (!kEngineCountsBusyTime) GTEST_SKIP() << "the engine does not count its busy time";
  EngineOptions options;
  options.backend = Backend::kRam;
  options.block_size = 64 * kKiB;
  std::vector<DriveOptions> drives;
  for (const double speed : {20e6, 80e6}) {
    drives.push_back({.bytes = 32 * kMiB});
    drives.back().ram = RamModel{.bytes_per_second = speed};
  }
  Fixture f(make_engine(options, drives));
  const ExtentId id = f.volume->create({.name = "x", .bytes = 2 * kMiB});
  EXPECT_FALSE(f.volume->space(0).shares_are_learned);
  for (int i = 0; i < 12; ++i) ASSERT_TRUE(f.write(id, 0, i).ok());
  EXPECT_TRUE(f.volume->space(0).shares_are_learned);
  EXPECT_GT(f.volume->space(1).share, 0.6);
  EXPECT_GT(f.volume->space(1).used, f.volume->space(0).used);
  EXPECT_TRUE(f.holds(id, 0, 11));
}

TEST(VolumeDeathTest, WhatMustNotOverlapIsABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Results results;
  const Memory memory(kGrain);
  const auto open = [&](auto&& use) {
    auto engine = ram_engine({kMiB}, {}, {.latency_seconds = 1});
    auto volume = make_volume(*engine, small_pieces());
    const ExtentId id = volume->create({.name = "x", .bytes = kGrain});
    use(*volume, ExtentTransfer{.extent = id, .data = memory.data(), .completion = &results});
  };
  EXPECT_DEATH(open([](Volume& v, const ExtentTransfer& t) {
                 v.write(t);
                 v.destroy(t.extent);
               }),
               "x is destroyed while it is transferred");
  EXPECT_DEATH(open([](Volume& v, const ExtentTransfer& t) {
                 v.write(t);
                 v.read(t);
               }),
               "slot 0 of x is written while it is transferred");
  EXPECT_DEATH(open([](Volume& v, const ExtentTransfer& t) {
                 v.destroy(t.extent);
                 v.read(t);
               }),
               "was destroyed");
}

}  // namespace
}  // namespace zg::io::test
