// The drives of a session: when they are opened, and how what is measured of them is used; and its machine.
#include "ziggurat/train/trainer.hpp"

#include "config/config_fixture.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/cuda.hpp"
#include "ziggurat/train/machine.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

class SessionDrives : public ConfigTest {
 protected:
  SessionDrives() {
    std::string text;
    while (text.size() < 4000) text += "all work and no play makes jack a dull boy, ";
    write("book.txt", text);
    fs::create_directories(directory_ + "/a");
    fs::create_directories(directory_ + "/b");
  }
  // Most of the state must go to the drives.
  RunConfig config(const Strings& overrides) const {
    Strings all{"data.train=" + directory_ + "/book.txt",
                "data.seq_len=16",
                "model.n_embd=32",
                "model.n_positions=32",
                "train_batch_size=4",
                "tiers.device=400KiB",
                "tiers.host=400KiB",
                "tiers.nvme.0.path=" + directory_ + "/a",
                "tiers.nvme.1.path=" + directory_ + "/b",
                "output.dir=" + directory_ + "/out"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    return load_set(all);
  }
};

TEST_F(SessionDrives, ExtentsAreSpreadByTheGivenShares) {
  for (const int faster : {0, 1}) {
    // Blocks enough for a share to show: the state of each is one extent, which lies on one drive.
    Trainer trainer(config({"aio.backend=ram", "model.n_layer=12"}));
    trainer.start(faster == 0 ? std::vector<double>{7, 1} : std::vector<double>{1, 7});
    trainer.rank().engine().flush();
    const std::int64_t more = trainer.node().io()->counters(faster).write_bytes,
                       less = trainer.node().io()->counters(1 - faster).write_bytes;
    EXPECT_GT(more + less, 200 * kKiB);
    EXPECT_GT(more, 2 * less) << "drive " << faster;
  }
}

TEST_F(SessionDrives, AreOpenedBeforeTheStartAndReclaimWhatAKilledRunHasLeft) {
  const std::string leftover = write("b/ziggurat-0123456789abcdef.tier", std::string(100000, 'x'));
  Trainer trainer(config({}));
  EXPECT_TRUE(fs::exists(leftover));  // not before it is meant
  EXPECT_FALSE(trainer.has_drives());
  trainer.open_node();
  EXPECT_FALSE(fs::exists(leftover));
  ASSERT_TRUE(trainer.has_drives());
  EXPECT_TRUE(fs::exists(directory_ + "/a/ziggurat.lock"));
  const std::int64_t needed = trainer.plan().layout->table.nvme_bytes();
  EXPECT_GE(trainer.node().io()->drive_bytes(0), needed / 2);
  trainer.start();  // with those drives
  trainer.rank().engine().flush();
  EXPECT_GT(trainer.node().io()->counters(0).write_bytes + trainer.node().io()->counters(1).write_bytes, 0);

  Trainer second(config({}));
  const Error error = error_of([&] { return second.open_node(), 0; });
  EXPECT_NE(error.message().find("is in use by this process"), std::string::npos) << error.what();
}

TEST_F(SessionDrives, TheSameDirectoryTwiceIsFound) {
  Trainer trainer(config({"tiers.nvme.1.path=" + directory_ + "/b/../a"}));
  const Error error = error_of([&] { return trainer.open_node(), 0; });
  EXPECT_NE(error.hint().find("a directory of its own"), std::string::npos) << error.what();
  EXPECT_FALSE(fs::exists(directory_ + "/a/ziggurat.lock"));
}

class SessionDevice : public ConfigTest {};

TEST_F(SessionDevice, AGpuThatIsNotThereIsSaidBeforeAnythingIsTaken) {
  if (!list_gpus(nullptr).empty()) GTEST_SKIP() << "there is a GPU";
  std::string text;
  while (text.size() < 4000) text += "all work and no play makes jack a dull boy, ";
  write("book.txt", text);
  try {
    Trainer trainer(load_set({"devices=cuda", "data.train=" + directory_ + "/book.txt", "data.seq_len=8",
                              "output.dir=" + directory_ + "/out"}));
    FAIL() << "made";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::kDevice) << e.what();
    EXPECT_FALSE(e.hint().empty());
  }
}

// What the program loads a configuration for.
TEST(ThisMachine, HasWhatDeviceAndKernelsSay) {
  const Machine machine = this_machine();
  EXPECT_EQ(machine.has_gpu(), !list_gpus(nullptr).empty());
  EXPECT_EQ(machine.has_bf16(), machine.bf16_instructions().rfind("none", 0) != 0);
}

}  // namespace
}  // namespace zg
