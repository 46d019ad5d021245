// Files of data: token files with what lies beside them, documents, the cache of a run.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "data/data_support.hpp"
#include "data/documents.hpp"
#include "data/token_description.hpp"
#include "fuzz/loop.hpp"
#include "support/files.hpp"
#include "ziggurat/data/dataset.hpp"
#include "ziggurat/data/documents.hpp"
#include "ziggurat/data/token_file.hpp"

namespace zg::fuzz {
namespace {

namespace fs = std::filesystem;

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// 48 tokens below 100.
std::string tokens() {
  std::vector<std::uint16_t> ids;
  for (std::uint16_t i = 0; i < 48; ++i) ids.push_back(static_cast<std::uint16_t>(i * 7 % 100));
  return bytes_of(ids);
}

void use_documents(const DocumentIndex& index, std::int64_t all) {
  const std::int64_t n = index.count();
  require(n >= 0, "a negative number of documents");
  std::int64_t last = 0;
  for (const std::int64_t start : index.starts(0, std::min<std::int64_t>(n, 1000))) {
    require(start >= last && start <= all, "documents out of order");
    last = start;
  }
  for (const std::int64_t token : {std::int64_t{0}, all / 2, all}) {
    const std::int64_t first = index.first_from(token);
    require(first >= 0 && first <= n, "a document beyond the last one");
  }
}

void use_batch(const Batch& batch, std::int64_t sequences, std::int64_t length) {
  const auto n = static_cast<std::size_t>(sequences * length);
  require(batch.ids.size() == n && batch.targets.size() == n, "a batch of another size");
  for (const std::int32_t id : batch.ids) require(id >= 0, fmt::format("token {}", id));
  std::int64_t valid = 0;
  for (const std::int32_t target : batch.targets) valid += target >= 0;
  require(valid == batch.valid, "targets that were not counted");
}

void train(const DataConfig& config, const std::string& cache, std::int64_t vocabulary) {
  const DataSet data(config, cache, vocabulary);
  Batch batch;
  for (std::int64_t step = 0; step < 2; ++step) {
    data.train_batch(7, step, 0, 2, batch);
    use_batch(batch, 2, config.seq_len);
    for (const std::int32_t id : batch.ids)
      require(vocabulary == 0 || id < vocabulary, "a token beyond the vocabulary");
  }
  if (data.validation_tokens() == 0) return;
  data.validation_batch(0, 2, batch);
  use_batch(batch, 2, config.seq_len);
}

// What lies beside x.bin, by itself and under a data set.
void use_token_file(const std::string& dir) {
  const std::string bin = dir + "/x.bin";
  const TokenDescription found = describe_tokens(bin, DType::kU16);
  const TokenFile file(bin, found.dtype);
  require(found.tokens < 0 || found.tokens == file.size(), "a number of tokens that is not the file's");
  std::vector<std::int32_t> ids(static_cast<std::size_t>(file.size()));
  file.read(0, file.size(), ids.data());
  if (found.mask) {
    const std::int64_t kept = found.mask->apply(0, file.size(), ids.data());
    require(kept >= 0 && kept <= file.size(), "a mask of another size");
  }
  if (const auto documents = open_documents(bin, file.size())) use_documents(*documents, file.size());
  for (const Packing packing : {Packing::kNone, Packing::kDocuments}) {
    DataConfig config = test::Settings{.train = bin, .validation_share = 0.25, .seq_len = 4};
    config.packing = packing;
    try {
      train(config, dir + "/cache", 100);
    } catch (const Error& e) {  // no documents, or too few tokens
      require(e.exit_code() == 2, e.what());
    }
  }
}

Parser token_files(const std::string& name, std::vector<Case> corpus, std::vector<std::string> changed) {
  return {.name = name,
          .corpus = std::move(corpus),
          .use = [](const Case&, const std::string& dir) { use_token_file(dir); },
          .on_disk = true,
          .writes = true,
          .changed = std::move(changed)};
}

// Sequences of these lengths, the documents as they are listed.
std::string megatron_index(const std::vector<std::int32_t>& lengths,
                           const std::vector<std::int64_t>& documents) {
  std::string index("MMIDIDX\0\0", 9);
  const auto put = [&](auto value) { index.append(reinterpret_cast<const char*>(&value), sizeof value); };
  put(std::int64_t{1}), put(std::uint8_t{8});
  put(static_cast<std::int64_t>(lengths.size())), put(static_cast<std::int64_t>(documents.size()));
  index += bytes_of(lengths);
  std::int64_t place = 0;
  for (const std::int32_t length : lengths) {
    put(place);
    place += 2 * length;
  }
  return index + bytes_of(documents);
}

TEST(Fuzz, MegatronIndex) {
  fuzz(token_files("megatron.idx",
                   {{{"x.idx", megatron_index({10, 20, 18}, {0, 1, 2, 3})}, {"x.bin", tokens()}},
                    {{"x.idx", megatron_index({48}, {0, 1})}, {"x.bin", tokens()}}},
                   {"x.idx"}));
}

std::string description(const std::string& more) {
  return R"({"format": "ziggurat tokens", "version": 1, "dtype": "uint16", "tokens": 48)" + more + "}";
}

TEST(Fuzz, PlacesOfDocuments) {
  const std::vector<std::int64_t> starts{0, 5, 5, 20, 31, 48};
  fuzz(token_files("token.docs",
                   {{{"x.docs", bytes_of(starts)}, {"x.bin", tokens()}, {"x.json", description("")}},
                    {{"x.docs", bytes_of(std::vector<std::int64_t>{0, 48})}, {"x.bin", tokens()}}},
                   {"x.docs"}));
}

TEST(Fuzz, LossMask) {
  std::string mask(48, 1);
  for (std::size_t i = 0; i < 20; ++i) mask[i] = 0;
  fuzz(token_files("token.mask",
                   {{{"x.mask", mask}, {"x.bin", tokens()}, {"x.json", description(R"(, "mask": true)")}}},
                   {"x.mask", "x.json"}));
}

TEST(Fuzz, TokenDescription) {
  fuzz(token_files("token.json",
                   {{{"x.json", description(R"(, "mask": false, "tokenizer": "gpt2")")}, {"x.bin", tokens()}},
                    {{"x.json", description("")}, {"x.bin", tokens()}}},
                   {"x.json", "x.json", "x.bin"}));
}

TEST(Fuzz, TokenFile) {
  std::vector<std::int32_t> header(256, 0);
  header[0] = 20240520, header[1] = 1, header[2] = 48;
  fuzz(token_files("token.bin", {{{"x.bin", bytes_of(header) + tokens()}}, {{"x.bin", tokens()}}}, {}));
}

TEST(Fuzz, JsonLines) {
  const auto bytes = make_byte_tokenizer();
  const std::string lines =
      "{\"text\": \"Hello \\u00e9 world\"}\n{\"tokens\": [1, 2, 3, 200]}\n"
      "{\"input_ids\": [5, 6, 7], \"labels\": [-100, 6, 7]}\n\n"
      "{\"input_ids\": [5, 6], \"loss_mask\": [0, 1], \"meta\": {\"a\": [1, 2.5, null]}}\n";
  const std::string one = R"({"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]})";
  const auto use_file = [&](const Case&, const std::string& dir) {
    for_each_document(dir + "/x.jsonl", *bytes, [&](std::int64_t, const Document& d) {
      for (const std::int32_t id : d.ids) require(id >= 0 && id < 256, "a token beyond the vocabulary");
      require(d.mask.empty() || d.mask.size() == d.ids.size(), "a mask of another length");
      return true;
    });
  };
  fuzz({.name = "documents.jsonl",
        .corpus = {{{"x.jsonl", lines}}, {{"x.jsonl", one + "\n"}}},
        .use = use_file,
        .on_disk = true});
  const DocumentReader reader(*bytes, "");
  fuzz({.name = "document.json",
        .corpus = {{{"x.json", one}},
                   {{"x.json", R"({"text": "a\nb\u0000c"})"}},
                   {{"x.json", R"({"input_ids": [5, 6], "loss_mask": [0, 1]})"}}},
        .use = [&](const Case& input, const std::string&) {
          Document d;
          reader.read({.text = input.front().content, .line = 1, .name = "x.jsonl:1"}, d);
          for (const std::int32_t id : d.ids) require(id >= 0 && id < 256, "a token beyond the vocabulary");
          require(d.mask.empty() || d.mask.size() == d.ids.size(), "a mask of another length");
        }});
}

