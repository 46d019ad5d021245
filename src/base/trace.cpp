#include "ziggurat/base/trace.hpp"

#include <algorithm>
#include <cstdio>
#include <memory>

#include "ziggurat/base/error.hpp"

namespace zg {

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
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "w"), &std::fclose);
  if (!file) throw Error(Errc::kIo, path, "the trace cannot be written: " + errno_text(errno));
  std::FILE* f = file.get();
  std::fprintf(f,
               "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"dropped_events\":\"%zu\"},\"traceEvents\":[\n",
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
    std::fprintf(
        f,
        "{\"ph\":\"M\",\"pid\":%zu,\"tid\":%zu,\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}},\n"
        "{\"ph\":\"M\",\"pid\":%zu,\"tid\":%zu,\"name\":\"thread_sort_index\",\"args\":{\"sort_"
        "index\":%zu}},\n",
        process_of[i], i, lanes_[i].name.c_str(), process_of[i], i, i);
  }
  for (std::size_t g = 1; g < groups.size(); ++g) {
    std::fprintf(
        f,
        "{\"ph\":\"M\",\"pid\":%zu,\"name\":\"process_name\",\"args\":{\"name\":\"%s\"}},\n"
        "{\"ph\":\"M\",\"pid\":%zu,\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%zu}},\n",
        g + 1, groups[g].c_str(), g + 1, g + 1);
  }
  for (const Event& e : events_) {
    std::fprintf(f, "{\"ph\":\"X\",\"pid\":%zu,\"tid\":%d,\"name\":\"%s\",\"ts\":%.3f,\"dur\":%.3f",
                 process_of[static_cast<std::size_t>(e.lane)], e.lane, e.name.c_str(),
                 seconds_between(origin_, e.begin) * 1e6, seconds_between(e.begin, e.end) * 1e6);
    if (e.bytes > 0) std::fprintf(f, ",\"args\":{\"bytes\":%lld}", static_cast<long long>(e.bytes));
    std::fputs("},\n", f);
  }
  std::fputs("{\"ph\":\"M\",\"pid\":1,\"name\":\"process_name\",\"args\":{\"name\":\"ziggurat\"}}\n]}\n", f);
  if (std::fflush(f) != 0 || std::ferror(f) != 0)
    throw Error(Errc::kIo, path, "writing the trace failed: " + errno_text(errno));
}

}  // namespace zg
