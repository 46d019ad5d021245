// Checkpoints of all formats that a program has written: each must load for ever.
#include <algorithm>
#include <filesystem>

#include "support/places.hpp"
#include "train/checkpoint_fixture.hpp"
#include "ziggurat/checkpoint/pins.hpp"
#include "ziggurat/io/hash.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

class CheckpointFormats : public CheckpointFixture {};

// A checkpoint of format 1, as the first program with checkpoints wrote it. It must load for ever.
TEST_F(CheckpointFormats, OfFormatOneLoad) {
  const std::string path = test::in_source("tests/data/checkpoint_format_1");
  const Checkpoint checkpoint(path);
  checkpoint.verify();
  EXPECT_EQ(checkpoint.manifest().step, 2);
  EXPECT_EQ(checkpoint.manifest().text(), read(path + "/manifest.json"));
  const std::string text = checkpoint.manifest().config;
  EXPECT_HAS(text, "\"n_embd\": 8");
  const Outcome rest = run(
      "rest", {"model.n_embd=8", "model.n_head=1", "model.n_positions=8", "data.seq_len=8", "steps=3"}, path);
  ASSERT_EQ(rest.losses.size(), 1u);
}

// One of format 2, of two ranks with parts of each layer, whose moments are codes in blocks of these parts.
TEST_F(CheckpointFormats, OfFormatTwoLoad) {
  const std::string path = test::in_source("tests/data/checkpoint_format_2");
  const Checkpoint checkpoint(path);
  checkpoint.verify();
  EXPECT_EQ(checkpoint.manifest().step, 2);
  EXPECT_EQ(checkpoint.manifest().text(), read(path + "/manifest.json"));
  const std::vector<Checkpoint::Piece> pieces = checkpoint.pieces();
  EXPECT_TRUE(std::any_of(pieces.begin(), pieces.end(), [](const auto& p) { return p.box.lines > 1; }));
  for (const char* ranks : {"1", "2"}) {
    const Outcome rest = run(fmt::format("rest{}", ranks),
                             {"model.n_embd=8", "model.n_head=2", "model.n_positions=8", "data.seq_len=8",
                              "steps=3", "optimizer.state=int8", fmt::format("devices=host:{}", ranks),
                              fmt::format("parallel.tensor={}", ranks)},
                             path);
    ASSERT_EQ(rest.losses.size(), 1u);
  }
}

// One of format 3, whose state lies in a drive's file that it names. The drive was /mnt/nvme0.
TEST_F(CheckpointFormats, OfFormatThreeLoad) {
  const std::string from = test::in_source("tests/data/checkpoint_format_3");
  const std::string path = directory_ + "/0001-step-2", name = "rank-00000.pins";
  fs::copy(from, path);
  CheckpointManifest manifest = parse_manifest(read(from + "/manifest.json"), from);
  PinnedState pins = parse_pinned(read(from + "/" + name), from);
  EXPECT_EQ(manifest.text(), read(from + "/manifest.json"));
  EXPECT_EQ(pins.text(), read(from + "/" + name));
  ASSERT_EQ(pins.files.size(), 1u);
  EXPECT_EQ(pins.files[0].directory, "/mnt/nvme0");
  pins.files[0].directory = path;  // where it is now
  const std::string text = pins.text();
  test::write_file(path + "/" + name, text);
  manifest.files = {{name, static_cast<std::int64_t>(text.size()), io::hash_of(text)}};
  test::write_file(path + "/manifest.json", manifest.text());
  const Checkpoint checkpoint(path);
  checkpoint.verify();
  EXPECT_EQ(checkpoint.manifest().step, 2);
  EXPECT_GT(checkpoint.manifest().pinned, 0);
  const Outcome rest = run("rest", small(3) + Strings{"model.n_head=1"}, path);
  ASSERT_EQ(rest.losses.size(), 1u);
}

}  // namespace
}  // namespace zg