// The files of a cache are the program's own: whatever is wrong with them, they are made anew.
void fuzz_cache(const std::string& name, const std::string& source, const std::vector<std::string>& changed,
                const std::string& progress) {
  const test::TempDir made;
  const DataConfig config = test::Settings{.train = source, .validation_share = 0.2, .seq_len = 8};
  (void)DataSet(config, made.path(), 0);
  Case files;
  for (const std::string& file : made.names()) {
    if (!fs::is_regular_file(made / file) || fs::path(file).extension() == ".lock") continue;
    files.push_back({file, test::read_file(made / file)});
  }
  if (!progress.empty()) {  // as an interrupted run leaves it
    const Json stamp = Json::parse(content_of(files, "tokens.json"));
    const Json all{{"sources", stamp["sources"]}, {"files", Json::parse(progress)}};
    std::erase_if(files, [](const File& f) { return f.name == "tokens.json"; });
    files.push_back({"progress.json", all.dump(1)});
    files.push_back({"train.bin.part", content_of(files, "train.bin").substr(0, 400)});
  }
  fuzz({.name = name,
        .corpus = {files},
        .use = [&](const Case&, const std::string& dir) { train(config, dir, 256); },
        .on_disk = true,
        .writes = true,
        .takes_all = true,
        .changed = changed});
}

TEST(Fuzz, TokenCache) {
  const test::TempDir dir;
  std::string text;
  for (int i = 0; i < 40; ++i) text += fmt::format("This is sentence {} of the text.\n", i);
  const std::string source = test::write_file(dir / "text.txt", text);
  fuzz_cache("tokens.json", source, {"tokens.json"}, "");
  fuzz_cache("token_cache", source, {}, "");
  fuzz_cache("progress.json", source, {"progress.json"}, R"({"train.bin": [200, 0, 200, 0, 0, false]})");
}

}  // namespace
}  // namespace zg::fuzz
