// Where I/O threads run.
#include <atomic>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "support.hpp"
#include "ziggurat/base/cores.hpp"

namespace zg::io::test {
namespace {

// The cores of the threads that completions were called on.
class SeenCores final : public Completion {
 public:
  void on_complete(Ticket, std::uint64_t, Result result) override {
    EXPECT_TRUE(result.ok());
    std::lock_guard lock(mutex_);
    seen_.insert(usable_cores());
    ++done_;
  }
  std::set<std::vector<int>> wait_for(int count) {
    while (done_ < count) std::this_thread::yield();
    std::lock_guard lock(mutex_);
    return seen_;
  }

 private:
  std::mutex mutex_;
  std::set<std::vector<int>> seen_;
  std::atomic<int> done_{0};
};

std::set<std::vector<int>> cores_of_io(const EngineOptions& options, const DriveOptions& drive) {
  SeenCores seen;
  const auto engine = make_engine(options, {drive});
  std::vector<char> bytes(64 * 4096, 1);
  for (int i = 0; i < 16; ++i) {
    (void)engine->submit({.op = Op::kWrite,
                          .offset = i * 4096,
                          .data = bytes.data() + i * 4096,
                          .bytes = 4096,
                          .completion = &seen});
  }
  return seen.wait_for(16);
}

TEST(IoCores, ADrivesThreadsRunWhereItSays) {
  const std::vector<int> all = usable_cores();
  const std::vector<int> last = {all.back()};
  const TempDir directory;
  for (const Backend backend : {Backend::kThreads, Backend::kRam}) {
    EngineOptions options{.backend = backend, .queues = 2};
    DriveOptions drive{.path = directory.path(), .bytes = 1 << 20, .kind = FileKind::kScratch};
    drive.cpus = last;
    EXPECT_EQ(cores_of_io(options, drive), std::set<std::vector<int>>{last}) << name_of(backend);
    // Also where nobody else is bound: whoever names cores wants them.
    options.bind_threads = false;
    EXPECT_EQ(cores_of_io(options, drive), std::set<std::vector<int>>{last}) << name_of(backend);
    drive.cpus = {};
    EXPECT_EQ(cores_of_io(options, drive), std::set<std::vector<int>>{all}) << name_of(backend);
  }
}

// The run goes on, slower perhaps.
TEST(IoCores, CoresThatAreNotOursAreNoFailure) {
  const std::vector<int> all = usable_cores();
  DriveOptions drive{.path = "ram", .bytes = 1 << 20};
  drive.cpus = {all.back() + 1};
  EXPECT_EQ(cores_of_io({.backend = Backend::kRam}, drive), std::set<std::vector<int>>{all});
}

}  // namespace
}  // namespace zg::io::test
