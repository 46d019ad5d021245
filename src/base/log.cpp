#include "ziggurat/base/log.hpp"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>

#include "ziggurat/base/log_name.hpp"
#include "ziggurat/base/printable.hpp"

namespace zg::log {
namespace {

// stderr with a progress line, which is erased before each log line and drawn again after it.
class StderrSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  enum class From { kProgress, kRefresh };
  void show(From from, const std::string& line) {
    std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (terminal_) {
      redraw(line);
    } else if (from == From::kRefresh ? now - refreshed_ > 2 * kSilence
                                      : !line.empty() && now - printed_ > kSilence) {
      refreshed_ = now;
      if (from == From::kProgress) printed_ = now;
      std::fprintf(stderr, "%s\n", line.c_str());
    }
    std::fflush(stderr);
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t text;
    formatter_->format(message, text);
    erase();
    std::fwrite(text.data(), 1, text.size(), stderr);
    draw();
  }
  void flush_() override { std::fflush(stderr); }

 private:
  void erase() const {
    if (!line_.empty()) std::fputs("\r\033[K", stderr);
  }
  void draw() const { std::fputs(line_.c_str(), stderr); }
  void redraw(const std::string& line) {
    erase();
    line_ = line;
    draw();
  }

  static constexpr std::chrono::seconds kSilence{10};  // between progress lines if stderr is no terminal

  const bool terminal_ = isatty(STDERR_FILENO) == 1;
  std::string line_;
  std::chrono::steady_clock::time_point printed_ = std::chrono::steady_clock::now();  // by progress()
  std::chrono::steady_clock::time_point refreshed_ = printed_;                        // by either
};

constexpr const char* kPattern = "%H:%M:%S.%e %l: %v";

struct Output {
  std::shared_ptr<StderrSink> sink = std::make_shared<StderrSink>();
  spdlog::logger logger{"ziggurat", sink};
  Output() {
    logger.set_pattern(kPattern);
    logger.flush_on(spdlog::level::trace);
  }
};

// Global, since there is only one stderr.
Output& output() {
  static Output instance;
  return instance;
}

spdlog::level::level_enum translate(Level level) {
  constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::debug, spdlog::level::info,
                                                   spdlog::level::warn, spdlog::level::err};
  return kLevels[static_cast<int>(level)];
}

}  // namespace

void set_name(const std::string& name) {
  std::string pattern = kPattern;
  if (!name.empty()) pattern.insert(pattern.size() - 2, name + ": ");
  output().logger.set_pattern(pattern);
}
void set_level(Level level) {
  output().logger.set_level(translate(level));
}
bool enabled(Level level) {
  return output().logger.should_log(translate(level));
}
void write(Level level, const std::string& text) {
  output().logger.log(translate(level), "{}", printable(text));
}
void write_always(Level level, const std::string& text) {
  output().sink->log({"ziggurat", translate(level), text});
  output().sink->flush();
}
void progress(const std::string& line) {
  output().sink->show(StderrSink::From::kProgress, line);
}
void refresh(const std::string& line) {
  output().sink->show(StderrSink::From::kRefresh, line);
}

}  // namespace zg::log
