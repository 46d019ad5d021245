#include "tests/cuda/comm/fake_nccl.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace zg::test {
namespace {

constexpr int kPolls = 3;  // looks until a call has settled

thread_local int t_depth = 0;
thread_local std::vector<void*> t_group;  // communicators that the thread's group has called

}  // namespace

FakeNccl::~FakeNccl() {
  std::vector<std::string> wrong = take_mistakes();
  for (const auto& comm : comms_) {
    if (!comm->gone) wrong.push_back(fmt::format("rank {} is neither destroyed nor aborted", comm->rank));
  }
  if (open_groups_ != 0) wrong.push_back(fmt::format("{} groups do not end", open_groups_));
  ZG_ASSERT(wrong.empty(), "misuse of NCCL: {}", fmt::join(wrong, "; "));
}

std::int64_t FakeNccl::calls(const std::string& name) const {
  std::lock_guard lock(mutex_);
  const auto it = counts_.find(name);
  return it == counts_.end() ? 0 : it->second;
}
void FakeNccl::fail(const std::string& name, std::int64_t nth) {
  std::lock_guard lock(mutex_);
  faults_[name] = counts_[name] + nth;
}
void FakeNccl::hang(bool hang) {
  std::lock_guard lock(mutex_);
  hangs_ = hang;
}
void FakeNccl::break_all(const std::string& words) {
  std::lock_guard lock(mutex_);
  for (const auto& [id, clique] : cliques_) clique->broken = words;
  changed_.notify_all();
}
std::vector<std::string> FakeNccl::take_mistakes() {
  std::lock_guard lock(mutex_);
  return std::exchange(mistakes_, {});
}

// The rest is called under the mutex, unless it says otherwise.
void FakeNccl::called(const char* name) {
  const std::int64_t n = ++counts_[name];
  const auto fault = faults_.find(name);
  if (fault != faults_.end() && fault->second == n)
    throw Error(Errc::kComm, name, "NCCL refused it: a fault that the test asked for");
}

void FakeNccl::mistake(const std::string& what) {
  mistakes_.push_back(what);
  throw Error(Errc::kComm, "NCCL", "invalid usage: " + what);
}

FakeNccl::Comm& FakeNccl::comm_of(comm::NcclComm handle) {
  for (const auto& comm : comms_) {
    if (reinterpret_cast<comm::NcclComm>(comm.get()) != handle) continue;
    if (comm->gone) mistake("the communicator is gone");
    return *comm;
  }
  mistake("there is no such communicator");
  std::abort();
}

comm::NcclId FakeNccl::make_id() {
  std::lock_guard lock(mutex_);
  called("make_id");
  comm::NcclId id{};
  const int number = ++next_id_;
  std::memcpy(id.data(), &number, sizeof(number));
  cliques_[id] = std::make_shared<Clique>();
  return id;
}

comm::NcclComm FakeNccl::init(int ranks, const comm::NcclId& id, int rank) {
  std::lock_guard lock(mutex_);
  called("init");
  const int device = runtime_->current_device();
  runtime_->load(fmt::format("NCCL {} on device {}", comms_.size(), device));
  const auto it = cliques_.find(id);
  if (it == cliques_.end()) mistake("an identity that was not made");
  Clique& clique = *it->second;
  if (clique.joined == 0) clique.ranks = ranks, clique.has.resize(static_cast<std::size_t>(ranks));
  if (clique.ranks != ranks) mistake(fmt::format("of {} ranks, elsewhere of {}", ranks, clique.ranks));
  if (rank < 0 || rank >= ranks || clique.has[static_cast<std::size_t>(rank)])
    mistake(fmt::format("rank {} of {} joins twice, or cannot", rank, ranks));
  for (const auto& comm : comms_) {
    if (comm->clique == it->second && comm->device == device) mistake("two ranks on one device");
  }
  clique.has[static_cast<std::size_t>(rank)] = true;
  ++clique.joined;
  comms_.push_back(std::make_unique<Comm>());
  Comm& comm = *comms_.back();
  comm.clique = it->second;
  comm.rank = rank, comm.device = device, comm.polls = kPolls;
  return reinterpret_cast<comm::NcclComm>(&comm);
}

