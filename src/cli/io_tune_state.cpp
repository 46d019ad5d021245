#include "cli/io_tune_state.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"
#include "ziggurat/base/json.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::cli {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kMark = "ziggurat_io_tune";
constexpr int kVersion = 1;
constexpr std::string_view kBegins = "{\"ziggurat_io_tune\"";  // every state file begins with this
constexpr const char* kFresh = "say --fresh to begin anew, or name another file with --state";

ordered_json json_of(const TuneSettings& s) {
  return {{kMark, kVersion},           {"machine", s.machine}, {"kernel", s.kernel},
          {"paths", json_of(s.paths)}, {"size", s.size},       {"for", s.goal}};
}

TuneSettings settings_in(const json& j) {
  TuneSettings s{.machine = j.at("machine"),
                 .kernel = j.at("kernel"),
                 .paths = {},
                 .size = j.at("size"),
                 .goal = j.at("for")};
  for (const json& p : j.at("paths")) s.paths.push_back({p.at("path"), p.at("filesystem"), p.at("device")});
  return s;
}

io::TuneSide side_in(const json& j) {
  return {.bytes_per_second = j.at("bytes_per_second"),
          .cpu_seconds_per_gb = j.at("cpu_seconds_per_gb"),
          .p50 = j.at("p50_seconds"),
          .p99 = j.at("p99_seconds")};
}

// A whole number above 0 that fits into an int.
int size_in(const json& j, const char* key) {
  const json& value = j.at(key);
  const bool whole = value.is_number_integer() && value > 0 && value <= std::numeric_limits<int>::max();
  if (!whole) throw std::runtime_error(key);
  return value.get<int>();
}

io::TuneRecord record_in(const json& j) {
  const std::string name = j.at("backend");
  const auto backend = io::backend_named(name);
  if (!backend) throw std::runtime_error("backend " + name);
  return {.point = {*backend, size_in(j, "block_size"), size_in(j, "queue_depth"), size_in(j, "queues")},
          .round = j.at("round"),
          .sample = {.read = side_in(j.at("read")), .write = side_in(j.at("write"))}};
}

// Protects a user's file that was named by mistake from being truncated. A run that was killed early may have
// written only a part of kBegins.
void check_is_ours(const std::string& path, const std::string& text) {
  const std::size_t n = std::min(text.size(), kBegins.size());
  if (text.compare(0, n, kBegins.substr(0, n)) == 0) return;
  throw Error(Errc::kUsage, path, "is there and is no state file of io-tune",
              "name another file with --state");
}

// Tries for a while, since a run that was killed a moment ago holds its lock until the kernel has ended its
// process.
bool lock_soon(int fd) {
  constexpr int kAttempts = 25;
  constexpr auto kPause = std::chrono::milliseconds(20);
  for (int attempt = 1;; ++attempt) {
    const int error = try_lock(fd);
    if (error == 0) return true;
    if (error != EWOULDBLOCK || attempt == kAttempts) return false;
    std::this_thread::sleep_for(kPause);
  }
}

std::string paths_text(const TuneSettings& s) {
  std::string text;
  for (const auto& p : s.paths)
    text += fmt::format("{}{} ({} on {})", text.empty() ? "" : ", ", p.path, p.filesystem, p.device);
  return text;
}

std::string difference(const TuneSettings& there, const TuneSettings& here) {
  std::string text;
  const auto compare = [&](const char* what, const std::string& a, const std::string& b) {
    if (a != b) text += fmt::format("{}{} was {} and is {}", text.empty() ? "" : "; ", what, a, b);
  };
  compare("the machine", there.machine, here.machine);
  compare("the kernel", there.kernel, here.kernel);
  compare("--path", paths_text(there), paths_text(here));
  compare("--size", format_bytes(there.size), format_bytes(here.size));
  compare("--for", there.goal, here.goal);
  return text;
}

}  // namespace

