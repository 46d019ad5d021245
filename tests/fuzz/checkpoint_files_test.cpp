// Files of checkpoints: manifests, what a rank has pinned, whole directories, copies with their index.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>

#include "fuzz/loop.hpp"
#include "support/files.hpp"
#include "support/places.hpp"
#include "train/checkpoint_bits.hpp"
#include "ziggurat/checkpoint/checkpoint.hpp"
#include "ziggurat/checkpoint/pins.hpp"
#include "ziggurat/io/hash.hpp"

namespace zg::fuzz {
namespace {

namespace fs = std::filesystem;

const std::string kStored = test::in_source("tests/data/checkpoint_format_");

// The end of a manifest, as the writer makes it.
std::string tail_of(const std::string& before) {
  return ",\n  \"xxh3\": \"" + io::hash_text(io::hash_of(before)) + "\"\n}\n";
}

// Makes the hash at the end of a manifest right, whatever stands before it.
std::string sealed(const std::string& manifest) {
  std::size_t end = manifest.rfind("\"xxh3\"");
  if (end != manifest.npos && manifest.find("\"files\"", end) == manifest.npos)
    end = manifest.rfind(',', end);
  if (end == manifest.npos) end = manifest.rfind('}');
  if (end == manifest.npos) return manifest;
  const std::string before = manifest.substr(0, end);
  return before + tail_of(before);
}

bool is_run(const std::string& run) {
  return run.size() == 16 && run.find_first_not_of("0123456789abcdef") == run.npos;
}

void use_manifest(const CheckpointManifest& m) {
  require(is_run(m.run), "a run that is no 16 digits, and becomes a part of paths: " + m.run);
  require(m.number >= 0 && m.step >= 0 && m.updates + m.skipped == m.step, "numbers of steps");
  require(m.number < std::numeric_limits<std::int64_t>::max(), "a number that nothing can follow");
  require(m.ranks >= 1 && m.processes >= 1 && m.shards >= 1 && m.stage >= 0, "numbers of ranks");
  require(m.pinned >= 0 && m.bytes() >= 0, "negative sizes");
  for (const CheckpointFile& file : m.files)
    require(file.name.find('/') == file.name.npos && file.name[0] != '.', "a path: " + file.name);
}

TEST(Fuzz, Manifest) {
  std::vector<Case> corpus;
  for (const char* format : {"1", "2", "3"})
    corpus.push_back({{"manifest.json", test::read_file(kStored + format + "/manifest.json")}});
  CheckpointManifest m = parse_manifest(corpus[0][0].content, "the first");
  m.scaler = LossScaler::State{.scale = 65536, .steps = 2, .last_overflow = 1, .hysteresis = 2};
  m.validation = Validation{2, 5.5};
  m.index = CheckpointFile{"index.json", 100, 7};
  corpus.push_back({{"manifest.json", m.text()}});
  fuzz({.name = "manifest.json",
        .corpus = corpus,
        .use =
            [](const Case& input, const std::string&) {
              const CheckpointManifest found = parse_manifest(input.front().content, "manifest.json");
              use_manifest(found);
              const std::string text = found.text();
              require(parse_manifest(text, "what was written").text() == text, "another one was written");
            },
        .seal = [](Case& input, Random&) { input.front().content = sealed(input.front().content); }});
}

void use_pinned(const PinnedState& state) {
  const auto segments = static_cast<std::int64_t>(state.segments.size());
  require(state.bytes() >= 0, "a negative size");
  for (const PinnedSegment& segment : state.segments) {
    std::int64_t left = segment.bytes;
    for (const io::StoredPiece& piece : segment.stored.pieces) {
      require(piece.drive >= 0 && piece.drive < static_cast<int>(state.files.size()),
              fmt::format("drive {} of {}", piece.drive, state.files.size()));
      require(piece.offset >= 0 && piece.bytes > 0 && piece.bytes <= left, "a piece beyond its segment");
      left -= piece.bytes;
    }
    require(left == 0, "a segment with a hole");
  }
  for (const PinnedPiece& p : state.pieces) {
    require(p.segment >= 0 && p.segment < segments && p.high_segment < segments,
            "a segment that is not there");
    require(p.box.count() > 0 && p.box.first >= 0, "an empty box");
    const std::int64_t whole = state.segments[static_cast<std::size_t>(p.segment)].bytes;
    require(p.offset >= 0 && p.offset <= whole && p.box.count() <= (whole - p.offset) / p.width(),
            "elements beyond their segment");
  }
  for (const KeptFile& file : state.files)
    require(file.name.find('/') == file.name.npos, "a path: " + file.name);
}

// Codes with their scales, split masters, boxes, two drives.
std::string all_kinds_pinned() {
  PinnedState s;
  s.files = {{"drive0", "ziggurat-0123456789abcdef.kept"}, {"drive1", "ziggurat-0123456789abcdee.kept"}};
  s.rates = {{1e9, 2e9, 1.5e9, 1e9}, {1e9, 2e9, 1.5e9, 1e9}};
  const auto segment = [&](const char* name, std::int64_t bytes) {
    s.segments.push_back({name, bytes, {}});
    s.segments.back().stored.version = 3;
    const std::int64_t first = bytes > 4096 ? 4096 : bytes;
    s.segments.back().stored.pieces = {{0, 0, first, 77}};
    if (bytes > first) s.segments.back().stored.pieces.push_back({1, 8192, bytes - first, 78});
  };
  segment("weights", 8192), segment("lower", 8192), segment("codes", 12288);
  s.pieces = {
      {"a", "F32", 1, 0, {0, 1, 1024, 0}, 0, 0, -1, 0},
      {"b", "BF16", 0, 2048, {64, 8, 16, 64}, -1, 0, -1, 0},
      {"c.exp_avg", "U8", 2, 0, {0, 1, 4096, 0}, -1, 0, 8192, 0},
      {"d", "F64", 1, 4096, {0, 1, 8, 0}, -1, 0, -1, 0},
  };
  return s.text();
}

TEST(Fuzz, PinnedState) {
  fuzz({.name = "rank.pins",
        .corpus = {{{"rank-00000.pins", test::read_file(kStored + "3/rank-00000.pins")}},
                   {{"rank-00000.pins", all_kinds_pinned()}}},
        .use = [](const Case& input, const std::string&) {
          const PinnedState state = parse_pinned(input.front().content, "rank-00000.pins");
          use_pinned(state);
          const std::string text = state.text();
          require(parse_pinned(text, "what was written").text() == text, "another one was written");
        }});
}

// --- whole directories ---------------------------------------------------------------------------

constexpr const char* kName = "0001-step-2";

std::string in(const std::string& name) {
  return std::string(kName) + "/" + name;
}

Case stored_checkpoint(const std::string& from) {
  Case files;
  for (const auto& entry : fs::directory_iterator(from))
    files.push_back({in(entry.path().filename()), test::read_file(entry.path())});
  std::sort(files.begin(), files.end(), [](const File& a, const File& b) { return a.name < b.name; });
  return files;
}

std::string header_of(const std::string& file) {
  std::uint64_t length = 0;
  if (file.size() >= 8) std::memcpy(&length, file.data(), 8);
  return file.size() < 8 || length > file.size() - 8 ? file : file.substr(0, 8 + length);
}

// Whether lists and objects are in each other so deep that a tree of it cannot be copied or written.
bool is_deep(const std::string& text) {
  int depth = 0, most = 0;
  for (const char c : text) {
    depth += (c == '[' || c == '{') - (c == ']' || c == '}');
    most = std::max(most, depth);
  }
  return most > 500;
}

// Sizes and hashes as the files have them, and then the manifest's own.
void seal_checkpoint(Case& input, Random&) {
  std::string& manifest = content_of(input, in("manifest.json"));
  Json json = is_deep(manifest) ? Json() : Json::parse(manifest, nullptr, false);
  bool changed = false;
  const auto set = [&](Json& of, const char* key, const Json& value) {
    if (of.contains(key) && of[key] == value) return;
    of[key] = value, changed = true;
  };
  const auto seal = [&](Json& of, const char* key) {
    if (!of.is_object() || !of.contains("name") || !of["name"].is_string()) return;
    const std::string name = of["name"];
    const auto file =
        std::find_if(input.begin(), input.end(), [&](const File& f) { return f.name == in(name); });
    if (file == input.end()) return;
    const bool whole = name.ends_with(".pins") || name.ends_with(".json");
    set(of, "bytes", file->content.size());
    set(of, key, io::hash_text(io::hash_of(whole ? file->content : header_of(file->content))));
  };
  if (json.is_object() && json.contains("files") && json["files"].is_array()) {
    for (Json& file : json["files"]) seal(file, "header_xxh3");
    if (json.contains("index")) seal(json["index"], "xxh3");
  }
  if (changed) {
    json.erase("xxh3");
    const std::string text = json.dump(2, ' ', false, Json::error_handler_t::replace);
    const std::string before = text.substr(0, text.size() - 2);
    manifest = before + tail_of(before);
  } else {
    manifest = sealed(manifest);
  }
}

void read_all(const Checkpoint& checkpoint) {
  const std::vector<CheckpointTensor> tensors = checkpoint.tensors();
  checkpoint.expect(tensors);
  for (const CheckpointTensor& t : tensors) {
    const std::int64_t n = std::min<std::int64_t>(t.count, 1 << 16);
    std::vector<char> values(static_cast<std::size_t>(8 * n));
    const CheckpointBox box{t.count - n, 1, n, 0};
    if (checkpoint.dtype_of(t.name) == "U8") {
      std::vector<float> scales(static_cast<std::size_t>(n));
      checkpoint.read_codes(t.name, box, reinterpret_cast<std::uint8_t*>(values.data()), scales.data());
    } else {
      checkpoint.read(t.name, box, values.data());
    }
  }
}

// As `checkpoint verify`, `show`, `export` and `train --resume` do.
void use_checkpoint(const std::string& dir) {
  const std::string path = dir + "/" + kName;
  (void)list_checkpoints(dir);
  for (const PinnedState& state : pins_in(path)) use_pinned(state);
  (void)kept_by(dir);
  const Checkpoint checkpoint(path);
  use_manifest(checkpoint.manifest());
  (void)checkpoint.drive_files();
  (void)checkpoint.pieces();
  checkpoint.verify();
  read_all(checkpoint);
  (void)compare_bits(checkpoint.manifest().bits, checkpoint.manifest().bits, {}, path);
  const Checkpoint copy(export_checkpoint(checkpoint, dir + "/copies"));
  copy.verify();
  read_all(copy);
  require(copy.manifest().step == checkpoint.manifest().step, "a copy of another step");
  discard_checkpoint(copy.path());
}

Parser directories(const std::string& name, std::vector<Case> corpus, std::vector<std::string> changed) {
  return {.name = name,
          .corpus = std::move(corpus),
          .use = [](const Case&, const std::string& dir) { use_checkpoint(dir); },
          .on_disk = true,
          .writes = true,
          .changed = std::move(changed),
          .seal = seal_checkpoint};
}

// The drive is the checkpoint's own directory, by a path that holds wherever the inputs lie.
Case pinned_checkpoint() {
  Case files = stored_checkpoint(kStored + "3");
  PinnedState pins = parse_pinned(content_of(files, in("rank-00000.pins")), "pins");
  pins.files[0].directory = kName;
  content_of(files, in("rank-00000.pins")) = pins.text();
  Random unused(0);
  seal_checkpoint(files, unused);
  return files;
}

TEST(Fuzz, CheckpointsOfTensors) {
  fuzz(directories("checkpoint", {stored_checkpoint(kStored + "1"), stored_checkpoint(kStored + "2")}, {}));
}

TEST(Fuzz, CheckpointsWithPins) {
  fuzz(directories("pinned_checkpoint", {pinned_checkpoint()},
                   {in("rank-00000.pins"), in("rank-00000.pins"), in("manifest.json")}));
}

TEST(Fuzz, IndexOfACopy) {
  const test::TempDir dir;
  for (const File& file : stored_checkpoint(kStored + "2")) test::write_file(dir / file.name, file.content);
  const Checkpoint from(dir / kName);
  const std::string copy = export_checkpoint(from, dir / "copies");
  const std::string number = fs::path(copy).filename();
  Case files;
  for (File& file : stored_checkpoint(copy)) files.push_back(std::move(file));
  fuzz({.name = "index.json",
        .corpus = {files},
        .use =
            [](const Case&, const std::string& directory) {
              const Checkpoint checkpoint(directory + "/" + kName);
              checkpoint.verify();
              read_all(checkpoint);
            },
        .on_disk = true,
        .changed = {in("index.json"), in("manifest.json")},
        .seal = seal_checkpoint});
}

}  // namespace
}  // namespace zg::fuzz
