// Documents (.jsonl), loss masks, and token files that say what is in them: Megatron's and those of
// tools/prepare.py.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "data/data_support.hpp"
#include "data/token_cache.hpp"
#include "data/token_description.hpp"
#include "support/places.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/data/dataset.hpp"

namespace zg {
namespace {

using namespace zg::test;
using Ids = std::vector<std::int32_t>;

constexpr std::int32_t kOut = MaskFile::kIgnored;
const std::string kTokenizers = test::in_source("tests/reference/tokenizers/");

Ids joined(const std::vector<Ids>& parts) {
  Ids all;
  for (const Ids& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Ids bytes_of(const std::string& text) {
  return Ids(text.begin(), text.end());
}

struct Documents : ::testing::Test {
  TempDir dir_;
  std::string cache_ = dir_ / "cache";
  DataConfig config_ = Settings{.validation_share = 0, .seq_len = 4};

  std::string lines(const std::string& content) { return write_file(dir_ / "t.jsonl", content); }
  DataSet make(std::int64_t vocab_size = 0) { return {config_, cache_, vocab_size}; }
  std::string error(Errc code = Errc::kUsage) {
    return refusal([&] { DataSet(config_, cache_, 0); }, code);
  }
  Ids tokens(const char* file = "train.bin") {
    const TokenFile opened(cache_ + "/" + file, DType::kU16);
    Ids ids(static_cast<std::size_t>(opened.size()));
    opened.read(0, opened.size(), ids.data());
    return ids;
  }
};

TEST_F(Documents, LinesOfTextAndTokensFollowEachOther) {
  config_.train = lines(
      "{\"text\": \"ab\\u00e9\"}\n\n  \r\n{\"tokens\": [1, 2, 3]}\n{\"input_ids\": [], \"id\": 7}\n"
      "{\"text\": \"\"}\n{\"input_ids\": [255]}");
  EXPECT_EQ(make().train_tokens(), 8);
  EXPECT_EQ(tokens(), (Ids{'a', 'b', 0xC3, 0xA9, 1, 2, 3, 255}));
  EXPECT_FALSE(std::filesystem::exists(cache_ + "/train.mask"));
}

TEST_F(Documents, HaveTheTemplateAroundThemAndTheEndToken) {
  config_.train = lines("{\"text\": \"The dog\"}\n{\"text\": \"x\"}\n");
  config_.tokenizer = {.kind = TokenizerConfig::Kind::kFile, .directory = kTokenizers + "llama3.json"};
  config_.document_end = "<|b|>";
  config_.seq_len = 2;
  const DataSet data = make();
  const auto t = make_file_tokenizer(kTokenizers + "llama3.json");
  const std::int32_t begin = t->id_of_token("<|a|>"), end = t->id_of_token("<|b|>");
  EXPECT_EQ(tokens(), joined({{begin}, t->encode("The dog"), {end, begin}, t->encode("x"), {end}}));
  config_.document_end = "<|none|>";
  EXPECT_HAS(error(), "data.document_end");
}

TEST_F(Documents, WhatTheMaskLeavesOutIsNoTarget) {
  config_.train = lines(
      "{\"input_ids\": [1, 2, 3], \"labels\": [1, -100, 3]}\n{\"text\": \"ab\"}\n"
      "{\"tokens\": [4, 5, 6], \"loss_mask\": [1, 1, 0]}\n");
  config_.seq_len = 7;
  const DataSet data = make();
  Batch batch;
  data.train_batch(1, 0, 0, 1, batch);
  EXPECT_EQ(batch.ids, (Ids{1, 2, 3, 'a', 'b', 4, 5}));
  // The first tokens of documents with masks are no targets either: 4 would be predicted from another
  // document.
  EXPECT_EQ(batch.targets, (Ids{kOut, 3, 'a', 'b', kOut, 5, kOut}));
  EXPECT_EQ(batch.valid, 4);
  const DataSet kept = make();
  kept.train_batch(1, 0, 0, 2, batch);
  EXPECT_EQ(batch.valid, 8);
  // Without any masked line the mask of the earlier tokens must not stay.
  lines("{\"text\": \"abcdefghij\"}\n");
  make().train_batch(1, 0, 0, 1, batch);
  EXPECT_EQ(batch.valid, 7);
}

TEST_F(Documents, AShareIsCutOffByTokensWithItsMask) {
  std::string content;
  for (int i = 0; i < 10; ++i)
    content += fmt::format("{{\"tokens\": [{0}, {0}], \"loss_mask\": [1, {1}]}}\n", i, i % 2);
  config_.train = lines(content);
  config_.validation_share = 0.3;
  const DataSet data = make();
  EXPECT_EQ(data.train_tokens(), 14);
  EXPECT_EQ(data.validation_tokens(), 6);
  Batch batch;
  data.validation_batch(0, 1, batch);
  EXPECT_EQ(batch.ids, (Ids{7, 7, 8, 8}));
  EXPECT_EQ(batch.targets, (Ids{7, kOut, kOut, kOut}));
  config_.validation = write_file(dir_ / "v.jsonl", "{\"text\": \"abcde\"}");
  make().validation_batch(0, 1, batch);
  EXPECT_EQ(batch.targets, bytes_of("bcde"));
}

TEST_F(Documents, WrongLinesAreNamedByFileAndLine) {
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"{\"text\": \"a", "is no JSON"},
      {"[1]", "is array, no JSON object"},
      {"{\"content\": \"a\"}", "has no \"text\""},
      {"{\"text\": \"a\", \"tokens\": [1]}", "more than one"},
      {"{\"text\": 5}", "\"text\" is number, no text"},
      {"{\"text\": \"a\", \"labels\": [-100]}", "has \"labels\" beside \"text\""},
      {"{\"tokens\": 5}", "\"tokens\" is no list"},
      {"{\"tokens\": [1, \"a\"]}", "\"tokens\" has string at place 1"},
      {"{\"tokens\": [1, 1.5]}", "\"tokens\" has 1.5 at place 1"},
      {"{\"tokens\": [256]}", "has the token 256; the tokenizer has 0 to 255"},
      {"{\"tokens\": [-1]}", "has the token -1"},
      {"{\"tokens\": [1, 2], \"labels\": [1]}", "\"labels\" has 1 numbers for 2 tokens"},
      {"{\"tokens\": [1, 2], \"labels\": [1, 5]}",
       "\"labels\" has 5 at place 1; -100 or the token itself, 2"},
      {"{\"tokens\": [1], \"loss_mask\": [2]}", "0 or 1 is expected"},
      {"{\"tokens\": [1], \"loss_mask\": [1], \"labels\": [1]}", "both"},
      {"{\"text\": \"a\xff\"}", "is no JSON"}};
  for (const auto& [line, reason] : wrong) {
    config_.train = lines("{\"text\": \"good\"}\n\n" + line + "\n{\"text\": \"more\"}\nno JSON either\n");
    const std::string found = error();
    EXPECT_HAS(found, dir_ / "t.jsonl:3: ");
    EXPECT_HAS(found, reason);
    EXPECT_FALSE(std::filesystem::exists(cache_ + "/train.bin"));
  }
  config_.tokenizer = chars();
  EXPECT_HAS(error(), "\"chars\" takes its vocabulary from a text");
}

// Lines changed at random: tokens, or one error that names the line.
TEST_F(Documents, AFuzzedLineGivesTokensOrAnError) {
  const std::uint64_t rounds = inputs_asked(100);
  const std::string good =
      "{\"text\": \"ab \\u00e9\"}\n{\"tokens\": [1, 2, 3, 4, 5], \"labels\": [1, -100, 3, 4, 5]}\n";
  static const std::string kInserted =
      "{}[]\",:\\0-1e9n\n\xff\x80"
      "99999999999999999999\"text\"";
  const std::uint64_t first = test_seed(50000);
  std::uint64_t errors = 0;
  for (std::uint64_t seed = first; seed < first + rounds; ++seed) {
    SCOPED_TRACE(seed);
    const NamedRandom random(seed, "fuzz");
    std::string text = good;
    const std::size_t at = random.below(0, text.size());
    if (random.below(1, 2) == 0) text.erase(at, 1 + random.below(2, 6));
    text.insert(std::min(at, text.size()),
                kInserted.substr(random.below(3, kInserted.size()), random.below(4, 5)));
    config_.train = lines(text);
    config_.seq_len = 1;
    try {
      Batch batch;
      make().train_batch(1, 0, 0, 2, batch);
    } catch (const Error& e) {
      ++errors;
      EXPECT_EQ(e.exit_code(), 2);
      EXPECT_HAS(std::string(e.what()), "t.jsonl:");
    }
  }
  EXPECT_GT(errors, rounds / 4);
}

// --- interruption --------------------------------------------------------------------------------

// Interrupted after the first piece, in a program of its own, since the flag cannot be taken back.
void interrupted_run(const DataConfig& config, const std::string& cache) {
  request_interrupt();
  try {
    DataSet(config, cache, 0);
  } catch (const Error& e) {
    std::fputs(e.what(), stderr);
    std::exit(e.exit_code());
  }
  std::exit(0);
}

// The interruption comes first, so that the program it is in has no threads that this one has started.
struct Interruption : Documents {
  void check() {
    cache_ = dir_ / "stopped";
    for (int i = 0; i < 2; ++i)
      EXPECT_EXIT(interrupted_run(config_, cache_), ::testing::ExitedWithCode(130), "are kept");
    const auto part = static_cast<std::int64_t>(std::filesystem::file_size(cache_ + "/train.bin.part"));
    // What is there is not made again: a token of it that was changed stays changed.
    {
      std::fstream file(cache_ + "/train.bin.part", std::ios::in | std::ios::out | std::ios::binary);
      file.write("\x07", 1);
    }
    Batch expected, found;
    make().train_batch(1, 0, 0, 50, found);
    Ids again = tokens();
    EXPECT_FALSE(std::filesystem::exists(cache_ + "/progress.json"));
    cache_ = dir_ / "whole";
    make().train_batch(1, 0, 0, 50, expected);
    const Ids whole = tokens();
    EXPECT_GT(part, 0);
    EXPECT_LT(part, static_cast<std::int64_t>(2 * whole.size()));
    EXPECT_EQ(again[0], 7);
    again[0] = whole[0];
    EXPECT_TRUE(again == whole);
    EXPECT_EQ(found.targets, expected.targets);
  }
};

TEST_F(Interruption, OfATextLosesNothing) {
  std::string text;
  while (text.size() < 2 * kPieceBytes + 100) text += "the dog and the fox ";
  config_.train = write_file(dir_ / "t.txt", text);
  check();
}

TEST_F(Interruption, OfDocumentsLosesNothing) {
  std::string content;
  for (int i = 0; content.size() < 2 * kPieceBytes + 100; ++i)
    content += fmt::format("{{\"tokens\": [{}, 2, 3], \"loss_mask\": [1, {}, 1]}}\n", i % 256, i % 2);
  config_.train = lines(content);
  check();
}

TEST_F(Interruption, OfOtherSourcesIsNotGoneOnWith) {
  std::string text;
  while (text.size() < 2 * kPieceBytes) text += "the dog and the fox ";
  config_.train = write_file(dir_ / "t.txt", text);
  EXPECT_EXIT(interrupted_run(config_, cache_), ::testing::ExitedWithCode(130), "are kept");
  text[0] = 'X';
  write_file(dir_ / "t.txt", text + "!");
  make();
  EXPECT_EQ(tokens(), bytes_of(text + "!"));
}

// --- Megatron's index ----------------------------------------------------------------------------

struct Index {
  std::int64_t version = 1;
  std::uint8_t type = 8;
  std::vector<std::int32_t> lengths;
  std::vector<std::int64_t> places, documents;

