#include "ziggurat/data/dataset.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <optional>
#include <string_view>
#include <tuple>

#include "data/packing.hpp"
#include "data/shuffle.hpp"
#include "data/sources.hpp"
#include "data/tokens.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg {
namespace {

constexpr std::int64_t kCheckTokens = 1 << 20;  // read at a time when a whole file is checked

// A file's sequences: windows that begin `stride` tokens apart, or packed documents.
struct Part {
  Split split;
  std::optional<PackedDocuments> packed;
  std::int64_t stride = 1;
  std::int64_t begin = 0;  // index of its first sequence in its pool
};

// The sequences of a source.
struct Pool {
  double end = 0;  // end of its interval in [0, 1), whose length is its share of the weights
  std::vector<Part> parts;
  std::int64_t sequences = 0;

  const Part& part_of(std::int64_t sequence) const {
    const auto behind = std::upper_bound(parts.begin(), parts.end(), sequence,
                                         [](std::int64_t s, const Part& p) { return s < p.begin; });
    return *std::prev(behind);
  }
};

// The pool whose interval contains x, in [0, 1).
const Pool& pool_at(const std::vector<Pool>& pools, double x) {
  const auto found = std::find_if(pools.begin(), pools.end(), [&](const Pool& p) { return x < p.end; });
  return found == pools.end() ? pools.back() : *found;
}

NamedRandom random_of(std::uint64_t seed, const char* what, std::int64_t step) {
  std::array<char, 48> name;
  const auto end = fmt::format_to_n(name.data(), name.size(), "{}{}", what, step).out;
  return {seed, std::string_view(name.data(), static_cast<std::size_t>(end - name.data()))};
}

}  // namespace

struct DataSet::State {
  std::int64_t seq_len = 0;
  std::int64_t id_limit = 0;           // all ids must be below it; 0: no limit
  bool made_here = false;              // the tokens were made by this program, from texts
  bool packs = false, blends = false;  // blends: several sources, each of which must have a sequence
  std::int64_t step_sequences = 0;     // epochs: sequences in a step's global batch; 0: random order
  std::unique_ptr<TextTokenizer> tokenizer;
  std::vector<Pool> train, validation;
  std::int64_t train_tokens = 0, validation_tokens = 0;
  std::int64_t train_targets = 0, validation_targets = 0;

  void add(std::vector<Pool>& pools, double weight, std::vector<Split> splits, std::int64_t stride);
  void check_lengths(const DataConfig& config) const;
  std::string needs() const;
  std::string why_no_validation(const DataConfig& config) const;
  void check_targets(const Sources& sources) const;
  void check_ids(const Split& split) const;
  void check_id(const Split& split, std::int64_t position, std::int32_t id) const {
    if (id < 0 || (id_limit > 0 && id >= id_limit)) throw_bad_id(split, position, id);
  }
  void check_tokens(const Split& split, std::int64_t first, const std::vector<std::int32_t>& tokens) const {
    for (std::size_t i = 0; i < tokens.size(); ++i)
      check_id(split, first + static_cast<std::int64_t>(i), tokens[i]);
  }
  static std::vector<std::int32_t> read_tokens(const Split& split, std::int64_t first, std::int64_t n) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(n));
    split.file->read(first, n, tokens.data());
    return tokens;
  }
  [[noreturn]] void throw_bad_id(const Split& split, std::int64_t position, std::int32_t id) const;
  std::int64_t window(const Split& split, std::int64_t start, std::int32_t* ids, std::int32_t* targets) const;
  std::int64_t packed(const Part& part, std::int64_t sequence, std::int32_t* ids, std::int32_t* targets,
                      std::int32_t* first_keys) const;
  void read(const Pool& pool, std::int64_t sequence, std::int64_t place, Batch& out) const;
  void resize(Batch& batch, std::int64_t sequences) const;
};

// The text of an error about data without a single sequence.
std::string DataSet::State::needs() const {
  if (packs) return "none of their documents has two";
  return fmt::format("a window of data.seq_len {} needs {}", seq_len, seq_len + 1);
}

