// Random raw transfers by four threads on every back end, with errors, interrupts, short and late blocks.
// (Torn writes and flipped bits are the volume's to find: an engine has no checksums.)
//
// A user has a region of each drive, in cells of 512 bytes. Regions meet within pages, so that users share
// those at their ends; the regions of odd users begin at odd bytes, so that nothing there is ever aligned. A
// cell knows its version; after a write that failed, none.
//
// Threads: a user has one that calls step(); on_complete() comes on I/O threads.
#include <algorithm>
#include <memory>
#include <vector>

#include "stress_support.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io::test {
namespace {

constexpr int kUsers = 4, kDrives = 2, kInFlight = 12;
constexpr std::int64_t kCell = 512, kCellsOfPage = kPage / kCell, kMostCells = 64;
constexpr std::int64_t kRegion = 40 * kPage + 3 * kCell, kOddity = 137;
constexpr std::int64_t kDriveBytes = (kUsers * kRegion / kPage + 1) * kPage;
// Writes that touch it fail with ENOSPC.
constexpr std::int64_t kFullFrom = 50 * kPage, kFullTo = 51 * kPage;

struct EngineTally {
  std::int64_t read = 0, written = 0, failed = 0, full = 0, past_end = 0, empty = 0, aligned = 0;
  std::int64_t waited = 0, polled = 0, told = 0, promoted = 0, registered = 0, bytes = 0;
  void add(const EngineTally& o) {
    const auto sum = [&](auto... member) { ((this->*member += o.*member), ...); };
    using T = EngineTally;
    sum(&T::read, &T::written, &T::failed, &T::full, &T::past_end, &T::empty, &T::aligned, &T::waited,
        &T::polled, &T::told, &T::promoted, &T::registered, &T::bytes);
  }
  std::string text() const {
    return fmt::format(
        "{} read, {} written, {} failed, {} full, {} past the end, {} empty, {} wholly aligned\n"
        "{} waited for, {} polled, {} told; {} promoted, {} times registered, {} moved",
        read, written, failed, full, past_end, empty, aligned, waited, polled, told, promoted, registered,
        format_bytes(bytes));
  }
};

class EngineUser final : public Completion {
 public:
  EngineUser(Engine& engine, StallWatch& watch, std::uint64_t seed, int number)
      : engine_(engine),
        watch_(watch),
        number_(number),
        base_(number * kRegion + (number % 2 != 0 ? kOddity : 0)),
        dice_(seed, static_cast<std::uint64_t>(number) + 100) {
    // The next region, or the end of the drive, begins no sooner.
    const std::int64_t cells = (kRegion - kOddity) / kCell;
    for (auto& drive : cells_) drive.resize(static_cast<std::size_t>(cells));
    for (int i = 0; i < kInFlight; ++i) {
      operations_.push_back(
          std::make_unique<Operation>(static_cast<std::uint64_t>(i), memory_.at(i * kRoom)));
      free_.push_back(operations_.back().get());
    }
  }

  void step() {
    watch_.counter(0).fetch_add(1, std::memory_order_relaxed);
    const std::int64_t what = dice_.roll(256);
    if (what == 0) return submit_past_end();
    if (what == 1) return submit_nothing();
    if (what < 5) return change_registration();
    if (what < 20) return promote();
    if (free_.empty() || (what < 64 && !flying_.empty())) collect_one();
    submit_cells(what % 2 == 0 ? Op::kRead : Op::kWrite);
  }

  // Compares every cell once more.
  void end() {
    while (!flying_.empty()) collect_one();
    for (int d = 0; d < kDrives; ++d) {
      const auto cells = static_cast<std::int64_t>(cells_[d].size());
      for (std::int64_t c = 0; c < cells; c += kMostCells)
        submit(Op::kRead, d, c, std::min(kMostCells, cells - c));
      while (!flying_.empty()) collect_one();
    }
    if (registered_) change_registration();
  }

  const EngineTally& tally() const { return tally_; }
  // Begun, and completed in any way.
  std::uint64_t begun() const { return (next_tag_ - kInFlight) / kInFlight; }
  std::uint64_t completed() const { return completed_; }

