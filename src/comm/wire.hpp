// Messages between the processes of a world.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/domain.hpp"

namespace zg::comm {

// Any thread. Messages of one sender with the same tag arrive in order. Failures throw Error(kComm).
class Wire {
 public:
  // A message in flight, until test() returns true. Until then its bytes must not be touched.
  class Request {
   public:
    virtual ~Request() = default;
    virtual bool test() = 0;
  };
  virtual ~Wire() = default;
  virtual int process() const = 0;
  virtual std::string describe() const = 0;
  virtual std::unique_ptr<Request> send(int process, int tag, const void* data, std::int64_t bytes) = 0;
  virtual std::unique_ptr<Request> receive(int process, int tag, void* data, std::int64_t bytes) = 0;
  virtual void abort() = 0;  // ends all processes of the world, unless zg::Processes does that
  // Tells the other processes, once, that a rank of this one has failed.
  virtual void tell_failure(int rank, const Error& error) = 0;
  // The failure that another process has reported, if any: the rank and its error.
  virtual std::optional<std::pair<int, Error>> heard_failure() = 0;
};

// Makes a wire over MPI to the other processes of this one's launcher. `ranks_of` receives the number of
// ranks of each process; this one has `ranks`. `apart`: see CommOptions. Throws Error(kUsage) like
// make_mpi_ranks().
std::unique_ptr<Wire> make_mpi_wire(int ranks, std::vector<int>& ranks_of, bool apart = false);

// The messages of one call that are in flight.
class Exchange {
 public:
  Exchange(Wire* wire, Failure& failure, double timeout_seconds)
      : wire_(wire), failure_(failure), timeout_(timeout_seconds) {}
  // `rank`: the other world rank, for error messages.
  void send(int process, int tag, int rank, const void* data, std::int64_t bytes);
  void receive(int process, int tag, int rank, void* data, std::int64_t bytes);
  // Returns when at most the latest `left` messages are in flight. `what`: the call, for error messages.
  void wait(const std::string& what, std::size_t left = 0);
  std::size_t under_way() const { return pending_.size(); }

 private:
  struct Pending {
    std::unique_ptr<Wire::Request> request;
    int rank;
    bool sends;
  };
  Wire* wire_;
  Failure& failure_;
  double timeout_;
  std::vector<Pending> pending_;
};

}  // namespace zg::comm