ordered_json json_of(const std::vector<TuneSettings::Path>& paths) {
  ordered_json list = ordered_json::array();
  for (const TuneSettings::Path& p : paths)
    list.push_back({{"path", p.path}, {"filesystem", p.filesystem}, {"device", p.device}});
  return list;
}

ordered_json json_of(const io::TunePoint& p) {
  return {{"backend", io::name_of(p.backend)},
          {"block_size", p.block_size},
          {"queue_depth", p.queue_depth},
          {"queues", p.queues}};
}

ordered_json json_of(const io::TuneSide& s) {
  return {{"bytes_per_second", s.bytes_per_second},
          {"cpu_seconds_per_gb", s.cpu_seconds_per_gb},
          {"p50_seconds", s.p50},
          {"p99_seconds", s.p99}};
}

TuneState::TuneState(std::string path, bool fresh) : path_(std::move(path)) {
  open_file(fresh);
}

TuneState::~TuneState() {
  close(fd_);
}

void TuneState::open_file(bool fresh) {
  fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd_ < 0) {
    throw Error(Errc::kUsage, path_, "the state file cannot be opened: " + errno_text(errno),
                "make its directory, or name another file with --state");
  }
  try {
    if (!lock_soon(fd_)) {
      if (errno != EWOULDBLOCK) throw Error(Errc::kIo, path_, "cannot be locked: " + errno_text(errno));
      throw Error(Errc::kUsage, path_, "is in use by another run of io-tune",
                  "wait for that one, or name another file with --state");
    }
    check_is_ours(path_, read_text_file(path_, "the state file"));
    if (fresh && ftruncate(fd_, 0) != 0) throw Error(Errc::kIo, path_, errno_text(errno));
    load();
  } catch (...) {
    close(fd_);
    throw;
  }
}

void TuneState::load() {
  const std::string text = read_text_file(path_, "the state file");
  std::size_t begin = 0;
  for (int number = 1; begin < text.size(); ++number) {
    const std::size_t end = text.find('\n', begin);
    if (end == std::string::npos) {  // the run was killed while it wrote this line
      if (ftruncate(fd_, static_cast<off_t>(begin)) != 0) throw Error(Errc::kIo, path_, errno_text(errno));
      cut_off_ = true;
      return;
    }
    try {
      const auto line = parse_json<json>(std::string_view(text).substr(begin, end - begin), path_, kFresh,
                                         {.first_line = number});
      if (number > 1) {
        records_.push_back(record_in(line));
      } else if (line.at(kMark) == kVersion) {
        settings_ = settings_in(line);
        has_header_ = true;
      } else {
        throw Error(Errc::kUsage, path_,
                    fmt::format("is of version {}, this is {}", line.at(kMark).dump(), kVersion), kFresh);
      }
    } catch (const Error&) {
      throw;
    } catch (const std::exception&) {
      throw Error(Errc::kUsage, fmt::format("{}:{}", path_, number), "is no line of io-tune's state", kFresh);
    }
    begin = end + 1;
  }
}

void TuneState::match(const TuneSettings& settings) {
  if (has_header_) {
    const std::string differs = difference(settings_, settings);
    if (differs.empty()) return;
    throw Error(Errc::kUsage, path_, "has points of other settings: " + differs, kFresh);
  }
  write_line(json_of(settings).dump());
  settings_ = settings;
  has_header_ = true;
}

void TuneState::append(const io::TuneRecord& record) {
  ordered_json line = json_of(record.point);
  line["round"] = record.round;
  line["read"] = json_of(record.sample.read);
  line["write"] = json_of(record.sample.write);
  write_line(line.dump());
  records_.push_back(record);
}

void TuneState::write_line(const std::string& line) const {
  const std::string text = line + "\n";
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t n = write(fd_, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw Error(Errc::kIo, path_, "cannot be written: " + errno_text(n < 0 ? errno : EIO));
    done += static_cast<std::size_t>(n);
  }
}

}  // namespace zg::cli