 private:
  enum class Way { kWait, kPoll, kCompletion };
  static constexpr std::int64_t kRoom = GuardedMemory::room(kMostCells * kCell);
  struct Cell {
    std::int64_t version = -1;
    int readers = 0;
    bool writing = false;
  };
  struct Operation {
    Operation(std::uint64_t i, char* pages) : index(i), memory(pages) {}
    const std::uint64_t index;
    Once once;
    Way way = Way::kWait;
    Op op = Op::kRead;
    int drive = 0;
    std::int64_t first = 0, count = 0;  // cells
    std::int64_t version = 0;           // of a write
    int error = 0;                      // expected, for certain
    Ticket ticket;
    std::atomic<bool> told{false};
    Result result;
    GuardedMemory memory;
  };

  void on_complete(Ticket ticket, std::uint64_t tag, Result result) override {
    Operation& o = *operations_[tag % kInFlight];
    if (!o.once.take(tag)) {
      ADD_FAILURE() << "a completion came twice, or for what nobody began: " << tag;
      return;
    }
    EXPECT_TRUE(ticket);
    o.result = result;
    std::lock_guard lock(mutex_);
    o.told.store(true, std::memory_order_relaxed);
    changed_.notify_one();
  }

  Cell& cell(int drive, std::int64_t i) { return cells_[drive][static_cast<std::size_t>(i)]; }
  std::int64_t cells() const { return static_cast<std::int64_t>(cells_[0].size()); }
  std::int64_t offset_of(std::int64_t first) const { return base_ + first * kCell; }
  Contents contents_of(int drive, std::int64_t i, std::int64_t version) const {
    const auto where = static_cast<std::uint64_t>((number_ * kDrives + drive) * cells() + i);
    return Contents(where << 40 ^ static_cast<std::uint64_t>(version));
  }

  // Some run of cells, every other time of whole pages where the region has them.
  void submit_cells(Op op) {
    const int drive = static_cast<int>(dice_.roll(kDrives));
    std::int64_t count = std::min(dice_.log_uniform(6), kMostCells);
    std::int64_t first = dice_.roll(cells() - kMostCells);
    if (dice_.roll(2) == 0) {
      count = round_up(count, kCellsOfPage);
      first = std::max<std::int64_t>(0, first - offset_of(first) % kPage / kCell);
    }
    while (!may_begin(op, drive, first, count)) collect_one();
    submit(op, drive, first, count);
  }

  bool may_begin(Op op, int drive, std::int64_t first, std::int64_t count) {
    if (free_.empty()) return false;
    for (std::int64_t i = first; i < first + count; ++i) {
      const Cell& c = cell(drive, i);
      if (c.writing || (op == Op::kWrite && c.readers > 0)) return false;
    }
    return true;
  }

  void submit(Op op, int drive, std::int64_t first, std::int64_t count) {
    while (free_.empty()) collect_one();
    Operation& o = take(op, drive, count * kCell);
    o.first = first;
    o.count = count;
    o.version = op == Op::kWrite ? ++version_ : 0;
    for (std::int64_t i = 0; i < count; ++i) {
      Cell& c = cell(drive, first + i);
      if (op == Op::kRead) {
        ++c.readers;
        continue;
      }
      c.writing = true;
      contents_of(drive, first + i, o.version).fill(o.memory.data() + i * kCell, kCell);
    }
    begin(o, offset_of(first), count * kCell);
  }

  // Results like any other: of what does not fit, and of no bytes at all.
  void submit_past_end() {
    while (free_.empty()) collect_one();
    const Op op = dice_.roll(2) == 0 ? Op::kRead : Op::kWrite;
    const std::int64_t bytes = 1 + dice_.roll(4 * kPage);
    Operation& o = take(op, 0, bytes);
    o.error = op == Op::kRead ? ENODATA : ENOSPC;
    begin(o, kDriveBytes - bytes + 1 + dice_.roll(kPage), bytes);
  }
  void submit_nothing() {
    while (free_.empty()) collect_one();
    Operation& o = take(dice_.roll(2) == 0 ? Op::kRead : Op::kWrite, 0, 0);
    begin(o, dice_.roll(kDriveBytes), 0);
  }

  Operation& take(Op op, int drive, std::int64_t bytes) {
    Operation& o = *free_.back();
    free_.pop_back();
    o.way = static_cast<Way>(dice_.roll(3));
    o.op = op;
    o.drive = drive;
    o.first = o.count = 0;
    o.error = 0;
    o.memory.place(dice_.roll(2) == 0 ? 0 : dice_.roll(kPage), bytes);
    if (op == Op::kRead) o.memory.wipe();
    return o;
  }

