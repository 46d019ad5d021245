// Collective communication between ranks.
//
// A rank is one device with its share of the work. The ranks of a process are threads. The ranks of all
// processes together are the world; ranks of the same process have consecutive numbers in it. A group is any
// set of ranks, and a Communicator is one rank's handle of a group. Every member of a group makes the same
// calls in the same order, each with equal counts and types.
//
// Results depend neither on timing nor on the back end: a sum is made element by element in ascending order
// of the members' world ranks, in fp64 for f64 and in fp32 for all narrower types, and is rounded once. An
// all-reduce is a reduce-scatter followed by an all-gather.
//
// A call enqueues its work on a stream of the rank's device and returns. Operands must not be changed until
// the stream has done the work. A call that the other members do not join fails after a timeout; the stream's
// synchronize() throws the failure, which names the missing ranks and their last calls. When a call of a rank
// fails, or the rank calls CommRank::fail, the calls of all others fail promptly with that rank's error.
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

enum class Reduction : std::uint8_t { kSum, kMax };  // kMax: NaN if any operand is NaN

// The traffic between one rank and the other members of a group: bytes of operands, whatever the back end
// really transfers. With d members and an operand of B bytes in all, an all-gather or a reduce-scatter sends
// and receives B (d - 1) / d bytes, an all-reduce twice as many.
struct CommTraffic {
  std::int64_t sent = 0, received = 0;  // bytes
  std::int64_t calls = 0;
  bool operator==(const CommTraffic&) const = default;
  CommTraffic& operator+=(const CommTraffic& o) {
    sent += o.sent, received += o.received, calls += o.calls;
    return *this;
  }
};

// Used by one thread at a time, like a stream. Members are numbered from 0 in the order of the group's list.
// Counts are in elements. Reductions take f64, f32, f16 and bf16; the other calls move any type as bytes.
// Buffers of one call must not overlap, unless the call's comment allows it.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;  // this member's number in the group
  virtual int size() const = 0;

  // out [size, count] gets `in` [count] of every member. `in` may be this member's row of `out`.
  virtual void all_gather(Stream& s, const void* in, void* out, std::int64_t count, DType dtype) = 0;
  // out [count] gets the reduction of row rank() of every member's `in` [size, count]. `out` may be this
  // member's row of `in`.
  virtual void reduce_scatter(Stream& s, const void* in, void* out, std::int64_t count, DType dtype,
                              Reduction reduction) = 0;
  // data [count] becomes the reduction of every member's data.
  virtual void all_reduce(Stream& s, void* data, std::int64_t count, DType dtype, Reduction reduction) = 0;
  // data [count] becomes the data of member `root`.
  virtual void broadcast(Stream& s, void* data, std::int64_t count, DType dtype, int root) = 0;
  // Row i of out [size, count] gets row rank() of member i's `in` [size, count].
  virtual void all_to_all(Stream& s, const void* in, void* out, std::int64_t count, DType dtype) = 0;
  // A send is done when the other member has received it. Sends and receives between two members match in
  // order.
  virtual void send(Stream& s, const void* data, std::int64_t count, DType dtype, int to) = 0;
  virtual void receive(Stream& s, void* data, std::int64_t count, DType dtype, int from) = 0;
  // The stream passes the barrier when every member's stream has reached it.
  virtual void barrier(Stream& s) = 0;

  virtual CommTraffic traffic() const = 0;  // sum over all calls so far
};

// One rank's handle of the world. Any thread may call fail(); only the rank's thread calls the rest.
class CommRank {
 public:
  virtual ~CommRank() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string describe() const = 0;  // describes the back end: "4 threads"
  // Makes a group. `members` are world ranks, and include this one. Any two ranks make the groups that they
  // share in the same order. `name` is for messages. The communicator must be destroyed before its rank, and
  // while none of its work is on a stream.
  virtual std::unique_ptr<Communicator> group(std::span<const int> members, const std::string& name) = 0;
  // Declares that this rank cannot go on. The calls of all other ranks fail with this error, prefixed with
  // this rank's number.
  virtual void fail(const Error& error) = 0;
};

struct CommOptions {
  double timeout_seconds = 600;  // how long a call waits for the other members
  // Makes a world that is independent of any other world of the same processes: failures in one are not
  // reported in the other.
  bool apart = false;
};

// The ranks of a world within this process, over shared memory; for streams of host devices.
std::vector<std::unique_ptr<CommRank>> make_local_ranks(int ranks, const CommOptions& options);

// Makes `ranks` ranks in this process, of a world that spans all processes that an MPI launcher has started.
// Initialises MPI unless it is initialised already, and finalises it with the last rank; if a rank has
// failed, all processes are ended instead. Throws Error(kUsage) in a build without MPI, and if MPI does not
// support several threads.
std::vector<std::unique_ptr<CommRank>> make_mpi_ranks(int ranks, const CommOptions& options);
// Whether an MPI launcher has started this process, judged by its environment. Does not initialise MPI.
bool is_under_mpi();

// A rank of a world that does not exist, for dry runs: calls count their bytes but move none.
std::unique_ptr<CommRank> make_dry_rank(int rank, int size);

}  // namespace zg
