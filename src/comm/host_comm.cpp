// Ranks on the host: threads of one process that read each other's operands in place, and messages between
// processes.
//
// Within a process nothing is staged: a call publishes its operands' addresses, and each member copies or
// reduces straight from the others' memory. Between processes an operand is sent once to each process that
// needs it, to one member there (its receiver); the others copy it from that member. Operands of reductions
// are sent unreduced, since sums must be made in the order of the ranks: each member receives its range from
// every remote member, in blocks.
#include <algorithm>
#include <map>
#include <utility>

#include "comm/copy.hpp"
#include "comm/domain.hpp"
#include "comm/host_ranks.hpp"
#include "comm/reduce.hpp"
#include "comm/wire.hpp"
#include "ziggurat/base/buffer.hpp"

namespace zg::comm {
namespace {

constexpr std::int64_t kBlock = std::int64_t{1} << 20;  // bytes of a remote operand reduced at a time

// State shared by the ranks of this process.
struct Process {
  Process(std::vector<int> counts, std::unique_ptr<Wire> w, const CommOptions& o, std::shared_ptr<Failure> f)
      : ranks_of(std::move(counts)),
        wire(std::move(w)),
        options(o),
        shared_failure(f != nullptr ? std::move(f) : std::make_shared<Failure>()) {
    for (int process = 0; process < static_cast<int>(ranks_of.size()); ++process) {
      for (int i = 0; i < ranks_of[static_cast<std::size_t>(process)]; ++i) {
        process_of.push_back(process);
        index_of.push_back(i);
      }
    }
  }
  // After a failure, other processes may wait for calls that will never come.
  ~Process() {
    if (wire != nullptr && failure.failed()) wire->abort();
  }
  // Records a failure. The first one of this process is reported to all other processes.
  void fail(int rank, const Error& error) {
    if (failure.failed()) return;
    failure.set(rank, error);
    if (wire != nullptr) wire->tell_failure(rank, error);
  }
  int size() const { return static_cast<int>(process_of.size()); }
  int here() const { return wire != nullptr ? wire->process() : 0; }

  // The meeting of the rank's n-th group with these members, n being the count of calls by this rank.
  std::shared_ptr<Meeting> meeting(const std::vector<int>& members, std::vector<int> local,
                                   const std::string& name, int rank) {
    std::lock_guard lock(mutex);
    auto& groups = meetings[members];
    auto& made = groups.made[rank];
    if (made == groups.meetings.size()) {
      groups.meetings.push_back(
          std::make_shared<Meeting>(std::move(local), name, failure, options.timeout_seconds));
    }
    return groups.meetings[made++];
  }
  // Numbers the groups that a rank here shares with a rank of another process, so that messages of different
  // groups have different tags. Called by the rank here, once for each group.
  int next_pair(int here_rank, int there_rank) {
    std::lock_guard lock(mutex);
    return pairs[{here_rank, there_rank}]++;
  }
  int tag(int pair, int from, int to) const {
    const int most = *std::max_element(ranks_of.begin(), ranks_of.end());
    return (pair * most + index_of[static_cast<std::size_t>(from)]) * most +
           index_of[static_cast<std::size_t>(to)];
  }

