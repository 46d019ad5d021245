// Engines and volumes allocate nothing in their steady state, on every back end.
//
// How many transfers are in flight at once depends on timing. So the test first brings about as many as there
// can be: a completion holds up the drive's I/O thread until all have been submitted.
#include <array>
#include <atomic>

#include "support/count_allocations.hpp"
#include "volume_support.hpp"

namespace zg::io::test {
namespace {

constexpr int kWindow = 24;  // transfers under way at once
constexpr int kDrives = 2;
constexpr std::int64_t kDriveBytes = 32 * kMiB;

struct Case {
  const char* name;
  Backend backend;
  bool faults = false;
  int queues = 1;
};

// Counts down without a container.
class Countdown {
 public:
  void set(std::int64_t n) { left_ = n; }
  void count(std::int64_t n = 1) {
    if (left_.fetch_sub(n) == n) left_.notify_one();
  }
  void wait() {
    for (std::int64_t n = left_; n != 0; n = left_) left_.wait(n);
  }

 private:
  std::atomic<std::int64_t> left_{0};
};

// Holds up the thread that completes its transfer.
class Gate final : public Completion {
 public:
  void on_complete(Ticket, std::uint64_t, Result) override {
    closed_ = true;
    closed_.notify_one();
    open_.wait(false);
  }
  void await_closed() { closed_.wait(false); }
  void open() {
    open_ = true;
    open_.notify_all();
  }

 private:
  std::atomic<bool> closed_{false}, open_{false};
};

class SteadyState : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    EngineOptions options;
    options.backend = GetParam().backend;
    options.block_size = 16 * kPage;
    options.queue_depth = 8;
    options.queues = GetParam().queues;
    if (GetParam().faults) {
      options.faults = {.seed = 4, .interrupt_rate = 0.05, .short_rate = 0.1, .delay_rate = 0.01};
    }
    std::vector<DriveOptions> drives;
    for (TempDir& directory : directories_)
      drives.push_back({.path = directory.path(), .bytes = kDriveBytes, .kind = FileKind::kScratch});
    engine_ = make_engine(options, drives);
    if (engine_->backend() != GetParam().backend) GTEST_SKIP() << engine_->describe();
  }

  // Every lane has had so many transfers at once, and in each of its places a block that bounces.
  void fill_up(int transfers) {
    class Count final : public Completion {
     public:
      void on_complete(Ticket, std::uint64_t, Result result) override {
        EXPECT_TRUE(result.ok());
        countdown.count();
      }
      Countdown countdown;
    } count;
    const int lanes = GetParam().queues;
    count.countdown.set(std::int64_t{kDrives} * lanes * transfers);
    std::vector<std::unique_ptr<Gate>> gates;
    for (int d = 0; d < kDrives; ++d) {
      for (int lane = 0; lane < lanes; ++lane) {
        gates.push_back(std::make_unique<Gate>());
        (void)engine_->submit({.drive = d,
                               .data = memory_.at(32 * kMiB + (d * lanes + lane) * kPage),
                               .bytes = kPage,
                               .completion = gates.back().get()});
      }
    }
    for (auto& gate : gates) gate->await_closed();
    for (int i = 0; i < transfers * lanes * kDrives; ++i) {
      const Ticket ticket = engine_->submit({.priority = Priority::kWriteBack,
                                             .drive = i % kDrives,
                                             .data = memory_.at(8 * i * kPage + 1),
                                             .bytes = 4 * kPage,
                                             .completion = &count});
      engine_->promote(ticket, Priority::kDemand);
    }
    for (auto& gate : gates) gate->open();
    count.countdown.wait();
  }

  template <class Round>
  void expect_steady(Round round) {
    constexpr int kRounds = 10;
    for (int i = 0; i < kRounds / 2; ++i) round(i);
    const std::int64_t before = zg::test::allocations_of_all_threads();
    for (int i = kRounds / 2; i < kRounds; ++i) round(i);
    EXPECT_EQ(zg::test::allocations_of_all_threads(), before) << "in " << kRounds / 2 << " rounds";
  }

  std::array<TempDir, kDrives> directories_;
  const Memory memory_{64 * kMiB};
  std::unique_ptr<Engine> engine_;
};

// Each completion submits the next one of its chain.
class Chains final : public Completion {
 public:
  Chains(Engine& engine, const Memory& memory) : engine_(engine), memory_(memory) {}
  void run(int links) {
    countdown_.set(std::int64_t{kWindow} * links);
    links_ = links;
    for (std::uint64_t chain = 0; chain < kWindow; ++chain) submit(chain * 1000);
    countdown_.wait();
  }
  void on_complete(Ticket, std::uint64_t tag, Result result) override {
    EXPECT_TRUE(result.ok());
    if (static_cast<int>(tag % 1000) + 1 < links_) submit(tag + 1);
    countdown_.count();
  }

 private:
  // Places of their own; of all kinds of alignment.
  void submit(std::uint64_t tag) {
    const auto chain = static_cast<std::int64_t>(tag / 1000), link = static_cast<std::int64_t>(tag % 1000);
    const bool odd = link % 3 == 0;
    const Ticket ticket = engine_.submit({.op = link % 2 == 0 ? Op::kWrite : Op::kRead,
                                          .priority = static_cast<Priority>(chain % kPriorities),
                                          .drive = static_cast<int>(chain % kDrives),
                                          .offset = chain * 64 * kPage + (odd ? 7 : 0),
                                          .data = memory_.at(chain * 64 * kPage + (link % 4 == 0 ? 1 : 0)),
                                          .bytes = 32 * kPage + (odd ? 3 : 0),
                                          .completion = this,
                                          .tag = tag});
    if (link % 5 == 0) engine_.promote(ticket, Priority::kDemand);
  }
  Engine& engine_;
  const Memory& memory_;
  Countdown countdown_;
  int links_ = 0;
};

