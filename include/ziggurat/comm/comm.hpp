// Collective communication between ranks.
//
// A rank is one device with its share of the work. The ranks of a process are threads; the ranks of all
// processes together are the world, counted so that those of a process are neighbours. A group is any set of
// ranks, and a Communicator is one rank's end of a group. Every member of a group makes the same calls in the
// same order, each with equal counts and types.
//
// Results depend neither on timing nor on the back end: a sum is made element by element in ascending order
// of the members' ranks in the world, in fp64 for f64 and in fp32 for all narrower types, and is rounded
// once. An all-reduce is a reduce-scatter followed by an all-gather.
//
// A call enqueues its work on a stream of the rank's device and returns. Operands must be left alone until
// the stream has done it. A call that the other members do not join fails after a timeout; the stream's
// synchronize() throws the failure, which names the ranks that are missing and what they did last. When a
// rank fails, or says so (CommRank::fail), the calls of all others fail promptly with that rank's error.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ziggurat/base/dtype.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/device/device.hpp"

namespace zg {

enum class Reduction : std::uint8_t { kSum, kMax };  // kMax: NaN if any operand is

// What one rank exchanged with the other members of a group: bytes of operands, however a back end carries
// them. For d members and an operand of B bytes in all, an all-gather and a reduce-scatter send and receive
// B (d - 1) / d each, an all-reduce twice that.
struct CommTraffic {
  std::int64_t sent = 0, received = 0;  // bytes
  std::int64_t calls = 0;
  bool operator==(const CommTraffic&) const = default;
  CommTraffic& operator+=(const CommTraffic& o) {
    sent += o.sent, received += o.received, calls += o.calls;
    return *this;
  }
};

// Used by one thread at a time, like a stream. Members are counted from 0 in the order in which the group
// names them. Counts are elements; sums and maxima are of f64, f32, f16 and bf16, everything else is moved as
// it is. Buffers of one call must not overlap, unless it says so.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;  // this member
  virtual int size() const = 0;

  // out [size, count] gets `in` [count] of every member. `in` may be this member's row of `out`.
  virtual void all_gather(Stream& s, const void* in, void* out, std::int64_t count, DType dtype) = 0;
  // out [count] gets the reduction of row rank() of every member's `in` [size, count]. `out` may be this
  // member's row of `in`.
  virtual void reduce_scatter(Stream& s, const void* in, void* out, std::int64_t count, DType dtype,
                              Reduction reduction) = 0;
  // data [count] becomes the reduction of every member's.
  virtual void all_reduce(Stream& s, void* data, std::int64_t count, DType dtype, Reduction reduction) = 0;
  // data [count] becomes that of member `root`.
  virtual void broadcast(Stream& s, void* data, std::int64_t count, DType dtype, int root) = 0;
  // Row i of out [size, count] gets row rank() of member i's `in` [size, count].
  virtual void all_to_all(Stream& s, const void* in, void* out, std::int64_t count, DType dtype) = 0;
  // A send ends when its member has received it. Sends and receives between two members match in order.
  virtual void send(Stream& s, const void* data, std::int64_t count, DType dtype, int to) = 0;
  virtual void receive(Stream& s, void* data, std::int64_t count, DType dtype, int from) = 0;
  // Is done when every member's stream has reached it.
  virtual void barrier(Stream& s) = 0;

  virtual CommTraffic traffic() const = 0;  // of all calls so far
};

// One rank's end of the world. Any thread may call fail(); the rest is for the rank's thread.
class CommRank {
 public:
  virtual ~CommRank() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string describe() const = 0;  // of the back end: "4 threads"
  // The members are ranks of the world, this one among them. Every member makes the groups that it shares
  // with another in the same order as that one. `name` is for messages. The communicator must go before its
  // rank does, and while no work of it is on a stream.
  virtual std::unique_ptr<Communicator> group(std::span<const int> members, const std::string& name) = 0;
  // This rank cannot go on. The calls of all other ranks fail with this error, behind the number of the rank.
  virtual void fail(const Error& error) = 0;
};

struct CommOptions {
  double timeout_seconds = 600;  // that a call waits for the other members
  // A world of its own beside another one of the same processes: failures of either are not told in the
  // other.
  bool apart = false;
};

// The ranks of a world within this process, over shared memory; for streams of host devices.
std::vector<std::unique_ptr<CommRank>> make_local_ranks(int ranks, const CommOptions& options);

// `ranks` ranks of this process in a world of all processes that an MPI launcher has started. MPI is
// initialised if it is not, and finalised with the last rank; where a rank has failed, all processes are
// ended instead. Throws Error(kUsage) in a build without MPI and where MPI cannot serve several threads.
std::vector<std::unique_ptr<CommRank>> make_mpi_ranks(int ranks, const CommOptions& options);
// Whether an MPI launcher has started this process, by its environment. MPI is not initialised.
bool is_under_mpi();

// A rank of a world that is not there: calls count their bytes and move none.
std::unique_ptr<CommRank> make_dry_rank(int rank, int size);

}  // namespace zg