// What was called is enqueued only now: work that is enqueued before does not wait for it.
bool FakeNccl::settled(comm::NcclComm handle) {
  Comm* comm = nullptr;
  {
    std::lock_guard lock(mutex_);
    called("settled");
    comm = &comm_of(handle);
    if (!comm->clique->broken.empty()) throw Error(Errc::kComm, "NCCL", comm->clique->broken);
    if (comm->in_group) mistake("a state is asked for inside a group");
    if (comm->clique->joined < comm->clique->ranks) return false;
    if (comm->polls == 0) return true;
    if (--comm->polls > 0) return false;
  }
  launch(*comm);
  return true;
}

void FakeNccl::begin_group() {
  std::lock_guard lock(mutex_);
  called("begin_group");
  if (t_depth > 0) mistake("a group inside a group");
  ++t_depth, ++open_groups_;
}

void FakeNccl::end_group() {
  std::lock_guard lock(mutex_);
  if (t_depth == 0) mistake("a group ends that did not begin");
  --t_depth, --open_groups_;
  for (void* comm : std::exchange(t_group, {})) static_cast<Comm*>(comm)->in_group = false;
  called("end_group");
}

void FakeNccl::add(comm::NcclComm handle, const char* name, const Op& op, CUstream_st* stream) {
  std::lock_guard lock(mutex_);
  called(name);
  Comm& comm = comm_of(handle);
  if (comm.finalized) mistake(fmt::format("{}: the communicator has ended", name));
  if (comm.polls > 0 && !comm.in_group) mistake(fmt::format("{}: the call before has not settled", name));
  if (!comm.pending.empty() && comm.stream != stream)
    mistake(fmt::format("{}: two streams in a group", name));
  if (op.peer < 0 || op.peer >= comm.clique->ranks) mistake(fmt::format("{}: no rank {}", name, op.peer));
  if ((op.kind == Kind::kSend || op.kind == Kind::kReceive) && op.peer == comm.rank)
    mistake(fmt::format("{}: to itself", name));
  if (runtime_->current_device() != comm.device)
    mistake(fmt::format("{}: the thread's device is {}, the communicator's {}", name,
                        runtime_->current_device(), comm.device));
  comm.stream = stream;
  comm.pending.push_back(op);
  comm.polls = kPolls;
  if (t_depth > 0 && !comm.in_group) comm.in_group = true, t_group.push_back(&comm);
}

void FakeNccl::launch(Comm& comm) {
  std::vector<Op> ops;
  std::vector<std::pair<const void*, std::int64_t>> uses;
  {
    std::lock_guard lock(mutex_);
    ops = std::exchange(comm.pending, {});
    if (ops.empty()) return;
    for (const Op& op : ops) {
      if (op.in != nullptr) uses.emplace_back(op.in, op.bytes);
      if (op.out != nullptr)
        uses.emplace_back(op.out, op.bytes * (op.kind == Kind::kAllGather ? comm.clique->ranks : 1));
    }
    ++comm.running;
  }
  const auto end = [this, &comm] {
    std::lock_guard lock(mutex_);
    --comm.running;
    changed_.notify_all();
  };
  try {
    runtime_->enqueue_library("nccl", comm.stream, uses, [this, &comm, ops, end] {
      run(comm, ops);
      end();
    });
  } catch (...) {
    end();
    throw;
  }
}

template <class Ready>
bool FakeNccl::wait(std::unique_lock<std::mutex>& lock, const Comm& comm, const Ready& ready) {
  while (hangs_ || !ready()) {
    if (comm.aborted || runtime_->ends() || !comm.clique->broken.empty()) return false;
    changed_.wait_for(lock, std::chrono::milliseconds(1));
  }
  return true;
}

