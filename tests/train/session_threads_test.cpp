// A session with a "threads" section.
#include <tbb/info.h>

#include <map>

#include "config/config_fixture.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

class SessionThreads : public ConfigTest {
 protected:
  SessionThreads() {
    std::string text;
    while (text.size() < 4000) text += "all work and no play makes jack a dull boy, ";
    write("book.txt", text);
    fs::create_directories(directory_ + "/drive");
  }
  ~SessionThreads() override { set_parallelism(tbb::info::default_concurrency()); }
  RunConfig config(const Strings& overrides) const {
    Strings all{"data.train=" + directory_ + "/book.txt",
                "data.seq_len=16",
                "model.n_embd=32",
                "model.n_positions=32",
                "train_batch_size=4",
                "tiers.device=400KiB",
                "tiers.host=400KiB",
                "tiers.nvme.0.path=" + directory_ + "/drive",
                "output.dir=" + directory_ + "/out"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    return load_set(all);
  }
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

TEST_F(SessionThreads, MoreThanThereAreIsRefusedBeforeAnythingIsOpened) {
  const std::string n = std::to_string(cores_ + 1);
  const Error compute = error_of([&] { return Trainer(config({"threads.compute=" + n})), 0; });
  EXPECT_EQ(compute.where(), "threads.compute");
  EXPECT_NE(compute.message().find("asks for " + n + " threads"), std::string::npos) << compute.what();
  const Error reserved =
      error_of([&] { return Trainer(config({"threads.reserved=" + std::to_string(cores_)})), 0; });
  EXPECT_EQ(reserved.where(), "threads.reserved");
  EXPECT_TRUE(fs::is_empty(directory_ + "/drive"));
}

TEST_F(SessionThreads, TheLimitHolds) {
  Trainer trainer(config({"threads.compute=1"}));
  EXPECT_EQ(parallelism(), cores_);  // nothing is taken before it is meant
  trainer.start();
  EXPECT_EQ(parallelism(), 1);
  EXPECT_NE(trainer.describe().find("\nthreads    1 compute on node "), std::string::npos)
      << trainer.describe();
}

TEST_F(SessionThreads, IoHasTheReservedCoreAndComputeTheOthers) {
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
    EXPECT_NE(text.find(bind ? ", bound to them; reserved: " : ", not bound; reserved: "), std::string::npos)
        << text;
    EXPECT_NE(text.find("threads.reserved is 1"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace zg
