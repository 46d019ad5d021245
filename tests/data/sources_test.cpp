// Several files, and blends of sources.
#include "data/sources.hpp"

#include <map>

#include "data/data_support.hpp"
#include "ziggurat/data/dataset.hpp"

namespace zg {
namespace {

using namespace zg::test;
using Ids = std::vector<std::int32_t>;

struct SeveralFiles : ::testing::Test {
  TempDir dir_;
  std::string cache_ = dir_ / "cache";

  // `count` tokens, which count up from `first`.
  std::string tokens(const char* name, std::uint16_t first, std::size_t count) {
    std::vector<std::uint16_t> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<std::uint16_t>(first + i);
    return write_tokens(dir_ / name, values);
  }
  DataConfig blend(std::vector<DataSource> sources, std::int64_t seq_len, double share = 0) {
    DataConfig config = Settings{.validation_share = share, .seq_len = seq_len};
    config.blend = std::move(sources);
    return config;
  }
  DataSet open(const DataConfig& config) { return {config, cache_, 0}; }
  std::string error(const DataConfig& config) {
    return refusal([&] { open(config); });
  }
};

TEST_F(SeveralFiles, PatternsStandForTheFilesThatMatchInOrder) {
  for (const char* name : {"b.bin", "a.bin", "c.txt", "odd[1].bin"}) write_file(dir_ / name, "xx");
  EXPECT_EQ(files_of(dir_ / "*.bin"),
            (std::vector<std::string>{dir_ / "a.bin", dir_ / "b.bin", dir_ / "odd[1].bin"}));
  EXPECT_EQ(files_of(dir_ / "odd[1].bin"), (std::vector<std::string>{dir_ / "odd[1].bin"}));
  EXPECT_EQ(files_of(dir_ / "none.txt"), (std::vector<std::string>{dir_ / "none.txt"}));
  EXPECT_HAS(refusal([&] { files_of(dir_ / "*.jsonl"); }), "no file has such a name");
}

// All windows of all files are drawn alike, and none has tokens of two files.
TEST_F(SeveralFiles, WindowsAreUniformOverAllFiles) {
  tokens("a.bin", 0, 14), tokens("b.bin", 100, 24), tokens("c.bin", 200, 3);
  const DataSet data = open(Settings{.train = dir_ / "?.bin", .validation_share = 0, .seq_len = 4});
  EXPECT_EQ(data.train_tokens(), 41);
  std::map<std::int32_t, int> hits;
  Batch batch;
  const int draws = 30 * 400;
  for (int step = 0; step < draws / 10; ++step) {
    data.train_batch(test_seed(7), step, 0, 10, batch);
    for (std::size_t i = 0; i < 40; ++i) ASSERT_EQ(batch.targets[i], batch.ids[i] + 1);
    for (std::size_t i = 0; i < 40; i += 4) ++hits[batch.ids[i]];
  }
  ASSERT_EQ(hits.size(), 10u + 20u);
  // Binomial with mean 400 and deviation below 20: six of them are passed once in 5e8.
  for (const auto& [start, count] : hits) EXPECT_NEAR(count, 400, 6 * 20) << start;
}

// One file gives the same batches, however it is named.
TEST_F(SeveralFiles, OneSourceIsWhatItWas) {
  const std::string path = tokens("a.bin", 0, 300);
  const DataSet plain = open(Settings{.train = path, .validation_share = 0.2, .seq_len = 8});
  const DataSet blended = open(blend({{{path}, 3.5}}, 8, 0.2));
  Batch a, b;
  plain.train_batch(5, 6, 7, 8, a), blended.train_batch(5, 6, 7, 8, b);
  EXPECT_EQ(a.ids, b.ids);
  plain.validation_batch(3, 9, a), blended.validation_batch(3, 9, b);
  EXPECT_EQ(a.ids, b.ids);
}

TEST_F(SeveralFiles, BlendsAreDrawnByTheirWeights) {
  const std::string a = tokens("a.bin", 0, 5000), b = tokens("b.bin", 10'000, 50),
                    c = tokens("c.bin", 20'000, 9);
  const DataSet data = open(blend({{{a}, 1}, {{b}, 2}, {{c}, 5}}, 8));
  std::map<std::int32_t, int> hits;
  Batch batch, part;
  const int draws = 8000;
  for (int step = 0; step < draws / 16; ++step) {
    data.train_batch(test_seed(11), step, 0, 16, batch);
    for (std::size_t i = 0; i < 16 * 8; i += 8) ++hits[batch.ids[i] / 10'000];
    // Sequence i is what it is, whoever asks for it.
    data.train_batch(test_seed(11), step, 9, 3, part);
    ASSERT_TRUE(std::equal(part.ids.begin(), part.ids.end(), batch.ids.begin() + 9 * 8));
  }
  // Binomial deviations of at most 44; six of them are passed once in 5e8.
  EXPECT_NEAR(hits[0], draws / 8, 6 * 44);
  EXPECT_NEAR(hits[1], draws / 4, 6 * 44);
  EXPECT_NEAR(hits[2], draws * 5 / 8, 6 * 44);
}

// Each source has its share of the n validation sequences, but for a few, and its windows come in order.
TEST_F(SeveralFiles, ValidationIsSharedOutEvenly) {
  const std::string a = tokens("a.bin", 0, 4001), b = tokens("b.bin", 10'000, 4001);
  const DataSet data = open(blend({{{a}, 1}, {{b}, 3}}, 4, 0.5));
  std::map<std::int32_t, std::set<std::int32_t>> starts;
  Batch batch;
  data.validation_batch(0, 400, batch);
  for (std::size_t i = 0; i < 400 * 4; i += 4) starts[batch.ids[i] / 10'000].insert(batch.ids[i]);
  EXPECT_NEAR(static_cast<double>(starts[0].size()), 100, 3);
  EXPECT_EQ(starts[0].size() + starts[1].size(), 400u) << "no window twice";
}

// Texts and documents, each tokenised into a folder of its own, which a second run uses again.
TEST_F(SeveralFiles, TextsHaveACacheEach) {
  const std::string text = write_file(dir_ / "a.txt", std::string(40, 'a')),
                    lines =
                        write_file(dir_ / "b.jsonl", "{\"text\": \"bbbbbbbbbb\"}\n{\"text\": \"bbbbb\"}\n");
  const std::string validation = write_file(dir_ / "v.txt", std::string(20, 'v'));
  DataConfig config = blend({{{text, lines}, 1}}, 4);
  config.validation = validation;
  for (int twice = 0; twice < 2; ++twice) {
    const DataSet data = open(config);
    EXPECT_EQ(data.train_tokens(), 55);
    EXPECT_EQ(data.validation_tokens(), 20);
    EXPECT_EQ(data.vocab_size(), 256);
    Batch batch;
    data.validation_batch(0, 2, batch);
    EXPECT_EQ(batch.ids, Ids(8, 'v'));
    data.train_batch(1, 0, 0, 100, batch);
    EXPECT_TRUE(std::count(batch.ids.begin(), batch.ids.end(), 'a') > 0 &&
                std::count(batch.ids.begin(), batch.ids.end(), 'b') > 0);
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(cache_), {}), 3);
}

// What lies beside token files says what their tokens mean.
TEST_F(SeveralFiles, RefusesTokensOfTwoTokenizers) {
  for (const char* folder : {"a", "b", "c", "d"}) std::filesystem::create_directories(dir_ / folder);
  make_tokenizer({}, "")->save(dir_ / "a");
  make_tokenizer(chars(), "abc")->save(dir_ / "b");
  make_tokenizer({}, "")->save(dir_ / "c");
  const auto in = [&](const char* folder) { return tokens((folder + std::string("/t.bin")).c_str(), 0, 40); };
  EXPECT_EQ(open(blend({{{in("a"), in("c"), in("d")}, 1}}, 4)).vocab_size(), 256);
  EXPECT_HAS(error(blend({{{in("a")}, 1}, {{in("b")}, 1}}, 4)), dir_ / "b/t.bin: has the tokenizer");
  DataConfig validated = blend({{{in("d")}, 1}}, 4);
  validated.validation = in("b");
  EXPECT_HAS(error(validated), "while " + (dir_ / "d/t.bin") + " has none");
}

TEST_F(SeveralFiles, RefusesWhatDoesNotGoTogether) {
  const std::string text = write_file(dir_ / "a.txt", std::string(40, 'a')), bin = tokens("b.bin", 0, 40),
                    few = tokens("c.bin", 0, 3);
  const std::string mixed = error(blend({{{text}, 1}, {{bin}, 1}}, 4));
  EXPECT_HAS(mixed, "is a token file, while");
  EXPECT_HAS(mixed, "data.blend");
  DataConfig letters = blend({{{text, text}, 1}}, 4);
  letters.tokenizer = chars();
  EXPECT_HAS(error(letters), "vocabulary from one text, here are 2");
  EXPECT_HAS(error(blend({{{bin}, 1}, {{few}, 1}}, 4)), few + ": 3 training tokens found");
  EXPECT_HAS(error(blend({{{bin}, 1}, {{}, 1}}, 4)), "a source of 0 files");
  EXPECT_HAS(error(blend({{{dir_ / "none*.bin"}, 1}}, 4)), "no file has such a name");
}

}  // namespace
}  // namespace zg
