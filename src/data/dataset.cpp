#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>

#include "data/token_cache.hpp"
#include "data/token_description.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/data/dataset.hpp"

namespace zg {
namespace {

// Tokens [first, first + count) of a file, and which of them are targets of the loss.
struct Split {
  std::shared_ptr<const TokenFile> file;
  std::shared_ptr<const MaskFile> mask;  // null: all
  std::int64_t first = 0, count = 0;
};

// Opens a token file as what lies beside it describes it.
Split open_tokens(const std::string& path, DType otherwise) {
  const TokenDescription description = describe_tokens(path, otherwise);
  auto file = std::make_shared<const TokenFile>(path, description.dtype);
  const std::int64_t tokens = file->size();
  return {std::move(file), description.mask, 0, tokens};
}

// Cuts the last share of the tokens off.
Split cut_off(Split& all, double share) {
  Split rest = all;
  all.count = static_cast<std::int64_t>(static_cast<double>(rest.count) * (1 - share));
  rest.first = all.count, rest.count -= all.count;
  return rest;
}

bool is_token_file(const std::string& path) {
  return std::filesystem::path(path).extension() == ".bin";
}

constexpr std::int64_t kCheckTokens = 1 << 20;  // read at a time when a whole file is checked

}  // namespace

struct DataSet::State {
  std::int64_t seq_len = 0;
  std::int64_t id_limit = 0;  // all ids must be below it; 0: no limit
  std::unique_ptr<TextTokenizer> tokenizer;
  Split train, validation;

  void take_texts(const DataConfig& config, const std::string& cache_dir);
  void take_token_files(const DataConfig& config);
  void check_lengths(const DataConfig& config) const;
  void check_ids(const Split& split) const;
  void check_id(const Split& split, std::int64_t position, std::int32_t id) const {
    if (id < 0 || (id_limit > 0 && id >= id_limit)) throw_bad_id(split, position, id);
  }
  [[noreturn]] void throw_bad_id(const Split& split, std::int64_t position, std::int32_t id) const;
  std::int64_t window(const Split& split, std::int64_t start, std::int32_t* ids, std::int32_t* targets) const;
  void resize(Batch& batch, std::int64_t sequences) const;
};

void DataSet::State::take_texts(const DataConfig& config, const std::string& cache_dir) {
  TokenCache cache = tokenise_cached(config, cache_dir);
  tokenizer = std::move(cache.tokenizer);
  train = {std::move(cache.train), cache.train_mask, 0, cache.train_tokens};
  validation = {std::move(cache.validation), cache.validation_mask, 0, cache.validation_tokens};
  if (is_document_file(config.train) && config.validation.empty() && config.validation_share > 0)
    validation = cut_off(train, config.validation_share);
}

void DataSet::State::take_token_files(const DataConfig& config) {
  train = open_tokens(config.train, config.token_dtype);
  if (!config.validation.empty()) {
    validation = open_tokens(config.validation, config.token_dtype);
  } else if (config.validation_share > 0) {
    validation = cut_off(train, config.validation_share);
  }
  if (config.tokenizer.kind == TokenizerConfig::Kind::kGpt2) {
    tokenizer = make_gpt2_tokenizer(config.tokenizer.directory);
  } else if (config.tokenizer.kind == TokenizerConfig::Kind::kFile) {
    tokenizer = make_file_tokenizer(config.tokenizer.directory);
  } else {
    const std::string beside = std::filesystem::path(config.train).parent_path().string();
    tokenizer = load_text_tokenizer(beside.empty() ? "." : beside);
  }
  log::info("data: {} training and {} validation tokens in token files, {}", train.count, validation.count,
            tokenizer ? "tokenizer " + tokenizer->identity() : "no tokenizer");
}

void DataSet::State::check_lengths(const DataConfig& config) const {
  const auto check = [&](const Split& split, const std::string& where, const char* what, const char* hint) {
    if (split.count > seq_len) return;
    throw Error(Errc::kUsage, where,
                fmt::format("{} {} tokens found; a window of data.seq_len {} needs {}", split.count, what,
                            seq_len, seq_len + 1),
                hint);
  };
  check(train, config.train, "training",
        "more text, a smaller data.seq_len, or a smaller share for validation");
  if (!config.validation.empty()) {
    check(validation, config.validation, "validation", "more text, or a smaller data.seq_len");
  } else if (config.validation_share > 0) {
    check(validation, config.train, "validation",
          "a larger share for validation, a smaller data.seq_len, or \"validation\": 0 for none");
  }
}

void DataSet::State::check_ids(const Split& split) const {
  if (split.count == 0) return;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(std::min(kCheckTokens, split.count)));
  for (std::int64_t done = 0; done < split.count; done += kCheckTokens) {
    const std::int64_t n = std::min(kCheckTokens, split.count - done);
    split.file->read(split.first + done, n, ids.data());
    // Compared as unsigned, so that ids of 2^31 and more, which are negative here, are the largest.
    const auto largest = std::max_element(ids.begin(), ids.begin() + n, [](std::int32_t a, std::int32_t b) {
      return static_cast<std::uint32_t>(a) < static_cast<std::uint32_t>(b);
    });
    check_id(split, split.first + done + (largest - ids.begin()), *largest);
  }
}

