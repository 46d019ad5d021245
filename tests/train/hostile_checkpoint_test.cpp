// Checkpoints that somebody else has made, or has changed: nothing outside of them is read, written or
// removed.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "train/checkpoint_fixture.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/checkpoint/directory_lock.hpp"
#include "ziggurat/checkpoint/format.hpp"
#include "ziggurat/checkpoint/pins.hpp"
#include "ziggurat/io/hash.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

class HostileCheckpoint : public CheckpointFixture {
 protected:
  HostileCheckpoint() {
    test::write_file(victim() + "/file", "precious");
    test::write_file(victim() + "/.hidden", "precious");
  }
  std::string victim() const { return directory_ + "/victim"; }
  void expect_victim() const {
    EXPECT_EQ(read(victim() + "/file"), "precious");
    EXPECT_EQ(read(victim() + "/.hidden"), "precious");
    EXPECT_EQ(std::distance(fs::directory_iterator(victim()), fs::directory_iterator{}), 2);
  }
  // Writes a manifest of this text, with the right hash.
  static void write_manifest(const std::string& checkpoint, std::string before) {
    before.resize(before.rfind(",\n  \"xxh3\""));
    test::write_file(checkpoint + "/manifest.json",
                     before + fmt::format(",\n  \"xxh3\": \"{}\"\n}}\n", io::hash_text(io::hash_of(before))));
  }
  void change_manifest(const std::string& checkpoint, const std::string& from, const std::string& to) const {
    std::string text = read(checkpoint + "/manifest.json");
    const std::size_t at = text.find(from);
    ASSERT_NE(at, text.npos) << from;
    write_manifest(checkpoint, text.replace(at, from.size(), to));
  }
  Error refused(const std::string& checkpoint) const {
    return usage_error([&] { return Checkpoint(checkpoint).verify(), 0; });
  }
  // A run whose state lies on a drive.
  std::string pinned(const std::string& name) {
    fs::create_directories(drive(name));
    return run(name, on_drive(name)).newest;
  }
  std::string drive(const std::string& name) const { return directory_ + "/drive of " + name; }
  Strings on_drive(const std::string& name) const {
    return {"tiers.device=600KiB", "tiers.host=300KiB", "aio.backend=threads", "checkpoint.state=pin",
            "tiers.nvme.0.path=" + drive(name)};
  }
  // Replaces the list of pins, and makes the manifest know the new one.
  void write_pins(const std::string& checkpoint, const std::string& text) const {
    const std::string file = checkpoint + "/manifest.json";
    CheckpointManifest m = parse_manifest(read(file), file);
    test::write_file(checkpoint + "/rank-00000.pins", text);
    m.files[0].bytes = static_cast<std::int64_t>(text.size());
    m.files[0].header_hash = io::hash_of(text);
    test::write_file(checkpoint + "/manifest.json", m.text());
  }
};

TEST_F(HostileCheckpoint, TheNameOfARunIsNoPath) {
  const std::string newest = run("out", small(2) + Strings{"checkpoint.keep=1"}).newest;
  const std::string all = fs::path(newest).parent_path(), run_line = "\"run\": \"";
  const std::string text = read(newest + "/manifest.json");
  const std::string own = text.substr(text.find(run_line) + run_line.size(), 16);
  // What the next checkpoint's directory would be called, with something in it that cannot be removed.
  test::write_file(all + "/0003-step-3.part-/keep/x", "x");
  for (const std::string& name : {std::string("/../../../victim"), std::string("../victim"), std::string(""),
                                  own.substr(1), own + "0", std::string("0123456789ABCDEF")}) {
    write_manifest(newest, std::string(text).replace(text.find(own), 16, name));
    const Error error = refused(newest);
    EXPECT_EQ(error.where(), newest + "/manifest.json");
    EXPECT_HAS(error.message(), "\"run\" that is no name of a run");
    EXPECT_EQ(usage_error([&] { return run("out", small(4), ""); }).code(), Errc::kUsage);
    EXPECT_THROW(export_checkpoint(Checkpoint(newest), directory_ + "/copies"), Error);
    expect_victim();
  }
}

// Links in the place of a directory that is to be removed, of a checkpoint and of its remains.
TEST_F(HostileCheckpoint, LinksAreNotFollowedWhereFilesAreRemoved) {
  const std::string newest = run("out", small(2)).newest, all = fs::path(newest).parent_path();
  const std::string name = Checkpoint(newest).manifest().run;
  fs::create_directory_symlink(victim(), all + "/0003-step-3.part-" + name);
  fs::create_directory_symlink(victim(), all + "/0001-step-1.part-removed");
  test::write_file(victim() + "/manifest.json", "precious");
  Trainer trainer(config("out", small(4) + Strings{"checkpoint.keep=1"}), {.resume = ""});
  trainer.prepare();
  trainer.run({});
  EXPECT_EQ(read(victim() + "/manifest.json"), "precious");
  fs::remove(victim() + "/manifest.json");
  expect_victim();
  EXPECT_EQ(list_checkpoints(all).front().number, 4);
}