// Adds a pool with the sequences of a source's files, if there are any.
void DataSet::State::add(std::vector<Pool>& pools, double weight, std::vector<Split> splits,
                         std::int64_t stride) {
  Pool pool;
  pool.end = weight;
  std::vector<std::string> left_out;
  std::string first;  // file, and tokens of all
  std::int64_t tokens = 0;
  for (Split& split : splits) {
    Part part{.split = std::move(split), .packed = {}, .stride = stride, .begin = pool.sequences};
    const Split& s = part.split;
    tokens += s.count;
    if (s.file && first.empty()) first = s.file->path();
    if (!packs) {
      pool.sequences += std::max<std::int64_t>(0, stride == 1 ? s.count - seq_len : (s.count - 1) / seq_len);
    } else if (s.documents) {
      part.packed.emplace(s.documents, s.first_document, s.document_count, seq_len);
      pool.sequences += part.packed->sequences();
    }
    if (pool.sequences > part.begin) {
      pool.parts.push_back(std::move(part));
    } else if (s.file) {
      left_out.push_back(fmt::format("the {} tokens of {}", s.count, s.file->path()));
    }
  }
  if (pool.sequences > 0) {
    for (const std::string& what : left_out)
      log::warning("data: {} are too few for a sequence, and are left out", what);
    return pools.push_back(std::move(pool));
  }
  if (stride > 1 || !blends) return;
  throw Error(Errc::kUsage, first.empty() ? "data.blend" : first,
              fmt::format("{} training tokens found in this source of {} file(s); {}", tokens, splits.size(),
                          needs()),
              "more text, a smaller data.seq_len, or a blend without it");
}

// Turns the pools' weights into intervals of [0, 1).
static void share_out(std::vector<Pool>& pools) {
  double sum = 0, end = 0;
  for (const Pool& pool : pools) sum += pool.end;
  for (Pool& pool : pools) end += pool.end / sum, pool.end = end;
}

void DataSet::State::check_lengths(const DataConfig& config) const {
  const auto fail = [&](const std::string& where, std::int64_t tokens, const char* what, const char* hint) {
    throw Error(Errc::kUsage, where, fmt::format("{} {} tokens found; {}", tokens, what, needs()), hint);
  };
  const std::string where = config.blend.empty() ? config.train : "data.train";
  if (train.empty())
    fail(where, train_tokens, "training",
         "more text, a smaller data.seq_len, or a smaller share for validation");
  if (!validation.empty()) return;
  if (!config.validation.empty()) {
    fail(config.validation, validation_tokens, "validation", "more text, or a smaller data.seq_len");
  } else if (config.validation_share > 0) {
    throw Error(Errc::kUsage, where,
                fmt::format("{} validation tokens found{}; {}", validation_tokens, why_no_validation(config),
                            needs()),
                "a file of its own as data.validation, a larger share for it, a smaller data.seq_len, or "
                "\"validation\": 0 for none");
  }
}

std::string DataSet::State::why_no_validation(const DataConfig& config) const {
  return fmt::format(", since data.validation is the share {} of {} tokens{}", config.validation_share,
                     train_tokens + validation_tokens, packs ? ", in whole documents" : "");
}

// Checks that training data and validation data have targets.
void DataSet::State::check_targets(const Sources& sources) const {
  const std::string documents =
      sources.documents >= 0 ? fmt::format("{} documents, ", sources.documents) : "";
  log::info("data: training on {}: {}{} tokens, of which {} are targets", sources.taken_as, documents,
            train_tokens, train_targets);
  const auto check = [&](const char* key, const char* what, std::int64_t tokens, std::int64_t targets) {
    if (tokens == 0 || targets > 0) return;
    throw Error(
        Errc::kUsage, key,
        fmt::format("none of the {} {} tokens is a target of the loss: {}", tokens, what,
                    packs ? "the documents have one token each, or masks leave all out"
                          : "masks leave all of them out"),
        "look at \"labels\", \"loss_mask\" or NAME.mask of these files: -100 and 0 leave a token out");
  };
  check("data.train", "training", train_tokens, train_targets);
  check("data.validation", "validation", validation_tokens, validation_targets);
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
  const bool of_tokenizer = tokenizer && tokenizer->vocab_size() == id_limit;
  std::string vocabulary = fmt::format("the {} vocabulary of {}", of_tokenizer ? "tokenizer's" : "model's",
                                       id_limit > 0 ? std::to_string(id_limit) : "at most 2^31 - 1");
  if (tokenizer && tokenizer->vocab_size() > id_limit)
    vocabulary += fmt::format("; the tokenizer's has {}", tokenizer->vocab_size());
  throw_bad_token(split.file->path(), position, id, vocabulary,
                  made_here && of_tokenizer
                      ? "the file was damaged, or changed while it was used: the next start makes it anew"
                      : "a larger model.vocab_size, the tokenizer that these tokens are of, or the right "
                        "data.token_dtype (uint16 or uint32) for this file");
}