// On the stream's thread.
void FakeNccl::run(Comm& comm, const std::vector<Op>& ops) {
  std::unique_lock lock(mutex_);
  Clique& clique = *comm.clique;
  const auto differ = [&](const std::string& what) {
    mistakes_.push_back(what);
    clique.broken = "invalid usage: " + what;
    changed_.notify_all();
  };
  const auto move = [](void* to, const void* from, std::int64_t bytes) {
    if (to != from) std::memcpy(to, from, static_cast<std::size_t>(bytes));
  };
  std::vector<std::shared_ptr<Letter>> sent;
  for (const Op& op : ops) {
    if (op.kind != Kind::kSend) continue;
    sent.push_back(std::make_shared<Letter>(Letter{op.in, op.bytes, false}));
    clique.letters[{comm.rank, op.peer}].push_back(sent.back());
  }
  changed_.notify_all();
  for (const Op& op : ops) {
    if (op.kind == Kind::kSend) continue;
    if (op.kind == Kind::kReceive) {
      auto& box = clique.letters[{op.peer, comm.rank}];
      if (!wait(lock, comm, [&] { return !box.empty(); })) return;
      Letter& letter = *box.front();
      if (letter.bytes != op.bytes)
        return differ(fmt::format("rank {} sends {} bytes, and rank {} receives {}", op.peer, letter.bytes,
                                  comm.rank, op.bytes));
      move(op.out, letter.data, op.bytes);
      letter.taken = true;
      box.pop_front();
      changed_.notify_all();
      continue;
    }
    const std::int64_t number = comm.collectives++;
    Together& together = clique.collectives[number];
    together.of.resize(static_cast<std::size_t>(clique.ranks));
    together.of[static_cast<std::size_t>(comm.rank)] = op;
    ++together.posted;
    for (const std::optional<Op>& other : together.of) {
      if (other && (other->kind != op.kind || other->bytes != op.bytes || other->peer != op.peer))
        return differ(fmt::format("collective {}: the calls of two ranks differ", number));
    }
    changed_.notify_all();
    if (!wait(lock, comm, [&] { return together.posted == clique.ranks; })) return;
    if (op.kind == Kind::kAllGather) {
      for (int r = 0; r < clique.ranks; ++r)
        move(static_cast<char*>(op.out) + r * op.bytes, together.of[static_cast<std::size_t>(r)]->in,
             op.bytes);
    } else {
      move(op.out, together.of[static_cast<std::size_t>(op.peer)]->in, op.bytes);
    }
    ++together.done;
    changed_.notify_all();
    if (!wait(lock, comm, [&] { return together.done == clique.ranks; })) return;
  }
  wait(lock, comm, [&] { return std::all_of(sent.begin(), sent.end(), [](auto& l) { return l->taken; }); });
}

void FakeNccl::all_gather(comm::NcclComm comm, const void* in, void* out, std::int64_t bytes,
                          CUstream_st* stream) {
  add(comm, "all_gather", {Kind::kAllGather, in, out, bytes, 0}, stream);
}
void FakeNccl::broadcast(comm::NcclComm comm, void* data, std::int64_t bytes, int root, CUstream_st* stream) {
  add(comm, "broadcast", {Kind::kBroadcast, data, data, bytes, root}, stream);
}
void FakeNccl::send(comm::NcclComm comm, const void* data, std::int64_t bytes, int to, CUstream_st* stream) {
  add(comm, "send", {Kind::kSend, data, nullptr, bytes, to}, stream);
}
void FakeNccl::receive(comm::NcclComm comm, void* data, std::int64_t bytes, int from, CUstream_st* stream) {
  add(comm, "receive", {Kind::kReceive, nullptr, data, bytes, from}, stream);
}

void FakeNccl::finalize(comm::NcclComm handle) {
  std::lock_guard lock(mutex_);
  called("finalize");
  Comm& comm = comm_of(handle);
  if (comm.polls > 0) mistake("finalize: the call before has not settled");
  comm.finalized = true;
  comm.polls = kPolls;
}

void FakeNccl::destroy(comm::NcclComm handle) {
  std::lock_guard lock(mutex_);
  called("destroy");
  Comm& comm = comm_of(handle);
  if (!comm.finalized || comm.polls > 0) mistake("destroy: the communicator has not ended");
  if (comm.running > 0) mistake("destroy: its work is not done");
  comm.gone = true;
}

void FakeNccl::abort(comm::NcclComm handle) {
  std::unique_lock lock(mutex_);
  called("abort");
  Comm& comm = comm_of(handle);
  comm.aborted = comm.gone = true;
  comm.pending.clear();
  changed_.notify_all();
}

}  // namespace zg::test