  explicit Index(std::vector<std::int32_t> l, std::int64_t width = 2) : lengths(std::move(l)), documents{0} {
    std::int64_t at = 0;
    for (const std::int32_t n : lengths) places.push_back(at), at += n * width;
    documents.push_back(static_cast<std::int64_t>(lengths.size()));
  }
  std::string content() const {
    std::string out("MMIDIDX\0\0", 9);
    const auto put = [&](const void* from, std::size_t n) { out.append(static_cast<const char*>(from), n); };
    const std::int64_t sequences = static_cast<std::int64_t>(lengths.size()),
                       ends = static_cast<std::int64_t>(documents.size());
    put(&version, 8), put(&type, 1), put(&sequences, 8), put(&ends, 8);
    put(lengths.data(), 4 * lengths.size()), put(places.data(), 8 * places.size());
    put(documents.data(), 8 * documents.size());
    return out;
  }
};

TEST_F(Documents, MegatronsIndexSaysTheTypeAndIsChecked) {
  config_.train = write_tokens(dir_ / "m.bin", std::vector<std::uint32_t>{70000, 2, 3, 4, 5});
  Index index({2, 3}, 4);
  index.type = 4;
  write_file(dir_ / "m.idx", index.content());
  const DataSet data = make();
  EXPECT_EQ(data.train_tokens(), 5);
  Batch batch;
  data.train_batch(1, 0, 0, 1, batch);
  EXPECT_EQ(batch.ids, (Ids{70000, 2, 3, 4}));

  const auto wrong = [&](const Index& changed, const std::string& reason) {
    write_file(dir_ / "m.idx", changed.content());
    const std::string found = error();
    EXPECT_HAS(found, dir_ / "m.idx: ");
    EXPECT_HAS(found, reason);
  };
  Index other = index;
  other.version = 2;
  wrong(other, "has version 2");
  other = index, other.type = 5;
  wrong(other, "of type 5");
  other = index, other.lengths[1] = 4;
  wrong(other, "has 6 tokens of 4 bytes, and it has 20 bytes");
  other = index, other.lengths[0] = -2;
  wrong(other, "sequence 0 has the length -2");
  other = index, other.places[1] = 4;
  wrong(other, "sequence 1 begins at byte 4; 8 is expected");
  other = index, other.documents.push_back(1);
  std::string cut = index.content();
  write_file(dir_ / "m.idx", cut.substr(0, cut.size() - 3));
  EXPECT_HAS(error(), "for 2 sequences and 2 documents");
  write_file(dir_ / "m.idx", cut.substr(0, 20));
  EXPECT_HAS(error(), "has 20 bytes; the header");
  cut[0] = 'N';
  write_file(dir_ / "m.idx", cut);
  EXPECT_HAS(error(), "does not begin with MMIDIDX");
}

TEST_F(Documents, AFuzzedIndexIsReadOrAnError) {
  const std::uint64_t rounds = inputs_asked(200);
  config_.train = write_tokens(dir_ / "m.bin", std::vector<std::uint16_t>(40, 1));
  const std::string good = Index({10, 0, 20, 10}).content();
  const std::uint64_t first = test_seed(60000);
  std::uint64_t errors = 0;
  for (std::uint64_t seed = first; seed < first + rounds; ++seed) {
    SCOPED_TRACE(seed);
    const NamedRandom random(seed, "fuzz");
    std::string content = good;
    const std::size_t at = random.below(0, content.size());
    switch (random.below(1, 3)) {
      case 0:
        content[at] = static_cast<char>(random.below(2, 256));
        break;
      case 1:
        content.erase(at, 1 + random.below(2, 9));
        break;
      default:
        content.insert(at, 1 + random.below(2, 9), static_cast<char>(random.below(3, 256)));
    }
    write_file(dir_ / "m.idx", content);
    config_.packing = seed % 2 == 0 ? Packing::kNone : Packing::kDocuments;
    try {
      EXPECT_EQ(make().train_tokens(), 40);
    } catch (const Error& e) {
      ++errors;
      EXPECT_EQ(e.exit_code(), 2) << e.what();
      EXPECT_HAS(std::string(e.what()), config_.packing == Packing::kNone ? "m.idx: " : "m.");
    }
  }
  EXPECT_GT(errors, rounds / 2);
}

// --- prepared tokens -----------------------------------------------------------------------------

TEST_F(Documents, PreparedTokensBringTypeAndMask) {
  config_.train = write_tokens(dir_ / "p.bin", std::vector<std::uint32_t>{70000, 2, 3, 4, 5});
  write_file(dir_ / "p.mask", std::string("\0\1\0\1\1", 5));
  const std::string good =
      R"({"format": "ziggurat tokens", "version": 1, "dtype": "uint32", "tokens": 5, "mask": true})";
  write_file(dir_ / "p.json", good);
  Batch batch;
  make().train_batch(1, 0, 0, 1, batch);
  EXPECT_EQ(batch.ids, (Ids{70000, 2, 3, 4}));
  EXPECT_EQ(batch.targets, (Ids{2, kOut, 4, 5}));
  EXPECT_EQ(batch.valid, 3);

  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = good;
    write_file(dir_ / "p.json", changed.replace(changed.find(from), from.size(), to));
    return error();
  };
  EXPECT_HAS(with("\"version\": 1", "\"version\": 2"), "version 2 found");
  EXPECT_HAS(with("uint32", "int8"), "dtype \"int8\" found");
  EXPECT_HAS(with("uint32", "uint16"), "has 5 tokens of 2 bytes, and it has 20 bytes");
  EXPECT_HAS(with("\"tokens\": 5", "\"tokens\": -5"), "tokens -5 found");
  write_file(dir_ / "p.json", good);
  write_file(dir_ / "p.mask", "abc");
  EXPECT_HAS(error(), "p.mask: has 3 bytes; one for each of 5 tokens");
  write_file(dir_ / "p.json", R"({"something": "else"})");
  config_.token_dtype = DType::kI32;
  make().train_batch(1, 0, 0, 1, batch);
  EXPECT_EQ(batch.valid, 4);
}

TEST_F(Documents, AFileOf100GBNeedsNoMemory) {
  const std::int64_t tokens = 50'000'000'000;
  config_.train = write_tokens(dir_ / "big.bin", std::vector<std::uint16_t>{1});
  std::error_code error;
  std::filesystem::resize_file(config_.train, static_cast<std::uintmax_t>(2 * tokens), error);
  if (error) GTEST_SKIP() << "no sparse file of 100 GB here: " << error.message();
  config_.seq_len = 4096;
  const std::int64_t before = resident_bytes();
  const DataSet data = make();
  EXPECT_EQ(data.train_tokens(), tokens);
  Batch batch;
  for (std::int64_t step = 0; step < 200; ++step) data.train_batch(1, step, 0, 4, batch);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // whose own memory would be counted
  EXPECT_LT(resident_bytes() - before, 16 * kMiB);
#else
  static_cast<void>(before);
#endif
}

}  // namespace
}  // namespace zg
