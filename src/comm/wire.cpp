#include "comm/wire.hpp"

#include <algorithm>
#include <thread>

namespace zg::comm {
namespace {

constexpr std::int64_t kMessage = std::int64_t{1} << 28;  // bytes: MPI counts with 32 bits
constexpr int kSpins = 200;                               // tests before the thread sleeps between them
constexpr std::chrono::microseconds kPause{20};
constexpr int kListen = 64;  // tests between two looks for a failure of another process

}  // namespace

void Exchange::send(int process, int tag, int rank, const void* data, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += kMessage) {
    pending_.push_back(
        {wire_->send(process, tag, static_cast<const char*>(data) + at, std::min(kMessage, bytes - at)), rank,
         true});
  }
}

void Exchange::receive(int process, int tag, int rank, void* data, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += kMessage) {
    pending_.push_back(
        {wire_->receive(process, tag, static_cast<char*>(data) + at, std::min(kMessage, bytes - at)), rank,
         false});
  }
}

void Exchange::wait(const std::string& what, std::size_t left) {
  const Patience patience(failure_, timeout_);
  for (int round = 0; pending_.size() > left; ++round) {
    const std::size_t oldest = pending_.size() - left;
    const auto done = [](const Pending& p) { return p.request->test(); };
    pending_.erase(
        std::remove_if(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(oldest), done),
        pending_.begin() + static_cast<std::ptrdiff_t>(oldest));
    if (pending_.size() <= left) return;
    if (round % kListen == kListen - 1) {
      if (const auto heard = wire_->heard_failure()) failure_.set(heard->first, heard->second);
    }
    patience.look();
    if (patience.is_over()) {
      const Pending& p = pending_.front();
      throw Error(Errc::kComm, fmt::format("rank {}", p.rank),
                  fmt::format("{} has waited for {} s for rank {} to {}", what, timeout_, p.rank,
                              p.sends ? "receive" : "send"),
                  kTimeoutHint);
    }
    round < kSpins ? std::this_thread::yield() : std::this_thread::sleep_for(kPause);
  }
}

}  // namespace zg::comm
