#include "data/token_cache.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "data/documents.hpp"
#include "data/token_writer.hpp"
#include "data/utf8.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/json.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/hash.hpp"

namespace zg {
namespace {

constexpr int kCacheVersion = 2;
constexpr const char* kTrainFile = "train.bin";
constexpr const char* kValidationFile = "validation.bin";
constexpr const char* kProgressFile = "progress.json";
constexpr std::size_t kShareBytes = 128 << 10;              // of a text that one thread tokenises at a time
constexpr std::int64_t kSaveEvery = std::int64_t{1} << 28;  // bytes of text between two notes of the progress

// Calls work(i) for i in [0, n) on the machine's threads. If several calls throw, the error of the smallest i
// is thrown.
template <class Work>
void in_parallel(std::size_t n, const Work& work) {
  std::vector<std::exception_ptr> errors(n);
  parallel_for(static_cast<std::int64_t>(n), 1, [&](std::int64_t begin, std::int64_t) {
    const auto i = static_cast<std::size_t>(begin);
    try {
      work(i);
    } catch (...) {
      errors[i] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// The tokens of a piece that may be cut at its end.
std::vector<std::int32_t> encode_piece(const TextTokenizer& tokenizer, std::string_view piece,
                                       const TextPlace& place) {
  std::vector<std::size_t> cuts{0};
  while (piece.size() - cuts.back() > kShareBytes) {
    const std::size_t n = tokenizer.safe_prefix(piece.substr(cuts.back(), kShareBytes));
    if (n == 0) break;
    cuts.push_back(cuts.back() + n);
  }
  cuts.push_back(piece.size());
  std::vector<std::vector<std::int32_t>> parts(cuts.size() - 1);
  in_parallel(parts.size(), [&](std::size_t i) {
    const TextPlace at{.where = place.where,
                       .offset = place.offset + static_cast<std::int64_t>(cuts[i]),
                       .goes_on = place.goes_on || i > 0};
    tokenizer.append(piece.substr(cuts[i], cuts[i + 1] - cuts[i]), at, parts[i]);
  });
  std::vector<std::int32_t> ids;
  for (const auto& part : parts) ids.insert(ids.end(), part.begin(), part.end());
  return ids;
}

// A lock that is held while the cache is checked and made. The system releases it when the process ends.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::string& directory)
      : fd_(::open((directory + "/tokens.lock").c_str(),
                   O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644)) {
    if (fd_.get() < 0) {
      throw Error(Errc::kIo, directory, "its lock file tokens.lock cannot be made: " + errno_text(errno),
                  "check the directory and its permissions");
    }
    // Polls instead of waiting in the kernel, since a signal does not end that wait.
    bool told = false;
    while (const int error = try_lock(fd_.get())) {
      if (error != EWOULDBLOCK) throw Error(Errc::kIo, directory, "cannot be locked: " + errno_text(error));
      if (!std::exchange(told, true))
        log::info("data: another process makes tokens in {}; waiting for it", directory);
      if (interrupted()) throw Error(Errc::kInterrupted, directory, "interrupted while waiting for its lock");
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }

 private:
  Descriptor fd_;
};

// An interrupted run's record of a file that it was making.
struct Kept {
  Progress at;
  bool complete = false;
};

// The value if it is a whole number from 0 to `most`, else -1.
std::int64_t whole_number(const nlohmann::json& value, std::int64_t most) {
  if (!value.is_number_integer() || value < 0 || value > most) return -1;
  return value.get<std::int64_t>();
}

constexpr std::int64_t kMostTokens = std::int64_t{1} << 56;

std::int64_t bytes_of(const std::string& path) {
  std::error_code error;
  const auto bytes = std::filesystem::file_size(path, error);
  return error ? -1 : static_cast<std::int64_t>(bytes);
}

class CacheMaker {
 public:
  CacheMaker(const DataConfig& config, const std::string& directory, std::unique_ptr<TextTokenizer> tokenizer)
      : config_(config), directory_(directory), train_(config.train) {
    if (!config.validation.empty()) validation_.emplace(config.validation);
    cache_.tokenizer = tokenizer ? std::move(tokenizer) : make_named_tokenizer(config.tokenizer);
    if (train_.documents() && !cache_.tokenizer) {
      throw Error(Errc::kUsage, "data.tokenizer",
                  fmt::format("\"chars\" takes its vocabulary from a text, and {} has {}", config.train,
                              name_of(train_.kind())),
                  "\"bytes\", {\"gpt2\": \"directory\"} or {\"file\": \"tokenizer.json\"}");
    }
  }

  TokenCache run() {
    const DirectoryLock lock(directory_);
    const nlohmann::json wanted = sources();
    if (!reuse(wanted)) make(wanted);
    return std::move(cache_);
  }

 private:
  bool by_characters() const { return config_.tokenizer.kind != TokenizerConfig::Kind::kBytes; }
  std::string path(const char* file) const { return (std::filesystem::path(directory_) / file).string(); }

  // Everything that the tokens depend on, which is known before any text is read: the vocabulary of "chars"
  // follows from the text.
  nlohmann::json sources() const {
    nlohmann::json stamp = {{"version", kCacheVersion}, {"train", train_.stamp()}};
    stamp["tokenizer"] = cache_.tokenizer ? cache_.tokenizer->identity() : "chars";
    if (train_.documents() || (validation_ && validation_->documents()))
      stamp["document_end"] = config_.document_end;
    if (validation_) {
      stamp["validation"] = validation_->stamp();
    } else {
      stamp["validation_share"] = config_.validation_share;
    }
    return stamp;
  }

  // All results except the checksums.
  nlohmann::json results() const {
    return {{"tokenizer", cache_.tokenizer->identity()},
            {"dtype", cache_.dtype == DType::kU16 ? "uint16" : "uint32"},
            {"train_tokens", cache_.train_tokens},
            {"validation_tokens", cache_.validation_tokens}};
  }
  std::string path_beside(const char* file, const char* ending) const {
    return std::filesystem::path(path(file)).replace_extension(ending).string();
  }
  bool is_documents(const char* file) const {
    return file == kTrainFile || !validation_ ? train_.documents() : validation_->documents();
  }
  bool has_mask(const char* file) const {
    return is_documents(file) && bytes_of(path_beside(file, ".mask")) >= 0;
  }

  // XXH3 of each file of the cache, by its name.
  std::map<std::string, std::string> checksums() const {
    std::map<std::string, std::string> sums;
    const auto add = [&](const std::string& file) {
      sums[std::filesystem::path(file).filename().string()] = checksum_of(file);
    };
    for (const auto& [file, tokens] :
         {std::pair(kTrainFile, cache_.train_tokens), std::pair(kValidationFile, cache_.validation_tokens)}) {
      if (tokens == 0) continue;
      add(path(file));
      if (has_mask(file)) add(path_beside(file, ".mask"));
      if (is_documents(file)) add(path_beside(file, ".docs"));
    }
    return sums;
  }
  std::string checksum_of(const std::string& file) const {
    const InputFile opened(file, "a file of a token cache");
    io::Hash hash;
    std::vector<char> block(1 << 20);
    for (std::int64_t at = 0; at < opened.bytes();) {
      const std::int64_t n = std::min<std::int64_t>(opened.bytes() - at, 1 << 20);
      opened.read(block.data(), n, at);
      hash.update(block.data(), n);
      at += n;
      if (interrupted()) throw Error(Errc::kInterrupted, file, "interrupted while its checksum was computed");
    }
    return io::hash_text(hash.value());
  }

  DType dtype_of_tokens() const {
    return cache_.tokenizer->vocab_size() <= 65536 ? DType::kU16 : DType::kI32;
  }

  // Called under the lock, so that the files opened are those just made, even if another process replaces
  // them next.
  void open_tokens() {
    const auto open = [&](const char* file, std::int64_t tokens) -> std::unique_ptr<TokenFile> {
      if (tokens == 0) return nullptr;
      auto opened = std::make_unique<TokenFile>(path(file), cache_.dtype);
      if (opened->size() == tokens) return opened;
      throw Error(Errc::kIo, path(file),
                  fmt::format("holds {} tokens, {} were written", opened->size(), tokens));
    };
    cache_.train = open(kTrainFile, cache_.train_tokens);
    cache_.validation = open(kValidationFile, cache_.validation_tokens);
    const auto mask = [&](const char* file, std::int64_t tokens) -> std::shared_ptr<const MaskFile> {
      if (tokens == 0 || !has_mask(file)) return nullptr;
      return std::make_shared<const MaskFile>(path_beside(file, ".mask"), tokens);
    };
    cache_.train_mask = mask(kTrainFile, cache_.train_tokens);
    cache_.validation_mask = mask(kValidationFile, cache_.validation_tokens);
    const auto documents = [&](const char* file,
                               std::int64_t tokens) -> std::shared_ptr<const DocumentIndex> {
      if (tokens == 0 || !is_documents(file)) return nullptr;
      return DocumentIndex::open_docs(path_beside(file, ".docs"), tokens);
    };
    cache_.train_documents = documents(kTrainFile, cache_.train_tokens);
    cache_.validation_documents = documents(kValidationFile, cache_.validation_tokens);
  }

  // Whether the cache in the directory can be used. Otherwise, for whatever reason, it is made anew: nothing
  // in it belongs to the user.
  bool reuse(const nlohmann::json& wanted) {
    if (bytes_of(path("tokens.json")) < 0) return false;
    const auto begin = Clock::now();
    const nlohmann::json stamp = read_json("tokens.json", "the stamp of a token cache");
    nlohmann::json found = stamp.is_object() ? stamp.value("sources", nlohmann::json()) : nlohmann::json();
    if (found != wanted) {
      const bool older = found.is_object() && found.value("version", nlohmann::json()) != kCacheVersion;
      log::info("data: the tokens in {} are {}, and are made anew", directory_,
                older ? "of another version of ziggurat, without the checksums of this one"
                      : "of other sources or settings");
      return false;
    }
    const bool learned =
        !cache_.tokenizer;  // its vocabulary follows from the text, and is in the cache's directory
    const std::string wrong =
        take_results(stamp.value("results", nlohmann::json()), stamp.value("xxh3", nlohmann::json()));
    if (wrong.empty()) {
      const double seconds = seconds_between(begin, Clock::now());
      log::info("data: {} training and {} validation tokens, kept in {}{}", cache_.train_tokens,
                cache_.validation_tokens, directory_,
                seconds < 1 ? "" : "; their checksums took " + format_seconds(seconds));
      return true;
    }
    log::warning("data: the tokens in {} are damaged and made anew: {}", directory_, wrong);
    if (learned) cache_.tokenizer = nullptr;
    return false;
  }

  // A JSON file of the cache; null if it is damaged.
  nlohmann::json read_json(const char* file, const char* what) const {
    try {
      return parse_json(read_text_file(path(file), what), path(file), "");
    } catch (const Error& e) {
      if (e.code() != Errc::kUsage) throw;
      log::warning("data: {}", e.what());
      return {};
    }
  }

  // Opens the files that `found` describes. Returns what is wrong with them; empty: nothing, and cache_ is
  // complete.
  std::string take_results(const nlohmann::json& found, const nlohmann::json& sums) {
    try {
      if (!found.is_object()) return "the stamp lacks its results";
      if (!cache_.tokenizer) cache_.tokenizer = load_text_tokenizer(directory_);
      if (!cache_.tokenizer) return "the tokenizer is missing";
      cache_.train_tokens = whole_number(found.value("train_tokens", nlohmann::json()), kMostTokens);
      cache_.validation_tokens =
          whole_number(found.value("validation_tokens", nlohmann::json()), kMostTokens);
      if (cache_.train_tokens < 0 || cache_.validation_tokens < 0)
        return "the stamp does not say how many tokens there are";
      cache_.dtype = dtype_of_tokens();
      if (found != results()) return "the stamp does not match the tokenizer";
      open_tokens();
      const auto found_sums = checksums();
      if (!sums.is_object() || sums.size() != found_sums.size()) {
        return fmt::format("the stamp has the XXH3 of {} files, here are {}", sums.size(), found_sums.size());
      }
      for (const auto& [file, sum] : found_sums) {
        const auto expected = sums.value(file, nlohmann::json());
        if (sum != expected)
          return fmt::format("{} has the XXH3 {}, {} is expected", file, sum, expected.dump());
      }
    } catch (const Error& e) {
      if (e.code() == Errc::kInterrupted) throw;
      return e.what();
    }
    return {};
  }

  void make(const nlohmann::json& wanted) {
    const auto begin = Clock::now();
    for (const TextFile* file : {&train_, validation_ ? &*validation_ : nullptr}) {
      if (file != nullptr)
        log::info("data: tokenising {} ({}) as {}", file->path(), format_bytes(file->size()),
                  name_of(file->kind()));
    }
    std::error_code ignored;
    // The stamp is removed first, so that the directory has no valid cache until a new one is complete.
    std::filesystem::remove(path("tokens.json"), ignored);
    wanted_ = wanted;
    take_progress();
    const std::int64_t characters = !train_.documents() && by_characters() ? survey() : 0;
    const std::int64_t cut = train_.documents() || validation_ ? train_.size() : cut_of(characters);
    cache_.dtype = dtype_of_tokens();
    cache_.train_tokens = tokenise(train_, train_.begin(), cut, kTrainFile);
    if (validation_) {
      cache_.validation_tokens =
          tokenise(*validation_, validation_->begin(), validation_->size(), kValidationFile);
    } else if (cut < train_.size()) {
      cache_.validation_tokens = tokenise(train_, cut, train_.size(), kValidationFile);
    }
    std::filesystem::remove(path(kProgressFile), ignored);
    cache_.tokenizer->save(directory_);
    const nlohmann::json stamp = {{"sources", wanted}, {"results", results()}, {"xxh3", checksums()}};
    write_file_atomically(path("tokens.json"), stamp.dump(1) + "\n");
    open_tokens();
    log::info("data: {} training and {} validation tokens made in {}", cache_.train_tokens,
              cache_.validation_tokens, format_seconds(seconds_between(begin, Clock::now())));
  }

  // Reads the text once: counts its characters, and makes the vocabulary of "chars".
  std::int64_t survey() {
    std::vector<bool> seen(0x110000);
    std::int64_t characters = 0;
    train_.for_pieces(train_.begin(), train_.size(), train_.begin(), utf8::whole_prefix,
                      [&](std::string_view piece, const TextPlace& place) {
                        characters += mark_code_points(piece, place, seen);
                        return true;
                      });
    if (!cache_.tokenizer) cache_.tokenizer = make_char_tokenizer(marked_code_points(seen));
    return characters;
  }

  // The byte where the training share ends.
  std::int64_t cut_of(std::int64_t characters) const {
    const std::int64_t units = by_characters() ? characters : train_.size() - train_.begin();
    const auto kept = static_cast<std::int64_t>(static_cast<double>(units) * (1 - config_.validation_share));
    if (kept >= units) return train_.size();
    return by_characters() ? byte_of_character(kept) : character_start(train_.begin() + kept);
  }

  std::int64_t byte_of_character(std::int64_t index) const {
    std::int64_t seen = 0, byte = train_.size();
    train_.for_pieces(train_.begin(), train_.size(), train_.begin(), utf8::whole_prefix,
                      [&](std::string_view piece, const TextPlace& place) {
                        for (std::size_t at = 0; at < piece.size() && seen <= index; ++at) {
                          if (utf8::is_continuation(piece[at])) continue;
                          if (seen++ == index) byte = place.offset + static_cast<std::int64_t>(at);
                        }
                        return seen <= index;
                      });
    return byte;
  }

  // The start of the character that `byte` belongs to; `byte` itself if the text is not valid UTF-8.
  std::int64_t character_start(std::int64_t byte) const {
    char around[4];
    const std::int64_t begin = std::max<std::int64_t>(train_.begin(), byte - 3);
    train_.read(begin, byte + 1 - begin, around);
    for (std::int64_t at = byte; at >= begin; --at) {
      if (!utf8::is_continuation(around[at - begin])) return at;
    }
    return byte;
  }

  // Takes over the partial results of an interrupted run with the same sources. Other files are ignored.
  void take_progress() {
    if (bytes_of(path(kProgressFile)) < 0) return;
    const nlohmann::json found = read_json(kProgressFile, "the progress of tokens");
    const auto of = [](const nlohmann::json& from, const char* key) {
      return from.is_object() ? from.value(key, nlohmann::json()) : nlohmann::json();
    };
    if (found.is_object() && of(found, "sources") != wanted_) return;
    for (const char* file : {kTrainFile, kValidationFile}) {
      const nlohmann::json values = of(of(found, "files"), file);
      if (found.is_object() && values.is_null()) continue;
      const std::optional<Kept> kept = kept_of(file, values);
      if (kept) {
        progress_[file] = *kept;
        continue;
      }
      log::warning("data: what {} says of {} is no progress of what lies there: the tokens are made anew",
                   path(kProgressFile), file);
      progress_.clear();
      return;
    }
  }

  // Parses a file's progress. None if the values are invalid, or do not fit the files.
  std::optional<Kept> kept_of(const char* file, const nlohmann::json& values) const {
    constexpr std::int64_t kMostBytes = std::numeric_limits<std::int64_t>::max();
    if (!values.is_array() || values.size() != 6 || !values[5].is_boolean()) return {};
    const TextFile& text = file == kTrainFile || !validation_ ? train_ : *validation_;
    const auto number = [&](std::size_t i, std::int64_t most) { return whole_number(values[i], most); };
    const Progress at{number(0, text.size()), number(1, text.size()), number(2, kMostTokens),
                      number(3, number(2, kMostBytes)), number(4, text.size())};
    if (at.offset < text.begin() || at.lines < 0 || at.tokens < 0 || at.left_out < 0 || at.documents < 0)
      return {};
    const bool complete = values[5] == true;
    const auto width = static_cast<std::int64_t>(size_of(cache_.tokenizer ? dtype_of_tokens() : DType::kU16));
    const auto holds = [&](const std::string& name, std::int64_t bytes) {
      const std::int64_t has = bytes_of(complete ? name : name + ".part");
      return complete ? has == bytes : is_own_part(name + ".part") && has >= bytes;
    };
    const bool documents = is_documents(file), masked = documents && (!complete || at.left_out > 0);
    const bool held =
        holds(path(file), at.tokens * width) && (!masked || holds(path_beside(file, ".mask"), at.tokens)) &&
        (!documents || holds(path_beside(file, ".docs"), 8 * (at.documents + (complete ? 1 : 0))));
    return held ? std::optional<Kept>({at, complete}) : std::nullopt;
  }

  void save_progress(const char* file, const Progress& at, bool done) {
    progress_[file] = {at, done};
    nlohmann::json files = nlohmann::json::object();
    for (const auto& [name, kept] : progress_) {
      const Progress& p = kept.at;
      files[name] = {p.offset, p.lines, p.tokens, p.left_out, p.documents, kept.complete};
    }
    write_file_atomically(path(kProgressFile),
                          nlohmann::json{{"sources", wanted_}, {"files", files}}.dump(1) + "\n");
  }

  // Tokenises bytes [begin, end) of the text, and returns the number of tokens. Tokens of "chars" are always
  // made anew, since its vocabulary is.
  std::int64_t tokenise(const TextFile& text, std::int64_t begin, std::int64_t end, const char* file) {
    Progress at{.offset = begin};
    const auto known = progress_.find(file);
    if (known != progress_.end() && config_.tokenizer.kind != TokenizerConfig::Kind::kChars &&
        known->second.at.offset >= begin && known->second.at.offset <= end) {
      if (known->second.complete) return known->second.at.tokens;
      at = known->second.at;
      log::info("data: goes on at {} of {}, with {} tokens", format_bytes(at.offset), text.path(), at.tokens);
    }
    const bool documents = text.documents();
    TokenWriter writer(path(file), cache_.dtype, documents, at);
    std::int64_t saved = at.offset;
    const DocumentReader reader(*cache_.tokenizer, documents ? config_.document_end : "");
    RecordReader records(text.kind(), text.path(), at.lines, at.documents);
    const auto started = Clock::now();
    const std::int64_t from = at.offset;
    const auto use = [&](std::string_view piece, const TextPlace& place) {
      if (documents) {
        write_documents(reader, records.take(piece), writer, at);
        at.lines = records.lines();
      } else {
        const std::vector<std::int32_t> ids = encode_piece(*cache_.tokenizer, piece, place);
        writer.write(ids);
        at.tokens += static_cast<std::int64_t>(ids.size());
      }
      at.offset = place.offset + static_cast<std::int64_t>(piece.size());
      const double rate = static_cast<double>(at.offset - from) / seconds_between(started, Clock::now());
      log::progress(fmt::format("data: {} of {} tokenised, {}/s", format_bytes(at.offset), format_bytes(end),
                                format_bytes(static_cast<std::int64_t>(rate))));
      if (at.offset - saved < kSaveEvery) return true;
      saved = at.offset;
      writer.keep();
      save_progress(file, at, false);
      return true;
    };
    try {
      text.for_pieces(
          at.offset, end, begin,
          [&](std::string_view piece) {
            return documents ? records.whole(piece) : cache_.tokenizer->safe_prefix(piece);
          },
          use);
      if (documents) records.finish();
    } catch (const Error& e) {
      if (e.code() != Errc::kInterrupted) throw;
      writer.keep();
      save_progress(file, at, false);
      throw Error(Errc::kInterrupted, text.path(),
                  fmt::format("interrupted while it was tokenised; the tokens of the first {} are kept",
                              format_bytes(at.offset)),
                  "the same command goes on there");
    }
    log::progress("");
    writer.finish(at);
    sync_directory(directory_);
    save_progress(file, at, true);
    return at.tokens;
  }

  void write_documents(const DocumentReader& reader, const std::vector<Record>& records, TokenWriter& writer,
                       Progress& at) const {
    std::vector<Document> documents(records.size());
    in_parallel(records.size(), [&](std::size_t i) { reader.read(records[i], documents[i]); });
    for (const Document& document : documents) writer.write(document, at);
  }

  const DataConfig& config_;
  std::string directory_;
  TextFile train_;
  std::optional<TextFile> validation_;
  nlohmann::json wanted_;
  std::map<std::string, Kept> progress_;  // keyed by file name
  TokenCache cache_;
};

}  // namespace

TokenCache tokenise_cached(const DataConfig& config, const std::string& directory,
                           std::unique_ptr<TextTokenizer> tokenizer) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) throw Error(Errc::kIo, directory, "cannot be created: " + error.message());
  return CacheMaker(config, directory, std::move(tokenizer)).run();
}

}  // namespace zg