  void begin(Operation& o, std::int64_t offset, std::int64_t bytes) {
    const std::uint64_t tag = next_tag_ + o.index;
    next_tag_ += kInFlight;
    const bool tells = o.way == Way::kCompletion;
    if (tells) o.once.arm(tag);
    if ((offset | bytes | static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(o.memory.data()))) %
            kPage ==
        0)
      ++tally_.aligned;
    o.ticket = engine_.submit({.op = o.op,
                               .priority = static_cast<Priority>(dice_.roll(kPriorities)),
                               .drive = o.drive,
                               .offset = offset,
                               .data = o.memory.data(),
                               .bytes = bytes,
                               .completion = tells ? this : nullptr,
                               .tag = tag});
    flying_.push_back(&o);
  }

  // Promotes a transfer that may be waiting, under way or done; at times one that ended long ago.
  void promote() {
    ++tally_.promoted;
    const auto priority = static_cast<Priority>(dice_.roll(kPriorities));
    if (stale_ && dice_.roll(4) == 0) engine_.promote(stale_, priority);
    if (!flying_.empty()) engine_.promote(flying_[index_below(flying_.size())]->ticket, priority);
  }
  std::size_t index_below(std::size_t n) {
    return static_cast<std::size_t>(dice_.roll(static_cast<std::int64_t>(n)));
  }

  // While it is in use.
  void change_registration() {
    registered_ = !registered_;
    if (!registered_) return engine_.unregister_memory(memory_.data());
    engine_.register_memory(memory_.data(), memory_.bytes());
    ++tally_.registered;
  }

  void collect_one() {
    const std::size_t at = index_below(flying_.size());
    Operation& o = *flying_[at];
    switch (o.way) {
      case Way::kWait:
        o.result = engine_.wait(o.ticket);
        ++tally_.waited;
        break;
      case Way::kPoll:
        while (!engine_.poll(o.ticket, o.result)) std::this_thread::yield();
        ++tally_.polled;
        break;
      case Way::kCompletion:
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return o.told.load(std::memory_order_relaxed); });
        o.told.store(false, std::memory_order_relaxed);
        ++tally_.told;
    }
    stale_ = o.ticket;
    ++completed_;
    flying_[at] = flying_.back();
    flying_.pop_back();
    check(o);
    free_.push_back(&o);
  }

  void check(const Operation& o) {
    const std::int64_t bytes = o.count * kCell;
    EXPECT_TRUE(o.memory.guards_hold()) << "bytes beside those of a transfer were changed";
    if (o.count == 0) {
      EXPECT_EQ(o.result.error, o.error);
      EXPECT_EQ(o.result.bytes, 0);
      ++(o.error != 0 ? tally_.past_end : tally_.empty);
      return;
    }
    if (o.result.ok()) {
      EXPECT_EQ(o.result.bytes, bytes);
      tally_.bytes += bytes;
      ++(o.op == Op::kRead ? tally_.read : tally_.written);
    } else {
      check_failure(o);
    }
    for (std::int64_t i = 0; i < o.count; ++i) settle_cell(o, i);
  }

  void check_failure(const Operation& o) {
    EXPECT_LE(o.result.bytes, o.count * kCell);
    const std::int64_t from = offset_of(o.first), to = from + o.count * kCell;
    if (o.result.error == ENOSPC) {
      EXPECT_TRUE(o.op == Op::kWrite && o.drive == 0 && from < kFullTo && round_up(to, kPage) > kFullFrom);
      ++tally_.full;
    } else {
      EXPECT_EQ(o.result.error, EIO);
      ++tally_.failed;
    }
  }

  void settle_cell(const Operation& o, std::int64_t i) {
    Cell& c = cell(o.drive, o.first + i);
    const char* const data = o.memory.data() + i * kCell;
    if (o.op == Op::kWrite) {
      c.writing = false;
      c.version = o.result.ok() ? o.version : -1;
      EXPECT_TRUE(contents_of(o.drive, o.first + i, o.version).are(data, kCell))
          << "a write changed its source";
      return;
    }
    --c.readers;
    if (!o.result.ok() || c.version < 0) return;
    EXPECT_TRUE(contents_of(o.drive, o.first + i, c.version).are(data, kCell))
        << "user " << number_ << " read wrong bytes at " << offset_of(o.first + i) << " of drive " << o.drive
        << ", " << i << " cells into a transfer of " << o.count;
  }

  Engine& engine_;
  StallWatch& watch_;
  const int number_;
  const std::int64_t base_;
  Dice dice_;
  EngineTally tally_;
  std::uint64_t next_tag_ = kInFlight, completed_ = 0;
  std::int64_t version_ = 0;
  std::vector<Cell> cells_[kDrives];
  const Memory memory_{kInFlight * kRoom};
  std::vector<std::unique_ptr<Operation>> operations_;  // by tag
  std::vector<Operation*> free_, flying_;
  bool registered_ = false;
  Ticket stale_;
  std::mutex mutex_;
  std::condition_variable changed_;  // an operation was told
};

