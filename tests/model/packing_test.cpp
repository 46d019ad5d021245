// Packed documents are what they are one by one: the sum of their losses, and every gradient.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "support/model_runner.hpp"
#include "support/reference.hpp"

namespace zg::test {
namespace {

struct Case {
  const char* name;
  ModelConfig config;
};

std::vector<Case> cases() {
  ModelConfig gpt2 = reference_gpt2(), llama = reference_llama(), window = reference_llama();
  llama.layers = window.layers = 3;
  window.block.window = 4;
  window.block.windowed = {true, false, true};
  return {{"gpt2", gpt2}, {"llama", llama}, {"window", window}};
}

using Documents = std::vector<std::vector<std::int32_t>>;

// Documents of these lengths: the same tokens for the same length and number.
Documents documents_of(std::initializer_list<std::size_t> lengths) {
  Documents documents;
  for (const std::size_t n : lengths) {
    documents.emplace_back();
    for (std::size_t i = 0; i < n; ++i)
      documents.back().push_back(static_cast<std::int32_t>(reference_hash("tokens", 1000 * n + i) % 257));
  }
  return documents;
}

// Adds a document to the end of a batch, of whose sequence `at` tokens are there.
void add(Batch& batch, const std::vector<std::int32_t>& document, std::int64_t at) {
  for (std::size_t i = 0; i < document.size(); ++i) {
    batch.ids.push_back(document[i]);
    const bool last = i + 1 == document.size(), left_out = i % 5 == 3;
    batch.targets.push_back(last || left_out ? -100 : document[i + 1]);
    batch.documents.push_back(static_cast<std::int32_t>(at));
  }
}

// Sequences of `time` tokens, the last of which may be padding, each a document of its own.
Batch packed(const std::vector<Documents>& sequences, std::int64_t time) {
  Batch batch{{static_cast<std::int64_t>(sequences.size()), time, {}, true}, {}, {}};
  for (const Documents& sequence : sequences) {
    std::int64_t at = 0;
    for (const auto& document : sequence)
      add(batch, document, at), at += static_cast<std::int64_t>(document.size());
    ZG_ASSERT_LE(at, time);
    for (; at < time; ++at)
      batch.ids.push_back(7), batch.targets.push_back(-100),
          batch.documents.push_back(static_cast<std::int32_t>(at));
  }
  return batch;
}

struct Result {
  double loss = 0;
  std::vector<double> gradients;
};

class Packing : public testing::TestWithParam<Case> {
 protected:
  Result run(const std::vector<Batch>& batches, Recompute recompute = Recompute::kNo) {
    HostStream stream{"packing test", HostStream::Mode::kInline};
    ModelRunner runner(GetParam().config, DType::kF64, host_ops(), stream);
    runner.fill(reference_weight);
    Result result;
    for (const Batch& batch : batches) result.loss += runner.forward_backward(batch, recompute);
    for (std::size_t u = 0; u < runner.units().size(); ++u) {
      for (std::int64_t i = 0; i < runner.units()[u].count; ++i)
        result.gradients.push_back(load(runner.grads(u), 0, i));
    }
    return result;
  }
  static void expect_same(const Result& a, const Result& b) {
    EXPECT_NEAR(a.loss, b.loss, 1e-11 * std::abs(b.loss));
    ASSERT_EQ(a.gradients.size(), b.gradients.size());
    double most = 0;
    for (const double g : b.gradients) most = std::max(most, std::abs(g));
    EXPECT_GT(most, 1e-3);
    for (std::size_t i = 0; i < a.gradients.size(); ++i)
      ASSERT_NEAR(a.gradients[i], b.gradients[i], 1e-11 * std::max(1.0, most)) << i;
  }
};

TEST_P(Packing, IsItsDocumentsOneByOne) {
  const Documents documents = documents_of({5, 1, 11, 2, 9, 17, 29, 3});
  std::vector<Batch> alone;
  for (const auto& document : documents) {
    alone.push_back({{1, static_cast<std::int64_t>(document.size())}, {}, {}});
    add(alone.back(), document, 0);
  }
  const Result expected = run(alone);
  const auto& d = documents;
  // Ragged; permuted within a sequence and over sequences; without padding and with much of it, which one
  // sequence consists of alone.
  expect_same(run({packed({{d[0], d[1], d[2], d[3], d[4]}, {d[5], d[7]}, {d[6]}}, 29)}), expected);
  expect_same(run({packed({{d[6]}, {d[7], d[5]}, {d[4], d[2], d[0], d[3], d[1]}}, 29)}), expected);
  expect_same(run({packed({{d[6], d[1], d[4]}, {d[7], d[0], d[2], d[3], d[5]}, {}}, 40)}), expected);
  expect_same(run({packed({{d[6], d[1], d[4]}, {d[7], d[0], d[2], d[3], d[5]}}, 40)}, Recompute::kYes),
              expected);
}

// Sequences that are one document each are what they are without documents, to the bit.
TEST_P(Packing, OneDocumentASequenceChangesNoBit) {
  const Documents documents = documents_of({23, 24});
  Batch batch = packed({{documents[0]}, {documents[1]}}, 24);
  std::fill(batch.documents.begin(), batch.documents.end(), 0);
  Batch plain = batch;
  plain.shape.documents = false;
  const Result a = run({batch}), b = run({plain});
  EXPECT_EQ(a.loss, b.loss);
  EXPECT_EQ(a.gradients, b.gradients);
}

INSTANTIATE_TEST_SUITE_P(Models, Packing, testing::ValuesIn(cases()),
                         [](const auto& of) { return std::string(of.param.name); });

}  // namespace
}  // namespace zg::test
