#include "comm/domain.hpp"

#include <algorithm>

namespace zg::comm {

const char* name_of(Kind kind) {
  static constexpr const char* kNames[] = {"all-gather", "reduce-scatter", "all-reduce", "broadcast",
                                           "all-to-all", "send",           "receive",    "barrier"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string text_of(const Call& c) {
  if (c.kind == Kind::kBarrier) return name_of(c.kind);
  std::string text = fmt::format("{} of {} {}", name_of(c.kind), c.count, zg::name_of(c.dtype));
  if (c.kind == Kind::kReduceScatter || c.kind == Kind::kAllReduce)
    text += c.reduction == Reduction::kSum ? " (sum)" : " (max)";
  if (c.kind == Kind::kBroadcast) text += fmt::format(" from member {}", c.peer);
  return text;
}

bool same_call(const Call& a, const Call& b) {
  return a.kind == b.kind && a.count == b.count && a.dtype == b.dtype && a.reduction == b.reduction &&
         a.peer == b.peer;
}

Error differing_calls(const std::string& group, int a, const Call& of_a, int b, const Call& of_b) {
  return {Errc::kComm, "group " + group,
          fmt::format("rank {} calls {}, and rank {} calls {}", a, text_of(of_a), b, text_of(of_b)),
          "ranks must run the same program"};
}

Range share_of(int member, int members, std::int64_t count, DType dtype) {
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t each = count / members, more = count % members;
  const std::int64_t first = member * each + std::min<std::int64_t>(member, more);
  return {first * element, (each + (member < more ? 1 : 0)) * element};
}

void Failure::set(int rank, const Error& error) {
  std::lock_guard lock(mutex_);
  if (error_) return;
  error_.emplace(Errc::kComm, fmt::format("rank {}", rank),
                 error.where().empty() ? error.message() : error.where() + ": " + error.message(),
                 error.hint());
  failed_.store(true, std::memory_order_release);
}

void Failure::rethrow() const {
  if (!failed()) return;
  std::lock_guard lock(mutex_);
  throw Error(*error_);
}

Meeting::Meeting(std::vector<int> ranks, std::string name, Failure& failure, double timeout_seconds)
    : ranks_(std::move(ranks)),
      name_(std::move(name)),
      failure_(failure),
      timeout_(timeout_seconds),
      arrived_(ranks_.size()),
      opened_(ranks_.size()),
      calls_(ranks_.size()) {}

std::string Meeting::last_of(int member) const {
  const auto m = static_cast<std::size_t>(member);
  if (opened_[m] == 0) return "has made no call";
  return fmt::format("made its call {} last, {}", opened_[m], text_of(of(member, member)));
}

// Makes this failure the failure of all ranks.
void Meeting::refuse(int member, const Error& error) {
  failure_.set(ranks_[static_cast<std::size_t>(member)], error);
  changed_.notify_all();
  throw error;
}

// `waits_for`: the members whose absence a timeout reports, if they are absent then.
template <class Ready>
void Meeting::wait(Lock& lock, const Ready& ready, const std::string& what,
                   const std::vector<int>& waits_for) {
  const Patience patience(failure_, timeout_);
  while (!ready()) {
    patience.look();
    if (patience.is_over()) {
      std::string missing;
      for (const int m : waits_for) {
        missing += fmt::format("{}rank {} {}", missing.empty() ? "" : "; ",
                               ranks_[static_cast<std::size_t>(m)], last_of(m));
      }
      const Error error(Errc::kComm, "group " + name_,
                        fmt::format("{} has waited for {} s; {}", what, timeout_, missing), kTimeoutHint);
      refuse(waits_for.empty() ? 0 : waits_for.front(), error);
    }
    changed_.wait_for(lock, Patience::kLook);
  }
  patience.look();
}

void Meeting::meet(int member) {
  const auto m = static_cast<std::size_t>(member);
  Lock lock(mutex_);
  const std::uint64_t now = ++arrived_[m];
  const auto all = [&] {
    return std::all_of(arrived_.begin(), arrived_.end(), [&](std::uint64_t n) { return n >= now; });
  };
  if (all()) {
    changed_.notify_all();
    return failure_.rethrow();
  }
  const Call call = of(member, member);
  std::vector<int> missing;
  const auto ready = [&] {
    if (all()) return true;
    missing.clear();
    for (int i = 0; i < members(); ++i) {
      if (arrived_[static_cast<std::size_t>(i)] < now) missing.push_back(i);
    }
    return false;
  };
  wait(lock, ready, fmt::format("rank {} in {}", ranks_[m], text_of(call)), missing);
}

void Meeting::open(int member, const Call& call) {
  const auto m = static_cast<std::size_t>(member);
  {
    std::lock_guard lock(mutex_);
    calls_[m][++opened_[m] % 2] = call;
  }
  meet(member);
  // Every member sees the same calls, so all of them refuse.
  for (int i = 0; i < members(); ++i) {
    if (same_call(of(member, i), call)) continue;
    refuse(member,
           differing_calls(name_, ranks_[m], call, ranks_[static_cast<std::size_t>(i)], of(member, i)));
  }
}

void Meeting::give(int from, int to, const Call& call) {
  Lock lock(mutex_);
  Letter& letter = letters_[{from, to}];
  letter = {&call, false};
  changed_.notify_all();
  wait(lock, [&] { return letter.taken; },
       fmt::format("rank {}, which sends to rank {},", ranks_[static_cast<std::size_t>(from)],
                   ranks_[static_cast<std::size_t>(to)]),
       {to});
  letter = {};
}

void Meeting::take(int from, int to, const Call& call, const std::function<void(const Call&)>& move) {
  Lock lock(mutex_);
  Letter& letter = letters_[{from, to}];
  wait(lock, [&] { return letter.call != nullptr && !letter.taken; },
       fmt::format("rank {}, which receives from rank {},", ranks_[static_cast<std::size_t>(to)],
                   ranks_[static_cast<std::size_t>(from)]),
       {from});
  const Call& sent = *letter.call;
  if (sent.count != call.count || sent.dtype != call.dtype) {
    refuse(to, Error(Errc::kComm, "group " + name_,
                     fmt::format("rank {} expects {} {} of rank {}, which sends {} {}",
                                 ranks_[static_cast<std::size_t>(to)], call.count, zg::name_of(call.dtype),
                                 ranks_[static_cast<std::size_t>(from)], sent.count, zg::name_of(sent.dtype)),
                     "ranks must run the same program"));
  }
  lock.unlock();  // the sender waits until it is notified
  move(sent);
  lock.lock();
  letter.taken = true;
  changed_.notify_all();
}

}  // namespace zg::comm
