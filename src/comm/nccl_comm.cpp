// Ranks with a GPU each: threads of one process, or of several.
//
// Each communicator has lanes; a lane is a thread with a CUDA stream. A call enqueues itself on a lane, and
// makes the rank's stream wait for its end. The lane waits until the rank's stream has reached the call, then
// meets the lanes of the other members, which compares the calls (Meeting), and only then enqueues NCCL's
// work and waits for it. So no NCCL kernel ever waits for a member that may not come. Nor can an NCCL kernel
// deadlock with a CUDA call that waits for the whole device, such as one that loads kernels: such calls are
// made while no stream of their device waits for the host (Completions::quiet()), and the rank's stream waits
// for the host during every call made here.
//
// NCCL only moves bytes; a kernel of ours reduces. A member receives its range of the others' operands chunk
// by chunk into staging memory, and reduces each chunk in the order of the ranks. Sends and receives are
// copies between the two GPUs, made by the receiver; between processes they go through host memory.
//
// Lanes of several processes meet by messages between the hosts, over the ranks' host communicators.
#include <algorithm>
#include <map>
#include <numeric>
#include <thread>
#include <utility>

#include "comm/domain.hpp"
#include "comm/host_ranks.hpp"
#include "comm/nccl_ranks.hpp"
#include "comm/nccl_world.hpp"
#include "ziggurat/base/buffer.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/cuda_access.hpp"

namespace zg::comm {
namespace {

constexpr std::int64_t kLetterBlock = 4 << 20;  // most bytes of a message to another process
constexpr int kMostGpus = 64;                   // kernels/cuda/reduce.hpp

// NCCL calls that form one NCCL group, and so count as one.
class NcclCalls {
 public:
  explicit NcclCalls(Nccl& nccl) : nccl_(nccl) { nccl_.begin_group(); }
  ~NcclCalls() {
    if (open_) try {
        nccl_.end_group();
      } catch (const Error&) {  // a call of the group has failed already
      }
  }
  void end() {
    open_ = false;
    nccl_.end_group();
  }

