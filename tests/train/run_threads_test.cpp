// A run with a "threads" section.
#include <tbb/info.h>

#include <map>

#include "train/run_fixture.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/system.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

class RunThreads : public RunTest {
 protected:
  ~RunThreads() override { set_parallelism(tbb::info::default_concurrency()); }
  RunConfig config(const Strings& overrides) const { return tiny_on_drives({"drive"}, overrides); }
  // The cores of this process's threads, by their names, as the kernel tells them.
  static std::multimap<std::string, std::string> cores_of_threads() {
    std::multimap<std::string, std::string> cores;
    for (const auto& task : fs::directory_iterator("/proc/self/task")) {
      std::ifstream comm(task.path() / "comm"), status(task.path() / "status");
      std::string name, line;
      std::getline(comm, name);
      const std::string key = "Cpus_allowed_list:\t";
      while (std::getline(status, line)) {
        if (line.compare(0, key.size(), key) == 0) cores.emplace(name, line.substr(key.size()));
      }
    }
    return cores;
  }
  static std::string only(const std::multimap<std::string, std::string>& cores, const std::string& name) {
    return cores.count(name) == 1 ? cores.find(name)->second
                                  : fmt::format("{} of {}", cores.count(name), name);
  }
  const int cores_ = tbb::info::default_concurrency();
};

TEST_F(RunThreads, MoreThanThereAreIsRefusedBeforeAnythingIsOpened) {
  const std::string n = std::to_string(cores_ + 1);
  const Error compute = usage_error([&] { return Trainer(config({"threads.compute=" + n})), 0; });
  EXPECT_EQ(compute.where(), "threads.compute");
  EXPECT_HAS(compute.message(), "asks for " + n + " threads");
  const Error reserved =
      usage_error([&] { return Trainer(config({"threads.reserved=" + std::to_string(cores_)})), 0; });
  EXPECT_EQ(reserved.where(), "threads.reserved");
  EXPECT_TRUE(fs::is_empty(directory_ + "/drive"));
}

TEST_F(RunThreads, TheLimitHolds) {
  Trainer trainer(config({"threads.compute=1"}));
  EXPECT_EQ(parallelism(), cores_);  // nothing is taken before it is meant
  trainer.start();
  EXPECT_EQ(parallelism(), 1);
  EXPECT_HAS(trainer.describe(), "\nthreads    1 compute on node ");
}

TEST_F(RunThreads, IoHasTheReservedCoreAndComputeTheOthers) {
  if (cores_ < 2 || read_core_topology().nodes.size() > 1) GTEST_SKIP() << "needs one node of two cores";
  const std::vector<int> all = usable_cores();
  for (const bool bind : {true, false}) {
    Trainer trainer(config({"threads.reserved=1", bind ? "threads.bind=auto" : "threads.bind=false"}));
    trainer.start();
    EXPECT_EQ(parallelism(), cores_ - 1);
    const auto threads = cores_of_threads();
    EXPECT_EQ(only(threads, "zg-io0"), format_cpu_list(bind ? std::vector<int>{all.front()} : all));
    const std::vector<int> rest(all.begin() + 1, all.end());
    parallel_for(64, 1, [&](std::int64_t, std::int64_t) { EXPECT_EQ(usable_cores(), bind ? rest : all); });
    EXPECT_EQ(usable_cores(), all);
    const std::string text = trainer.describe();
    EXPECT_HAS(text, bind ? ", bound to them; reserved: " : ", not bound; reserved: ");
    EXPECT_HAS(text, "threads.reserved is 1");
  }
}

}  // namespace
}  // namespace zg
