// State shared by the ranks of one process: whether one of them has failed, and where their threads meet.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ziggurat/base/trace.hpp"
#include "ziggurat/comm/comm.hpp"

namespace zg::comm {

enum class Kind : std::uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kAllToAll,
  kSend,
  kReceive,
  kBarrier
};
const char* name_of(Kind kind);

// One call of one member, as its stream carries it out.
struct Call {
  const void* in = nullptr;
  void* out = nullptr;
  std::int64_t count = 0;
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kU8;
  Reduction reduction = Reduction::kSum;
  int peer = 0;  // broadcast: the root; send and receive: the other member
};
std::string text_of(const Call& call);  // "all-gather of 100 f32"
bool same_call(const Call& a, const Call& b);
// The error for world ranks `a` and `b` that make different calls.
Error differing_calls(const std::string& group, int a, const Call& of_a, int b, const Call& of_b);

struct Range {  // a range of an operand's bytes
  std::int64_t first = 0, bytes = 0;
};
// The range of an all-reduce of `count` elements that the member reduces. The members' ranges are as equal as
// whole elements allow.
Range share_of(int member, int members, std::int64_t count, DType dtype);

// The first failure among the ranks of the process. Any thread.
class Failure {
 public:
  // Only the first failure is kept.
  void set(int rank, const Error& error);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  void rethrow() const;  // throws the failure, if there is one

 private:
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::optional<Error> error_;
};

// The hint of timeout errors, for users of a configuration file and for users of the library.
inline constexpr const char* kTimeoutHint =
    "see what that rank does; if it only needs longer, raise parallel.timeout_seconds of the configuration "
    "(--set parallel.timeout_seconds=3600; in a program: CommOptions::timeout_seconds)";

// Tracks how long a wait has lasted, and when it must end. look() throws the failure of another rank.
class Patience {
 public:
  Patience(const Failure& failure, double timeout_seconds)
      : failure_(failure), timeout_(timeout_seconds), begin_(Clock::now()) {}
  static constexpr std::chrono::milliseconds kLook{20};  // between two looks for a failure
  void look() const { failure_.rethrow(); }
  bool is_over() const { return seconds_between(begin_, Clock::now()) > timeout_; }

 private:
  const Failure& failure_;
  double timeout_;
  Clock::time_point begin_;
};

// Where those members of a group meet that are threads of this process. meet() is a barrier. open() publishes
// a member's call and meets; then each member reads the operands that the others have published, and all meet
// once more before any operand may be changed.
class Meeting {
 public:
  // ranks: the members' world ranks, for messages.
  Meeting(std::vector<int> ranks, std::string name, Failure& failure, double timeout_seconds);
  int members() const { return static_cast<int>(ranks_.size()); }
  // Throws Error(kComm) if the members' calls differ.
  void open(int member, const Call& call);
  // The call that `member` published when `me` last called open(). Valid until `me` calls open() again.
  const Call& of(int me, int member) const {
    return calls_[static_cast<std::size_t>(member)][opened_[static_cast<std::size_t>(me)] % 2];
  }
  void meet(int member);

  // Pass an operand from one member to another: give() returns when the other member's take() has read the
  // operand by `move`, which is called with the sender's call.
  void give(int from, int to, const Call& call);
  void take(int from, int to, const Call& call, const std::function<void(const Call&)>& move);

 private:
  struct Letter {
    const Call* call = nullptr;  // given and not taken
    bool taken = false;
  };
  using Lock = std::unique_lock<std::mutex>;
  template <class Ready>
  void wait(Lock& lock, const Ready& ready, const std::string& what, const std::vector<int>& waits_for);
  [[noreturn]] void refuse(int member, const Error& error);
  std::string last_of(int member) const;

  const std::vector<int> ranks_;
  const std::string name_;
  Failure& failure_;
  const double timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::uint64_t> arrived_;
  std::vector<std::uint64_t> opened_;
  // Two calls for each member: a member may open its next call while others still use the one it published
  // before, but not the one after that.
  std::vector<std::array<Call, 2>> calls_;
  std::map<std::pair<int, int>, Letter> letters_;
};

}  // namespace zg::comm
