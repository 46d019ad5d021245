// Token files and caches that are damaged, cut, of the wrong width, or not what they seem.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <nlohmann/json.hpp>
#include <thread>

#include "data/data_support.hpp"
#include "data/text_tokenizer.hpp"
#include "data/token_writer.hpp"
#include "data/tokens.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/data/dataset.hpp"
#include "ziggurat/data/documents.hpp"

namespace zg {
namespace {

using namespace zg::test;
using Ids = std::vector<std::int32_t>;
using Json = nlohmann::json;

struct Damage : ::testing::Test {
  TempDir dir_;
  std::string cache_ = dir_ / "cache";
  DataConfig config_ = Settings{.validation_share = 0.2, .seq_len = 4};

  DataSet make(std::int64_t vocab_size = 0) { return {config_, cache_, vocab_size}; }
  std::string error() {
    return refusal([&] { make(); });
  }
  void flip(const std::string& path, std::streamoff at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const int byte = file.get();
    file.seekp(at);
    file.put(static_cast<char>(byte ^ 1));
    ASSERT_TRUE(file.flush().good());
  }
};

// --- cut files -----------------------------------------------------------------------------------

TEST_F(Damage, ATokenFileThatIsCutUnderARunIsAnError) {
  config_.train = write_tokens(dir_ / "t.bin", std::vector<std::uint16_t>(100'000, 1));
  config_.validation_share = 0;
  const DataSet data = make();
  std::filesystem::resize_file(config_.train, 6);
  Batch batch;
  const std::string found = refusal([&] { data.train_batch(1, 0, 0, 4, batch); }, Errc::kIo);
  EXPECT_HAS(found, config_.train);
  EXPECT_HAS(found, "another program has cut it");
}

// --- widths --------------------------------------------------------------------------------------

TEST_F(Damage, IdsOfAnotherWidthAreRefused) {
  const NamedRandom random(test_seed(41), "ids");
  const auto ids = [&]<class T>(T, std::uint64_t most) {
    std::vector<T> all(500);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<T>(random.below(i, most));
    return all;
  };
  const auto open = [&](const auto& tokens, DType dtype) {
    const std::string path = write_tokens(dir_ / "t.bin", tokens);
    return open_raw_tokens(path, dtype).file->size();
  };
  const auto refused = [&](const auto& tokens, DType dtype) {
    const std::string found = refusal([&] { (void)open(tokens, dtype); });
    EXPECT_HAS(found, dir_ / "t.bin");
    return found;
  };
  for (const std::uint64_t vocabulary : {65ull, 50257ull, 65536ull, 151'936ull, 262'144ull}) {
    SCOPED_TRACE(vocabulary);
    EXPECT_HAS(refused(ids(std::uint32_t{}, vocabulary), DType::kU16), "set data.token_dtype to \"uint32\"");
    EXPECT_HAS(refused(ids(std::int64_t{}, vocabulary), DType::kU16), "have 64 bits, and are read as 16");
    EXPECT_HAS(refused(ids(std::int64_t{}, vocabulary), DType::kI32), "have 64 bits, and are read as 32");
    EXPECT_EQ(open(ids(std::uint32_t{}, vocabulary), DType::kI32), 500);
    if (vocabulary > 65536) continue;
    EXPECT_EQ(open(ids(std::uint16_t{}, vocabulary), DType::kU16), 500);
  }
  // Few and small ids are no sign.
  EXPECT_EQ(open(ids(std::uint16_t{}, 2), DType::kU16), 500);
  EXPECT_EQ(open(ids(std::uint16_t{}, 4), DType::kU16), 500);
  EXPECT_EQ(open(std::vector<std::uint16_t>(500, 0), DType::kU16), 500);
  EXPECT_EQ(open(std::vector<std::uint16_t>(500, 7), DType::kU16), 500);
  EXPECT_EQ(open(std::vector<std::uint32_t>{1, 2, 3}, DType::kU16), 6);
  // Who has no setting takes the width that the file shows.
  const std::string path = write_tokens(dir_ / "t.bin", ids(std::uint32_t{}, 5000));
  EXPECT_EQ(open_raw_tokens(path, {}).file->size(), 500);
}

TEST_F(Damage, MegatronsMinusOneIsNamed) {
  config_.train = write_tokens(dir_ / "t.bin", Ids{5, 6, -1, 7, 8, 9, 10, 11, 12, 13});
  config_.token_dtype = DType::kI32, config_.validation_share = 0;
  EXPECT_HAS(error(), "token 4294967295 at position 2 (-1 as a signed number)");
}

// --- the vocabulary ------------------------------------------------------------------------------

TEST_F(Damage, TheTokenizersSizeIsTheLimitWhereTheModelSaysNone) {
  config_.train =
      write_tokens(dir_ / "t.bin", std::vector<std::uint16_t>{1, 2, 3, 0, 1, 2, 3, 200, 1, 1, 1, 1});
  make_tokenizer(chars(), "abcd")->save(dir_.path());
  config_.validation_share = 0;
  EXPECT_HAS(error(), "token 200 at position 7 is beyond the tokenizer's vocabulary of 4");
  EXPECT_EQ(make(256).train_tokens(), 12);
}

TEST_F(Damage, ACacheThatIsChangedUnderARunIsNoticed) {
  config_.train = write_file(dir_ / "t.txt", std::string(1000, 'a') + std::string(1000, 'b'));
  config_.tokenizer = chars();
  const DataSet data = make();
  {
    std::fstream file(cache_ + "/train.bin", std::ios::in | std::ios::out | std::ios::binary);
    file << std::string(3200, '\x7f');
  }
  Batch batch;
  const std::string found = refusal([&] { data.train_batch(1, 0, 0, 1, batch); });
  EXPECT_HAS(found, "token 32639");
  EXPECT_HAS(found, "the next start makes it anew");
}

// --- checksums of a cache ------------------------------------------------------------------------

struct CacheDamage : Damage {
  CacheDamage() {
    std::string lines;
    for (int i = 0; i < 200; ++i)
      lines += fmt::format("{{\"tokens\": [{0}, 2, 3, 4], \"loss_mask\": [1, {1}, 1, 1]}}\n", i, i % 2);
    config_.train = write_file(dir_ / "t.jsonl", lines);
    config_.validation = write_file(dir_ / "v.jsonl", lines);
  }
  // Whether making the data set makes the tokens again: a file kept open here cannot lend its inode.
  bool remade() {
    const std::ifstream held(cache_ + "/train.bin");
    struct stat before {
    }, after{};
    EXPECT_EQ(::stat((cache_ + "/train.bin").c_str(), &before), 0);
    make();
    EXPECT_EQ(::stat((cache_ + "/train.bin").c_str(), &after), 0);
    return before.st_ino != after.st_ino;
  }
  void change_stamp(const std::function<void(Json&)>& change) {
    Json stamp = Json::parse(read_file(cache_ + "/tokens.json"));
    change(stamp);
    write_file(cache_ + "/tokens.json", stamp.dump());
  }
};

TEST_F(CacheDamage, OneFlippedBitOfAnyFileMakesTheTokensAnew) {
  make();
  EXPECT_FALSE(remade());
  const std::string good = read_file(cache_ + "/train.bin");
  for (const char* file :
       {"train.bin", "validation.bin", "train.mask", "validation.mask", "train.docs", "validation.docs"}) {
    SCOPED_TRACE(file);
    flip(cache_ + "/" + file, 17);
    EXPECT_TRUE(remade());
    EXPECT_FALSE(remade());
    EXPECT_TRUE(read_file(cache_ + "/train.bin") == good);
  }
  std::filesystem::remove(cache_ + "/train.mask");
  EXPECT_TRUE(remade());
}

TEST_F(CacheDamage, AStampOfOddNumbersOrOfAnOlderVersionIsMadeAnew) {
  make();
  const std::vector<std::function<void(Json&)>> changes = {
      [](Json& s) { s["results"]["train_tokens"] = -4; },
      [](Json& s) { s["results"]["train_tokens"] = 1e300; },
      [](Json& s) { s["results"]["train_tokens"] = 18446744073709551615ull; },
      [](Json& s) { s["results"]["validation_tokens"] = "80"; },
      [](Json& s) {
        s["results"] = Json::array({1, 2});
      },
      [](Json& s) { s["results"] = 5; },
      [](Json& s) { s["xxh3"] = 5; },
      [](Json& s) { s["xxh3"]["train.bin"] = 5; },
      [](Json& s) { s.erase("xxh3"); },
      [](Json& s) { s["sources"]["version"] = 1; },
      [](Json& s) { s["sources"] = nullptr; },
      [](Json& s) { s = Json::array(); }};
  for (std::size_t i = 0; i < changes.size(); ++i) {
    SCOPED_TRACE(i);
    change_stamp(changes[i]);
    EXPECT_TRUE(remade());
    EXPECT_FALSE(remade());
  }
  write_file(cache_ + "/tokens.json", std::string(100'000, '['));
  EXPECT_TRUE(remade());
  write_file(cache_ + "/tokens.json", std::string("{\"sources\": \0}", 14));
  EXPECT_TRUE(remade());
}

// Bytes of a cache's files changed at random: it is used or made anew, and its tokens are right.
TEST_F(CacheDamage, AFuzzedCacheGivesTheRightTokens) {
  make();
  Batch expected, found;
  make().train_batch(1, 0, 0, 50, expected);
  const std::uint64_t rounds = inputs_asked(40), begin = test_seed(80000);
  for (std::uint64_t seed = begin; seed < begin + rounds; ++seed) {
    SCOPED_TRACE(seed);
    const NamedRandom random(seed, "cache");
    static const std::vector<std::string> names = {
        "train.bin",       "validation.bin",          "train.mask", "tokens.json",
        "validation.docs", "tokenizer.ziggurat.json", "tokens.json"};
    const std::string path = cache_ + "/" + names[random.below(0, names.size())];
    std::string content = read_file(path);
    ASSERT_FALSE(content.empty());
    const std::size_t at = random.below(1, content.size());
    content[at] = static_cast<char>(random.below(2, 256));
    if (random.below(3, 4) == 0) content.resize(at);
    write_file(path, content);
    make().train_batch(1, 0, 0, 50, found);
    EXPECT_EQ(found.ids, expected.ids);
    EXPECT_EQ(found.targets, expected.targets);
  }
}

// --- progress ------------------------------------------------------------------------------------

TEST_F(CacheDamage, ProgressThatIsNoneIsMadeAnew) {
  make();
  const Json sources = Json::parse(read_file(cache_ + "/tokens.json"))["sources"];
  const std::string good = read_file(cache_ + "/train.bin");
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  const std::vector<Json> progress = {Json{-1, 0, 0, 0, 0, false},
                                      Json{0, 0, -5, 0, 0, false},
                                      Json{0, 0, most, 0, 0, false},
                                      Json{most, 0, 4, 0, 1, false},
                                      Json{0, most, 4, 0, 1, false},
                                      Json{40, 1, 4, 5, 1, false},
                                      Json{40, 1, 4, 0, most, false},
                                      Json{40, 1, 4, 0, 1},
                                      Json{40, 1, 4, 0, 1, 0},
                                      Json{40, 1, 4.5, 0, 1, false},
                                      Json{"a", 1, 4, 0, 1, false},
                                      Json{40, 1, 4, 0, 1, true},
                                      Json{40, 1, 1 << 20, 0, 1, false},
                                      Json(5),
                                      Json::object(),
                                      Json{0, 0, 18446744073709551615ull, 0, 0, false}};
  for (std::size_t i = 0; i < progress.size(); ++i) {
    SCOPED_TRACE(progress[i].dump());
    std::filesystem::remove(cache_ + "/tokens.json");
    for (const char* part : {"train.bin.part", "train.mask.part", "train.docs.part"})
      write_file(cache_ + "/" + part, std::string(64, 'x'));
    write_file(cache_ + "/progress.json",
               Json{{"sources", sources}, {"files", {{"train.bin", progress[i]}}}}.dump());
    make();
    EXPECT_TRUE(read_file(cache_ + "/train.bin") == good);
  }
  for (const char* text : {"[]", "5", "{", "null", "{\"sources\": 5}", "{\"files\": 5}"}) {
    SCOPED_TRACE(text);
    std::filesystem::remove(cache_ + "/tokens.json");
    write_file(cache_ + "/progress.json", text);
    make();
    EXPECT_TRUE(read_file(cache_ + "/train.bin") == good);
  }
}

// --- links, and locks ----------------------------------------------------------------------------

TEST_F(CacheDamage, PartsThatAreLinksAreNotWrittenThrough) {
  std::filesystem::create_directories(cache_);
  const std::string victim = write_file(dir_ / "victim", "precious");
  std::filesystem::create_symlink(victim, cache_ + "/train.bin.part");
  std::filesystem::create_hard_link(victim, cache_ + "/train.docs.part");
  ASSERT_EQ(::mkfifo((cache_ + "/train.mask.part").c_str(), 0600), 0);
  ::alarm(20);
  make();
  ::alarm(0);
  EXPECT_EQ(read_file(victim), "precious");
  EXPECT_FALSE(std::filesystem::is_symlink(cache_ + "/train.bin"));
  // What a noted progress speaks of may have become a link meanwhile.
  std::filesystem::create_symlink(victim, dir_ / "part.part");
  EXPECT_HAS(refusal([&] { PartWriter(dir_ / "part", 4); }, Errc::kIo), "part.part");
  std::filesystem::remove(dir_ / "part.part");
  std::filesystem::create_hard_link(victim, dir_ / "part.part");
  EXPECT_HAS(refusal([&] { PartWriter(dir_ / "part", 4); }, Errc::kIo), "part.part");
  EXPECT_EQ(read_file(victim), "precious");
  // The lock's file neither.
  std::filesystem::remove(cache_ + "/tokens.lock");
  std::filesystem::create_symlink(dir_ / "made", cache_ + "/tokens.lock");
  EXPECT_HAS(refusal([&] { make(); }, Errc::kIo), "tokens.lock");
  EXPECT_FALSE(std::filesystem::exists(dir_ / "made"));
}

void waiting_run(const DataConfig& config, const std::string& cache) {
  ::alarm(20);  // for a wait that does not end
  install_interrupt_handler();
  std::thread([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    ::kill(::getpid(), SIGTERM);
  }).detach();
  try {
    DataSet(config, cache, 0);
  } catch (const Error& e) {
    std::fputs(e.what(), stderr);
    std::_Exit(e.exit_code());
  }
  std::_Exit(0);
}

TEST_F(CacheDamage, ASignalEndsTheWaitForTheLock) {
  std::filesystem::create_directories(cache_);
  const Descriptor lock(::open((cache_ + "/tokens.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  ASSERT_EQ(::flock(lock.get(), LOCK_EX), 0);
  EXPECT_EXIT(waiting_run(config_, cache_), ::testing::ExitedWithCode(130), "waiting for its lock");
}

// --- what lies beside tokens ---------------------------------------------------------------------

TEST_F(Damage, DescriptionsAreReadAsFarAsNeeded) {
  config_.train = write_tokens(dir_ / "t.bin", std::vector<std::uint16_t>(1000, 1));
  // Another program's file of any size may have the name.
  write_file(dir_ / "t.json", "[");
  std::filesystem::resize_file(dir_ / "t.json", std::uintmax_t{1} << 33);
  EXPECT_EQ(make().train_tokens(), 800);
  const auto with = [&](const char* mask, const char* tokens) {
    write_file(dir_ / "t.json",
               fmt::format(R"({{"format": "ziggurat tokens", "version": 1, "dtype": "uint16", )"
                           R"("tokens": {}, "mask": {}}})",
                           tokens, mask));
    return error();
  };
  EXPECT_HAS(with("1", "1000"), "mask 1 found, true or false expected");
  EXPECT_HAS(with("false", "18446744073709551615"), "tokens 18446744073709551615 found");
  EXPECT_HAS(with("false", "1e3"), "tokens 1000.0 found");
  std::filesystem::remove(dir_ / "t.json");
  std::filesystem::create_symlink("t.json", dir_ / "t.json");  // to itself
  EXPECT_HAS(error(), "t.json");
  std::filesystem::remove(dir_ / "t.json");
  write_file(dir_ / "t.idx", "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n");
  EXPECT_HAS(error(), "git lfs pull");
}

// --- documents of token files --------------------------------------------------------------------

TEST_F(Damage, TokenFilesHaveDocumentsToo) {
  const auto bytes = make_tokenizer({}, "");
  const auto visited = [&](const std::string& path) {
    std::vector<Ids> all;
    std::vector<std::size_t> masked;
    for_each_document(path, *bytes, [&](std::int64_t number, const Document& document) {
      EXPECT_EQ(number, static_cast<std::int64_t>(all.size()) + 1);
      all.push_back(document.ids);
      masked.push_back(document.mask.size());
      return true;
    });
    return std::pair(all, masked);
  };
  const std::string path = write_tokens(dir_ / "t.bin", std::vector<std::uint16_t>{1, 2, 3, 4, 5});
  EXPECT_EQ(visited(path).first, (std::vector<Ids>{{1, 2, 3, 4, 5}}));
  write_tokens(dir_ / "t.docs", std::vector<std::int64_t>{0, 2, 2, 5});
  EXPECT_EQ(visited(path).first, (std::vector<Ids>{{1, 2}, {}, {3, 4, 5}}));
  write_tokens(dir_ / "t.mask", std::vector<std::uint8_t>{1, 0, 1, 1, 0});
  write_file(dir_ / "t.json",
             R"({"format": "ziggurat tokens", "version": 1, "dtype": "uint16", "tokens": 5, "mask": true})");
  EXPECT_EQ(visited(path).second, (std::vector<std::size_t>{2, 0, 3}));
  const std::string wide = write_tokens(dir_ / "w.bin", std::vector<std::uint16_t>{1, 2, 300});
  EXPECT_HAS(refusal([&] { visited(wide); }),
             "token 300 at position 2 is beyond the tokenizer's vocabulary of 256");
}

}  // namespace
}  // namespace zg