TEST_F(HostileCheckpoint, OnlyItsOwnFilesGoWithACheckpoint) {
  const std::string newest = run("out", {}).newest;
  test::write_file(newest + "/notes.txt", "mine");
  const Error error = test::error_of([&] { discard_checkpoint(newest); });
  EXPECT_HAS(error.message(), "notes.txt is no file of a checkpoint, and stays");
  EXPECT_EQ(read(newest + ".part-removed/notes.txt"), "mine");
  EXPECT_FALSE(fs::exists(newest));
  for (const char* name : {"manifest.json", "index.json", "rank-00000.safetensors", "rank-123456.pins",
                           "state-00001-of-00003.safetensors"})
    EXPECT_TRUE(is_of_checkpoint(name)) << name;
  for (const char* name : {"rank-0.safetensors", "rank-00000.safetensors.bak", "state-00001.safetensors",
                           "rank-.pins", "rank-123456789.pins", "manifest.json~", "", "../manifest.json"})
    EXPECT_FALSE(is_of_checkpoint(name)) << name;
}

TEST_F(HostileCheckpoint, NumbersOfAManifestHaveTheirRanges) {
  const std::string newest = run("out", small(2)).newest, text = read(newest + "/manifest.json");
  const auto problem = [&](const std::string& from, const std::string& to) {
    const std::size_t at = text.find(from);
    EXPECT_NE(at, text.npos) << from;
    write_manifest(newest, std::string(text).replace(at, from.size(), to));
    return refused(newest).message();
  };
  for (const char* key : {"ranks", "processes", "shards"}) {
    for (const char* number : {"0", "4294967296", "2147483647", "-1", "1.5", "18446744073709551615"})
      EXPECT_HAS(problem(fmt::format("\"{}\": 1", key), fmt::format("\"{}\": {}", key, number)), key);
  }
  EXPECT_HAS(problem("\"number\": ", "\"number\": 922337203685477580"), "\"number\"");
  EXPECT_HAS(problem("\"step\": ", "\"step\": 922337203685477580"), "\"step\"");
  EXPECT_HAS(problem("\"bytes\": ", "\"bytes\": 92233720368547"), "\"bytes\"");
  EXPECT_HAS(problem("rank-00000.safetensors", "a\\u001b[2Jb"), "which no checkpoint has");
  EXPECT_HAS(problem("\"files\": [",
                     "\"files\": [{\"name\": \"rank-00000.safetensors\", \"bytes\": 1, "
                     "\"header_xxh3\": \"0123456789abcdef\"}, "),
             "names rank-00000.safetensors twice");
  write_manifest(newest, text);
  EXPECT_NO_THROW(Checkpoint(newest).verify());
}

// Whoever counts on from the largest number of a directory must be able to.
TEST_F(HostileCheckpoint, NamesWithHugeNumbersAreNone) {
  const std::string all = directory_ + "/all";
  for (const char* name : {"9223372036854775807-step-2", "0001-step-9223372036854775807",
                           "1000000000000001-step-1", "99999999999999999999999-step-1"})
    fs::create_directories(all + "/" + name);
  EXPECT_TRUE(list_checkpoints(all).empty());
  fs::create_directories(all + "/1000000000000000-step-1");
  EXPECT_EQ(list_checkpoints(all).size(), 1u);
}

