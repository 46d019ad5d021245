#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <set>
#include <thread>

#include "data/data_support.hpp"
#include "data/token_cache.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/data/dataset.hpp"

namespace zg {
namespace {

using namespace zg::test;
using Kind = TokenizerConfig::Kind;
using Ids = std::vector<std::int32_t>;

Ids all_of(const TokenFile& file) {
  Ids ids(static_cast<std::size_t>(file.size()));
  file.read(0, file.size(), ids.data());
  return ids;
}

// --- token files ---------------------------------------------------------------------------------

TEST(TokenFile, ReadsBothWidthsAnywhere) {
  TempDir dir;
  const std::vector<std::uint16_t> narrow = {0, 1, 50256, 65535, 7};
  const TokenFile a(write_tokens(dir / "a.bin", narrow), DType::kU16);
  EXPECT_EQ(a.size(), 5);
  EXPECT_EQ(all_of(a), (Ids{0, 1, 50256, 65535, 7}));
  Ids part(2, -9);
  a.read(3, 2, part.data());
  EXPECT_EQ(part, (Ids{65535, 7}));
  a.read(5, 0, part.data());
  const TokenFile b(write_tokens(dir / "b.bin", std::vector<std::uint32_t>{3, 2147483647, 4}), DType::kI32);
  EXPECT_EQ(all_of(b), (Ids{3, 2147483647, 4}));
  EXPECT_DEATH(a.read(4, 2, part.data()), "tokens \\[4, 4 \\+ 2\\) of 5");
}

TEST(TokenFile, RefusesWhatIsNone) {
  TempDir dir;
  const auto error = [&](const std::string& path, DType dtype) {
    const std::string text = refusal([&] { TokenFile(path, dtype); });
    EXPECT_HAS(text, path);
    return text;
  };
  EXPECT_HAS(error(dir / "missing.bin", DType::kU16), "No such file");
  EXPECT_HAS(error(write_file(dir / "empty.bin", ""), DType::kU16), "empty");
  EXPECT_HAS(error(write_file(dir / "odd.bin", "abc"), DType::kU16), "3 bytes");
  EXPECT_HAS(error(write_file(dir / "half.bin", "abcdef"), DType::kI32), "uint32");
  EXPECT_HAS(error(dir.path(), DType::kU16), "this is a directory");
}

template <class T>
std::string with_header(const std::string& path, std::int32_t magic, std::int32_t version, std::int32_t count,
                        const std::vector<T>& tokens) {
  std::vector<std::int32_t> header(256);
  header[0] = magic, header[1] = version, header[2] = count;
  std::string content(reinterpret_cast<const char*>(header.data()), 1024);
  content.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(T));
  return write_file(path, content);
}

TEST(TokenFile, SkipsTheHeaderOfLlmc) {
  TempDir dir;
  const std::vector<std::uint16_t> narrow = {5, 6, 7};
  const std::vector<std::uint32_t> wide = {100000, 6};
  EXPECT_EQ(all_of(TokenFile(with_header(dir / "a.bin", 20240520, 1, 3, narrow), DType::kU16)),
            (Ids{5, 6, 7}));
  EXPECT_EQ(all_of(TokenFile(with_header(dir / "b.bin", 20240801, 7, 2, wide), DType::kI32)),
            (Ids{100000, 6}));
  EXPECT_EQ(TokenFile(with_header(dir / "c.bin", 12345, 1, 3, narrow), DType::kU16).size(), 512 + 3);
  const auto error = [](const std::string& path, DType dtype) {
    return refusal([&] { TokenFile(path, dtype); });
  };
  EXPECT_HAS(error(with_header(dir / "d.bin", 20240520, 2, 3, narrow), DType::kU16),
             "of version 2; 1 is read");
  EXPECT_HAS(error(with_header(dir / "e.bin", 20240520, 1, 4, narrow), DType::kU16),
             "of 4 tokens, and has 3");
  EXPECT_HAS(error(with_header(dir / "f.bin", 20240801, 7, 2, wide), DType::kU16), "\"uint32\"");
  EXPECT_HAS(error(with_header(dir / "g.bin", 20240520, 1, 0, std::vector<std::uint16_t>{}), DType::kU16),
             "0 bytes");
}

TEST(TokenFile, ReadingDoesNotGrowResidentMemory) {
  TempDir dir;
  const std::int64_t bytes = 64 * kMiB;
  write_file(dir / "big.bin", "ab");
  std::filesystem::resize_file(dir / "big.bin", bytes);
  const TokenFile file(dir / "big.bin", DType::kU16);
  Ids window(4096);
  const std::int64_t before = resident_bytes();
  for (std::int64_t at = 0; at + 4096 <= file.size(); at += 4096) file.read(at, 4096, window.data());
  EXPECT_LT(resident_bytes() - before, 8 * kMiB);
}

// --- data sets -----------------------------------------------------------------------------------

struct Dataset : ::testing::Test {
  TempDir dir_;
  std::string cache_ = dir_ / "cache/deep";