 private:
  Nccl& nccl_;
  bool open_ = true;
};

// A thread with a CUDA stream that carries out calls one after the other.
struct Lane {
  Lane(CudaAccess& gpu, const std::string& name)
      : queue(gpu.make_queue()), thread(name, HostStream::Mode::kThread) {}
  std::unique_ptr<CudaQueue> queue;
  // For messages to other processes. `copies` is made at its first use.
  std::unique_ptr<Stream> copies;
  HostStream letters{"letters", HostStream::Mode::kInline};
  Buffer block;
  HostStream thread;  // last, so that it ends first
};

class GpuCommunicator final : public Communicator {
 public:
  GpuCommunicator(std::shared_ptr<NcclWorld> world, int rank, const std::vector<int>& members,
                  const std::string& name)
      : world_(std::move(world)),
        world_rank_(rank),
        members_(members),
        name_(name),
        device_(*world_->devices[world_->local(rank)]),
        gpu_(access_of(device_)),
        on_host_(world_->on_host[world_->local(rank)]->group(members, name)),
        group_(world_->group(members, name, rank)) {
    rank_ = on_host_->rank();
    const auto is_here = [this](int r) { return world_->is_here(r); };
    if (!std::all_of(members.begin(), members.end(), is_here))
      lanes_meet_ = world_->on_host[world_->local(rank)]->group(members, name);
    for (int m = 0; m < size(); ++m) {
      if (is_here(rank_of(m))) continue;
      // Both members make the two groups in the same order.
      const std::vector<int> both{rank_of(std::min(m, rank_)), rank_of(std::max(m, rank_))};
      for (const bool up : {true, false})
        letters_[{m, up}] = world_->on_host[world_->local(rank)]->group(both, name);
    }
    std::vector<int> all(members.size());
    std::iota(all.begin(), all.end(), 0);
    counter_ = make_dry_rank(rank_, size())->group(all, name);
    for (const int r : members_) {
      const auto lower = [&](int other) { return other < r; };
      order_.push_back(static_cast<std::size_t>(std::count_if(members_.begin(), members_.end(), lower)));
    }
  }
  ~GpuCommunicator() override {
    lanes_.clear();
    if (staging_ != nullptr) device_.arena().release(staging_, staging_bytes_);
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  CommTraffic traffic() const override {
    CommTraffic all = counter_->traffic();
    return all += on_host_->traffic();
  }

  void all_gather(Stream& s, const void* in, void* out, std::int64_t count, DType dtype) override {
    if (is_host(s)) return on_host_->all_gather(s, in, out, count, dtype);
    counter_->all_gather(s, in, out, count, dtype);
    enqueue(s, {.in = in, .out = out, .count = count, .kind = Kind::kAllGather, .dtype = dtype});
  }
  void reduce_scatter(Stream& s, const void* in, void* out, std::int64_t count, DType dtype,
                      Reduction reduction) override {
    if (is_host(s)) return on_host_->reduce_scatter(s, in, out, count, dtype, reduction);
    counter_->reduce_scatter(s, in, out, count, dtype, reduction);
    enqueue(s, {in, out, count, Kind::kReduceScatter, dtype, reduction, 0});
  }
  void all_reduce(Stream& s, void* data, std::int64_t count, DType dtype, Reduction reduction) override {
    if (is_host(s)) return on_host_->all_reduce(s, data, count, dtype, reduction);
    counter_->all_reduce(s, data, count, dtype, reduction);
    enqueue(s, {data, data, count, Kind::kAllReduce, dtype, reduction, 0});
  }
  void broadcast(Stream& s, void* data, std::int64_t count, DType dtype, int root) override {
    if (is_host(s)) return on_host_->broadcast(s, data, count, dtype, root);
    counter_->broadcast(s, data, count, dtype, root);
    enqueue(s, {data, data, count, Kind::kBroadcast, dtype, Reduction::kSum, root});
  }
  void all_to_all(Stream& s, const void* in, void* out, std::int64_t count, DType dtype) override {
    if (is_host(s)) return on_host_->all_to_all(s, in, out, count, dtype);
    counter_->all_to_all(s, in, out, count, dtype);
    enqueue(s, {.in = in, .out = out, .count = count, .kind = Kind::kAllToAll, .dtype = dtype});
  }
  void send(Stream& s, const void* data, std::int64_t count, DType dtype, int to) override {
    if (is_host(s)) return on_host_->send(s, data, count, dtype, to);
    ZG_ASSERT(to != rank_, "member {} sends to itself", to);
    counter_->send(s, data, count, dtype, to);
    enqueue(s, {data, nullptr, count, Kind::kSend, dtype, Reduction::kSum, to});
  }
  void receive(Stream& s, void* data, std::int64_t count, DType dtype, int from) override {
    if (is_host(s)) return on_host_->receive(s, data, count, dtype, from);
    ZG_ASSERT(from != rank_, "member {} receives from itself", from);
    counter_->receive(s, data, count, dtype, from);
    enqueue(s, {nullptr, data, count, Kind::kReceive, dtype, Reduction::kSum, from});
  }
  void barrier(Stream& s) override {
    if (is_host(s)) return on_host_->barrier(s);
    counter_->barrier(s);
    enqueue(s, {});
  }

 private:
  static bool is_host(Stream& s) { return dynamic_cast<HostStream*>(&s) != nullptr; }
  static std::int64_t bytes_of(std::int64_t count, DType dtype) {
    ZG_ASSERT_GE(count, 0);
    return count * static_cast<std::int64_t>(size_of(dtype));
  }
  Nccl& nccl() { return *world_->nccl; }
  ExchangeReserve& reserve() { return *world_->reserves[world_->local(world_rank_)]; }
  NcclComm comm() { return group_->comms[static_cast<std::size_t>(rank_)]; }
  bool is_letter(const Call& call) const { return call.kind == Kind::kSend || call.kind == Kind::kReceive; }
  bool is_abroad(int member) const { return letters_.count({member, true}) > 0; }
  int rank_of(int member) const { return members_[static_cast<std::size_t>(member)]; }

  // Sends and receives run concurrently with each other and with collective calls, so each direction between
  // two members has a lane of its own.
  Lane& lane_of(const Call& call) {
    const std::pair key(is_letter(call) ? call.kind : Kind::kBarrier, is_letter(call) ? call.peer : 0);
    std::unique_ptr<Lane>& lane = lanes_[key];
    if (lane == nullptr) lane = std::make_unique<Lane>(gpu_, "comm " + name_);
    return *lane;
  }

  void enqueue(Stream& s, const Call& call) {
    Lane& lane = lane_of(call);
    const Event reached = s.record(), done = Event::pending();
    lane.thread.enqueue(name_of(call.kind), [this, &lane, call, reached, done] {
      reached.wait();
      run(lane, call);
      done.set();
    });
    // Connections are made while no stream waits for the host; see connect().
    const bool connects = !is_letter(call) && call.kind != Kind::kBarrier && !std::exchange(connects_, true);
    connects ? done.wait() : s.wait(done);
  }

  // On a failure, ends NCCL's work first, and then all other work of the device.
  void run(Lane& lane, const Call& call) {
    try {
      world_->failure->rethrow();
      gpu_.use();
      gpu_.check();
      carry_out(lane, call);
    } catch (const Error& error) {
      give_up(call, error);
    } catch (const std::exception& error) {
      give_up(call, Error(Errc::kComm, "group " + name_, error.what()));
    }
  }
  void give_up(const Call& call, const Error& error) {
    world_->fail(world_rank_, error);  // ignored if another rank has failed already
    if (!is_letter(call)) group_->abort(static_cast<std::size_t>(rank_));
    gpu_.fail(std::make_exception_ptr(error));
  }

  // Publishes the call of this member's lane. Returns when the lanes of all members have come with the same
  // call; throws if a call differs.
  void open(const Call& c) {
    if (lanes_meet_ == nullptr) return group_->meeting.open(rank_, c);
    const auto number = [](auto value) { return static_cast<std::int64_t>(value); };
    const std::array mine{number(c.kind), number(c.dtype), number(c.reduction), number(c.peer), c.count};
    std::vector<std::array<std::int64_t, 5>> all(members_.size());
    lanes_meet_->all_gather(meeting_stream_, mine.data(), all.data(), number(mine.size()), DType::kI64);
    for (std::size_t m = 0; m < all.size(); ++m) {
      if (all[m] == mine) continue;
      const auto& [kind, dtype, reduction, peer, count] = all[m];
      const Call theirs{nullptr,
                        nullptr,
                        count,
                        static_cast<Kind>(kind),
                        static_cast<DType>(dtype),
                        static_cast<Reduction>(reduction),
                        static_cast<int>(peer)};
      throw differing_calls(name_, world_rank_, c, members_[m], theirs);
    }
  }
  void meet() {
    lanes_meet_ == nullptr ? group_->meeting.meet(rank_) : lanes_meet_->barrier(meeting_stream_);
  }
  NcclId identity() {
    if (lanes_meet_ == nullptr) return group_->identity();
    NcclId id{};
    if (rank_ == 0) id = nccl().make_id();
    lanes_meet_->broadcast(meeting_stream_, id.data(), static_cast<std::int64_t>(id.size()), DType::kU8, 0);
    return id;
  }

  void carry_out(Lane& lane, const Call& c) {
    Meeting& meeting = group_->meeting;
    const std::int64_t bytes = bytes_of(c.count, c.dtype);
    const auto rows = [&](int member) { return Range{member * bytes, bytes}; };
    if (is_letter(c) && is_abroad(c.peer)) return pass_abroad(lane, c, bytes);
    if (c.kind == Kind::kSend) return meeting.give(rank_, c.peer, c);
    if (c.kind == Kind::kReceive) {
      return meeting.take(c.peer, rank_, c, [&](const Call& sent) {
        lane.queue->copy_from(group_->gpus[static_cast<std::size_t>(c.peer)]->index(), c.out, sent.in, bytes);
        wait(*lane.queue, c, nullptr);
      });
    }
    open(c);
    if (c.kind == Kind::kBarrier) return;
    if (comm() == nullptr && size() > 1) connect(*lane.queue, c);
    switch (c.kind) {
      case Kind::kAllGather:
        gather(*lane.queue, c, c.in, rows, true);
        break;
      case Kind::kReduceScatter:
        reduce(*lane.queue, c, rows, c.out);
        break;
      case Kind::kAllReduce: {
        const auto range = [&](int member) { return share_of(member, size(), c.count, c.dtype); };
        char* const mine = static_cast<char*>(c.out) + range(rank_).first;
        reduce(*lane.queue, c, range, mine);
        gather(*lane.queue, c, mine, range, c.count % size() == 0);
        break;
      }
      case Kind::kBroadcast:
        if (size() == 1 || bytes == 0) break;
        nccl().broadcast(comm(), c.out, bytes, c.peer, lane.queue->handle());
        settle(c);
        break;
      default:
        all_to_all(*lane.queue, c, bytes);
    }
    wait(*lane.queue, c, comm());
  }

  // Sends to or receives from a member of another process, block by block through host memory. NCCL would
  // have to connect the two members first, and can do so only while no stream waits for the host: then
  // neither member could be waiting for a third.
  void pass_abroad(Lane& lane, const Call& c, std::int64_t bytes) {
    if (lane.copies == nullptr) lane.copies = device_.make_stream("letters " + name_);
    const bool sends = c.kind == Kind::kSend, up = sends == (c.peer > rank_);
    Communicator& letters = *letters_.at({c.peer, up});
    const int peer = c.peer > rank_ ? 1 : 0;
    lane.block.reserve(std::min(bytes, kLetterBlock));
    for (std::int64_t at = 0; at < bytes; at += kLetterBlock) {
      const std::int64_t n = std::min(kLetterBlock, bytes - at);
      if (sends) {
        device_.copy_to_host(*lane.copies, lane.block.data(), static_cast<const char*>(c.in) + at, n);
        lane.copies->synchronize();
        letters.send(lane.letters, lane.block.data(), n, DType::kU8, peer);
      } else {
        letters.receive(lane.letters, lane.block.data(), n, DType::kU8, peer);
        device_.copy_to_device(*lane.copies, static_cast<char*>(c.out) + at, lane.block.data(), n);
        lane.copies->synchronize();
      }
    }
  }

  // Makes NCCL's communicator, and its connections by a small call of each kind. NCCL loads kernels and takes
  // memory then, so this first waits until no stream of a member waits for the host. That comes true, since
  // the work that such a stream waits for depends on no later call in the members' order.
  void connect(CudaQueue& queue, const Call& c) {
    const auto quiet = gpu_.quiet();
    meet();
    group_->comms[static_cast<std::size_t>(rank_)] = nccl().init(size(), identity(), rank_);
    settle(c);
    const std::int64_t row = kAlignment;
    char *const out = reserve().connecting(), *const in = out + size() * row;
    exchange(
        queue, c, [&](int m) { return std::pair<const void*, std::int64_t>(in + m * row, row); },
        [&](int m) { return std::pair<void*, std::int64_t>(out + m * row, row); });
    nccl().all_gather(comm(), in, out, row, queue.handle());
    settle(c);
    nccl().broadcast(comm(), out, row, 0, queue.handle());
    settle(c);
    wait(queue, c, comm());
    meet();
  }

  void* allocate(std::int64_t bytes) {
    void* const memory = device_.arena().allocate(bytes);
    if (memory == nullptr) {
      throw Error(Errc::kMemory, "group " + name_,
                  fmt::format("the device's budget has no {} for communication", format_bytes(bytes)),
                  "raise tiers.device");
    }
    return memory;
  }

  // Sends what(m) to every other member m, and receives from m into where(m). Both return an address and a
  // number of bytes.
  template <class What, class Where>
  void exchange(CudaQueue& queue, const Call& c, const What& what, const Where& where) {
    NcclCalls calls(nccl());
    for (int i = 1; i < size(); ++i) {
      const int to = (rank_ + i) % size(), from = (rank_ + size() - i) % size();
      if (const auto [data, bytes] = what(to); bytes > 0)
        nccl().send(comm(), data, bytes, to, queue.handle());
      if (const auto [data, bytes] = where(from); bytes > 0)
        nccl().receive(comm(), data, bytes, from, queue.handle());
    }
    calls.end();
    settle(c);
  }

  // Gathers: each member's `in` becomes range(member) of every member's c.out. even: all ranges have the same
  // length.
  template <class RangeOf>
  void gather(CudaQueue& queue, const Call& c, const void* in, const RangeOf& range, bool even) {
    char* const out = static_cast<char*>(c.out);
    const Range mine = range(rank_);
    if (size() > 1 && even) {
      if (mine.bytes > 0) nccl().all_gather(comm(), in, out, mine.bytes, queue.handle());
      return settle(c);
    }
    queue.copy(out + mine.first, in, mine.bytes);
    if (size() == 1) return;
    exchange(
        queue, c, [&](int) { return std::pair(in, mine.bytes); },
        [&](int m) { return std::pair<void*, std::int64_t>(out + range(m).first, range(m).bytes); });
  }

  void all_to_all(CudaQueue& queue, const Call& c, std::int64_t bytes) {
    const auto* const in = static_cast<const char*>(c.in);
    auto* const out = static_cast<char*>(c.out);
    queue.copy(out + rank_ * bytes, in + rank_ * bytes, bytes);
    if (size() == 1) return;
    exchange(
        queue, c, [&](int m) { return std::pair<const void*, std::int64_t>(in + m * bytes, bytes); },
        [&](int m) { return std::pair<void*, std::int64_t>(out + m * bytes, bytes); });
  }

  // `out` gets the reduction of this member's range of every member's c.in.
  template <class RangeOf>
  void reduce(CudaQueue& queue, const Call& c, const RangeOf& range, void* out) {
    const auto element = static_cast<std::int64_t>(size_of(c.dtype));
    const auto others = static_cast<std::int64_t>(size()) - 1;
    std::int64_t most = 0;
    for (int m = 0; m < size(); ++m) most = std::max(most, range(m).bytes);
    if (others > 0 && most > 0 && staging_ == nullptr) {
      staging_bytes_ = world_->options.staging_bytes;
      ZG_ASSERT_GE(staging_bytes_, others * kAlignment);
      staging_ = reserve().take_staging();
      if (staging_ == nullptr) staging_ = allocate(staging_bytes_);
    }
    const std::int64_t chunk =
        others > 0 ? staging_bytes_ / others / kAlignment * kAlignment : std::max<std::int64_t>(most, 1);
    const auto part = [&](int member, std::int64_t first) {
      const std::int64_t all = range(member).bytes, begin = std::min(all, first);
      return Range{begin, std::min(chunk, all - begin)};
    };
    const auto staged = [&](int member) {
      return static_cast<char*>(staging_) + (member < rank_ ? member : member - 1) * chunk;
    };
    const auto at = [&](int member, std::int64_t first) {
      return static_cast<const char*>(c.in) + range(member).first + part(member, first).first;
    };
    std::vector<const void*> operands(static_cast<std::size_t>(size()));
    for (std::int64_t first = 0; first < most; first += chunk) {
      const Range mine = part(rank_, first);
      if (others > 0) {
        exchange(
            queue, c,
            [&](int m) { return std::pair<const void*, std::int64_t>(at(m, first), part(m, first).bytes); },
            [&](int m) { return std::pair<void*, std::int64_t>(staged(m), mine.bytes); });
      }
      for (int m = 0; m < size(); ++m)
        operands[order_[static_cast<std::size_t>(m)]] = m == rank_ ? at(m, first) : staged(m);
      queue.reduce(operands, static_cast<char*>(out) + mine.first, mine.bytes / element, c.dtype,
                   c.reduction == Reduction::kMax);
    }
  }

  // Returns when NCCL has enqueued the requested work.
  void settle(const Call& c) {
    until([&] { return nccl().settled(comm()); }, c);
  }
  // Returns when the queue's work is done. `comm`: the NCCL communicator whose failures to check for; null:
  // none.
  void wait(CudaQueue& queue, const Call& c, NcclComm comm) {
    queue.mark();
    until([&] { return queue.reached(); }, c, comm);
  }
  template <class Ready>
  void until(const Ready& ready, const Call& c, NcclComm comm = nullptr) {
    const Patience patience(*world_->failure, world_->options.timeout_seconds);
    while (!ready()) {
      world_->listen();
      patience.look();
      gpu_.check();
      if (comm != nullptr) (void)nccl().settled(comm);  // throws NCCL's failure
      if (patience.is_over()) {
        throw Error(Errc::kComm, "group " + name_,
                    fmt::format("all members have joined {}, but NCCL has not done it in {:.0f} s",
                                text_of(c), world_->options.timeout_seconds),
                    "NCCL says more with NCCL_DEBUG=INFO in the environment");
      }
      std::this_thread::sleep_for(kPollInterval);
    }
  }

  const std::shared_ptr<NcclWorld> world_;
  const int world_rank_;
  const std::vector<int> members_;  // world ranks
  const std::string name_;
  Device& device_;
  CudaAccess& gpu_;
  const std::unique_ptr<Communicator> on_host_;
  const std::shared_ptr<NcclGroup> group_;
  std::unique_ptr<Communicator> lanes_meet_;  // for members in several processes; null: meet in group_
  HostStream meeting_stream_{"meeting", HostStream::Mode::kInline};
  // Indexed by member of another process, and by direction: true from the lower to the higher member.
  std::map<std::pair<int, bool>, std::unique_ptr<Communicator>> letters_;
  std::unique_ptr<Communicator> counter_;  // counts the traffic of calls on the GPU's streams
  int rank_ = -1;
  std::vector<std::size_t> order_;  // by member: how many members have a lower world rank
  bool connects_ = false;           // a call that needs NCCL has been made
  void* staging_ = nullptr;         // staging_ and staging_bytes_: used only by the lane of collectives
  std::int64_t staging_bytes_ = 0;
  std::map<std::pair<Kind, int>, std::unique_ptr<Lane>> lanes_;
};

class GpuRank final : public CommRank {
 public:
  GpuRank(std::shared_ptr<NcclWorld> world, int rank) : world_(std::move(world)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return world_->on_host.front()->size(); }
  std::string describe() const override {
    return fmt::format("{} GPUs{}, {}", size(),
                       world_->wire != nullptr
                           ? fmt::format(", {} of them in this process, which meets others by {}",
                                         world_->devices.size(), world_->wire->describe())
                           : "",
                       world_->nccl->describe());
  }
  std::unique_ptr<Communicator> group(std::span<const int> members, const std::string& name) override {
    return std::make_unique<GpuCommunicator>(world_, rank_, std::vector<int>(members.begin(), members.end()),
                                             name);
  }
  void fail(const Error& error) override { world_->fail(rank_, error); }

