#include "ziggurat/base/trace.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/file.hpp"

namespace zg {
namespace {

// A trace has millions of lines: they go to the file in pieces of this size.
class TraceWriter {
 public:
  explicit TraceWriter(const std::string& path) : file_(path, 0) { text_.reserve(2 * kPiece); }
  template <class... Args>
  void line(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Args>(args)...);
    if (text_.size() >= kPiece) write();
  }
  void commit() {
    write();
    file_.commit();
  }

 private:
  static constexpr std::size_t kPiece = 1 << 20;
  void write() {
    const auto bytes = static_cast<std::int64_t>(text_.size());
    file_.write_at(written_, text_.data(), bytes);
    written_ += bytes;
    text_.clear();
  }
  OutputFile file_;
  std::string text_;
  std::int64_t written_ = 0;
};

}  // namespace

void Trace::start() {
  if (whole_ != this) return whole_->start();
  std::lock_guard lock(mutex_);
  events_.reserve(1 << 16);
  on_.store(true, std::memory_order_relaxed);
}

int Trace::lane(const std::string& name) {
  std::lock_guard lock(whole_->mutex_);
  std::vector<Lane>& lanes = whole_->lanes_;
  const Lane lane{group_, name};
  const auto it = std::find(lanes.begin(), lanes.end(), lane);
  if (it != lanes.end()) return static_cast<int>(it - lanes.begin());
  lanes.push_back(lane);
  return static_cast<int>(lanes.size() - 1);
}

void Trace::add(int lane, std::string name, Clock::time_point begin, Clock::time_point end,
                std::int64_t bytes) {
  if (!on()) return;
  if (whole_ != this) return whole_->add(lane, std::move(name), begin, end, bytes);
  std::lock_guard lock(mutex_);
  if (events_.size() >= kCapacity) {
    ++dropped_;
    return;
  }
  events_.push_back({lane, std::move(name), begin, end, bytes});
}

void Trace::save(const std::string& path) const {
  if (whole_ != this) return whole_->save(path);
  std::lock_guard lock(mutex_);
  TraceWriter out(path);
  out.line("{{\"displayTimeUnit\":\"ms\",\"otherData\":{{\"dropped_events\":\"{}\"}},\"traceEvents\":[\n",
           dropped_);
  // A group is what the format calls a process; the first one is for lanes without a group.
  std::vector<std::string> groups{""};
  std::vector<std::size_t> process_of;  // by lane
  for (const Lane& lane : lanes_) {
    const auto it = std::find(groups.begin(), groups.end(), lane.group);
    process_of.push_back(static_cast<std::size_t>(it - groups.begin()) + 1);
    if (it == groups.end()) groups.push_back(lane.group);
  }
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    out.line(
        "{{\"ph\":\"M\",\"pid\":{0},\"tid\":{1},\"name\":\"thread_name\",\"args\":{{\"name\":\"{2}\"}}}},\n"
        "{{\"ph\":\"M\",\"pid\":{0},\"tid\":{1},\"name\":\"thread_sort_index\",\"args\":{{\"sort_"
        "index\":{1}}}}},\n",
        process_of[i], i, lanes_[i].name);
  }
  for (std::size_t g = 1; g < groups.size(); ++g) {
    out.line(
        "{{\"ph\":\"M\",\"pid\":{0},\"name\":\"process_name\",\"args\":{{\"name\":\"{1}\"}}}},\n"
        "{{\"ph\":\"M\",\"pid\":{0},\"name\":\"process_sort_index\",\"args\":{{\"sort_index\":{0}}}}},\n",
        g + 1, groups[g]);
  }
  for (const Event& e : events_) {
    out.line("{{\"ph\":\"X\",\"pid\":{},\"tid\":{},\"name\":\"{}\",\"ts\":{:.3f},\"dur\":{:.3f}",
             process_of[static_cast<std::size_t>(e.lane)], e.lane, e.name,
             seconds_between(origin_, e.begin) * 1e6, seconds_between(e.begin, e.end) * 1e6);
    if (e.bytes > 0) out.line(",\"args\":{{\"bytes\":{}}}", e.bytes);
    out.line("}},\n");
  }
  out.line("{{\"ph\":\"M\",\"pid\":1,\"name\":\"process_name\",\"args\":{{\"name\":\"ziggurat\"}}}}\n]}}\n");
  out.commit();
}

}  // namespace zg
