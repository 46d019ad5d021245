// Records: what is wrong with one, and where; lists that come in pieces; documents that are no targets.
#include "data/records.hpp"

#include <functional>

#include "data/data_support.hpp"
#include "data/text_file.hpp"
#include "ziggurat/data/dataset.hpp"
#include "ziggurat/data/documents.hpp"

namespace zg {
namespace {

using namespace zg::test;
using Ids = std::vector<std::int32_t>;

struct Records : ::testing::Test {
  TempDir dir_;
  std::string cache_ = dir_ / "cache";
  DataConfig config_ = Settings{.validation_share = 0, .seq_len = 2};

  std::string error(const std::string& name, const std::string& content) {
    config_.train = write_file(dir_ / name, content);
    return refusal([&] { DataSet(config_, cache_, 0); });
  }
  std::int64_t train_tokens(const std::string& name, const std::string& content) {
    config_.train = write_file(dir_ / name, content);
    return DataSet(config_, cache_, 0).train_tokens();
  }
};

TEST_F(Records, OtherRecordsAreNamedWithWhatMakesDocumentsOfThem) {
  const std::vector<std::vector<std::string>> others = {
      {R"({"messages": [{"role": "user", "content": "a"}]})", "a chat (\"messages\")",
       "tools/prepare.py --tok"},
      {R"({"prompt": "a", "completion": "b"})", "a prompt with its completion", "tools/prepare.py --tok"},
      {R"({"prompt": "a", "chosen": "b", "rejected": "c"})", "preference", "completion: .chosen"},
      {R"({"instruction": "a", "input": "", "output": "b"})", "(Alpaca)", "completion: .output"},
      {R"({"conversations": [{"from": "human", "value": "a"}]})", "ShareGPT", "messages: [.conversations"},
      {R"({"id": 1, "content": "a"})", "of texts it has \"content\"", "{text: .[\"content\"]}"},
      {R"({"a": "", "b": "", "c": "", "d": "", "e": "", "f": "", "g": "", "h": "", "i": "", "j": ""})",
       "\"g\", \"h\" and 2 more", "if \"h\" is the text"},
      {R"({"a key that is a whole sentence, as it stands at the top of a table": "", "b": ""})",
       "of texts it has \"b\"", "if \"b\" is the text"},
      {R"({"data": [{"text": "a"}]})", "has no \"text\"", "jq -c '.[\"data\"][]'"}};
  for (const auto& other : others) {
    SCOPED_TRACE(other[0]);
    for (const std::string& content : {"{\"text\": \"a\"}\n" + other[0] + "\n", other[0] + "\n" + other[0]}) {
      const std::string found = error("a.jsonl", content);
      EXPECT_HAS(found, "a.jsonl:" + std::string(content[2] == 't' ? "2" : "1"));
      EXPECT_HAS(found, other[1]);
      EXPECT_HAS(found, other[2]);
    }
    EXPECT_HAS(error("a.json", "[{\"text\": \"a\"},\n" + other[0] + "]"), "a.json:2, record 2: ");
  }
}

TEST_F(Records, ErrorsNameTheFilesLine) {
  const std::string found =
      error("a.jsonl", std::string(39, '\n') + "{\"text\": \"good\"}\n{\"text\": \x1b\x01}\n");
  EXPECT_HAS(found, "a.jsonl:41: is no JSON: line 41, column 10");
  EXPECT_EQ(found.find('\x1b'), found.npos);
  EXPECT_HAS(error("a.jsonl", "{\"input_ids\": [1, 500]}\n"), "data.tokenizer");
  EXPECT_HAS(error("a.jsonl", "{\"input_ids\": [18446744073709551615]}\n"), "beyond all tokens");
}

// Python's json writes what JSON does not have.
TEST_F(Records, NotANumberIsNoneOfOurBusiness) {
  EXPECT_EQ(
      train_tokens("a.jsonl", "{\"score\": NaN, \"x\": [-Infinity,Infinity], \"text\": \"NaN\\\"NaN\"}\n"),
      7);
  EXPECT_EQ(train_tokens("a.txt", "{\"score\": NaN, \"tokens\": [1, 2, 3]}\n"), 3);
  EXPECT_HAS(error("a.jsonl", "{\"text\": NaN}\n"), "\"text\" is null or NaN");
  EXPECT_HAS(error("a.jsonl", "{\"tokens\": [1, NaN]}\n"), "\"tokens\" has null or NaN at place 1");
  EXPECT_HAS(error("a.jsonl", "{\"x\": NaNa, \"text\": \"a\"}\n"), "is no JSON");
}

TEST_F(Records, WrongListsAreNamed) {
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"[{\"text\": \"a\"},\n{\"text\": \"b\"}", "a.json:2: ends behind record 2, ']' expected"},
      {"[{\"text\": \"a\"}\n{\"text\": \"b\"}]", "a.json:2: found '{' behind record 1, ',' or ']' expected"},
      {"[{\"text\": \"a\"},\n]", "a.json:2: record 2 begins with ']'"},
      {"[{\"text\": \"a\"}]\n[]", "a.json:2: goes on behind the list's end"},
      {"[{\"text\": \"a\"},\n{\"text\": \"b]", "a.json:2: record 2, which begins here, does not end"},
      {"[\"a\"]", "record 1 begins with '\"'"},
      {"[1]", "an object is expected"},
      {"[{\"text\": \"a\"}, {\"text\" \"b\"}]", "a.json:1, record 2: is no JSON"}};
  for (const auto& [content, reason] : wrong) EXPECT_HAS(error("a.json", content), reason);
}