  struct Groups {
    std::vector<std::shared_ptr<Meeting>> meetings;
    std::map<int, std::size_t> made;  // by world rank: how many groups the rank has made
  };
  const std::vector<int> ranks_of;        // by process: its number of ranks
  std::vector<int> process_of, index_of;  // by world rank: its process, and its index there
  std::unique_ptr<Wire> wire;             // null: one process
  const CommOptions options;
  const std::shared_ptr<Failure> shared_failure;
  Failure& failure = *shared_failure;
  std::mutex mutex;  // guards what follows
  std::map<std::vector<int>, Groups> meetings;
  std::map<std::pair<int, int>, int> pairs;
};

class HostCommunicator final : public Communicator {
 public:
  HostCommunicator(std::shared_ptr<Process> process, int rank, std::vector<int> members, std::string name)
      : process_(std::move(process)),
        world_rank_(rank),
        members_(std::move(members)),
        name_(std::move(name)) {
    std::vector<int> local;
    for (int i = 0; i < size(); ++i) {
      const int r = world(i);
      const int at = process_->process_of[static_cast<std::size_t>(r)];
      if (r == rank) rank_ = i;
      by_process_[at].push_back(i);
      peers_.push_back({at, -1, 0});
      if (at == process_->here()) {
        peers_.back().local = static_cast<int>(local.size());
        local.push_back(r);
      } else {
        peers_.back().pair = process_->next_pair(rank, r);
      }
    }
    ZG_ASSERT(rank_ >= 0, "rank {} is no member of group {}", rank, name_);
    for (const int r : members_) {
      const auto lower = [&](int other) { return other < r; };
      order_.push_back(static_cast<std::size_t>(std::count_if(members_.begin(), members_.end(), lower)));
    }
    remote_ = by_process_.size() > 1;
    me_ = peers_[static_cast<std::size_t>(rank_)].local;
    meeting_ = process_->meeting(members_, std::move(local), name_, rank);
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  CommTraffic traffic() const override { return traffic_; }

  void all_gather(Stream& s, const void* in, void* out, std::int64_t count, DType dtype) override {
    const std::int64_t bytes = bytes_of(count, dtype);
    note((size() - 1) * bytes, (size() - 1) * bytes);
    enqueue(s, {.in = in, .out = out, .count = count, .kind = Kind::kAllGather, .dtype = dtype});
  }
  void reduce_scatter(Stream& s, const void* in, void* out, std::int64_t count, DType dtype,
                      Reduction reduction) override {
    const std::int64_t bytes = bytes_of(count, dtype);
    note((size() - 1) * bytes, (size() - 1) * bytes);
    enqueue(s, {in, out, count, Kind::kReduceScatter, dtype, reduction, 0});
  }
  void all_reduce(Stream& s, void* data, std::int64_t count, DType dtype, Reduction reduction) override {
    const std::int64_t mine = share_of(rank_, size(), count, dtype).bytes,
                       others = bytes_of(count, dtype) - mine;
    // This member sends the others' ranges, and receives them reduced. It receives its own range from all
    // others, and sends it to them reduced.
    note(others + (size() - 1) * mine, (size() - 1) * mine + others);
    enqueue(s, {data, data, count, Kind::kAllReduce, dtype, reduction, 0});
  }
  void broadcast(Stream& s, void* data, std::int64_t count, DType dtype, int root) override {
    const std::int64_t bytes = bytes_of(count, dtype);
    rank_ == root ? note((size() - 1) * bytes, 0) : note(0, bytes);
    enqueue(s, {data, data, count, Kind::kBroadcast, dtype, Reduction::kSum, root});
  }
  void all_to_all(Stream& s, const void* in, void* out, std::int64_t count, DType dtype) override {
    const std::int64_t bytes = bytes_of(count, dtype);
    note((size() - 1) * bytes, (size() - 1) * bytes);
    enqueue(s, {.in = in, .out = out, .count = count, .kind = Kind::kAllToAll, .dtype = dtype});
  }
  void send(Stream& s, const void* data, std::int64_t count, DType dtype, int to) override {
    ZG_ASSERT(to != rank_, "member {} sends to itself", to);
    note(bytes_of(count, dtype), 0);
    enqueue(s, {data, nullptr, count, Kind::kSend, dtype, Reduction::kSum, to});
  }
  void receive(Stream& s, void* data, std::int64_t count, DType dtype, int from) override {
    ZG_ASSERT(from != rank_, "member {} receives from itself", from);
    note(0, bytes_of(count, dtype));
    enqueue(s, {nullptr, data, count, Kind::kReceive, dtype, Reduction::kSum, from});
  }
  void barrier(Stream& s) override {
    note(0, 0);
    enqueue(s, {});
  }

 private:
  struct Peer {
    int process = 0;
    int local = -1;  // its number in the meeting; -1: it is in another process
    int pair = 0;    // if it is remote: the result of next_pair()
  };

  int world(int member) const { return members_[static_cast<std::size_t>(member)]; }
  const Peer& peer(int member) const { return peers_[static_cast<std::size_t>(member)]; }
  bool is_remote(int member) const { return peer(member).local < 0; }
  static std::int64_t bytes_of(std::int64_t count, DType dtype) {
    ZG_ASSERT_GE(count, 0);
    return count * static_cast<std::int64_t>(size_of(dtype));
  }
  void note(std::int64_t sent, std::int64_t received) { traffic_ += {sent, received, 1}; }

  void enqueue(Stream& s, const Call& call) {
    auto* const stream = dynamic_cast<HostStream*>(&s);
    ZG_ASSERT(stream != nullptr, "ranks on the processor need a host device's streams");
    stream->enqueue(name_of(call.kind), [this, call] { run(call); });
  }

  void run(const Call& call) {
    try {
      process_->failure.rethrow();
      Exchange exchange(process_->wire.get(), process_->failure, process_->options.timeout_seconds);
      carry_out(call, exchange);
    } catch (const Error& error) {
      process_->fail(world_rank_, error);  // ignored if another rank has failed already
      throw;
    }
  }

  void carry_out(const Call& c, Exchange& x) {
    const std::int64_t bytes = bytes_of(c.count, c.dtype);
    const auto rows = [&](int member) { return Range{member * bytes, bytes}; };
    switch (c.kind) {
      case Kind::kAllGather:
        return gather(c, c.in, rows, x);
      case Kind::kReduceScatter:
        reduce_range(c, rows, c.out, x);
        return meeting_->meet(me_);
      case Kind::kAllReduce: {
        const auto range = [&](int member) { return share_of(member, size(), c.count, c.dtype); };
        char* const mine = static_cast<char*>(c.out) + range(rank_).first;
        reduce_range(c, range, mine, x);
        return gather(c, mine, range, x);
      }
      case Kind::kBroadcast:
        return broadcast(c, bytes, x);
      case Kind::kAllToAll:
        return all_to_all(c, bytes, x);
      case Kind::kSend:
        if (!is_remote(c.peer)) return meeting_->give(me_, peer(c.peer).local, c);
        send_to(c.peer, c.in, bytes, x);
        return x.wait(what(c));
      case Kind::kReceive:
        if (!is_remote(c.peer)) {
          return meeting_->take(peer(c.peer).local, me_, c,
                                [&](const Call& sent) { copy(c.out, sent.in, bytes); });
        }
        receive_from(c.peer, c.out, bytes, x);
        return x.wait(what(c));
      case Kind::kBarrier:
        meeting_->open(me_, c);
        if (!remote_) return;
        if (me_ == 0) meet_processes(c, x);
        return meeting_->meet(me_);
    }
  }

  std::string what(const Call& c) const {
    return fmt::format("rank {} in {} of group {}", world_rank_, text_of(c), name_);
  }

  // The member in process `at` that receives the operands of `from`, a member of another process.
  int receiver(int at, int from) const {
    const auto& there = by_process_.at(peer(from).process);
    const auto& here = by_process_.at(at);
    const auto place = std::find(there.begin(), there.end(), from) - there.begin();
    return here[static_cast<std::size_t>(place) % here.size()];
  }
  void send_to(int member, const void* data, std::int64_t bytes, Exchange& x) const {
    const Peer& p = peer(member);
    x.send(p.process, process_->tag(p.pair, world_rank_, world(member)), world(member), data, bytes);
  }
  void receive_from(int member, void* data, std::int64_t bytes, Exchange& x) const {
    const Peer& p = peer(member);
    x.receive(p.process, process_->tag(p.pair, world(member), world_rank_), world(member), data, bytes);
  }
  // Sends to one receiver in each other process.
  void send_abroad(const void* data, std::int64_t bytes, Exchange& x) const {
    for (const auto& [process, ignored] : by_process_) {
      if (process != process_->here()) send_to(receiver(process, rank_), data, bytes, x);
    }
  }
  const Call& published(int member) const { return meeting_->of(me_, member); }

  // Gathers: each member's `in` becomes range(member) of every member's c.out.
  template <class RangeOf>
  void gather(const Call& c, const void* in, const RangeOf& range, Exchange& x) {
    char* const out = static_cast<char*>(c.out);
    const auto place = [&](int member) { return out + range(member).first; };
    if (remote_) {
      send_abroad(in, range(rank_).bytes, x);
      for (int m = 0; m < size(); ++m) {
        if (is_remote(m) && receiver(process_->here(), m) == rank_)
          receive_from(m, place(m), range(m).bytes, x);
      }
    }
    Call with_in = c;
    with_in.in = in;
    meeting_->open(me_, with_in);
    for (int i = 0; i < size(); ++i) {
      const int m = (rank_ + i) % size();  // so that not all members copy from the same one at once
      if (!is_remote(m)) copy(place(m), published(peer(m).local).in, range(m).bytes);
    }
    if (remote_) {
      x.wait(what(c));
      meeting_->meet(me_);
      for (int m = 0; m < size(); ++m) {
        if (!is_remote(m)) continue;
        const int from = peer(receiver(process_->here(), m)).local;
        copy(place(m), static_cast<const char*>(published(from).out) + range(m).first, range(m).bytes);
      }
    }
    meeting_->meet(me_);
  }

  // `out` gets the reduction of this member's range of every member's c.in. The caller meets the others again
  // before any c.in may change.
  template <class RangeOf>
  void reduce_range(const Call& c, const RangeOf& range, void* out, Exchange& x) {
    const auto of = [&](const void* data, int member) {
      return static_cast<const char*>(data) + range(member).first;
    };
    std::vector<const void*> operands(static_cast<std::size_t>(size()));
    const std::int64_t mine = range(rank_).bytes;
    const auto element = static_cast<std::int64_t>(size_of(c.dtype));
    if (!remote_) {
      meeting_->open(me_, c);
      for (int m = 0; m < size(); ++m)
        operands[order_[static_cast<std::size_t>(m)]] = of(published(peer(m).local).in, rank_);
      return reduce(operands, out, mine / element, c.dtype, c.reduction);
    }
    // Block by block: while one block is reduced, the next is in transit.
    std::int64_t most = 0, remote = 0;
    for (int m = 0; m < size(); ++m) {
      most = std::max(most, range(m).bytes);
      remote += is_remote(m) ? 1 : 0;
    }
    const std::int64_t block = std::min(kBlock, std::max<std::int64_t>(most, element));
    staging_.reserve(2 * remote * block);
    const std::int64_t blocks = (most + block - 1) / block;
    const auto part = [&](int member, std::int64_t b) {
      const std::int64_t all = range(member).bytes, first = std::min(all, b * block);
      return Range{first, std::min(block, all - first)};
    };
    const auto staged = [&](std::int64_t b, std::int64_t number) {
      return static_cast<char*>(staging_.data()) + (b % 2 * remote + number) * block;
    };
    const auto start = [&](std::int64_t b) {
      std::int64_t number = 0;
      for (int m = 0; m < size(); ++m) {
        if (!is_remote(m)) continue;
        receive_from(m, staged(b, number++), part(rank_, b).bytes, x);
        send_to(m, of(c.in, m) + part(m, b).first, part(m, b).bytes, x);
      }
      return x.under_way();
    };
    if (blocks > 0) start(0);
    meeting_->open(me_, c);
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::size_t before = x.under_way();
      const std::size_t later = b + 1 < blocks ? start(b + 1) - before : 0;
      x.wait(what(c), later);
      const Range now = part(rank_, b);
      std::int64_t number = 0;
      for (int m = 0; m < size(); ++m) {
        operands[order_[static_cast<std::size_t>(m)]] =
            is_remote(m) ? staged(b, number++) : of(published(peer(m).local).in, rank_) + now.first;
      }
      reduce(operands, static_cast<char*>(out) + now.first, now.bytes / element, c.dtype, c.reduction);
    }
  }

