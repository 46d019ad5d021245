#include "data/token_cache.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "data/utf8.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

constexpr int kCacheVersion = 1;
constexpr const char* kTrainFile = "train.bin";
constexpr const char* kValidationFile = "validation.bin";

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

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
  void for_pieces(std::int64_t begin, std::int64_t end,
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
      if (whole > 0) use(std::string_view(buffer).substr(0, whole), {.where = path_, .offset = offset});
      buffer.erase(0, whole);
      if (interrupted()) throw Error(Errc::kInterrupted, path_, "interrupted while it was tokenised");
    }
  }

 private:
  std::string path_;
  Descriptor fd_;
  std::int64_t size_ = 0, mtime_ns_ = 0;
};

// Writes tokens to path + ".part", which finish() renames to `path`.
class TokenWriter {
 public:
  TokenWriter(const std::string& path, DType dtype)
      : path_(path),
        part_(path + ".part"),
        dtype_(dtype),
        fd_(::open(part_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
    if (fd_.get() < 0) throw Error(Errc::kIo, part_, "cannot be created: " + errno_text(errno));
  }
  ~TokenWriter() {
    if (!finished_) ::unlink(part_.c_str());
  }
  TokenWriter(const TokenWriter&) = delete;
  TokenWriter& operator=(const TokenWriter&) = delete;

  void write(const std::vector<std::int32_t>& ids) {
    count_ += static_cast<std::int64_t>(ids.size());
    if (dtype_ == DType::kI32) return write_bytes(reinterpret_cast<const char*>(ids.data()), ids.size() * 4);
    narrow_.assign(ids.begin(), ids.end());
    write_bytes(reinterpret_cast<const char*>(narrow_.data()), narrow_.size() * 2);
  }

  std::int64_t finish() {
    if (::fsync(fd_.get()) != 0 || ::close(fd_.release()) != 0 ||
        ::rename(part_.c_str(), path_.c_str()) != 0) {
      throw Error(Errc::kIo, path_, "cannot be written: " + errno_text(errno));
    }
    finished_ = true;
    return count_;
  }

 private:
  void write_bytes(const char* data, std::size_t n) {
    while (n > 0) {
      const ssize_t done = ::write(fd_.get(), data, n);
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0)
        throw Error(Errc::kIo, part_, "cannot be written: " + errno_text(done < 0 ? errno : EIO));
      data += done, n -= static_cast<std::size_t>(done);
    }
  }

  std::string path_, part_;
  DType dtype_;
  Descriptor fd_;
  std::vector<std::uint16_t> narrow_;
  std::int64_t count_ = 0;
  bool finished_ = false;
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
  CacheMaker(const DataConfig& config, const std::string& directory)
      : config_(config), directory_(directory), train_(config.train) {
    if (!config.validation.empty()) validation_.emplace(config.validation);
    if (config.tokenizer.kind == TokenizerConfig::Kind::kBytes) cache_.tokenizer = make_byte_tokenizer();
    if (config.tokenizer.kind == TokenizerConfig::Kind::kGpt2) {
      cache_.tokenizer = make_gpt2_tokenizer(config.tokenizer.directory);
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
    if (validation_) {
      stamp["validation"] = validation_->stamp();
    } else {
      stamp["validation_share"] = config_.validation_share;
    }
    return stamp;
  }

  nlohmann::json results() const {
    return {{"tokenizer", cache_.tokenizer->identity()},
            {"dtype", cache_.dtype == DType::kU16 ? "uint16" : "uint32"},
            {"train_tokens", cache_.train_tokens},
            {"validation_tokens", cache_.validation_tokens}};
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
    const std::int64_t characters = by_characters() ? survey() : 0;
    const std::int64_t cut = validation_ ? train_.size() : cut_of(characters);
    cache_.dtype = dtype_of_tokens();
    cache_.train_tokens = tokenise(train_, 0, cut, path(kTrainFile));
    if (validation_) {
      cache_.validation_tokens = tokenise(*validation_, 0, validation_->size(), path(kValidationFile));
    } else if (cut < train_.size()) {
      cache_.validation_tokens = tokenise(train_, cut, train_.size(), path(kValidationFile));
    }
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
    train_.for_pieces(0, train_.size(), utf8::whole_prefix,
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
    train_.for_pieces(0, train_.size(), utf8::whole_prefix,
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

  std::int64_t tokenise(const TextFile& text, std::int64_t begin, std::int64_t end,
                        const std::string& file) const {
    TokenWriter writer(file, cache_.dtype);
    std::vector<std::int32_t> ids;
    text.for_pieces(
        begin, end, [&](std::string_view piece) { return cache_.tokenizer->safe_prefix(piece); },
        [&](std::string_view piece, const TextPlace& place) {
          ids.clear();
          cache_.tokenizer->append(piece, place, ids);
          writer.write(ids);
          log::progress(
              fmt::format("data: {} of {} tokenised", format_bytes(place.offset), format_bytes(end)));
        });
    log::progress("");
    return writer.finish();
  }

  const DataConfig& config_;
  std::string directory_;
  TextFile train_;
  std::optional<TextFile> validation_;
  TokenCache cache_;
};

}  // namespace

TokenCache tokenise_cached(const DataConfig& config, const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) throw Error(Errc::kIo, directory, "cannot be created: " + error.message());
  return CacheMaker(config, directory).run();
}

}  // namespace zg
