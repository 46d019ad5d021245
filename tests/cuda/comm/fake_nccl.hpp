// NCCL as a test sees it, over a FakeRuntime: calls run on the streams of its devices, which meet there, and
// misuse is found that NCCL would refuse, or would let pass and hang or go wrong by: calls that differ or
// that come before the last one has settled, streams and memory of another device, groups that do not end,
// communicators that are not given back.
#pragma once
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/nccl.hpp"
#include "tests/cuda/fake_runtime.hpp"

namespace zg::test {

class FakeNccl final : public comm::Nccl {
 public:
  explicit FakeNccl(std::shared_ptr<FakeRuntime> runtime) : runtime_(std::move(runtime)) {}
  // Asserts that nothing leaks and no misuse was found.
  ~FakeNccl() override;

  std::int64_t calls(const std::string& name) const;
  // The n-th call from now of this name throws.
  void fail(const std::string& name, std::int64_t nth);
  // Work that is enqueued from now on never ends, until it is aborted.
  void hang(bool hang);
  // An asynchronous error of all communicators.
  void break_all(const std::string& words);
  std::vector<std::string> take_mistakes();

  std::string describe() const override { return "a fake NCCL"; }
  comm::NcclId make_id() override;
  comm::NcclComm init(int ranks, const comm::NcclId& id, int rank) override;
  bool settled(comm::NcclComm comm) override;
  void begin_group() override;
  void end_group() override;
  void all_gather(comm::NcclComm comm, const void* in, void* out, std::int64_t bytes,
                  CUstream_st* stream) override;
  void broadcast(comm::NcclComm comm, void* data, std::int64_t bytes, int root, CUstream_st* stream) override;
  void send(comm::NcclComm comm, const void* data, std::int64_t bytes, int to, CUstream_st* stream) override;
  void receive(comm::NcclComm comm, void* data, std::int64_t bytes, int from, CUstream_st* stream) override;
  void finalize(comm::NcclComm comm) override;
  void destroy(comm::NcclComm comm) override;
  void abort(comm::NcclComm comm) override;

 private:
  enum class Kind { kAllGather, kBroadcast, kSend, kReceive };
  struct Op {
    Kind kind;
    const void* in = nullptr;
    void* out = nullptr;
    std::int64_t bytes = 0;
    int peer = 0;  // or the root
  };
  struct Letter {
    const void* data;
    std::int64_t bytes;
    bool taken = false;
  };
  // One collective, as the members post it.
  struct Together {
    std::vector<std::optional<Op>> of;  // by rank; empty: not posted yet
    int posted = 0, done = 0;
  };
  struct Clique {
    int ranks = 0, joined = 0;
    std::vector<bool> has;
    std::map<std::pair<int, int>, std::deque<std::shared_ptr<Letter>>> letters;
    std::map<std::int64_t, Together> collectives;
    std::string broken;
  };
  struct Comm {
    std::shared_ptr<Clique> clique;
    int rank = 0, device = 0;
    std::vector<Op> pending;  // enqueued on `stream` when the call settles
    CUstream_st* stream = nullptr;
    bool in_group = false;
    int polls = 0;  // until the call has settled
    int running = 0;
    std::int64_t collectives = 0;
    bool finalized = false, aborted = false, gone = false;
  };

  void called(const char* name);
  void mistake(const std::string& what);  // and throws
  Comm& comm_of(comm::NcclComm comm);
  void add(comm::NcclComm comm, const char* name, const Op& op, CUstream_st* stream);
  void launch(Comm& comm);  // without the mutex
  void run(Comm& comm, const std::vector<Op>& ops);
  template <class Ready>
  bool wait(std::unique_lock<std::mutex>& lock, const Comm& comm, const Ready& ready);

  const std::shared_ptr<FakeRuntime> runtime_;
  mutable std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::map<std::string, std::int64_t> counts_;
  std::map<std::string, std::int64_t> faults_;  // by name: the number of the call
  std::vector<std::string> mistakes_;
  std::map<comm::NcclId, std::shared_ptr<Clique>> cliques_;
  std::vector<std::unique_ptr<Comm>> comms_;
  bool hangs_ = false;
  int next_id_ = 0, open_groups_ = 0;
};

}  // namespace zg::test
