// What a file of data is taken as, and what is refused with which command.
#include "data/file_kind.hpp"

#include <sys/stat.h>

#include "data/data_support.hpp"
#include "data/text_file.hpp"
#include "ziggurat/data/dataset.hpp"
#include "ziggurat/data/documents.hpp"

namespace zg {
namespace {

using namespace zg::test;
using namespace std::string_literals;
using Ids = std::vector<std::int32_t>;

struct FileKind : ::testing::Test {
  TempDir dir_;

  DataKind kind(const std::string& name, const std::string& content) {
    return kind_of_data(write_file(dir_ / name, content));
  }
  std::string error(const std::string& name, const std::string& content) {
    return refusal([&] { (void)kind(name, content); });
  }
  std::string data_error(const std::string& name, const std::string& content) {
    DataConfig config =
        Settings{.train = write_file(dir_ / name, content), .validation_share = 0, .seq_len = 2};
    return refusal([&] { DataSet(config, dir_ / "cache", 0); });
  }
  // Texts of all documents, as the tokenizer "bytes" gives them back.
  std::vector<std::string> documents(const std::string& name, const std::string& content) {
    const auto bytes = make_tokenizer({}, "");
    std::vector<std::string> texts;
    for_each_document(write_file(dir_ / name, content), *bytes, [&](std::int64_t, const Document& document) {
      texts.push_back(bytes->decode(document.ids));
      return true;
    });
    return texts;
  }
};

const std::string kLinesText = "{\"text\": \"ab\"}\n{\"id\": 1, \"text\": \"cde\"}\n";
const std::string kListText = " [ {\"text\": \"a]b\"},\n{\"text\": \"c\\\"}{\", \"more\": [{}]} ]\n";

TEST_F(FileKind, DocumentsHaveAnyName) {
  for (const char* name : {"a.jsonl", "a.JSONL", "a.ndjson", "a.json", "a.JSON", "a.txt", "a", "a.data"}) {
    SCOPED_TRACE(name);
    EXPECT_EQ(kind(name, kLinesText), DataKind::kLines);
    EXPECT_EQ(kind(name, "\xef\xbb\xbf\n\n" + kLinesText), DataKind::kLines);
    EXPECT_EQ(kind(name, kListText), DataKind::kList);
    EXPECT_EQ(kind(name, "{\"messages\": []}"), DataKind::kLines);
    EXPECT_EQ(documents(name, kLinesText), (std::vector<std::string>{"ab", "cde"}));
    EXPECT_EQ(documents(name, "\xef\xbb\xbf" + kListText), (std::vector<std::string>{"a]b", "c\"}{"}));
  }
  EXPECT_EQ(kind("t.BIN", "{}"), DataKind::kTokens);
}

// Brackets alone make no documents of a text.
TEST_F(FileKind, ATextStaysOne) {
  for (const std::string& text :
       {"{curly} words"s, "[Verse 1]\nwords"s, "{\n  \"text\": \"over lines\"\n}\n"s, "{"s, "[ { a"s,
        "{\"text\": \"a\"}\nand so on, in prose\n"s, "{\"time\": 1}\n{\"time\": 2}\n"s, "[{\"time\": 1}]"s,
        "[1, 2]"s, "words\n{\"text\": \"a\"}\n"s, "PAR1 is a word"s, "ORC and elf"s, "MM and II"s, "BM"s,
        " "s, "\xff\xfd"s, "GGUF"s}) {
    SCOPED_TRACE(text);
    for (const char* name : {"a.txt", "a", "a.md"}) EXPECT_EQ(kind(name, text), DataKind::kText);
    const std::string path = write_file(dir_ / "b.txt", text);
    EXPECT_EQ(documents("b.txt", text), std::vector<std::string>{text});
  }
  EXPECT_HAS(error("a.json", "{\n  \"text\": \"over lines\"\n}\n"), "jq -c .");
  EXPECT_HAS(error("a.json", "words"), "neither '{' nor '['");
}

// A first record that is longer than what is looked at first.
TEST_F(FileKind, ALongFirstRecordIsSeenWhole) {
  const std::string much(3 << 20, 'x');
  EXPECT_EQ(kind("a.txt", "{\"id\": 1, \"text\": \"" + much + "\"}\n" + kLinesText), DataKind::kLines);
  EXPECT_EQ(kind("a.txt", "[{\"id\": 1, \"text\": \"" + much + "\"}]"), DataKind::kList);
  EXPECT_EQ(kind("a.txt", "{" + much), DataKind::kText);
}

TEST_F(FileKind, FilesOfOtherProgramsAreRefusedWithACommand) {
  const std::string zeros(64, '\0'), tar = std::string(257, 'a') + "ustar" + zeros;
  const struct {
    const char* name;
    std::string content;
    const char *what, *command;
  } others[] = {
      {"a.parquet", "PAR1" + zeros + "PAR1", "a Parquet file", "read_parquet"},
      {"a.txt", "PAR1 without zeros, PAR1", "a Parquet file", "read_parquet"},
      {"a.arrow", "ARROW1\0\0"s + zeros, "Arrow or Feather", "read_feather"},
      {"a.arrow", "\xff\xff\xff\xff"s + zeros, "a stream of Arrow", "datasets"},
      {"a.npz", "PK\3\4" + zeros, "NumPy (.npz)", "numpy.load"},
      {"a.docx", "PK\3\4" + zeros, "office", "plain text"},
      {"a.zip", "PK\3\4" + zeros, "a zip archive", "unzip"},
      {"a.jsonl.gz", "\x1f\x8b\x08\0"s + zeros, "gzip", "gzip -dk"},
      {"a.tar.gz", "\x1f\x8b\x08\0"s + zeros, "gzip", "tar -xzf"},
      {"a.zst", "\x28\xb5\x2f\xfd" + zeros, "zstd", "zstd -d"},
      {"a.bz2", "BZh91AY&SY", "bzip2", "bzip2 -dk"},
      {"a.xz",
       "\xfd"
       "7zXZ\0"s,
       "xz", "xz -dk"},
      {"a.tar", tar, "a tar archive", "tar -xf"},
      {"a.npy", "\x93NUMPY\1\0"s, "NumPy (.npy)", "numpy.load"},
      {"a.h5", "\x89HDF\r\n\x1a\n", "HDF5", "h5py"},
      {"a.db", "SQLite format 3\0"s, "SQLite", "sqlite3"},
      {"a.pdf", "%PDF-1.5 ...", "a PDF", "pdftotext"},
      {"a.pkl", "\x80\4\x95" + zeros, "a pickle", ".jsonl"},
      {"a.safetensors", "\x10\0\0\0\0\0\0\0{\"a\": 1}"s, "safetensors", "model.from"},
      {"a.gguf", "GGUF\3\0\0\0"s, "GGUF", "model.from"},
      {"a.png", "\x89PNG\r\n\x1a\n", "PNG", ""},
      {"a.jpg", "\xff\xd8\xff\xe0", "JPEG", ""},
      {"a.idx", "MMIDIDX\0\0"s, "index of a Megatron", "NAME.bin"},
      {"a.csv", "a,b\n1,2\n", "a table (.csv)", "read_csv"},
      {"a.TSV", "a\tb\n", "a table (.tsv)", "sep='\\t'"},
      {"a.txt", "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", "Git LFS",
       "git lfs pull"},
      {"c.bin", "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", "Git LFS",
       "git lfs pull"},
      {"b.bin", "\x93NUMPY\1\0"s, "NumPy (.npy)", "numpy.load"},
      {"b.bin", "PK\3\4" + zeros, "a zip archive, as PyTorch", "tofile"},
      {"b.bin", "\x1f\x8b\x08\0"s + zeros, "gzip", "gzip -dk"},
      {"b.bin", "MMIDIDX\0\0"s + "\0"s, "index of a Megatron", "NAME.bin"},
      {"b.bin", "\x10\0\0\0\0\0\0\0{\"a\": 1}"s, "safetensors", "model.from"},
      {"b.bin", "\x80\2\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", "a pickle", ""},
  };
  for (const auto& other : others) {
    SCOPED_TRACE(std::string(other.name) + ", " + other.what);
    const std::string found = data_error(other.name, other.content);
    EXPECT_HAS(found, dir_ / other.name);
    EXPECT_HAS(found, other.what);
    EXPECT_HAS(found, other.command);
    EXPECT_EQ(found.find("{0}"), found.npos);
    EXPECT_FALSE(std::filesystem::exists(dir_ / "cache/tokens.json"));
  }
}

TEST_F(FileKind, WideTextsAndZerosAreRefused) {
  const auto wide = [](const std::string& text, std::size_t width, bool little) {
    std::string out;
    for (const char c : text) {
      std::string unit(width, '\0');
      unit[little ? 0 : width - 1] = c;
      out += unit;
    }
    return out;
  };
  const std::string text = "a plain text of some words, which go on";
  EXPECT_HAS(error("a.txt", "\xff\xfe" + wide(text, 2, true)), "iconv -f UTF-16 -t UTF-8");
  EXPECT_HAS(error("a.txt", "\xfe\xff" + wide(text, 2, false)), "iconv -f UTF-16 ");
  EXPECT_HAS(error("a.txt", "\xff\xfe\0\0"s + wide(text, 4, true)), "iconv -f UTF-32 ");
  EXPECT_HAS(error("a.txt", wide(text, 2, true)), "iconv -f UTF-16LE ");
  EXPECT_HAS(error("a.txt", wide(text, 2, false)), "iconv -f UTF-16BE ");
  EXPECT_HAS(error("a.txt", wide(text, 4, true)), "iconv -f UTF-32LE ");
  EXPECT_HAS(error("a.txt", text + "\0"s + text), "a zero byte at byte 39");
  std::string late(kPieceBytes + 100, 'a');
  late[kPieceBytes + 7] = '\0';
  EXPECT_HAS(data_error("l.txt", late), fmt::format("a zero byte at byte {}", kPieceBytes + 7));
}

// The mark belongs to no tokenizer's text, nor to the share that is cut off.
TEST_F(FileKind, AByteOrderMarkIsPassedOver) {
  const std::string text = "abcdefghij";
  for (const TokenizerConfig& tokenizer : {TokenizerConfig{}, chars()}) {
    const DataConfig config = Settings{.train = write_file(dir_ / "t.txt", "\xef\xbb\xbf" + text),
                                       .validation_share = 0.3,
                                       .tokenizer = tokenizer,
                                       .seq_len = 2};
    const DataSet data(config, dir_ / "cache", 0);
    EXPECT_EQ(data.train_tokens(), 7);
    EXPECT_EQ(data.validation_tokens(), 3);
    Batch batch;
    data.validation_batch(0, 1, batch);
    EXPECT_EQ(data.tokenizer()->decode(batch.ids), "hi");
  }
  EXPECT_EQ(documents("t.txt", "\xef\xbb\xbf" + text), std::vector<std::string>{text});
  EXPECT_HAS(data_error("e.txt", "\xef\xbb\xbf"), "empty");
}

// A pipe that nobody writes to would block whoever opens it.
TEST_F(FileKind, PipesAreRefusedAtOnce) {
  const auto pipe = [&](const char* name) {
    EXPECT_EQ(::mkfifo((dir_ / name).c_str(), 0600), 0);
    return dir_ / name;
  };
  const auto refused = [&](const std::string& train) {
    DataConfig config = Settings{.train = train, .validation_share = 0, .seq_len = 2};
    config.packing = Packing::kDocuments;
    EXPECT_HAS(refusal([&] { DataSet(config, dir_ / "cache", 0); }), "this is a pipe");
  };
  ::alarm(20);  // for a test that hangs
  refused(pipe("t.txt"));
  refused(pipe("t.jsonl"));
  refused(pipe("t.bin"));
  for (const char* ending : {"idx", "json", "docs", "mask"}) {
    const std::string name = "beside-"s + ending;
    const std::string bin = write_tokens(dir_ / (name + ".bin"), std::vector<std::uint16_t>{1, 2, 3});
    write_file(
        dir_ / (name + ".json"),
        R"({"format": "ziggurat tokens", "version": 1, "dtype": "uint16", "tokens": 3, "mask": true})");
    write_tokens(dir_ / (name + ".mask"), std::vector<std::uint8_t>{1, 1, 1});
    std::filesystem::remove(dir_ / (name + "." + ending));
    pipe((name + "." + ending).c_str());
    refused(bin);
  }
  ::alarm(0);
}

// Heads of other programs, cut and changed, under all names: a kind, or one error that names the file.
TEST_F(FileKind, AFuzzedFileHasAKindOrAnError) {
  const std::vector<std::string> heads = {
      kLinesText,        kListText,    "\xef\xbb\xbf" + kLinesText,   "PAR1\0\0PAR1"s,
      "\x1f\x8b\x08\0"s, "\x93NUMPY"s, "\x80\4\x95\0\0\0\0\0\0\0\0"s, "\x10\0\0\0\0\0\0\0{\"a\": 1}"s,
      "words of a text"};
  const std::vector<std::string> names = {"f.txt", "f.json", "f.jsonl", "f.bin", "f", "f.csv"};
  const std::uint64_t rounds = inputs_asked(300), begin = test_seed(70000);
  const auto bytes = make_tokenizer({}, "");
  std::uint64_t errors = 0;
  for (std::uint64_t seed = begin; seed < begin + rounds; ++seed) {
    SCOPED_TRACE(seed);
    const NamedRandom random(seed, "kinds");
    std::string content = heads[random.below(0, heads.size())];
    for (std::uint64_t i = 0; i < random.below(1, 4); ++i) {
      const std::size_t at = random.below(10 + 4 * i, content.size() + 1);
      const char byte = static_cast<char>(random.below(11 + 4 * i, 256));
      if (random.below(12 + 4 * i, 2) == 0 && at < content.size()) {
        content[at] = byte;
      } else {
        content.insert(at, 1 + random.below(13 + 4 * i, 3), byte);
      }
    }
    const std::string name = names[random.below(2, names.size())];
    try {
      (void)documents(name, content);
    } catch (const Error& e) {
      ++errors;
      EXPECT_EQ(e.exit_code(), 2) << e.what();
      EXPECT_HAS(std::string(e.what()), dir_ / name);
    }
  }
  EXPECT_GT(errors, rounds / 10);
}

}  // namespace
}  // namespace zg