// Reads seq_len + 1 tokens from `start` of the split: seq_len inputs, and their successors as targets.
// Returns the number of targets that count.
std::int64_t DataSet::State::window(const Split& split, std::int64_t start, std::int32_t* ids,
                                    std::int32_t* targets) const {
  const std::int64_t first = split.first + start;
  const std::vector<std::int32_t> tokens = read_tokens(split, first, seq_len + 1);
  std::copy(tokens.begin(), tokens.end() - 1, ids);
  std::copy(tokens.begin() + 1, tokens.end(), targets);
  // The ids were checked when the file was opened, but the file may have changed since, and an id beyond the
  // vocabulary would make the embedding read past its end.
  check_tokens(split, first, tokens);
  return split.mask ? split.mask->apply(first + 1, seq_len, targets) : seq_len;
}

// Reads a sequence of packed documents. The last token of a document and padding have no targets.
std::int64_t DataSet::State::packed(const Part& part, std::int64_t sequence, std::int32_t* ids,
                                    std::int32_t* targets, std::int32_t* first_keys) const {
  const Split& split = part.split;
  std::int64_t at = 0, valid = 0;
  for (const DocumentPiece& piece : part.packed->sequence(sequence)) {
    const std::int64_t n = piece.length, counted = piece.goes_on ? n : n - 1;
    const std::vector<std::int32_t> tokens = read_tokens(split, piece.first, n + (piece.goes_on ? 1 : 0));
    check_tokens(split, piece.first, tokens);
    std::copy_n(tokens.begin(), n, ids + at);
    std::copy(tokens.begin() + 1, tokens.end(), targets + at);
    if (!piece.goes_on) targets[at + n - 1] = MaskFile::kIgnored;
    valid += split.mask ? split.mask->apply(piece.first + 1, counted, targets + at) : counted;
    std::fill_n(first_keys + at, n, static_cast<std::int32_t>(at));
    at += n;
  }
  for (; at < seq_len; ++at)
    ids[at] = 0, targets[at] = MaskFile::kIgnored, first_keys[at] = static_cast<std::int32_t>(at);
  return valid;
}

// Reads sequence `sequence` of the pool into the batch's sequence `place`.
void DataSet::State::read(const Pool& pool, std::int64_t sequence, std::int64_t place, Batch& out) const {
  const Part& part = pool.part_of(sequence);
  const std::int64_t at = place * seq_len, own = sequence - part.begin;
  std::int32_t *const ids = out.ids.data() + at, *const targets = out.targets.data() + at;
  out.valid += packs ? packed(part, own, ids, targets, out.first_keys.data() + at)
                     : window(part.split, own * part.stride, ids, targets);
}

void DataSet::State::resize(Batch& batch, std::int64_t sequences) const {
  ZG_ASSERT_GE(sequences, 0);
  const auto n = static_cast<std::size_t>(sequences * seq_len);
  batch.ids.resize(n);
  batch.targets.resize(n);
  batch.first_keys.resize(packs ? n : 0);
  batch.valid = 0;
}

