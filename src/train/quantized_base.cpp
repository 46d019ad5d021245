#include "train/quantized_base.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <utility>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/hash.hpp"
#include "ziggurat/train/quantize.hpp"

namespace zg {
namespace {

namespace fs = std::filesystem;

constexpr const char* kKey = "model.quantize";
constexpr const char* kCacheKey = "model.quantize_cache";
constexpr int kVersion = 1;  // part of each entry's name; grows when the same model would get other codes

std::string cache_of(const RunConfig& config) {
  if (!config.quantize.cache.empty()) return config.quantize.cache;
  const auto absolute = [](const char* variable) -> std::string {
    const char* const path = std::getenv(variable);
    return path != nullptr && *path == '/' ? path : "";
  };
  if (const std::string cache = absolute("XDG_CACHE_HOME"); !cache.empty()) return cache + "/ziggurat/models";
  if (const std::string home = absolute("HOME"); !home.empty()) return home + "/.cache/ziggurat/models";
  throw Error(Errc::kUsage, kCacheKey, "is not given, and neither XDG_CACHE_HOME nor HOME is set",
              "name a directory for quantised models");
}

// Whether the quantised model depends on a file of this name. The tokenizer and its like are only copied.
bool counts(const std::string& name) {
  return name == "config.json" || name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
}

// "Qwen3-8B-nf4-0123456789abcdef". Sizes and times stand for the content of the weights, which would take
// long to read.
std::string entry_name(const std::string& from, SavedCode code) {
  const fs::path path = fs::canonical(from);
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(path)) {
    const std::string name = entry.path().filename();
    if (counts(name) && entry.is_regular_file()) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  std::string text = fmt::format("{}\n{}\n{}\n", kVersion, name_of(code), path.string());
  for (const std::string& name : names) {
    const InputFile file((path / name).string(), "a file of the model");
    text += fmt::format("{}\n{}\n{}\n", name, file.bytes(), file.mtime_ns());
  }
  fs::path named = fs::absolute(from).lexically_normal();
  if (!named.has_filename()) named = named.parent_path();
  return fmt::format("{}-{}-{}", named.filename().string(), name_of(code), io::hash_text(io::hash_of(text)));
}

class QuantizedBase {
 public:
  QuantizedBase(const RunConfig& config, const std::function<bool()>& stop)
      : from_(config.model_from),
        code_(*config.quantize.code),
        cache_(cache_of(config)),
        entry_((fs::path(cache_) / entry_name(from_, code_)).string()),
        stop_(stop) {}

  const std::string& entry() const { return entry_; }
  bool is_there() const {
    std::error_code unknown;
    return fs::exists(entry_ + "/config.json", unknown);
  }

  void say_taken() const { log::info("model: {} in {} is taken from {}", from_, name_of(code_), entry_); }

  void make(const std::function<std::int64_t(const std::string&)>& free_bytes) const {
    const std::int64_t bytes = bytes_of_entry();  // before anything is made, since it refuses some models
    std::error_code error;
    fs::create_directories(cache_, error);
    if (error) {
      throw Error(Errc::kUsage, fmt::format("{} {}", kCacheKey, cache_),
                  "cannot be created: " + errno_text(error.value()),
                  "check the directory and its permissions, or name another");
    }
    const Lock lock(*this);
    if (is_there()) return say_taken();  // another run has made it meanwhile
    if (const std::int64_t free = free_bytes(cache_); free < bytes) {
      throw Error(Errc::kUsage, fmt::format("{} {}", kCacheKey, cache_),
                  fmt::format("has {} free; {} in {} takes {}", format_bytes(free), from_, name_of(code_),
                              format_bytes(bytes)),
                  "make room, or name another directory");
    }
    write();
  }

 private:
  // Held while the entry is made. The system releases it when the process ends.
  class Lock {
   public:
    explicit Lock(const QuantizedBase& base)
        : fd_(::open((base.entry_ + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666)) {
      if (fd_ < 0) {
        throw Error(Errc::kUsage, fmt::format("{} {}", kCacheKey, base.cache_),
                    "cannot be written to: " + errno_text(errno),
                    "check the directory and its permissions, or name another");
      }
      try {
        wait(base);
      } catch (...) {
        (void)::close(fd_);
        throw;
      }
    }
    ~Lock() { (void)::close(fd_); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    // Polls instead of waiting in the kernel, since `stop` is to end the wait.
    void wait(const QuantizedBase& base) const {
      bool told = false;
      while (const int error = try_lock(fd_)) {
        if (error != EWOULDBLOCK) {
          log::warning("{} cannot be locked ({}): runs that begin at once may each quantise the model",
                       base.cache_, errno_text(error));
          return;
        }
        if (!std::exchange(told, true)) log::info("model: another run makes {}; waiting for it", base.entry_);
        base.check_stop("interrupted while waiting for another run to quantise it");
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
    }

    const int fd_;
  };

  void check_stop(const char* what) const {
    if (stop_ && stop_()) throw Error(Errc::kInterrupted, from_, what);
  }

  std::int64_t bytes_of_entry() const {
    try {
      return quantized_bytes(from_, code_);
    } catch (const Error& e) {
      if (e.where() != from_) throw;
      // An error whose place is the directory says why this model gets no such codes.
      throw Error(e.code(), kKey, fmt::format("is {}, and {} {}", name_of(code_), from_, e.message()),
                  e.hint() + ", or remove the key");
    }
  }

  void write() const {
    log::info("model: {} is quantised to {} in {}, from where later runs take it", from_, name_of(code_),
              entry_);
    const auto begin = Clock::now();
    const CodedSave saved = quantize_model(from_, entry_, code_, [&](std::int64_t done, std::int64_t all) {
      check_stop("interrupted while it was quantised; nothing of that is kept");
      if (!log::enabled(log::Level::kInfo)) return;  // the first process of a run speaks for all
      log::progress(fmt::format("model: {:.0f}% quantised to {}",
                                100 * static_cast<double>(done) / static_cast<double>(all), name_of(code_)));
    });
    log::progress("");
    log::info("model: {} matrices in {}, {} in all, in {}; largest error {:.3g}, in {}", saved.matrices,
              name_of(code_), format_bytes(saved.bytes), format_seconds(seconds_between(begin, Clock::now())),
              saved.largest_error, saved.largest_error_in);
  }

  const std::string from_;
  const SavedCode code_;
  const std::string cache_, entry_;
  const std::function<bool()>& stop_;
};

}  // namespace

std::string quantized_base(const RunConfig& config, const std::function<bool()>& stop,
                           const std::function<std::int64_t(const std::string&)>& free_bytes) {
  const QuantizedBase base(config, stop);
  base.is_there() ? base.say_taken() : base.make(free_bytes);
  return base.entry();
}

RunConfig with_quantized_base(RunConfig config, Processes& processes, const std::function<bool()>& stop) {
  if (!config.quantize.code) return config;
  std::string entry;
  for (const bool first : {true, false}) {
    processes.together([&] {
      if (first == (processes.number_here() == 0)) entry = quantized_base(config, stop);
    });
  }
  config.quantize.of = std::exchange(config.model_from, entry);
  return config;
}

}  // namespace zg
