#include "ziggurat/base/trace.hpp"

#include <algorithm>
#include <cstdio>
#include <memory>

#include "ziggurat/base/error.hpp"

namespace zg {

void Trace::start() {
  std::lock_guard lock(mutex_);
  events_.reserve(1 << 16);
  on_.store(true, std::memory_order_relaxed);
}

int Trace::lane(const std::string& name) {
  std::lock_guard lock(mutex_);
  const auto it = std::find(lanes_.begin(), lanes_.end(), name);
  if (it != lanes_.end()) return static_cast<int>(it - lanes_.begin());
  lanes_.push_back(name);
  return static_cast<int>(lanes_.size() - 1);
}

void Trace::add(int lane, std::string name, Clock::time_point begin, Clock::time_point end,
                std::int64_t bytes) {
  if (!on()) return;
  std::lock_guard lock(mutex_);
  if (events_.size() >= kCapacity) {
    ++dropped_;
    return;
  }
  events_.push_back({lane, std::move(name), begin, end, bytes});
}

void Trace::save(const std::string& path) const {
  std::lock_guard lock(mutex_);
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "w"), &std::fclose);
  if (!file) throw Error(Errc::kIo, path, "the trace cannot be written: " + errno_text(errno));
  std::FILE* f = file.get();
  std::fprintf(f,
               "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"dropped_events\":\"%zu\"},\"traceEvents\":[\n",
               dropped_);
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    std::fprintf(f,
                 "{\"ph\":\"M\",\"pid\":1,\"tid\":%zu,\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}},\n"
                 "{\"ph\":\"M\",\"pid\":1,\"tid\":%zu,\"name\":\"thread_sort_index\",\"args\":{\"sort_"
                 "index\":%zu}},\n",
                 i, lanes_[i].c_str(), i, i);
  }
  for (const Event& e : events_) {
    std::fprintf(f, "{\"ph\":\"X\",\"pid\":1,\"tid\":%d,\"name\":\"%s\",\"ts\":%.3f,\"dur\":%.3f", e.lane,
                 e.name.c_str(), seconds_between(origin_, e.begin) * 1e6,
                 seconds_between(e.begin, e.end) * 1e6);
    if (e.bytes > 0) std::fprintf(f, ",\"args\":{\"bytes\":%lld}", static_cast<long long>(e.bytes));
    std::fputs("},\n", f);
  }
  std::fputs("{\"ph\":\"M\",\"pid\":1,\"name\":\"process_name\",\"args\":{\"name\":\"ziggurat\"}}\n]}\n", f);
  if (std::fflush(f) != 0 || std::ferror(f) != 0)
    throw Error(Errc::kIo, path, "writing the trace failed: " + errno_text(errno));
}

}  // namespace zg