  void broadcast(const Call& c, std::int64_t bytes, Exchange& x) {
    const bool abroad = is_remote(c.peer);
    const int source = abroad ? receiver(process_->here(), c.peer) : c.peer;
    if (rank_ == c.peer && remote_) send_abroad(c.in, bytes, x);
    if (abroad && source == rank_) {
      receive_from(c.peer, c.out, bytes, x);
      x.wait(what(c));
    }
    meeting_->open(me_, c);
    copy(c.out, published(peer(source).local).in, bytes);
    x.wait(what(c));
    meeting_->meet(me_);
  }

  void all_to_all(const Call& c, std::int64_t bytes, Exchange& x) {
    for (int m = 0; m < size(); ++m) {
      if (!is_remote(m)) continue;
      receive_from(m, static_cast<char*>(c.out) + m * bytes, bytes, x);
      send_to(m, static_cast<const char*>(c.in) + m * bytes, bytes, x);
    }
    meeting_->open(me_, c);
    for (int i = 0; i < size(); ++i) {
      const int m = (rank_ + i) % size();
      if (is_remote(m)) continue;
      copy(static_cast<char*>(c.out) + m * bytes,
           static_cast<const char*>(published(peer(m).local).in) + rank_ * bytes, bytes);
    }
    x.wait(what(c));
    meeting_->meet(me_);
  }

