// What others may have put into a checkpoint's files: it is taken, or refused by one error.
#include <algorithm>
#include <random>

#include "support/seed.hpp"
#include "train/checkpoint_fixture.hpp"
#include "ziggurat/checkpoint/pins.hpp"
#include "ziggurat/io/hash.hpp"
#include "ziggurat/train/observers.hpp"

namespace zg {
namespace {

class CheckpointInputs : public CheckpointFixture {};

// A random mutation of the given text: some changes, cut off, or with the end of another text.
std::string mutated(std::string text, const std::string& other, std::mt19937_64& random) {
  static const Strings kTokens{"null",
                               "-1",
                               "0",
                               "18446744073709551615",
                               "9223372036854775808",
                               "1e308",
                               "1e999",
                               "[",
                               "]",
                               "{",
                               "}",
                               "[[[[[[[[",
                               "\"",
                               ",",
                               ":",
                               "\\u0000",
                               "true",
                               "\"format\"",
                               "../",
                               "\xff",
                               " 4 2",
                               "[2]",
                               ".scale"};
  const auto at = [&] { return static_cast<std::size_t>(random() % (text.size() + 1)); };
  switch (random() % 8) {
    case 0:
      return text.substr(0, at());
    case 1:
      return text.substr(0, at()) + other.substr(random() % (other.size() + 1));
    default:
      break;
  }
  for (std::uint64_t i = 0, n = 1 + random() % 3; i < n; ++i) {
    const std::size_t from = at(), length = static_cast<std::size_t>(random() % 24);
    switch (random() % 5) {
      case 0:
        if (from < text.size()) text[from] = static_cast<char>(random());
        break;
      case 1:
        text.erase(from, length);
        break;
      case 2:
        text.insert(at(), text.substr(from, length));
        break;
      case 3:
        text.insert(from, kTokens[random() % kTokens.size()]);
        break;
      default:  // a number, where there is one
        if (const std::size_t digit = text.find_first_of("0123456789", from); digit != text.npos)
          text.replace(digit, 1, kTokens[random() % 7]);
    }
  }
  return text;
}

// ZG_TEST_INPUTS manifests with the right hash, but other contents: each is taken, or refused by one error.
TEST_F(CheckpointInputs, ManifestsByChanceAreTakenOrRefused) {
  const std::int64_t inputs = as_asked("ZG_TEST_INPUTS", 20'000);
  const std::uint64_t seed = test::test_seed(7);
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  std::mt19937_64 random(seed);
  std::string text = read(run("out", {}).newest + "/manifest.json");
  // Two inputs in three are short, since they are parsed the faster.
  CheckpointManifest brief = parse_manifest(text, "m");
  brief.config = "{}", brief.bits.resize(3);
  brief.scaler = LossScaler::State{};
  brief.validation = Validation{2, 4.5}, brief.index = CheckpointFile{"index.json", 5, 7};
  const std::string whole[] = {brief.text(), brief.text(), text};
  std::int64_t taken = 0;
  for (std::int64_t i = 0; i < inputs; ++i) {
    const std::string& base = whole[i % 3];
    const std::string before = mutated(base.substr(0, base.rfind(",\n  \"xxh3\"")), text, random);
    const std::string input =
        before + fmt::format(",\n  \"xxh3\": \"{}\"\n}}\n", io::hash_text(io::hash_of(before)));
    try {
      const CheckpointManifest m = parse_manifest(input, "m");
      EXPECT_EQ(parse_manifest(m.text(), "m").text(), m.text());
      ++taken;
    } catch (const Error& error) {
      if (error.code() != Errc::kUsage || error.where() != "m" || error.message().empty())
        ADD_FAILURE() << error.what();
    }
    if (HasFailure()) FAIL() << input;
  }
  std::printf("%lld manifests, %lld of them taken\n", static_cast<long long>(inputs),
              static_cast<long long>(taken));
  EXPECT_GT(taken, inputs / 50);
  EXPECT_LT(taken, inputs / 2);
}

// The same with the headers of a rank's file, a hundredth as many.
TEST_F(CheckpointInputs, HeadersByChanceAreTakenOrRefused) {
  const std::int64_t inputs = as_asked("ZG_TEST_INPUTS", 20'000) / 100;
  const std::uint64_t seed = test::test_seed(8);
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  std::mt19937_64 random(seed);
  const Checkpoint good(run("out", small(1) + Strings{"devices=host:2", "parallel.tensor=2", "model.n_head=2",
                                                      "optimizer.state=int8"})
                            .newest);
  const std::vector<CheckpointTensor> wanted = good.tensors();
  const std::string path = directory_ + "/copies/0001-step-1";
  std::filesystem::create_directories(directory_ + "/copies");
  std::filesystem::copy(good.path(), path);
  const std::string file = path + "/rank-00001.safetensors", content = read(file);
  std::uint64_t length = 0;
  std::memcpy(&length, content.data(), sizeof length);
  CheckpointManifest m = good.manifest();
  std::int64_t opened = 0;
  for (std::int64_t i = 0; i < inputs; ++i) {
    const std::string header = mutated(content.substr(sizeof length, length), content, random);
    const std::uint64_t now = header.size();
    std::string all(sizeof now, '\0');
    std::memcpy(all.data(), &now, sizeof now);
    all += header;
    m.files[1].header_hash = io::hash_of(all);
    all += content.substr(sizeof length + length);
    m.files[1].bytes = static_cast<std::int64_t>(all.size());
    test::write_file(file, all);
    test::write_file(path + "/manifest.json", m.text());
    try {
      const Checkpoint checkpoint(path);
      ++opened;
      checkpoint.expect(wanted);
      for (const CheckpointTensor& tensor : wanted) {
        std::vector<char> bytes(static_cast<std::size_t>(tensor.count) * 8);
        checkpoint.read(tensor.name, 0, tensor.count, bytes.data());
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Errc::kUsage) << error.what();
    }
    if (HasFailure()) FAIL() << header;
  }
  EXPECT_GT(opened, 0);
}

// Seven steps with state that lies on a drive, and what its checkpoint says of the places.
class PinnedInputs : public CheckpointInputs {
 protected:
  std::string pinned(const std::string& name, const Strings& settings) {
    std::filesystem::create_directories(directory_ + "/drive of " + name);
    return run(name, settings + Strings{"tiers.device=600KiB", "tiers.host=300KiB", "aio.backend=threads",
                                        "checkpoint.state=pin",
                                        "tiers.nvme.0.path=" + directory_ + "/drive of " + name})
        .newest;
  }
  static constexpr const char* kPins = "/rank-00000.pins";
};

// Texts that say where state lies: each is taken, and then says what it said, or refused by one error.
TEST_F(PinnedInputs, PlacesByChanceAreTakenOrRefused) {
  const std::int64_t inputs = as_asked("ZG_TEST_INPUTS", 20'000);
  const std::uint64_t seed = test::test_seed(9);
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  std::mt19937_64 random(seed);
  std::vector<std::string> whole;
  for (const Strings& format :
       {Strings{"optimizer.state=split", "bf16.enabled=true"}, Strings{"optimizer.state=int8"}}) {
    PinnedState pins = parse_pinned(read(pinned(format[0], format) + kPins), "p");
    // Short, since short texts are parsed the faster: the first segments, and what lies in these alone.
    pins.segments.resize(std::min<std::size_t>(pins.segments.size(), 3));
    std::erase_if(pins.pieces, [&](const PinnedPiece& p) { return std::max(p.segment, p.high_segment) > 2; });
    if (pins.pieces.size() > 6) pins.pieces.resize(6);
    EXPECT_FALSE(pins.pieces.empty());
    whole.push_back(pins.text());
  }
  std::int64_t taken = 0;
  for (std::int64_t i = 0; i < inputs; ++i) {
    const std::string input = mutated(whole[i % 2], whole[(i + 1) % 2], random);
    try {
      const PinnedState pins = parse_pinned(input, "p");
      EXPECT_EQ(parse_pinned(pins.text(), "p").text(), pins.text());
      for (const PinnedPiece& p : pins.pieces) {
        const auto& segment = pins.segments.at(static_cast<std::size_t>(p.segment));
        EXPECT_LE(p.offset + p.box.count() * p.width(), segment.bytes);
      }
      ++taken;
    } catch (const Error& error) {
      if (error.code() != Errc::kUsage || error.where() != "p" || error.message().empty())
        ADD_FAILURE() << error.what();
    }
    if (HasFailure()) FAIL() << input;
  }
  std::printf("%lld texts, %lld of them taken\n", static_cast<long long>(inputs),
              static_cast<long long>(taken));
  EXPECT_GT(taken, inputs / 50);
  EXPECT_LT(taken, inputs * 2 / 3);
}

// The same for files of a checkpoint whose manifest has their hashes, a hundredth as many. What is accepted
// names other places, and reading from them gives values or one error.
TEST_F(PinnedInputs, FilesByChanceAreReadOrRefused) {
  const std::int64_t inputs = as_asked("ZG_TEST_INPUTS", 20'000) / 100;
  const std::uint64_t seed = test::test_seed(10);
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  std::mt19937_64 random(seed);
  const std::string path = pinned("out", {"optimizer.state=int8"}), text = read(path + kPins);
  const Checkpoint good(path);
  const std::vector<CheckpointTensor> wanted = good.tensors();
  CheckpointManifest m = good.manifest();
  std::int64_t opened = 0;
  for (std::int64_t i = 0; i < inputs; ++i) {
    const std::string input = mutated(text, text, random);
    m.files[0].bytes = static_cast<std::int64_t>(input.size());
    m.files[0].header_hash = io::hash_of(input);
    test::write_file(path + kPins, input);
    test::write_file(path + "/manifest.json", m.text());
    try {
      const Checkpoint checkpoint(path);
      ++opened;
      checkpoint.expect(wanted);
      checkpoint.verify();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Errc::kUsage) << error.what();
    }
    if (HasFailure()) FAIL() << input;
  }
  EXPECT_GT(opened, 0);
}

// What a drive's file is kept for, as others may have written it: a run that starts there never removes a
// file that a checkpoint needs.
TEST_F(PinnedInputs, KeptFilesStayWhateverIsSaidOfThem) {
  const std::int64_t inputs = as_asked("ZG_TEST_INPUTS", 20'000) / 100;
  const std::uint64_t seed = test::test_seed(11);
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  std::mt19937_64 random(seed);
  const std::string path = pinned("out", {}), drive = directory_ + "/drive of out";
  const std::vector<std::string> files = Checkpoint(path).drive_files();
  ASSERT_EQ(files.size(), 1u);
  const std::string purpose = read(files[0] + "-for");
  std::filesystem::create_directories(directory_ + "/others");
  for (std::int64_t i = 0; i < inputs; ++i) {
    const std::string input = mutated(purpose, directory_ + "/others\n", random);
    test::write_file(files[0] + "-for", input);
    reclaim_kept(system_files(), drive);
    ASSERT_TRUE(std::filesystem::exists(files[0])) << input;
  }
  test::write_file(files[0] + "-for", purpose);
  Checkpoint(path).verify();
}

// The log of a run that goes on: what is left of it are whole records from the first step on.
TEST_F(CheckpointInputs, LogsByChanceAreCut) {
  const std::int64_t inputs = as_asked("ZG_TEST_INPUTS", 20'000) / 100;  // each is synced
  const std::uint64_t seed = test::test_seed(12);
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  std::mt19937_64 random(seed);
  std::string whole;
  for (int step = 1; step <= 4; ++step)
    whole += fmt::format("{{\"step\":{},\"loss\":5.5,\"val_loss\":5.25,\"bytes\":{{\"h2d\":3}}}}\n", step);
  const std::string path = directory_ + "/log.jsonl";
  std::int64_t all = 0;
  for (std::int64_t i = 0; i < inputs; ++i) {
    const std::string input = mutated(whole, whole, random);
    test::write_file(path, input);
    const std::int64_t records = cut_log(path, 3, true);
    const std::string left = read(path);
    ASSERT_EQ(records, std::count(left.begin(), left.end(), '\n')) << input;
    ASSERT_LE(records, 3);
    if (left != input.substr(0, left.size())) {
      ASSERT_EQ(left, input + "\n");  // whose last line had no end
    }
    all += records == 3 ? 1 : 0;
  }
  EXPECT_GT(all, inputs / 20);
  EXPECT_LT(all, inputs);
}

}  // namespace
}  // namespace zg