struct Setup {
  const char* name;
  Backend backend;
  int queues = 1;
  bool sqpoll = false;
  int share = 200;  // of the volume's operations: one in so many
};

class EngineStressTest : public testing::TestWithParam<Setup> {
 protected:
  void open(std::uint64_t seed) {
    EngineOptions options;
    options.backend = GetParam().backend;
    options.block_size = 16 * kKiB;
    options.queue_depth = 8;
    options.queues = GetParam().queues;
    options.sqpoll = GetParam().sqpoll;
    options.faults = {.seed = seed,
                      .error_rate = 0.004,
                      .interrupt_rate = 0.01,
                      .short_rate = 0.01,
                      .delay_rate = 0.001,
                      .rules = {{.fault = Fault::kError,
                                 .error = ENOSPC,
                                 .drive = 0,
                                 .op = Op::kWrite,
                                 .from = kFullFrom,
                                 .to = kFullTo}}};
    const DriveOptions drive = {.path = directory_.path(), .bytes = kDriveBytes, .kind = FileKind::kScratch};
    engine_ = make_engine(options, std::vector<DriveOptions>(kDrives, drive));
  }

  const TempDir directory_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(EngineStressTest, EveryTransferCompletesOnceWithItsBytesOrAnError) {
  const std::uint64_t seed = printed_seed();
  open(seed);
  if (engine_->backend() != GetParam().backend) GTEST_SKIP() << engine_->describe();
  printf("%s\n", engine_->describe().c_str());
  StallWatch watch(1, kPatienceSeconds, [&] { return engine_->state(); });
  std::vector<std::unique_ptr<EngineUser>> users;
  for (int u = 0; u < kUsers; ++u) users.push_back(std::make_unique<EngineUser>(*engine_, watch, seed, u));
  const std::int64_t operations = stress_operations() / GetParam().share;
  const auto begin = Clock::now();
  on_threads(users, [&](EngineUser& user) {
    for (std::int64_t i = 0; i < operations / kUsers && !testing::Test::HasFailure(); ++i) user.step();
    user.end();
  });
  const double seconds = seconds_between(begin, Clock::now());
  engine_.reset();  // its end delivers the completions that are left
  EngineTally sum;
  for (const auto& user : users) {
    sum.add(user->tally());
    EXPECT_EQ(user->completed(), user->begun());
  }
  printf("%lld operations in %.1f s, %.0f a second\n%s\n", static_cast<long long>(operations), seconds,
         static_cast<double>(operations) / seconds, sum.text().c_str());
  EXPECT_GT(sum.read + sum.written, 10 * sum.failed);
  if (operations < 5000) return;  // too few to have seen everything
  EXPECT_GT(sum.failed, 0);
  EXPECT_GT(sum.full, 0);
  EXPECT_GT(sum.past_end, 0);
  EXPECT_GT(sum.empty, 0);
  EXPECT_GT(sum.aligned, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Backends, EngineStressTest,
    testing::Values(Setup{.name = "ram", .backend = Backend::kRam, .share = 20},
                    Setup{.name = "uring", .backend = Backend::kUring},
                    Setup{.name = "uring_two_queues", .backend = Backend::kUring, .queues = 2},
                    Setup{.name = "uring_sqpoll", .backend = Backend::kUring, .sqpoll = true, .share = 2000},
                    Setup{.name = "libaio", .backend = Backend::kLibaio},
                    Setup{.name = "libaio_two_queues", .backend = Backend::kLibaio, .queues = 2},
                    Setup{.name = "threads", .backend = Backend::kThreads},
                    Setup{.name = "threads_two_queues", .backend = Backend::kThreads, .queues = 2}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace zg::io::test