TEST_F(HostileCheckpoint, PlacesOfPinsHaveTheirRanges) {
  const std::string newest = pinned("out");
  const PinnedState good = parse_pinned(read(newest + "/rank-00000.pins"), "p");
  const auto expect_refused = [&](const PinnedState& pins) {
    write_pins(newest, pins.text());
    const Error error = refused(newest);
    EXPECT_EQ(error.where(), newest + "/rank-00000.pins");
    EXPECT_THROW(export_checkpoint(Checkpoint(newest), directory_ + "/copies"), Error);
    EXPECT_THROW((void)run("out", on_drive("out") + Strings{"steps=4"}, ""), Error);
  };
  const auto text_with = [&](const std::string& from, const std::string& to) {
    std::string text = good.text();
    const std::size_t at = text.find(from);
    EXPECT_NE(at, text.npos) << from;
    write_pins(newest, text.replace(at, from.size(), to));
    return refused(newest).message();
  };
  // Numbers that become negative, or 0, as an int.
  const io::StoredPiece& first = good.segments[0].stored.pieces[0];
  const std::string place = fmt::format("[\n{},\n{},\n{},", first.drive, first.offset, first.bytes);
  for (const std::int64_t drive : {std::int64_t{1}, std::int64_t{1} << 31, (std::int64_t{1} << 32) - 1,
                                   std::int64_t{1} << 32, std::int64_t{-1}})
    EXPECT_HAS(text_with(place, fmt::format("[\n{},\n{},\n{},", drive, first.offset, first.bytes)),
               "where state lies");
  // Pieces whose sum wraps around to the segment's size.
  PinnedState wrapped = good;
  std::vector<io::StoredPiece>& pieces = wrapped.segments[0].stored.pieces;
  io::StoredPiece huge = pieces[0];
  huge.bytes = std::int64_t{1} << 48;
  pieces.insert(pieces.end(), 1 << 16, huge);
  expect_refused(wrapped);
}

TEST_F(HostileCheckpoint, PinsWithoutTensorsAreCopiedAsNone) {
  const std::string newest = pinned("out");
  PinnedState pins = parse_pinned(read(newest + "/rank-00000.pins"), "p");
  pins.pieces.clear();
  write_pins(newest, pins.text());
  Checkpoint(newest).verify();
  const std::string copy = export_checkpoint(Checkpoint(newest), directory_ + "/copies");
  EXPECT_TRUE(Checkpoint(copy).tensors().empty());
  EXPECT_TRUE(Checkpoint(copy).manifest().files.empty());
}

// A list of pins that was changed does not say which state is needed: all stays, and can still be mended.
TEST_F(HostileCheckpoint, AFlippedBitOfPinsRemovesNoState) {
  const std::string newest = pinned("out"), file = newest + "/rank-00000.pins", text = read(file);
  const std::vector<std::string> kept = Checkpoint(newest).drive_files();
  ASSERT_EQ(kept.size(), 1u);
  const std::string name = fs::path(kept[0]).filename(), bytes = read(kept[0]);
  std::string other = text;
  char& digit = other[text.find(name) + std::string("ziggurat-").size()];
  digit = digit == '0' ? '1' : '0';
  test::write_file(file, other);
  EXPECT_THROW((void)pins_in(newest), Error);
  reclaim_kept(system_files(), drive("out"));
  ASSERT_TRUE(fs::exists(kept[0]));
  free_unpinned({{fs::path(kept[0]).parent_path(), name}}, fs::path(newest).parent_path());
  EXPECT_TRUE(read(kept[0]) == bytes);
  (void)run("another", on_drive("out"));
  ASSERT_TRUE(fs::exists(kept[0]));
  test::write_file(file, text);
  EXPECT_NO_THROW(Checkpoint(newest).verify());
}

// What is kept for whom is said by a file that anybody may have put there.
TEST_F(HostileCheckpoint, PipesOnADriveStopNobody) {
  fs::create_directories(drive("out"));
  const std::string kept = drive("out") + "/ziggurat-0123456789abcdef.kept";
  ASSERT_EQ(::mkfifo(kept.c_str(), 0600), 0);
  ASSERT_EQ(::mkfifo((kept + "-for").c_str(), 0600), 0);
  const std::string newest = pinned("out");
  EXPECT_TRUE(fs::exists(kept));
  PinnedState pins = parse_pinned(read(newest + "/rank-00000.pins"), "p");
  pins.files[0].name = fs::path(kept).filename();
  write_pins(newest, pins.text());
  EXPECT_HAS(refused(newest).message(), "is no regular file");
  // A link is not followed either.
  fs::remove(kept);
  fs::create_symlink(victim() + "/file", kept);
  EXPECT_EQ(refused(newest).where(), kept);
}

TEST_F(HostileCheckpoint, WhatARunWritesToIsNotRemovedBeneathIt) {
  const std::string newest = run("out", {}).newest, all = fs::path(newest).parent_path();
  const Checkpoint checkpoint(newest);
  {
    const DirectoryLock lock("checkpoint.path", all);
    const Error error = usage_error([&] { return discard_checkpoint(newest), 0; });
    EXPECT_HAS(error.message(), "is in use by another run");
    EXPECT_HAS(usage_error([&] { return export_checkpoint(checkpoint, all); }).message(), "in use");
    EXPECT_NO_THROW(Checkpoint(newest).verify());
  }
  discard_checkpoint(newest);
  EXPECT_FALSE(fs::exists(newest));
}

}  // namespace
}  // namespace zg
