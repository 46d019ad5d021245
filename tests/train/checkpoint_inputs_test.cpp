// What others may have put into a checkpoint's files: it is taken, or refused by one error.
#include <random>

#include "support/seed.hpp"
#include "train/checkpoint_fixture.hpp"
#include "train/checkpoint_writer.hpp"
#include "ziggurat/io/hash.hpp"

namespace zg {
namespace {

class CheckpointInputs : public CheckpointFixture {};

// A text that differs from the given one by chance.
std::string mutated(std::string text, std::mt19937_64& random) {
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
  const std::string whole[] = {brief.text(), brief.text(), text};
  std::int64_t taken = 0;
  for (std::int64_t i = 0; i < inputs; ++i) {
    const std::string& base = whole[i % 3];
    const std::string before = mutated(base.substr(0, base.rfind(",\n  \"xxh3\"")), random);
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
    const std::string header = mutated(content.substr(sizeof length, length), random);
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

}  // namespace
}  // namespace zg