  DataSet make(const Settings& config, std::int64_t vocab_size = 0) { return {config, cache_, vocab_size}; }
  std::string error(const Settings& config, std::int64_t vocab_size = 0) {
    return refusal([&] { DataSet(config, cache_, vocab_size); });
  }
  Ids tokens(const char* file, DType dtype = DType::kU16) {
    return all_of(TokenFile(cache_ + "/" + file, dtype));
  }
};

std::string pattern(std::size_t n) {
  std::string text;
  for (std::size_t i = 0; i < n; ++i) text.push_back(static_cast<char>('A' + i * 7 % 53));
  return text;
}

TEST_F(Dataset, BatchesAreWindowsAtTheDocumentedOffsets) {
  const std::string text = pattern(1003);
  const DataSet data = make({.train = write_file(dir_ / "t.txt", text), .seq_len = 17});
  EXPECT_EQ(data.train_tokens(), 902);  // int(1003 * 0.9)
  EXPECT_EQ(data.validation_tokens(), 101);
  EXPECT_EQ(data.vocab_size(), 256);
  Batch batch;
  data.train_batch(5, 12, 3, 4, batch);
  ASSERT_EQ(batch.ids.size(), 4u * 17);
  ASSERT_EQ(batch.targets.size(), 4u * 17);
  EXPECT_EQ(batch.valid, 4 * 17);
  for (std::size_t i = 0; i < 4; ++i) {
    const std::size_t start = NamedRandom(5, "data.12").below(3 + i, 902 - 17);
    for (std::size_t t = 0; t < 17; ++t) {
      ASSERT_EQ(batch.ids[i * 17 + t], text[start + t]);
      ASSERT_EQ(batch.targets[i * 17 + t], text[start + t + 1]);
    }
  }
}

TEST_F(Dataset, ABatchDependsOnSeedStepAndSequenceAlone) {
  const DataSet data = make({.train = write_file(dir_ / "t.txt", pattern(100'000)), .seq_len = 8});
  Batch whole, part, other;
  data.train_batch(1, 7, 0, 6, whole);
  const auto* kept = whole.ids.data();
  Ids joined;
  for (const std::int64_t first : {0, 2, 4}) {
    data.train_batch(1, 7, first, 2, part);
    joined.insert(joined.end(), part.ids.begin(), part.ids.end());
  }
  EXPECT_EQ(joined, whole.ids);
  data.train_batch(1, 8, 0, 6, other);
  EXPECT_NE(other.ids, whole.ids);
  data.train_batch(2, 7, 0, 6, other);
  EXPECT_NE(other.ids, whole.ids);
  data.train_batch(1, 9'000'000'000'000, 0, 6, whole);
  EXPECT_EQ(whole.ids.data(), kept);  // nothing is allocated again
}

TEST_F(Dataset, StartsAreUniformOverAllThatFit) {
  std::vector<std::uint16_t> count_up(30);
  for (std::size_t i = 0; i < count_up.size(); ++i) count_up[i] = static_cast<std::uint16_t>(i);
  const DataSet data =
      make({.train = write_tokens(dir_ / "t.bin", count_up), .validation_share = 0, .seq_len = 9});
  EXPECT_EQ(data.train_tokens(), 30);
  EXPECT_EQ(data.validation_tokens(), 0);
  const std::uint64_t seed = test_seed(9);
  SCOPED_TRACE(seed);
  std::vector<int> hits(21);
  Batch batch;
  const int draws = 21 * 500;
  for (int step = 0; step < draws / 10; ++step) {
    data.train_batch(seed, step, 0, 10, batch);
    for (std::size_t i = 0; i < 10; ++i) {
      ASSERT_LE(batch.ids[i * 9], 20);
      ++hits[static_cast<std::size_t>(batch.ids[i * 9])];
      ASSERT_EQ(batch.targets[i * 9 + 8], batch.ids[i * 9] + 9);
    }
  }
  // Binomial with mean 500 and deviation about 22: six of them are passed once in 5e8.
  for (std::size_t s = 0; s < hits.size(); ++s) EXPECT_NEAR(hits[s], 500, 6 * 22) << "start " << s;
}

TEST_F(Dataset, ValidationWindowsFollowEachOtherAndStartAgain) {
  const std::string text = pattern(1000);
  const DataSet data = make({.train = write_file(dir_ / "t.txt", text), .seq_len = 33});
  ASSERT_EQ(data.validation_tokens(), 100);  // three windows: 0..33, 33..66, 66..99
  Batch batch;
  data.validation_batch(1, 4, batch);
  const std::size_t starts[] = {933, 966, 900, 933};
  for (std::size_t i = 0; i < 4; ++i) {
    for (std::size_t t = 0; t < 33; ++t) {
      ASSERT_EQ(batch.ids[i * 33 + t], text[starts[i] + t]);
      ASSERT_EQ(batch.targets[i * 33 + t], text[starts[i] + t + 1]);
    }
  }
}

TEST_F(Dataset, OneWindowIsEnoughAndOneTokenLessIsNot) {
  const std::string exact = write_file(dir_ / "exact.txt", pattern(65));
  const DataSet data = make({.train = exact, .validation_share = 0, .seq_len = 64});
  Batch batch;
  data.train_batch(1, 2, 3, 5, batch);
  for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(batch.ids[i * 64], 'A');
  EXPECT_HAS(error({.train = exact, .validation_share = 0, .seq_len = 65}), "65 training tokens");
  EXPECT_HAS(error({.train = exact, .validation_share = 0.5, .seq_len = 32}), "32 training tokens");
  EXPECT_HAS(error({.train = exact, .validation_share = 0.05, .seq_len = 8}), "4 validation tokens");
  EXPECT_HAS(error({.train = exact, .validation = write_file(dir_ / "v.txt", "ab"), .seq_len = 8}),
             dir_ / "v.txt: 2 validation tokens");
}

TEST_F(Dataset, RefusesImpossibleSettings) {
  const std::string text = write_file(dir_ / "t.txt", pattern(1000));
  const std::string bin = write_tokens(dir_ / "t.bin", std::vector<std::uint16_t>(1000, 1));
  EXPECT_HAS(error({}), "data.train");
  EXPECT_HAS(error({.train = dir_ / "none.txt"}), "No such file");
  EXPECT_HAS(error({.train = dir_.path()}), "this is a directory");
  EXPECT_HAS(error({.train = write_file(dir_ / "empty.txt", "")}), "empty");
  EXPECT_HAS(error({.train = text, .seq_len = 0}), "data.seq_len");
  EXPECT_HAS(error({.train = text, .validation_share = 1}), "a share of 1");
  EXPECT_HAS(error({.train = text, .validation_share = -0.1}), "a share of -0.1");
  EXPECT_HAS(error({.train = text, .validation = bin}), "is a token file, while");
  EXPECT_HAS(error({.train = bin, .validation = text}), "is a text, while");
}

TEST_F(Dataset, CharactersAreCutByCharactersAndBytesAtCharacters) {
  // Ten characters in 25 bytes; they start at 0 1 3 6 10 11 13 16 20 23.
  const std::string text = "aé日\U0001F600aé日\U0001F600日é";
  const std::string path = write_file(dir_ / "t.txt", text);
  Settings config{.train = path, .validation_share = 0.3, .tokenizer = chars(), .seq_len = 2};
  {
    const DataSet data = make(config);
    EXPECT_EQ(data.train_tokens(), 7);
    EXPECT_EQ(data.validation_tokens(), 3);
    EXPECT_EQ(data.vocab_size(), 4);
    EXPECT_EQ(tokens("validation.bin"), (Ids{3, 2, 1}));
  }
  config.tokenizer.kind = Kind::kBytes;
  config.seq_len = 1;
  // int(25 * (1 - share)) of these shares is 24, 23, 22, 21, 20, 19, 18, 17, 16, 15.
  const double shares[] = {0.03, 0.07, 0.11, 0.15, 0.19, 0.23, 0.27, 0.31, 0.35, 0.39};
  const std::int64_t cuts[] = {23, 23, 20, 20, 20, 16, 16, 16, 16, 13};
  for (std::size_t i = 0; i < std::size(shares); ++i) {
    config.validation_share = shares[i];
    EXPECT_EQ(make(config).train_tokens(), cuts[i]) << shares[i];
  }
}

TEST_F(Dataset, BytesThatAreNoTextAreCutAnywhere) {
  const DataSet data = make(
      {.train = write_file(dir_ / "t", std::string(100, '\x80')), .validation_share = 0.5, .seq_len = 4});
  EXPECT_EQ(data.train_tokens(), 50);
}

TEST_F(Dataset, UnknownCharactersOfTheValidationTextAreNamed) {
  const std::string text = error({.train = write_file(dir_ / "t.txt", "abcabcabc"),
                                  .validation = write_file(dir_ / "v.txt", "abcx"),
                                  .tokenizer = chars(),
                                  .seq_len = 2});
  EXPECT_HAS(text, dir_ / "v.txt");
  EXPECT_HAS(text, "U+0078 'x' at byte 3");
  EXPECT_FALSE(std::filesystem::exists(cache_ + "/tokens.json"));
  EXPECT_FALSE(std::filesystem::exists(cache_ + "/validation.bin.part"));
}

// Texts of several pieces give the tokens that they give in one.
TEST_F(Dataset, StreamingChangesNothing) {
  const std::uint64_t seed = test_seed(21);
  SCOPED_TRACE(seed);
  const std::string block = random_text(seed, 200'000);
  std::string text;
  while (text.size() <= kPieceBytes + kPieceBytes / 8) text += block;
  const std::string path = write_file(dir_ / "t.txt", text);
  const std::string vocabulary = english_vocabulary().save(dir_ / "vocabulary");
  for (const TokenizerConfig& tokenizer : {TokenizerConfig{}, chars(), gpt2(vocabulary)}) {
    const DataSet data = make({.train = path, .validation_share = 0, .tokenizer = tokenizer, .seq_len = 8});
    const bool wide = data.vocab_size() > 65536;
    EXPECT_EQ(tokens("train.bin", wide ? DType::kI32 : DType::kU16),
              make_tokenizer(tokenizer, text)->encode(text));
  }
}

TEST_F(Dataset, AStretchWithoutWhiteSpaceGrowsThePiece) {
  std::string text;
  while (text.size() <= kPieceBytes + 1000) text += "the+";
  text += " and";
  const std::string vocabulary = english_vocabulary().save(dir_ / "vocabulary");
  const TokenizerConfig tokenizer = gpt2(vocabulary);
  make({.train = write_file(dir_ / "t.txt", text),
        .validation_share = 0,
        .tokenizer = tokenizer,
        .seq_len = 8});
  EXPECT_EQ(tokens("train.bin"), make_tokenizer(tokenizer, "")->encode(text));
}

TEST_F(Dataset, InvalidUtf8IsNamedByItsPlaceInTheFile) {
  std::string text(kPieceBytes + 100, 'a');
  text[kPieceBytes + 50] = '\xff';
  const std::string path = write_file(dir_ / "t.txt", text);
  const std::string found = error({.train = path, .tokenizer = chars()});
  EXPECT_HAS(found, path);
  EXPECT_HAS(found, fmt::format("at byte {} (0xFF)", kPieceBytes + 50));
}

TEST_F(Dataset, VocabulariesBeyond65536AreKeptWide) {
  std::string text;
  for (char32_t c = 0x20; c < 0x20000; ++c) {
    if (c < 0xD800 || c >= 0xE000) utf8::append(c, text);
  }
  const Settings config{
      .train = write_file(dir_ / "t.txt", text), .validation_share = 0, .tokenizer = chars(), .seq_len = 4};
  EXPECT_GT(make(config).vocab_size(), 65536);
  const DataSet kept = make(config);
  EXPECT_EQ(tokens("train.bin", DType::kI32).back(), kept.vocab_size() - 1);
}

// --- the cache -----------------------------------------------------------------------------------

struct Cache : Dataset {
  Settings config_;
  Cache() { config_ = {.train = write_file(dir_ / "t.txt", pattern(5000)), .seq_len = 8}; }

  ino_t inode() const {
    struct stat st {};
    EXPECT_EQ(::stat((cache_ + "/train.bin").c_str(), &st), 0);
    return st.st_ino;
  }
  // Whether making the data set again makes the tokens again. A file kept open here cannot lend its inode to
  // the next.
  bool remade() {
    const std::ifstream held(cache_ + "/train.bin");
    const ino_t before = inode();
    make(config_);
    return inode() != before;
  }
};

TEST_F(Cache, IsTakenWhileNothingHasChanged) {
  for (const Kind kind : {Kind::kBytes, Kind::kChars, Kind::kGpt2}) {
    config_.tokenizer = {.kind = kind, .directory = ""};
    if (kind == Kind::kGpt2) config_.tokenizer.directory = english_vocabulary().save(dir_ / "vocabulary");
    const DataSet first = make(config_);
    EXPECT_FALSE(remade());
    const DataSet second = make(config_);
    EXPECT_EQ(second.train_tokens(), first.train_tokens());
    EXPECT_EQ(second.validation_tokens(), first.validation_tokens());
    EXPECT_EQ(second.vocab_size(), first.vocab_size());
    EXPECT_EQ(second.tokenizer()->encode("ABC"), first.tokenizer()->encode("ABC"));
    Batch a, b;
    first.train_batch(1, 2, 0, 3, a);
    second.train_batch(1, 2, 0, 3, b);
    EXPECT_EQ(a.ids, b.ids);
  }
}

TEST_F(Cache, IsMadeAnewWhenTheSourceChanges) {
  make(config_);
  write_file(config_.train, pattern(5001));
  EXPECT_TRUE(remade());
  EXPECT_FALSE(remade());
  const auto time = std::filesystem::last_write_time(config_.train);
  std::filesystem::last_write_time(config_.train, time + std::chrono::seconds(1));  // the size stays
  EXPECT_TRUE(remade());
  std::filesystem::copy_file(config_.train, dir_ / "other.txt");
  config_.train = dir_ / "other.txt";
  EXPECT_TRUE(remade());
  EXPECT_FALSE(remade());
}

TEST_F(Cache, IsMadeAnewWhenTheSettingsChange) {
  make(config_);
  config_.validation_share = 0.2;
  EXPECT_TRUE(remade());
  config_.validation = write_file(dir_ / "v.txt", pattern(100));
  EXPECT_TRUE(remade());
  config_.validation_share = 0.3;  // without effect now
  EXPECT_FALSE(remade());
  write_file(dir_ / "v.txt", pattern(101));
  EXPECT_TRUE(remade());
  config_.tokenizer.kind = Kind::kChars;
  EXPECT_TRUE(remade());
  EXPECT_FALSE(remade());
  config_.tokenizer = gpt2(english_vocabulary().save(dir_ / "vocabulary"));
  EXPECT_TRUE(remade());
  TinyVocabulary({std::pair<std::string, std::string>("A", "H")}).save(dir_ / "vocabulary");
  EXPECT_TRUE(remade());
}

TEST_F(Cache, IsMadeAnewWhenItIsDamaged) {
  config_.tokenizer.kind = Kind::kChars;
  const std::int64_t expected = make(config_).train_tokens();
  const std::vector<std::function<void()>> damages = {
      [&] { std::filesystem::remove(cache_ + "/tokens.json"); },
      [&] { write_file(cache_ + "/tokens.json", "{"); },
      [&] { write_file(cache_ + "/tokens.json", "[]"); },
      [&] {
        std::string stamp = read_file(cache_ + "/tokens.json");
        stamp.replace(stamp.find("train_tokens"), 12, "train_tokenz");
        write_file(cache_ + "/tokens.json", stamp);
      },
      [&] {
        std::string stamp = read_file(cache_ + "/tokens.json");
        const auto at = stamp.find("\"results\"");
        stamp.replace(at, 9, "\"nothing\"");
        write_file(cache_ + "/tokens.json", stamp);
      },
      [&] { std::filesystem::resize_file(cache_ + "/train.bin", 100); },
      [&] { std::filesystem::resize_file(cache_ + "/train.bin", 101); },
      [&] { std::filesystem::remove(cache_ + "/validation.bin"); },
      [&] { std::filesystem::remove(cache_ + "/" + kTokenizerFile); },
      [&] { write_file(cache_ + "/" + kTokenizerFile, "{}"); },
      [&] { make_tokenizer({}, "")->save(cache_); },
  };
  for (std::size_t i = 0; i < damages.size(); ++i) {
    SCOPED_TRACE(i);
    damages[i]();
    EXPECT_TRUE(remade());
    EXPECT_FALSE(remade());
    EXPECT_EQ(make(config_).train_tokens(), expected);
  }
}

TEST_F(Cache, ADirectoryThatCannotBeIsAnIoError) {
  write_file(dir_ / "file", "x");
  EXPECT_HAS(refusal([&] { DataSet(config_, dir_ / "file/cache", 0); }, Errc::kIo), dir_ / "file/cache");
}

TEST_F(Cache, TwoAtOnceAgree) {
  std::vector<std::int64_t> counts(3);
  std::vector<std::thread> threads;
  for (auto& c : counts) threads.emplace_back([this, &c] { c = make(config_).train_tokens(); });
  for (auto& t : threads) t.join();
  for (const auto c : counts) EXPECT_EQ(c, 4500);
}

// --- token files as data, and vocabularies -------------------------------------------------------

TEST_F(Dataset, TokenFilesAreSplitByTokens) {
  std::vector<std::uint32_t> tokens(101);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::uint32_t>(100'000 + i);
  Settings config{.train = write_tokens(dir_ / "t.bin", tokens), .token_dtype = DType::kI32, .seq_len = 4};
  const DataSet data = make(config, 200'000);
  EXPECT_EQ(data.train_tokens(), 90);
  EXPECT_EQ(data.validation_tokens(), 11);
  EXPECT_EQ(data.tokenizer(), nullptr);
  EXPECT_EQ(data.vocab_size(), 0);
  EXPECT_FALSE(std::filesystem::exists(cache_));
  Batch batch;
  data.validation_batch(0, 3, batch);
  EXPECT_EQ(batch.ids, (Ids{100090, 100091, 100092, 100093, 100094, 100095, 100096, 100097, 100090, 100091,
                            100092, 100093}));
  config.validation = write_tokens(dir_ / "v.bin", std::vector<std::uint32_t>{1, 2, 3, 4, 5});
  make(config).validation_batch(0, 1, batch);
  EXPECT_EQ(batch.targets, (Ids{2, 3, 4, 5}));
}

TEST_F(Dataset, ATokenFileHasTheTokenizerBesideIt) {
  const Settings config{.train = write_tokens(dir_ / "t.bin", std::vector<std::uint16_t>(100, 1)),
                        .seq_len = 4};
  make_tokenizer(chars(), "xyz")->save(dir_.path());
  const DataSet data = make(config);
  ASSERT_NE(data.tokenizer(), nullptr);
  EXPECT_EQ(data.vocab_size(), 3);
  EXPECT_EQ(data.tokenizer()->decode(Ids{1}), "y");
}

TEST_F(Dataset, TokensBeyondTheVocabularyNameFilePositionAndId) {
  std::vector<std::uint16_t> tokens(3'000'000, 9);
  tokens[2'500'000] = 10;
  const std::string path = write_tokens(dir_ / "t.bin", tokens);
  EXPECT_EQ(make({.train = path}, 11).train_tokens(), 2'700'000);
  const std::string found = error({.train = path}, 10);
  EXPECT_HAS(found, path);
  EXPECT_HAS(found, "token 10 at position 2500000 is beyond the model's vocabulary of 10");
  tokens[2'900'000] = 12;  // in the validation share
  write_tokens(path, tokens);
  EXPECT_HAS(error({.train = path}, 11), "token 12 at position 2900000");

  std::vector<std::uint32_t> wide(1000, 1);
  wide[77] = 3'000'000'000u;
  const Settings config{
      .train = write_tokens(dir_ / "w.bin", wide), .token_dtype = DType::kI32, .seq_len = 4};
  EXPECT_HAS(error(config, 50257), "token 3000000000 at position 77");
  EXPECT_HAS(error(config), "token 3000000000 at position 77");  // no vocabulary allows it
}

TEST_F(Dataset, ATextWhoseTokensDoNotFitTheModelIsAnError) {
  const Settings config{.train = write_file(dir_ / "t.txt", pattern(1000)), .seq_len = 8};
  EXPECT_EQ(make(config, 200).vocab_size(), 256);  // no byte of this text is above 'A' + 52
  EXPECT_HAS(error(config, 100), "the tokenizer's has 256");
}

TEST_F(Dataset, AFileThatChangesUnderUsIsNoticed) {
  const std::string path = write_tokens(dir_ / "t.bin", std::vector<std::uint16_t>(100, 1));
  const DataSet data = make({.train = path, .validation_share = 0, .seq_len = 4}, 50);
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    const std::string high(200, '\x7f');
    file.write(high.data(), 200);
  }
  Batch batch;
  EXPECT_HAS(refusal([&] { data.train_batch(1, 0, 0, 1, batch); }), "token 32639");
}

TEST_F(Dataset, TinyShakespeare) {
  if (shared_data().empty()) GTEST_SKIP() << "no ../shared/data beside the source";
  const std::string text = shared_data() + "/tinyshakespeare.txt";
  const DataSet words = make({.train = text, .tokenizer = gpt2(shared_data() + "/gpt2-tokenizer")}, 50257);
  EXPECT_EQ(words.train_tokens(), 301'966);
  EXPECT_EQ(words.validation_tokens(), 36'059);
  const DataSet letters = make({.train = text, .tokenizer = chars()});
  EXPECT_EQ(letters.train_tokens(), 1'003'854);
  EXPECT_EQ(letters.validation_tokens(), 111'540);
  EXPECT_EQ(letters.vocab_size(), 65);
}

}  // namespace
}  // namespace zg