DataSet::DataSet(const DataConfig& config, const std::string& cache_dir, std::int64_t vocab_size)
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  if (config.train.empty() && config.blend.empty())
    throw Error(Errc::kUsage, "data.train", "is missing: a text or a token file (.bin)");
  if (config.seq_len < 1) {
    throw Error(Errc::kUsage, "data.seq_len", fmt::format("{} found, 1 or more expected", config.seq_len));
  }
  if (!(config.validation_share >= 0 && config.validation_share < 1)) {
    throw Error(Errc::kUsage, "data.validation",
                fmt::format("a share of {} found, one in [0, 1) expected", config.validation_share));
  }
  s.seq_len = config.seq_len;
  s.id_limit = vocab_size;
  s.packs = config.packing == Packing::kDocuments;
  s.blends = config.blend.size() > 1;
  if (config.order == Order::kEpochs) {
    if (s.blends) {
      throw Error(Errc::kUsage, "data.order",
                  "\"epochs\" found with several sources, of which some come round sooner than others",
                  "\"random\", or data.train with a list of files in place of data.blend");
    }
    ZG_ASSERT_GE(config.step_sequences, 1);
    s.step_sequences = config.step_sequences;
  }
  Sources sources = Sources::open(config, cache_dir);
  s.tokenizer = std::move(sources.tokenizer);
  // The tokenizer says how large the vocabulary is where the model does not. Tokens made here are below it.
  s.made_here = sources.tokens_known_below;
  const std::int64_t known = s.tokenizer ? s.tokenizer->vocab_size() : 0;
  if (known > 0 && (s.id_limit == 0 || (s.made_here && known < s.id_limit))) s.id_limit = known;
  // If so, the tokens need not all be read to check them.
  const bool known_below =
      sources.tokens_known_below && (vocab_size == 0 || s.tokenizer->vocab_size() <= vocab_size);
  std::vector<Split> to_check;
  for (Source& source : sources.list) {
    for (const auto& [splits, tokens, targets] :
         {std::tuple(&source.train, &s.train_tokens, &s.train_targets),
          std::tuple(&source.validation, &s.validation_tokens, &s.validation_targets)}) {
      for (const Split& split : *splits) {
        const std::int64_t can_be_learnt = targets_of(split, s.packs);
        *tokens += split.count, *targets += can_be_learnt;
        if (split.count > 1 && can_be_learnt == 0)
          log::warning("data: none of {} tokens of {} is a target", split.count, split.file->path());
        const bool cannot_be_above =
            split.count > 0 && split.file->dtype() == DType::kU16 && (s.id_limit == 0 || s.id_limit > 65535);
        if (!known_below && !cannot_be_above) to_check.push_back(split);
      }
    }
    s.add(s.train, source.weight, std::move(source.train), s.step_sequences > 0 ? s.seq_len : 1);
    s.add(s.validation, source.weight, std::move(source.validation), s.seq_len);
  }
  s.check_lengths(config);
  share_out(s.train), share_out(s.validation);
  if (s.packs) {
    std::int64_t sequences = 0, tokens = 0;
    for (const Pool& pool : s.train) {
      sequences += pool.sequences;
      for (const Part& part : pool.parts) tokens += part.packed->tokens();
    }
    log::info("data: documents packed into {} sequences of {} tokens, {:.1f}% full", sequences, s.seq_len,
              100 * static_cast<double>(tokens) / static_cast<double>(sequences * s.seq_len));
  }
  s.check_targets(sources);
  for (const Split& split : to_check) s.check_ids(split);
}

DataSet::~DataSet() = default;

const Tokenizer* DataSet::tokenizer() const {
  return state_->tokenizer.get();
}
std::int64_t DataSet::vocab_size() const {
  return state_->tokenizer ? state_->tokenizer->vocab_size() : 0;
}
std::int64_t DataSet::train_tokens() const {
  return state_->train_tokens;
}
std::int64_t DataSet::validation_tokens() const {
  return state_->validation_tokens;
}
std::int64_t DataSet::validation_sequences() const {
  std::int64_t sequences = 0;
  for (const Pool& pool : state_->validation) sequences += pool.sequences;
  return sequences;
}

void DataSet::train_batch(std::uint64_t seed, std::int64_t step, std::int64_t first_sequence,
                          std::int64_t sequences, Batch& out) const {
  const State& s = *state_;
  ZG_ASSERT(step >= 0 && first_sequence >= 0, "step {}, sequence {}", step, first_sequence);
  s.resize(out, sequences);
  if (s.step_sequences > 0) {
    const Pool& pool = s.train.front();
    for (std::int64_t i = 0; i < sequences; ++i) {
      const std::int64_t number = step * s.step_sequences + first_sequence + i, n = pool.sequences;
      s.read(pool, Shuffle(random_of(seed, "data.epoch.", number / n), n).at(number % n), i, out);
    }
    return;
  }
  // Each step has its own random streams, so the number of sequences in a step need not be known here.
  const NamedRandom random = random_of(seed, "data.", step), blend = random_of(seed, "data.blend.", step);
  for (std::int64_t i = 0; i < sequences; ++i) {
    const auto number = static_cast<std::uint64_t>(first_sequence + i);
    const double x = s.train.size() == 1 ? 0 : static_cast<double>(blend.below(number, 1ull << 53)) * 0x1p-53;
    const Pool& pool = pool_at(s.train, x);
    const std::uint64_t sequence = random.below(number, static_cast<std::uint64_t>(pool.sequences));
    s.read(pool, static_cast<std::int64_t>(sequence), i, out);
  }
}

void DataSet::validation_batch(std::int64_t first_sequence, std::int64_t sequences, Batch& out) const {
  const State& s = *state_;
  ZG_ASSERT(s.validation_tokens > 0, "there is no validation data");
  ZG_ASSERT_GE(first_sequence, 0);
  s.resize(out, sequences);
  for (std::int64_t i = 0; i < sequences; ++i) {
    const std::int64_t number = first_sequence + i;
    const double turns = static_cast<double>(number) * std::numbers::phi;
    const Pool& pool = pool_at(s.validation, s.validation.size() == 1 ? 0 : turns - std::floor(turns));
    s.read(pool, number % pool.sequences, i, out);
  }
}

}  // namespace zg
