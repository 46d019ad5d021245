#include "data/token_cache.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "data/documents.hpp"
#include "data/token_writer.hpp"
#include "data/utf8.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

constexpr int kCacheVersion = 1;
constexpr const char* kTrainFile = "train.bin";
constexpr const char* kValidationFile = "validation.bin";
constexpr const char* kProgressFile = "progress.json";
constexpr std::size_t kShareBytes = 128 << 10;              // of a text that one thread tokenises at a time
constexpr std::int64_t kSaveEvery = std::int64_t{1} << 28;  // bytes of text between two notes of the progress
constexpr std::size_t kLongestPiece = std::size_t{1} << 30;

// Calls work(i) for i in [0, n) on the machine's threads. Of several errors the one of the smallest i is
// thrown.
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

// A text file of any size, read in pieces.
class TextFile {
 public:
  explicit TextFile(const std::string& path) : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    struct stat st {};
    if (fd_.get() < 0 || ::fstat(fd_.get(), &st) != 0) {
      throw Error(Errc::kUsage, path, "a text cannot be read: " + errno_text(errno));
    }
    if (!S_ISREG(st.st_mode)) throw Error(Errc::kUsage, path, "a text is expected, this is no regular file");
    size_ = st.st_size;
    if (size_ == 0) throw Error(Errc::kUsage, path, "is empty; a text is expected");
    mtime_ns_ = std::int64_t{st.st_mtim.tv_sec} * 1'000'000'000 + st.st_mtim.tv_nsec;
  }

  const std::string& path() const { return path_; }
  std::int64_t size() const { return size_; }
  nlohmann::json stamp() const {
    return {{"path", std::filesystem::weakly_canonical(path_).string()},
            {"size", size_},
            {"mtime_ns", mtime_ns_}};
  }

  void read(std::int64_t offset, std::int64_t n, char* out) const {
    while (n > 0) {
      const ssize_t got = ::pread(fd_.get(), out, static_cast<std::size_t>(n), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw Error(Errc::kIo, path_, "cannot be read: " + errno_text(errno));
      if (got == 0)
        throw Error(Errc::kIo, path_, fmt::format("ended at byte {} of {}: it was cut", offset, size_));
      offset += got, out += got, n -= got;
    }
  }

  // Passes bytes [begin, end) to use(piece, place), in order. prefix(text) says after how many bytes a text
  // that goes on may be cut; 0: nowhere yet, more must be read.
  // `text_begin` is where the text begins that goes on at `begin`.
  void for_pieces(std::int64_t begin, std::int64_t end, std::int64_t text_begin,
                  const std::function<std::size_t(std::string_view)>& prefix,
                  const std::function<void(std::string_view, const TextPlace&)>& use) const {
    std::string buffer;
    std::int64_t read_to = begin;
    while (read_to < end || !buffer.empty()) {
      const std::int64_t more = std::min(static_cast<std::int64_t>(kPieceBytes), end - read_to);
      const std::size_t had = buffer.size();
      buffer.resize(had + static_cast<std::size_t>(more));
      read(read_to, more, buffer.data() + had);
      read_to += more;
      const std::size_t whole = read_to == end ? buffer.size() : prefix(buffer);
      const std::int64_t offset = read_to - static_cast<std::int64_t>(buffer.size());
      if (whole == 0 && buffer.size() > kLongestPiece) {
        throw Error(
            Errc::kUsage, path_,
            fmt::format(
                "the {} from byte {} on cannot be cut, neither into lines of documents nor into words",
                format_bytes(static_cast<std::int64_t>(buffer.size())), offset),
            "with this tokenizer give documents, a .jsonl file of {\"text\": ...}");
      }
      const TextPlace place{.where = path_, .offset = offset, .goes_on = offset > text_begin};
      if (whole > 0) use(std::string_view(buffer).substr(0, whole), place);
      buffer.erase(0, whole);
      if (interrupted()) throw Error(Errc::kInterrupted, path_, "interrupted while it was tokenised");
    }
  }

 private:
  std::string path_;
  Descriptor fd_;
  std::int64_t size_ = 0, mtime_ns_ = 0;
};