void DataSet::State::throw_bad_id(const Split& split, std::int64_t position, std::int32_t id) const {
  const std::string beyond = tokenizer && tokenizer->vocab_size() > id_limit
                                 ? fmt::format("; the tokenizer's has {}", tokenizer->vocab_size())
                                 : "";
  throw Error(Errc::kUsage, split.file->path(),
              fmt::format("token {} at position {} is beyond the model's vocabulary of {}{}",
                          static_cast<std::uint32_t>(id), position,
                          id_limit > 0 ? std::to_string(id_limit) : "at most 2^31 - 1", beyond),
              "a larger model.vocab_size, or the right data.token_dtype (uint16 or uint32) for this file");
}

// Reads seq_len + 1 tokens from `start` of the split: seq_len inputs, and as targets their successors, of
// which it returns how many count.
std::int64_t DataSet::State::window(const Split& split, std::int64_t start, std::int32_t* ids,
                                    std::int32_t* targets) const {
  const std::int64_t first = split.first + start;
  split.file->read(first, seq_len, ids);
  split.file->read(first + seq_len, 1, targets + seq_len - 1);
  std::copy(ids + 1, ids + seq_len, targets);
  // The ids were checked when the file was opened, but the file may have changed since, and an id beyond the
  // vocabulary would make the embedding read past its end.
  for (std::int64_t i = 0; i < seq_len; ++i) check_id(split, first + i, ids[i]);
  check_id(split, first + seq_len, targets[seq_len - 1]);
  return split.mask ? split.mask->apply(first + 1, seq_len, targets) : seq_len;
}

void DataSet::State::resize(Batch& batch, std::int64_t sequences) const {
  ZG_ASSERT_GE(sequences, 0);
  const auto n = static_cast<std::size_t>(sequences * seq_len);
  batch.ids.resize(n);
  batch.targets.resize(n);
  batch.valid = 0;
}

DataSet::DataSet(const DataConfig& config, const std::string& cache_dir, std::int64_t vocab_size)
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  if (config.train.empty())
    throw Error(Errc::kUsage, "data.train", "is missing: a text or a token file (.bin)");
  if (config.seq_len < 1) {
    throw Error(Errc::kUsage, "data.seq_len", fmt::format("{} found, 1 or more expected", config.seq_len));
  }
  if (!(config.validation_share >= 0 && config.validation_share < 1)) {
    throw Error(Errc::kUsage, "data.validation",
                fmt::format("a share of {} found, one in [0, 1) expected", config.validation_share));
  }
  const bool tokens = is_token_file(config.train);
  if (!config.validation.empty() && is_token_file(config.validation) != tokens) {
    throw Error(Errc::kUsage, "data.validation",
                fmt::format("{} is a {}, while {} is a {}", config.validation, tokens ? "text" : "token file",
                            config.train, tokens ? "token file" : "text"),
                "both must be of one kind, so that their tokens mean the same");
  }
  s.seq_len = config.seq_len;
  s.id_limit = vocab_size;
  if (tokens) {
    s.take_token_files(config);
  } else {
    s.take_texts(config, cache_dir);
  }
  s.check_lengths(config);
  // Tokens made here are below the tokenizer's vocabulary, so they need not all be read.
  const bool known_below = !tokens && (vocab_size == 0 || s.tokenizer->vocab_size() <= vocab_size);
  const bool cannot_be_above =
      s.train.file->dtype() == DType::kU16 && (vocab_size == 0 || vocab_size > 65535);
  if (!known_below && !cannot_be_above) {
    s.check_ids(s.train);
    s.check_ids(s.validation);
  }
}

DataSet::~DataSet() = default;

const Tokenizer* DataSet::tokenizer() const {
  return state_->tokenizer.get();
}
std::int64_t DataSet::vocab_size() const {
  return state_->tokenizer ? state_->tokenizer->vocab_size() : 0;
}
std::int64_t DataSet::train_tokens() const {
  return state_->train.count;
}
std::int64_t DataSet::validation_tokens() const {
  return state_->validation.count;
}

void DataSet::train_batch(std::uint64_t seed, std::int64_t step, std::int64_t first_sequence,
                          std::int64_t sequences, Batch& out) const {
  const State& s = *state_;
  ZG_ASSERT(step >= 0 && first_sequence >= 0, "step {}, sequence {}", step, first_sequence);
  s.resize(out, sequences);
  // Each step has a random stream of its own, so that the number of sequences in a step, which is not known
  // here, does not matter.
  std::array<char, 32> name;
  const auto end = fmt::format_to_n(name.data(), name.size(), "data.{}", step).out;
  const NamedRandom random(seed, std::string_view(name.data(), static_cast<std::size_t>(end - name.data())));
  for (std::int64_t i = 0; i < sequences; ++i) {
    const std::uint64_t starts = static_cast<std::uint64_t>(s.train.count - s.seq_len);
    const std::uint64_t start = random.below(static_cast<std::uint64_t>(first_sequence + i), starts);
    out.valid += s.window(s.train, static_cast<std::int64_t>(start), out.ids.data() + i * s.seq_len,
                          out.targets.data() + i * s.seq_len);
  }
}

void DataSet::validation_batch(std::int64_t first_sequence, std::int64_t sequences, Batch& out) const {
  const State& s = *state_;
  ZG_ASSERT(s.validation.count > 0, "there is no validation data");
  ZG_ASSERT_GE(first_sequence, 0);
  s.resize(out, sequences);
  const std::int64_t windows = (s.validation.count - 1) / s.seq_len;
  for (std::int64_t i = 0; i < sequences; ++i) {
    const std::int64_t start = (first_sequence + i) % windows * s.seq_len;
    out.valid +=
        s.window(s.validation, start, out.ids.data() + i * s.seq_len, out.targets.data() + i * s.seq_len);
  }
}

}  // namespace zg
