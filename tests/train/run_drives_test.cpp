// The drives of a run: when they are opened, and how what is measured of them is used; and its machine.
#include "ziggurat/train/trainer.hpp"

#include "train/run_fixture.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/cuda.hpp"
#include "ziggurat/train/machine.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

class RunDrives : public RunTest {
 protected:
  RunConfig config(const Strings& overrides) const { return tiny_on_drives({"a", "b"}, overrides); }
};

TEST_F(RunDrives, ExtentsAreSpreadByTheGivenShares) {
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

TEST_F(RunDrives, AreOpenedBeforeTheStartAndReclaimWhatAKilledRunHasLeft) {
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
  const Error error = usage_error([&] { return second.open_node(), 0; });
  EXPECT_HAS(error.message(), "is in use by this process");
}

TEST_F(RunDrives, TheSameDirectoryTwiceIsFound) {
  Trainer trainer(config({"tiers.nvme.1.path=" + directory_ + "/b/../a"}));
  const Error error = usage_error([&] { return trainer.open_node(), 0; });
  EXPECT_HAS(error.hint(), "a directory of its own");
  EXPECT_FALSE(fs::exists(directory_ + "/a/ziggurat.lock"));
}

class RunDevice : public RunTest {};

TEST_F(RunDevice, AGpuThatIsNotThereIsSaidBeforeAnythingIsTaken) {
  if (!list_gpus(nullptr).empty()) GTEST_SKIP() << "there is a GPU";
  const RunConfig config = on_book({"devices=cuda", "data.seq_len=8"});
  const Error e = test::error_of([&] { const Trainer trainer(config); });
  EXPECT_EQ(e.code(), Errc::kDevice) << e.what();
  EXPECT_FALSE(e.hint().empty());
}

// The machine for which the program loads a configuration.
TEST(ThisMachine, HasWhatDeviceAndKernelsSay) {
  const Machine machine = this_machine();
  EXPECT_EQ(machine.has_gpu(), !list_gpus(nullptr).empty());
  EXPECT_EQ(machine.has_bf16(), machine.bf16_instructions().rfind("none", 0) != 0);
}

}  // namespace
}  // namespace zg