  // A barrier of processes: each process's first member exchanges a byte with the first members of the
  // others.
  void meet_processes(const Call& c, Exchange& x) {
    std::vector<char> told(by_process_.size());
    const char token = 0;
    std::size_t i = 0;
    for (const auto& [process, there] : by_process_) {
      if (process == process_->here()) continue;
      send_to(there.front(), &token, 1, x);
      receive_from(there.front(), &told[i++], 1, x);
    }
    x.wait(what(c));
  }

  const std::shared_ptr<Process> process_;
  const int world_rank_;
  const std::vector<int> members_;  // world ranks
  const std::string name_;
  // Indexed by member: how many members have a lower world rank.
  std::vector<std::size_t> order_;
  int rank_ = -1;  // this member's number in the group
  int me_ = 0;     // this member's number in the meeting
  bool remote_ = false;
  std::vector<Peer> peers_;
  std::map<int, std::vector<int>> by_process_;  // by process: its members, in the group's order
  std::shared_ptr<Meeting> meeting_;
  Buffer staging_;
  CommTraffic traffic_;
};

class HostRank final : public CommRank {
 public:
  HostRank(std::shared_ptr<Process> process, int rank) : process_(std::move(process)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return process_->size(); }
  std::string describe() const override {
    const std::string threads =
        fmt::format("{} threads", process_->ranks_of[static_cast<std::size_t>(process_->here())]);
    return process_->wire == nullptr ? threads
                                     : fmt::format("{}, {} processes by {}", threads,
                                                   process_->ranks_of.size(), process_->wire->describe());
  }
  std::unique_ptr<Communicator> group(std::span<const int> members, const std::string& name) override {
    for (const int m : members) {
      ZG_ASSERT(m >= 0 && m < size(), "group {}: there is no rank {} of {}", name, m, size());
      ZG_ASSERT(std::count(members.begin(), members.end(), m) == 1, "group {} names rank {} twice", name, m);
    }
    return std::make_unique<HostCommunicator>(process_, rank_,
                                              std::vector<int>(members.begin(), members.end()), name);
  }
  void fail(const Error& error) override { process_->fail(rank_, error); }

 private:
  std::shared_ptr<Process> process_;
  const int rank_;
};

}  // namespace

std::vector<std::unique_ptr<CommRank>> make_host_ranks(std::vector<int> ranks_of, std::unique_ptr<Wire> wire,
                                                       const CommOptions& options,
                                                       std::shared_ptr<Failure> failure) {
  const auto process =
      std::make_shared<Process>(std::move(ranks_of), std::move(wire), options, std::move(failure));
  std::vector<std::unique_ptr<CommRank>> ranks;
  for (int rank = 0; rank < process->size(); ++rank) {
    if (process->process_of[static_cast<std::size_t>(rank)] == process->here())
      ranks.push_back(std::make_unique<HostRank>(process, rank));
  }
  return ranks;
}

}  // namespace zg::comm

namespace zg {

std::vector<std::unique_ptr<CommRank>> make_local_ranks(int ranks, const CommOptions& options) {
  ZG_ASSERT_GE(ranks, 1);
  return comm::make_host_ranks({ranks}, nullptr, options);
}

}  // namespace zg