// Records of all lengths lie across the pieces in which a file is read.
TEST_F(Records, ListsComeInPieces) {
  const NamedRandom random(test_seed(31), "records");
  std::string list = "[", lines;
  for (std::uint64_t i = 0; list.size() < 2 * kPieceBytes; ++i) {
    const std::string record =
        fmt::format("{{\"tokens\": [{}, 1, 2], \"note\": \"{}\"}}", i % 256,
                    std::string(random.below(i, i % 100 == 0 ? 500'000 : 300), i % 2 == 0 ? '[' : '}'));
    list += (list.size() > 1 ? ",\n" : "") + record;
    lines += record + "\n";
  }
  list += "]";
  const auto bytes = make_tokenizer({}, "");
  const auto ids_of = [&](const std::string& name, const std::string& content) {
    Ids ids;
    for_each_document(write_file(dir_ / name, content), *bytes, [&](std::int64_t, const Document& document) {
      ids.insert(ids.end(), document.ids.begin(), document.ids.end());
      return true;
    });
    return ids;
  };
  const Ids of_list = ids_of("a.json", list);
  EXPECT_TRUE(of_list == ids_of("a.jsonl", lines));
  EXPECT_EQ(train_tokens("a.json", list), static_cast<std::int64_t>(of_list.size()));
}

// --- what can be learnt --------------------------------------------------------------------------

TEST_F(Records, DataWithoutATargetIsRefused) {
  const std::string masked = "{\"tokens\": [1, 2, 3, 4], \"labels\": [-100, -100, -100, -100]}\n",
                    good = "{\"tokens\": [1, 2, 3, 4], \"loss_mask\": [0, 0, 0, 1]}\n";
  EXPECT_HAS(error("a.jsonl", masked + masked), "none of the 8 training tokens is a target");
  EXPECT_EQ(train_tokens("a.jsonl", masked + good), 8);
  config_.validation = write_file(dir_ / "v.jsonl", masked);
  EXPECT_HAS(error("a.jsonl", masked + good), "none of the 4 validation tokens is a target");
  config_.validation.clear();
  const auto prepared = [&](const std::vector<std::uint8_t>& mask) {
    write_tokens(dir_ / "p.mask", mask), write_tokens(dir_ / "p.docs", std::vector<std::int64_t>{0, 2, 4});
    write_file(
        dir_ / "p.json",
        R"({"format": "ziggurat tokens", "version": 1, "dtype": "uint16", "tokens": 4, "mask": true})");
    config_.train = write_tokens(dir_ / "p.bin", std::vector<std::uint16_t>{1, 2, 3, 4});
    DataSet(config_, cache_, 0);
  };
  for (const Packing packing : {Packing::kNone, Packing::kDocuments}) {
    config_.packing = packing;
    EXPECT_HAS(refusal([&] { prepared({0, 0, 0, 0}); }), "none of the 4 training tokens");
    EXPECT_HAS(refusal([&] { prepared({1, 0, 0, 0}); }), "none of the 4 training tokens");
    prepared({0, 1, 0, 0});
  }
  // The first token of a document is a target of windows alone.
  EXPECT_HAS(refusal([&] { prepared({1, 0, 1, 0}); }), "none of the 4 training tokens");
  config_.packing = Packing::kNone;
  prepared({1, 0, 1, 0});
}

TEST_F(Records, AShareWithoutTokensSaysWhy) {
  config_.validation_share = 0.1;
  const std::string found = error("a.jsonl", "{\"text\": \"abcdefg\"}\n");
  EXPECT_HAS(found, "since data.validation is the share 0.1 of 7 tokens");
  EXPECT_HAS(found, "a file of its own as data.validation");
  config_.packing = Packing::kDocuments;
  EXPECT_HAS(error("a.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"abcdefghijklmnopqrstuvw\"}\n"),
             "in whole documents");
}

TEST_F(Records, TextsAndDocumentsStandBesideEachOther) {
  config_.validation = write_file(dir_ / "v.jsonl", "{\"text\": \"vwxyz\"}\n");
  EXPECT_EQ(train_tokens("a.txt", "a text of words"), 15);
  const DataSet data(config_, cache_, 0);
  EXPECT_EQ(data.validation_tokens(), 5);
  Batch batch;
  data.validation_batch(0, 1, batch);
  EXPECT_EQ(batch.ids, (Ids{'v', 'w'}));
  config_.validation = write_file(dir_ / "v.txt", "vwxyz{}");
  EXPECT_EQ(train_tokens("b.jsonl", "{\"text\": \"abc\"}\n"), 3);
  EXPECT_EQ(DataSet(config_, cache_, 0).validation_tokens(), 7);
}

// A file that is cut while it is read is no shorter file.
TEST_F(Records, AFileThatIsCutWhileItIsReadIsAnError) {
  std::string lines;
  while (lines.size() < 3 * kPieceBytes) lines += "{\"text\": \"" + std::string(1000, 'x') + "\"}\n";
  const std::string path = write_file(dir_ / "a.jsonl", lines);
  const auto bytes = make_tokenizer({}, "");
  const std::string found = refusal(
      [&] {
        for_each_document(path, *bytes, [&](std::int64_t, const Document&) {
          std::filesystem::resize_file(path, kPieceBytes);
          return true;
        });
      },
      Errc::kIo);
  EXPECT_HAS(found, path);
  EXPECT_HAS(found, "ends at byte");
}

}  // namespace
}  // namespace zg