 private:
  const std::shared_ptr<NcclWorld> world_;
  const int rank_;
};

}  // namespace

std::vector<std::unique_ptr<CommRank>> make_nccl_ranks(std::span<Device* const> devices,
                                                       std::shared_ptr<Nccl> nccl,
                                                       const GpuCommOptions& options,
                                                       std::vector<int> ranks_of,
                                                       std::unique_ptr<Wire> wire) {
  ZG_ASSERT(!devices.empty(), "no GPUs");
  if (ranks_of.empty()) ranks_of = {static_cast<int>(devices.size())};
  const int all = std::accumulate(ranks_of.begin(), ranks_of.end(), 0);
  if (all > kMostGpus) {
    throw Error(Errc::kUsage, "devices",
                fmt::format("name {} GPUs in all processes, and at most {} can be", all, kMostGpus),
                "start fewer processes, or name fewer GPUs");
  }
  const auto failure = std::make_shared<Failure>();
  std::vector<std::unique_ptr<ExchangeReserve>> reserves;
  for (Device* device : devices)
    reserves.push_back(std::make_unique<ExchangeReserve>(*device, all, options.staging_bytes));
  Wire* const messages = wire.get();
  auto on_host = make_host_ranks(std::move(ranks_of), std::move(wire), {options.timeout_seconds}, failure);
  ZG_ASSERT_EQ(on_host.size(), devices.size());
  const auto world = std::make_shared<NcclWorld>(options, std::move(nccl), failure,
                                                 std::vector(devices.begin(), devices.end()),
                                                 std::move(on_host), std::move(reserves), messages);
  std::vector<std::unique_ptr<CommRank>> ranks;
  for (const auto& rank : world->on_host) ranks.push_back(std::make_unique<GpuRank>(world, rank->rank()));
  return ranks;
}

}  // namespace zg::comm
