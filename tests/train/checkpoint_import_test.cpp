// Checkpoints of tensors that others have trained.
#include <algorithm>
#include <filesystem>

#include "train/checkpoint_fixture.hpp"

namespace zg {
namespace {

class CheckpointImport : public CheckpointFixture {
 protected:
  // A text in the header of a safetensors file is replaced by one of the same length.
  std::string with(const std::string& file, const std::string& behind, const std::string& old,
                   const std::string& now) const {
    std::string bytes = read(file);
    const std::size_t at = bytes.find(old, bytes.find(behind));
    EXPECT_NE(at, bytes.npos);
    EXPECT_EQ(old.size(), now.size());
    const std::string path = directory_ + "/theirs.safetensors";
    test::write_file(path, bytes.replace(at, old.size(), now));
    return path;
  }
};

TEST_F(CheckpointImport, TakesTensorsOfTheRightShapesAlone) {
  const Outcome o = run("out", {"model.n_embd=8", "model.n_head=1", "model.n_positions=8", "data.seq_len=8"});
  const Checkpoint like(o.newest);
  const std::string file = o.newest + "/rank-00000.safetensors", to = directory_ + "/imported";
  const std::string made = import_checkpoint(like, file, to, 7);
  EXPECT_EQ(Checkpoint(made).manifest().step, 7);
  EXPECT_TRUE(tensors_in(made) == o.tensors);
  const auto problem = [&](const std::string& theirs) {
    return usage_error([&] { return import_checkpoint(like, theirs, to, 8); });
  };
  for (const std::string name : {"h.0.mlp.c_fc.weight", "h.0.mlp.c_fc.weight.exp_avg"}) {
    const std::string behind = "\"" + name + "\":{";
    const Error turned = problem(with(file, behind, "\"shape\":[32,8]", "\"shape\":[8,32]"));
    EXPECT_HAS(turned.message(), "has " + name + " as [8, 32] in F32, [32, 8] in F32 expected");
    EXPECT_HAS(turned.hint(), "transpose it");
    const Error flat = problem(with(file, behind, "\"shape\":[32,8]", "\"shape\": [256]"));
    EXPECT_HAS(flat.message(), "has " + name + " as [256] in F32, [32, 8] in F32 expected");
    EXPECT_HAS(flat.hint(), "the model must be that of " + o.newest);
  }
  EXPECT_EQ(list_checkpoints(to).size(), 1u);
}

// What one run has exported, its copy's file alone, is what another one takes.
TEST_F(CheckpointImport, TakesTheFileOfACopyOfPinnedState) {
  std::filesystem::create_directories(directory_ + "/drive");
  const Outcome o = run("out", {"tiers.device=600KiB", "tiers.host=300KiB", "aio.backend=threads",
                                "checkpoint.state=pin", "tiers.nvme.0.path=" + directory_ + "/drive"});
  const std::string copy = export_checkpoint(Checkpoint(o.newest), directory_ + "/copies");
  for (const Checkpoint& like : {Checkpoint(o.newest), Checkpoint(copy)}) {
    const std::string made =
        import_checkpoint(like, copy + "/state-00001-of-00001.safetensors", directory_ + "/imported", 3);
    EXPECT_TRUE(tensors_in(made) == o.tensors);
  }
}

// What is imported lies in its file, also where the other checkpoint's state lies on a drive.
TEST_F(CheckpointImport, PinsNothing) {
  std::filesystem::create_directories(directory_ + "/drive");
  const Strings model{"model.n_embd=8", "model.n_head=1", "model.n_positions=8", "data.seq_len=8"};
  const Strings drive{"tiers.device=600KiB", "tiers.host=300KiB", "aio.backend=threads",
                      "checkpoint.state=pin", "tiers.nvme.0.path=" + directory_ + "/drive"};
  const Checkpoint like(run("out", model + drive).newest);
  EXPECT_GT(like.manifest().pinned, 0);
  const Outcome other = run("other", model);
  std::vector<double> told;
  const Checkpoint made(import_checkpoint(like, other.newest + "/rank-00000.safetensors",
                                          directory_ + "/imported", 3,
                                          [&](double share) { told.push_back(share); }));
  EXPECT_EQ(made.manifest().pinned, 0);
  EXPECT_TRUE(tensors_in(made.path()) == other.tensors);
  ASSERT_FALSE(told.empty());
  EXPECT_TRUE(std::is_sorted(told.begin(), told.end()));
  EXPECT_EQ(told.back(), 1);
}

}  // namespace
}  // namespace zg