TEST_P(SteadyState, TransfersWithCompletions) {
  fill_up(kWindow * 2);
  Chains chains(*engine_, memory_);
  expect_steady([&](int) { chains.run(6); });
}

TEST_P(SteadyState, TransfersThatAreWaitedAndPolledFor) {
  fill_up(kWindow * 2);
  std::array<Ticket, kWindow> tickets;
  expect_steady([&](int round) {
    for (int i = 0; i < kWindow; ++i) {
      tickets[static_cast<std::size_t>(i)] = engine_->submit({.op = round % 2 == 0 ? Op::kWrite : Op::kRead,
                                                              .drive = i % kDrives,
                                                              .offset = i * 64 * kPage,
                                                              .data = memory_.at(i * 64 * kPage),
                                                              .bytes = 64 * kPage});
    }
    for (std::size_t i = 0; i < kWindow; ++i) {
      Result result;
      if (i % 2 == 0 || !engine_->poll(tickets[i], result)) result = engine_->wait(tickets[i]);
      EXPECT_TRUE(result.ok());
    }
  });
}

// Extents that are written, whole and staged, abandoned, and read in pieces, several at once.
class Extents final : public ExtentCompletion {
 public:
  static constexpr int kExtents = 2;
  static constexpr std::int64_t kBytes = 9 * kMiB + 5;

  Extents(Volume& volume, const Memory& memory) : volume_(volume), memory_(memory) {
    for (ExtentId& id : ids_) id = volume.create({.name = "x", .bytes = kBytes});
  }
  // Whatever becomes of the rest: this many are under way at once.
  void begin_all() {
    countdown_.set(kExtents);
    for (int i = 0; i < kExtents; ++i) volume_.write(transfer(i, 0));
    for (int i = 0; i < kExtents; ++i) volume_.abandon(id(i), 0);
    countdown_.wait();
    abandoned_ = 0;
  }
  void round(int number) {
    countdown_.set(kExtents);
    for (int i = 0; i < kExtents; ++i) volume_.write(transfer(i, i % 2 == number % 2 ? 0 : -1));
    for (int i = number % 2; i < kExtents; i += 2) {
      volume_.promote(id(i), 0, Priority::kDemand);
      for (const std::int64_t ready : {std::int64_t{1} << 20, std::int64_t{5} << 20})
        volume_.mark_ready(id(i), 0, ready);
      number % 4 == 3 ? volume_.abandon(id(i), 0) : volume_.mark_ready(id(i), 0, kBytes);
    }
    countdown_.wait();
    countdown_.set(kExtents);
    for (int i = 0; i < kExtents; ++i) volume_.read(transfer(i, -1));
    countdown_.wait();
  }
  void on_piece(ExtentId, std::uint64_t, std::int64_t, std::int64_t bytes) override { told_ += bytes; }
  void on_extent(ExtentId, std::uint64_t, ExtentResult result) override {
    ++(result.ok() ? good_ : result.error == ECANCELED ? abandoned_ : empty_);
    countdown_.count();
  }
  std::int64_t good() const { return good_; }
  std::int64_t abandoned() const { return abandoned_; }
  std::int64_t empty() const { return empty_; }
  std::int64_t told() const { return told_; }

 private:
  ExtentId id(int i) const { return ids_[static_cast<std::size_t>(i)]; }
  ExtentTransfer transfer(int i, std::int64_t ready) {
    return {.extent = id(i), .data = memory_.at(i * 12 * kMiB), .completion = this, .ready = ready};
  }
  Volume& volume_;
  const Memory& memory_;
  std::array<ExtentId, kExtents> ids_;
  Countdown countdown_;
  std::atomic<std::int64_t> good_{0}, abandoned_{0}, empty_{0}, told_{0};
};

TEST_P(SteadyState, ExtentsInPartsAndWhole) {
  fill_up(kWindow * 2);
  const auto volume = make_volume(*engine_, {.shares = {1, 1}, .adapt = false});
  Extents extents(*volume, memory_);
  extents.begin_all();
  int rounds = 0;
  expect_steady([&](int round) {
    extents.round(round);
    ++rounds;
  });
  EXPECT_EQ(extents.abandoned(), rounds / 4 * Extents::kExtents / 2);
  EXPECT_EQ(extents.empty(), extents.abandoned());
  EXPECT_EQ(extents.good(), 2 * rounds * Extents::kExtents - 2 * extents.abandoned());
  EXPECT_EQ(extents.told(), (rounds * Extents::kExtents - extents.empty()) * Extents::kBytes);
}

INSTANTIATE_TEST_SUITE_P(Backends, SteadyState,
                         testing::Values(Case{"uring", Backend::kUring}, Case{"libaio", Backend::kLibaio},
                                         Case{"threads", Backend::kThreads}, Case{"ram", Backend::kRam},
                                         Case{"ram_faults", Backend::kRam, true},
                                         Case{"uring_faults", Backend::kUring, true}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace zg::io::test
