// The drives of a session: when they are opened, and how what is measured of them is used; and its machine.
#include "ziggurat/train/session.hpp"

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
    Trace trace;
    // Blocks enough for a share to show: the state of each is one extent, which lies on one drive.
    Session session(config({"aio.backend=ram", "model.n_layer=12"}), &trace);
    session.start(faster == 0 ? std::vector<double>{7, 1} : std::vector<double>{1, 7});
    session.engine().flush();
    const std::int64_t more = session.io()->counters(faster).write_bytes,
                       less = session.io()->counters(1 - faster).write_bytes;
    EXPECT_GT(more + less, 200 * kKiB);
    EXPECT_GT(more, 2 * less) << "drive " << faster;
  }
}

TEST_F(SessionDrives, AreOpenedBeforeTheStartAndReclaimWhatAKilledRunHasLeft) {
  const std::string leftover = write("b/ziggurat-0123456789abcdef.tier", std::string(100000, 'x'));
  Trace trace;
  Session session(config({}), &trace);
  EXPECT_TRUE(fs::exists(leftover));  // not before it is meant
  EXPECT_EQ(session.io(), nullptr);
  session.open_drives();
  EXPECT_FALSE(fs::exists(leftover));
  ASSERT_NE(session.io(), nullptr);
  EXPECT_TRUE(fs::exists(directory_ + "/a/ziggurat.lock"));
  const std::int64_t needed = session.layout().table.nvme_bytes();
  EXPECT_GE(session.io()->drive_bytes(0), needed / 2);
  session.start();  // with those drives
  session.engine().flush();
  EXPECT_GT(session.io()->counters(0).write_bytes + session.io()->counters(1).write_bytes, 0);

  Session second(config({}), &trace);
  const Error error = error_of([&] { return second.open_drives(), 0; });
  EXPECT_NE(error.message().find("is in use by this process"), std::string::npos) << error.what();
}

TEST_F(SessionDrives, TheSameDirectoryTwiceIsFound) {
  Trace trace;
  Session session(config({"tiers.nvme.1.path=" + directory_ + "/b/../a"}), &trace);
  const Error error = error_of([&] { return session.open_drives(), 0; });
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
    Session session(load_set({"devices=cuda", "data.train=" + directory_ + "/book.txt", "data.seq_len=8",
                              "output.dir=" + directory_ + "/out"}),
                    nullptr);
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