// A lock that is held while the cache is checked and made. The system releases it when the process ends.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::string& directory)
      : fd_(::open((directory + "/tokens.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
    if (fd_.get() < 0)
      throw Error(Errc::kIo, directory, "its lock file cannot be made: " + errno_text(errno));
    if (::flock(fd_.get(), LOCK_EX | LOCK_NB) == 0) return;
    log::info("data: another process makes tokens in {}; waiting for it", directory);
    while (::flock(fd_.get(), LOCK_EX) != 0) {
      if (errno != EINTR) throw Error(Errc::kIo, directory, "cannot be locked: " + errno_text(errno));
      if (interrupted()) throw Error(Errc::kInterrupted, directory, "interrupted while waiting for its lock");
    }
  }

 private:
  Descriptor fd_;
};

class CacheMaker {
 public:
  CacheMaker(const DataConfig& config, const std::string& directory, std::unique_ptr<TextTokenizer> tokenizer)
      : config_(config),
        directory_(directory),
        documents_(is_document_file(config.train)),
        train_(config.train) {
    if (!config.validation.empty()) validation_.emplace(config.validation);
    cache_.tokenizer = tokenizer ? std::move(tokenizer) : make_named_tokenizer(config.tokenizer);
    if (documents_ && !cache_.tokenizer) {
      throw Error(Errc::kUsage, "data.tokenizer",
                  "\"chars\" takes its vocabulary from a text, not from documents",
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

  // All that the tokens depend on. It is known before any text is read: the vocabulary of "chars" follows
  // from the text.
  nlohmann::json sources() const {
    nlohmann::json stamp = {{"version", kCacheVersion}, {"train", train_.stamp()}};
    stamp["tokenizer"] = cache_.tokenizer ? cache_.tokenizer->identity() : "chars";
    if (documents_) stamp["document_end"] = config_.document_end, stamp["document_places"] = true;
    if (validation_) {
      stamp["validation"] = validation_->stamp();
    } else {
      stamp["validation_share"] = config_.validation_share;
    }
    return stamp;
  }

  nlohmann::json results() const {
    nlohmann::json found = {{"tokenizer", cache_.tokenizer->identity()},
                            {"dtype", cache_.dtype == DType::kU16 ? "uint16" : "uint32"},
                            {"train_tokens", cache_.train_tokens},
                            {"validation_tokens", cache_.validation_tokens}};
    if (documents_) found["masks"] = {has_mask(kTrainFile), has_mask(kValidationFile)};
    return found;
  }
  bool has_mask(const char* file) const {
    return documents_ &&
           std::filesystem::exists(std::filesystem::path(path(file)).replace_extension(".mask"));
  }

  DType dtype_of_tokens() const {
    return cache_.tokenizer->vocab_size() <= 65536 ? DType::kU16 : DType::kI32;
  }

  // Called under the lock, so that these are the tokens that were made, even if another process makes others
  // next.
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
      return std::make_shared<const MaskFile>(
          std::filesystem::path(path(file)).replace_extension(".mask").string(), tokens);
    };
    cache_.train_mask = mask(kTrainFile, cache_.train_tokens);
    cache_.validation_mask = mask(kValidationFile, cache_.validation_tokens);
    const auto documents = [&](const char* file,
                               std::int64_t tokens) -> std::shared_ptr<const DocumentIndex> {
      if (tokens == 0 || !documents_) return nullptr;
      return DocumentIndex::open_docs(std::filesystem::path(path(file)).replace_extension(".docs").string(),
                                      tokens);
    };
    cache_.train_documents = documents(kTrainFile, cache_.train_tokens);
    cache_.validation_documents = documents(kValidationFile, cache_.validation_tokens);
  }

  // Whether the cache in the directory can be used. Otherwise, for whatever reason, it is made anew: nothing
  // in it belongs to the user.
  bool reuse(const nlohmann::json& wanted) {
    if (!std::filesystem::exists(path("tokens.json"))) return false;
    const std::string text = read_text_file(path("tokens.json"), "the stamp of a token cache");
    const auto stamp = nlohmann::json::parse(text, nullptr, false);
    if (!stamp.is_object() || stamp.value("sources", nlohmann::json()) != wanted) {
      log::info("data: the tokens in {} are of other sources or settings", directory_);
      return false;
    }
    const bool learned =
        !cache_.tokenizer;  // its vocabulary follows from the text, and lies beside the tokens
    const std::string wrong = take_results(stamp.value("results", nlohmann::json()));
    if (wrong.empty()) {
      log::info("data: {} training and {} validation tokens, kept in {}", cache_.train_tokens,
                cache_.validation_tokens, directory_);
      return true;
    }
    log::warning("data: the tokens in {} are damaged and made anew: {}", directory_, wrong);
    if (learned) cache_.tokenizer = nullptr;
    return false;
  }

  // Opens the files that `found` describes. Returns what is wrong with them; empty: nothing, and cache_ is
  // complete.
  std::string take_results(const nlohmann::json& found) {
    try {
      if (!cache_.tokenizer) cache_.tokenizer = load_text_tokenizer(directory_);
      if (!cache_.tokenizer) return "the tokenizer is missing";
      cache_.train_tokens = found.at("train_tokens").get<std::int64_t>();
      cache_.validation_tokens = found.at("validation_tokens").get<std::int64_t>();
      cache_.dtype = dtype_of_tokens();
      if (found != results()) return "the stamp does not match the tokenizer";
      open_tokens();
    } catch (const Error& e) {
      return e.what();
    } catch (const nlohmann::json::exception& e) {
      return e.what();
    }
    return {};
  }

  void make(const nlohmann::json& wanted) {
    const auto begin = Clock::now();
    log::info("data: tokenising {} ({})", train_.path(), format_bytes(train_.size()));
    std::error_code ignored;
    // Without its stamp the directory holds no valid cache until the end.
    std::filesystem::remove(path("tokens.json"), ignored);
    wanted_ = wanted;
    take_progress();
    const std::int64_t characters = !documents_ && by_characters() ? survey() : 0;
    const std::int64_t cut = documents_ || validation_ ? train_.size() : cut_of(characters);
    cache_.dtype = dtype_of_tokens();
    cache_.train_tokens = tokenise(train_, 0, cut, kTrainFile);
    if (validation_) {
      cache_.validation_tokens = tokenise(*validation_, 0, validation_->size(), kValidationFile);
    } else if (cut < train_.size()) {
      cache_.validation_tokens = tokenise(train_, cut, train_.size(), kValidationFile);
    }
    std::filesystem::remove(path(kProgressFile), ignored);
    cache_.tokenizer->save(directory_);
    const nlohmann::json stamp = {{"sources", wanted}, {"results", results()}};
    write_file_atomically(path("tokens.json"), stamp.dump(1) + "\n");
    open_tokens();
    log::info("data: {} training and {} validation tokens made in {}", cache_.train_tokens,
              cache_.validation_tokens, format_seconds(seconds_between(begin, Clock::now())));
  }

  // Reads the text once: counts its characters, and makes the vocabulary of "chars".
  std::int64_t survey() {
    std::vector<bool> seen(0x110000);
    std::int64_t characters = 0;
    train_.for_pieces(0, train_.size(), 0, utf8::whole_prefix,
                      [&](std::string_view piece, const TextPlace& place) {
                        characters += mark_code_points(piece, place, seen);
                      });
    if (!cache_.tokenizer) cache_.tokenizer = make_char_tokenizer(marked_code_points(seen));
    return characters;
  }

  // The byte where the training share ends.
  std::int64_t cut_of(std::int64_t characters) const {
    const std::int64_t units = by_characters() ? characters : train_.size();
    const auto kept = static_cast<std::int64_t>(static_cast<double>(units) * (1 - config_.validation_share));
    if (kept >= units) return train_.size();
    return by_characters() ? byte_of_character(kept) : character_start(kept);
  }

  std::int64_t byte_of_character(std::int64_t index) const {
    std::int64_t seen = 0, byte = train_.size();
    train_.for_pieces(0, train_.size(), 0, utf8::whole_prefix,
                      [&](std::string_view piece, const TextPlace& place) {
                        for (std::size_t at = 0; at < piece.size() && seen <= index; ++at) {
                          if (utf8::is_continuation(piece[at])) continue;
                          if (seen++ == index) byte = place.offset + static_cast<std::int64_t>(at);
                        }
                      });
    return byte;
  }

  // The start of the character that `byte` belongs to; `byte` itself where the text is no UTF-8.
  std::int64_t character_start(std::int64_t byte) const {
    char around[4];
    const std::int64_t begin = std::max<std::int64_t>(0, byte - 3);
    train_.read(begin, byte + 1 - begin, around);
    for (std::int64_t at = byte; at >= begin; --at) {
      if (!utf8::is_continuation(around[at - begin])) return at;
    }
    return byte;
  }

  // What an interrupted run of the same sources has made; whatever else lies there is ignored.
  void take_progress() {
    if (!std::filesystem::exists(path(kProgressFile))) return;
    const auto found =
        nlohmann::json::parse(read_text_file(path(kProgressFile), "the progress of tokens"), nullptr, false);
    try {
      if (found.at("sources") != wanted_) return;
      for (const char* file : {kTrainFile, kValidationFile}) {
        if (!found.at("files").contains(file)) continue;
        const nlohmann::json& values = found["files"][file];
        const auto number = [&](int i) { return values.at(static_cast<std::size_t>(i)).get<std::int64_t>(); };
        const Progress progress{number(0), number(1), number(2), number(3), number(4)};
        const bool complete = values.at(5) == true;
        const std::string name = path(file) + (complete ? "" : ".part");
        const auto width =
            static_cast<std::int64_t>(size_of(cache_.tokenizer ? dtype_of_tokens() : DType::kU16));
        std::error_code error;
        const auto bytes = static_cast<std::int64_t>(std::filesystem::file_size(name, error));
        if (!error && bytes >= progress.tokens * width) progress_[file] = {progress, complete};
      }
    } catch (const nlohmann::json::exception&) {
      progress_.clear();
    }
  }

  void save_progress(const char* file, const Progress& at, bool done) {
    progress_[file] = {at, done};
    nlohmann::json files = nlohmann::json::object();
    for (const auto& [name, entry] : progress_) {
      const Progress& p = entry.first;
      files[name] = {p.offset, p.lines, p.tokens, p.left_out, p.documents, entry.second};
    }
    write_file_atomically(path(kProgressFile),
                          nlohmann::json{{"sources", wanted_}, {"files", files}}.dump(1) + "\n");
  }

  // Returns the number of tokens. The vocabulary of "chars" is learned anew, so its tokens are made anew.
  std::int64_t tokenise(const TextFile& text, std::int64_t begin, std::int64_t end, const char* file) {
    Progress at{.offset = begin};
    const auto known = progress_.find(file);
    if (known != progress_.end() && config_.tokenizer.kind != TokenizerConfig::Kind::kChars) {
      if (known->second.second) return known->second.first.tokens;
      at = known->second.first;
      log::info("data: goes on at {} of {}, with {} tokens", format_bytes(at.offset), text.path(), at.tokens);
    }
    TokenWriter writer(path(file), cache_.dtype, documents_, at);
    std::int64_t saved = at.offset;
    const DocumentReader reader(*cache_.tokenizer, documents_ ? config_.document_end : "");
    const auto started = Clock::now();
    const std::int64_t from = at.offset;
    const auto use = [&](std::string_view piece, const TextPlace& place) {
      if (documents_) {
        write_documents(reader, piece, place, writer, at);
      } else {
        const std::vector<std::int32_t> ids = encode_piece(*cache_.tokenizer, piece, place);
        writer.write(ids);
        at.tokens += static_cast<std::int64_t>(ids.size());
      }
      at.offset = place.offset + static_cast<std::int64_t>(piece.size());
      const double rate = static_cast<double>(at.offset - from) / seconds_between(started, Clock::now());
      log::progress(fmt::format("data: {} of {} tokenised, {}/s", format_bytes(at.offset), format_bytes(end),
                                format_bytes(static_cast<std::int64_t>(rate))));
      if (at.offset - saved < kSaveEvery) return;
      saved = at.offset;
      writer.keep();
      save_progress(file, at, false);
    };
    try {
      text.for_pieces(
          at.offset, end, begin,
          [&](std::string_view piece) {
            return documents_ ? piece.rfind('\n') + 1 : cache_.tokenizer->safe_prefix(piece);
          },
          use);
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
    save_progress(file, at, true);
    return at.tokens;
  }

  // The documents of whole lines.
  void write_documents(const DocumentReader& reader, std::string_view piece, const TextPlace& place,
                       TokenWriter& writer, Progress& at) const {
    std::vector<std::pair<std::string_view, std::int64_t>> lines;  // with their numbers
    while (!piece.empty()) {
      const std::size_t end = std::min(piece.find('\n'), piece.size());
      const std::string_view line = piece.substr(0, end);
      piece.remove_prefix(std::min(end + 1, piece.size()));
      ++at.lines;
      if (line.find_first_not_of(" \t\r") != std::string_view::npos) lines.emplace_back(line, at.lines);
    }
    std::vector<Document> documents(lines.size());
    in_parallel(lines.size(), [&](std::size_t i) {
      reader.read(lines[i].first, fmt::format("{}:{}", place.where, lines[i].second), documents[i]);
    });
    for (const Document& document : documents) writer.write(document, at);
  }

  const DataConfig& config_;
  std::string directory_;
  bool documents_;
  TextFile train_;
  std::optional<TextFile> validation_;
  nlohmann::json wanted_;
  std::map<std::string, std::pair<Progress, bool>> progress_;  // by file; whether it is complete
  TokenCache cache_;
};

}  // namespace

bool is_document_file(const std::string& path) {
  return std::filesystem::path(path).extension() == ".jsonl";
}

TokenCache tokenise_cached(const DataConfig& config, const std::string& directory,
                           std::unique_ptr<TextTokenizer> tokenizer) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) throw Error(Errc::kIo, directory, "cannot be created: " + error.message());
  return CacheMaker(config, directory, std::move(tokenizer)).run();
}

}  // namespace zg
