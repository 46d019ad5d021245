// Documents in sequences: the packing itself, and batches of it.
#include "data/packing.hpp"

#include <algorithm>
#include <numeric>
#include <set>

#include "data/data_support.hpp"
#include "data/document_index.hpp"
#include "data/token_description.hpp"
#include "ziggurat/data/dataset.hpp"

namespace zg {
namespace {

using namespace zg::test;
using Ids = std::vector<std::int32_t>;
using Lengths = std::vector<std::int64_t>;

TEST(BestFit, TakesTheLongestFirstAndTheTightestRoom) {
  const Lengths lengths = {3, 7, 5, 2, 10, 4};
  // 10 | 7, 3 | 5, 4 | 2: the 3 goes beside the 7, where it leaves nothing, and not beside the 5.
  const std::vector<std::vector<std::size_t>> expected = {{4}, {1, 0}, {2, 5}, {3}};
  EXPECT_EQ(best_fit_decreasing(lengths, 10), expected);
  EXPECT_TRUE(best_fit_decreasing({}, 10).empty());
  // Among equals the earlier one is first.
  EXPECT_EQ(best_fit_decreasing(Lengths{5, 5, 5}, 10), (std::vector<std::vector<std::size_t>>{{0, 1}, {2}}));
}

// Every piece once, none over the room, and no two sequences that would fit into one.
TEST(BestFit, HoldsEachPieceOnceAndWastesLittle) {
  const NamedRandom random(test_seed(3), "lengths");
  for (std::uint64_t c = 0; c < 50; ++c) {
    const std::int64_t room = 1 + static_cast<std::int64_t>(random.below(3 * c, 300));
    Lengths lengths(random.below(3 * c + 1, 400));
    for (std::size_t i = 0; i < lengths.size(); ++i)
      lengths[i] =
          1 + static_cast<std::int64_t>(random.below(1000 * (c + 1) + i, static_cast<std::uint64_t>(room)));
    const auto sequences = best_fit_decreasing(lengths, room);
    std::set<std::size_t> seen;
    Lengths tokens;
    for (const auto& sequence : sequences) {
      tokens.push_back(0);
      for (const std::size_t piece : sequence) {
        tokens.back() += lengths[piece];
        EXPECT_TRUE(seen.insert(piece).second);
      }
      EXPECT_LE(tokens.back(), room);
    }
    EXPECT_EQ(seen.size(), lengths.size());
    std::sort(tokens.begin(), tokens.end());
    if (tokens.size() > 1) {
      EXPECT_GT(tokens[0] + tokens[1], room);
    }
  }
}

struct PackedData : ::testing::Test {
  TempDir dir_;
  std::string cache_ = dir_ / "cache";

