// The interface of GPU ranks to NCCL: exactly the NCCL calls that they need. nccl_library.cpp implements it
// with NVIDIA's library, which is loaded at run time; the tests implement it with a fake that detects misuse.
//
// Communicators are non-blocking: a call returns before NCCL has carried it out, and the communicator's next
// call, or work on its streams that depends on it, must wait until settled() is true. So a thread never hangs
// inside NCCL, and abort() ends any call in progress. A call that NCCL refuses throws Error(kComm).
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>

struct CUstream_st;
struct ncclComm;

namespace zg::comm {

using NcclComm = ncclComm*;
using NcclId = std::array<char, 128>;

class Nccl {
 public:
  virtual ~Nccl() = default;
  virtual std::string describe() const = 0;  // "NCCL 2.28.9"
  virtual NcclId make_id() = 0;
  // Makes this rank's handle of a new communicator, on the thread's current device. `ranks` calls with the
  // same id join the same communicator.
  virtual NcclComm init(int ranks, const NcclId& id, int rank) = 0;
  // Whether the host side of all calls so far is done. Throws if a call has failed.
  virtual bool settled(NcclComm comm) = 0;
  // Calls between the two count as one. A thread has one open group at a time.
  virtual void begin_group() = 0;
  virtual void end_group() = 0;
  // Sizes are in bytes. `in` may be this rank's row of `out`.
  virtual void all_gather(NcclComm comm, const void* in, void* out, std::int64_t bytes,
                          CUstream_st* stream) = 0;
  virtual void broadcast(NcclComm comm, void* data, std::int64_t bytes, int root, CUstream_st* stream) = 0;
  virtual void send(NcclComm comm, const void* data, std::int64_t bytes, int to, CUstream_st* stream) = 0;
  virtual void receive(NcclComm comm, void* data, std::int64_t bytes, int from, CUstream_st* stream) = 0;
  // Call before destroy(), for all ranks of the process within one group.
  virtual void finalize(NcclComm comm) = 0;
  virtual void destroy(NcclComm comm) = 0;  // all its work must be done
  virtual void abort(NcclComm comm) = 0;    // ends its work and destroys it
};

inline constexpr const char* kNcclLibrary = "libnccl.so.2";
// Null, with the reason in `why`, if the library is missing or too old.
std::unique_ptr<Nccl> load_nccl(std::string* why, const std::string& library = kNcclLibrary);

}  // namespace zg::comm
