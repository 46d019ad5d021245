// Random use of a volume by four threads against a model, over memory and over files.
#include <algorithm>

#include "volume_support.hpp"

namespace zg::io::test {
namespace {

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
    if (roll(2) == 0) e.bytes -= roll(kPage);
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
      volume_.read({.extent = e.id, .slot = slot, .data = into[i]->data(), .completion = &results, .tag = i});
    }
    expected_.fill(0, kMost, static_cast<std::uint64_t>(version));
    for (const std::uint64_t i : {0, 1}) {
      const ExtentResult result = results.wait_for(i);
      EXPECT_EQ(result.error, version < 0 ? ENODATA : 0) << volume_.explain(e.id, Op::kRead, result);
      if (version < 0) continue;
      EXPECT_TRUE(same_bytes(*into[i], expected_, e.bytes)) << volume_.describe_layout(e.id, slot);
      read_bytes_ += e.bytes;
    }
  }
  void expect_versions(const Extent& e) {
    const auto newest = std::max_element(e.versions.begin(), e.versions.end());
    EXPECT_EQ(volume_.newest_slot(e.id), *newest < 0 ? -1 : newest - e.versions.begin());
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

}  // namespace
}  // namespace zg::io::test