  // A token file whose token number i is i, with documents of these lengths.
  std::string write(const char* name, const Lengths& lengths, const std::vector<std::uint8_t>& mask = {}) {
    std::vector<std::int64_t> starts{0};
    for (const std::int64_t n : lengths) starts.push_back(starts.back() + n);
    Ids tokens(static_cast<std::size_t>(starts.back()));
    std::iota(tokens.begin(), tokens.end(), 0);
    write_tokens(dir_ / (name + std::string(".docs")), starts);
    if (!mask.empty()) write_tokens(dir_ / (name + std::string(".mask")), mask);
    write_file(
        dir_ / (name + std::string(".json")),
        fmt::format(
            R"({{"format": "ziggurat tokens", "version": 1, "dtype": "uint32", "tokens": {}, "mask": {}}})",
            tokens.size(), !mask.empty()));
    return write_tokens(dir_ / (name + std::string(".bin")), tokens);
  }
  DataSet open(const std::string& path, std::int64_t seq_len, double share = 0) {
    DataConfig config = Settings{.train = path, .validation_share = share, .seq_len = seq_len};
    config.packing = Packing::kDocuments;
    return {config, cache_, 0};
  }
};

struct Document {
  std::int64_t first, end;
};
std::vector<Document> documents_of(const Lengths& lengths) {
  std::vector<Document> documents;
  std::int64_t at = 0;
  for (const std::int64_t n : lengths) documents.push_back({at, at + n}), at += n;
  return documents;
}

// Each token of a sequence is of one document, behind the token before it or the first of a piece; its target
// is the next token of that document; the rest is padding. Adds what has a target to `learnt`.
void expect_packed(const Batch& batch, std::int64_t seq_len, const Lengths& lengths,
                   std::multiset<std::int32_t>& learnt) {
  const std::vector<Document> documents = documents_of(lengths);
  std::int64_t valid = 0;
  for (std::size_t s = 0; s * static_cast<std::size_t>(seq_len) < batch.ids.size(); ++s) {
    bool padding = false;
    for (std::int64_t t = 0; t < seq_len; ++t) {
      const auto i = s * static_cast<std::size_t>(seq_len) + static_cast<std::size_t>(t);
      const std::int32_t id = batch.ids[i], target = batch.targets[i], key = batch.first_keys[i];
      ASSERT_GE(key, t > 0 ? batch.first_keys[i - 1] : 0);
      ASSERT_LE(key, t);
      if (key == t && id == 0 && target < 0) padding = true;
      if (padding) {
        ASSERT_TRUE(key == t && id == 0 && target < 0) << "token " << t;
        continue;
      }
      const auto document = std::find_if(documents.begin(), documents.end(),
                                         [&](const Document& d) { return id >= d.first && id < d.end; });
      ASSERT_NE(document, documents.end());
      if (key < t) {
        ASSERT_EQ(id, batch.ids[i - 1] + 1);
        ASSERT_GT(id, document->first);
      } else {
        ASSERT_EQ((id - document->first) % seq_len, 0) << "a piece begins at a whole number of sequences";
      }
      ASSERT_EQ(target, id + 1 < document->end ? id + 1 : -100);
      if (target >= 0) learnt.insert(target), ++valid;
    }
  }
  EXPECT_EQ(batch.valid, valid);
}

// Every sequence by number, through validation, which goes through all in order: each token that another of
// its document comes before is learnt once. Lengths 0 and 1, of whole sequences, one more and one less, long
// ones.
TEST_F(PackedData, EveryTargetIsLearntOnce) {
  const Lengths lengths = {5, 1, 0, 8, 9, 16, 17, 3, 2, 7, 31, 1, 6};
  for (const std::int64_t seq_len : {1, 2, 8, 64}) {
    SCOPED_TRACE(seq_len);
    DataConfig config =
        Settings{.train = write("t", lengths), .validation = write("v", lengths), .seq_len = seq_len};
    config.packing = Packing::kDocuments;
    const DataSet data(config, cache_, 0);
    std::multiset<std::int32_t> learnt, expected;
    for (const Document& d : documents_of(lengths))
      for (std::int64_t i = d.first + 1; i < d.end; ++i) expected.insert(static_cast<std::int32_t>(i));
    const auto index = DocumentIndex::open_docs(dir_ / "v.docs", 106);
    const std::int64_t sequences = PackedDocuments(index, 0, index->count(), seq_len).sequences();
    Batch batch;
    for (std::int64_t i = 0; i < sequences; ++i) {
      data.validation_batch(i, 1, batch);
      expect_packed(batch, seq_len, lengths, learnt);
      if (testing::Test::HasFatalFailure()) return;
    }
    EXPECT_EQ(learnt, expected);
    EXPECT_EQ(data.validation_sequences(), sequences);
    Batch again, first;
    data.validation_batch(sequences, 1, again), data.validation_batch(0, 1, first);
    EXPECT_EQ(again.ids, first.ids);
  }
}

// More documents than are packed together, so that groups follow each other.
TEST_F(PackedData, GroupsOfDocuments) {
  const NamedRandom random(test_seed(5), "documents");
  Lengths lengths(2 * kPackedTogether + 77);
  for (std::size_t i = 0; i < lengths.size(); ++i)
    lengths[i] = static_cast<std::int64_t>(random.below(i, 40));
  const DataSet data = open(write("t", lengths), 32);
  std::multiset<std::int32_t> ignored;
  Batch batch, again;
  for (std::int64_t step = 0; step < 40; ++step) {
    data.train_batch(3, step, 0, 8, batch);
    expect_packed(batch, 32, lengths, ignored);
    if (testing::Test::HasFatalFailure()) return;
    data.train_batch(3, step, 5, 2, again);
    EXPECT_TRUE(std::equal(again.ids.begin(), again.ids.end(), batch.ids.begin() + 5 * 32));
    EXPECT_TRUE(
        std::equal(again.first_keys.begin(), again.first_keys.end(), batch.first_keys.begin() + 5 * 32));
  }
}

TEST_F(PackedData, MasksStay) {
  std::vector<std::uint8_t> mask(12, 1);
  mask[3] = mask[7] = mask[8] = 0;
  const DataSet data = open(write("t", {5, 7}, mask), 12);
  Batch batch;
  data.train_batch(1, 0, 0, 1, batch);
  EXPECT_EQ(batch.ids, (Ids{5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4}));
  EXPECT_EQ(batch.targets, (Ids{6, -100, -100, 9, 10, 11, -100, 1, 2, -100, 4, -100}));
  EXPECT_EQ(batch.first_keys, (Ids{0, 0, 0, 0, 0, 0, 0, 7, 7, 7, 7, 7}));
  EXPECT_EQ(batch.valid, 7);
}

// A share for validation is whole documents.
TEST_F(PackedData, ValidationIsWholeDocuments) {
  const Lengths lengths = {10, 10, 10, 10};
  const DataSet data = open(write("t", lengths), 10, 0.4);
  EXPECT_EQ(data.train_tokens(), 30);  // the first document that begins at token 24 or behind it
  EXPECT_EQ(data.validation_tokens(), 10);
  Batch batch;
  data.validation_batch(0, 1, batch);
  EXPECT_EQ(batch.ids.front(), 30);
}

// Documents of a .jsonl file, tokenised and cached, with their masks.
TEST_F(PackedData, OfLinesOfJson) {
  const std::string path =
      write_file(dir_ / "d.jsonl",
                 "{\"text\": \"abc\"}\n{\"tokens\": [100, 101, 102, 103]}\n"
                 "{\"input_ids\": [110, 111], \"loss_mask\": [0, 0]}\n{\"text\": \"\"}\n");
  for (int twice = 0; twice < 2; ++twice) {  // made, and from the cache
    const DataSet data = open(path, 9);
    Batch batch;
    data.train_batch(1, 0, 0, 1, batch);
    EXPECT_EQ(batch.ids, (Ids{100, 101, 102, 103, 'a', 'b', 'c', 110, 111}));
    EXPECT_EQ(batch.targets, (Ids{101, 102, 103, -100, 'b', 'c', -100, -100, -100}));
    EXPECT_EQ(batch.first_keys, (Ids{0, 0, 0, 0, 4, 4, 4, 7, 7}));
  }
}

// Megatron's documents may be several sequences.
TEST_F(PackedData, OfAnIndexOfMegatron) {
  write_tokens(dir_ / "m.bin", std::vector<std::uint16_t>{1, 2, 3, 4, 5, 6, 7});
  std::string index("MMIDIDX\0\0", 9);
  const auto put = [&](auto value) { index.append(reinterpret_cast<const char*>(&value), sizeof value); };
  put(std::int64_t{1}), put(std::uint8_t{8}), put(std::int64_t{3}), put(std::int64_t{3});
  for (const std::int32_t length : {2, 2, 3}) put(length);
  for (const std::int64_t place : {0, 4, 8}) put(place);
  for (const std::int64_t document : {0, 2, 3}) put(document);
  write_file(dir_ / "m.idx", index);
  const DataSet data = open(dir_ / "m.bin", 7);
  Batch batch;
  data.train_batch(1, 0, 0, 1, batch);
  EXPECT_EQ(batch.ids, (Ids{1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(batch.first_keys, (Ids{0, 0, 0, 0, 4, 4, 4}));
}

TEST_F(PackedData, RefusesWhatHasNoDocuments) {
  const auto error = [&](const std::string& path) { return refusal([&] { open(path, 4); }); };
  EXPECT_HAS(error(write_file(dir_ / "t.txt", "one text without documents")), "data.packing");
  EXPECT_HAS(error(write_tokens(dir_ / "plain.bin", std::vector<std::uint16_t>(40, 1))),
             "nothing says where the documents of");
  EXPECT_HAS(error(write("ones", {1, 1, 0, 1})), "none of their documents has two");
  const std::string good = write("bad", {3, 4});
  const auto damaged = [&](const std::vector<std::int64_t>& starts) {
    write_tokens(dir_ / "bad.docs", starts);
    return error(good);
  };
  EXPECT_HAS(damaged({0, 3, 8}), "token 8 of 7");
  EXPECT_HAS(damaged({0, 3}), "end at token 3; there are 7 tokens");
  EXPECT_HAS(damaged({0, 5, 3, 7}), "document 2 begins at token 3");
  EXPECT_HAS(damaged({}), "0 bytes");
}

}  // namespace
}  // namespace zg
