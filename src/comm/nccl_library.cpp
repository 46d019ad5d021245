// Nccl over NVIDIA's library.
#include <dlfcn.h>

#include <cstdlib>

#include "comm/nccl.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"

namespace zg::comm {
namespace {

// NCCL's types, from its documentation, so that a build does not need its header.
enum Result { kSuccess = 0, kInProgress = 7 };
constexpr int kUint8 = 1;
// The fields of ncclConfig_t as of version 2.14. NCCL reads as many as `size` and `version` indicate.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};
constexpr int kOldest = 21800;  // older versions have bugs in non-blocking communicators
struct Id {
  NcclId bytes;
};

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

struct Functions {
  void* handle = nullptr;
  int (*get_version)(int*) = nullptr;
  int (*get_id)(Id*) = nullptr;
  int (*init)(NcclComm*, int, Id, int, Config*) = nullptr;
  int (*async_error)(NcclComm, int*) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*all_gather)(const void*, void*, std::size_t, int, NcclComm, CUstream_st*) = nullptr;
  int (*broadcast)(const void*, void*, std::size_t, int, int, NcclComm, CUstream_st*) = nullptr;
  int (*send)(const void*, std::size_t, int, int, NcclComm, CUstream_st*) = nullptr;
  int (*receive)(void*, std::size_t, int, int, NcclComm, CUstream_st*) = nullptr;
  int (*finalize)(NcclComm) = nullptr;
  int (*destroy)(NcclComm) = nullptr;
  int (*abort)(NcclComm) = nullptr;
  const char* (*error_string)(int) = nullptr;
  const char* (*last_error)(NcclComm) = nullptr;

  template <class Function>
  bool find(Function& into, const char* name) {
    into = reinterpret_cast<Function>(dlsym(handle, name));
    return into != nullptr;
  }
  // The name of a function that the library lacks; null if it has all.
  const char* find_all() {
    if (!find(get_version, "ncclGetVersion")) return "ncclGetVersion";
    if (!find(get_id, "ncclGetUniqueId")) return "ncclGetUniqueId";
    if (!find(init, "ncclCommInitRankConfig")) return "ncclCommInitRankConfig";
    if (!find(async_error, "ncclCommGetAsyncError")) return "ncclCommGetAsyncError";
    if (!find(group_start, "ncclGroupStart")) return "ncclGroupStart";
    if (!find(group_end, "ncclGroupEnd")) return "ncclGroupEnd";
    if (!find(all_gather, "ncclAllGather")) return "ncclAllGather";
    if (!find(broadcast, "ncclBroadcast")) return "ncclBroadcast";
    if (!find(send, "ncclSend")) return "ncclSend";
    if (!find(receive, "ncclRecv")) return "ncclRecv";
    if (!find(finalize, "ncclCommFinalize")) return "ncclCommFinalize";
    if (!find(destroy, "ncclCommDestroy")) return "ncclCommDestroy";
    if (!find(abort, "ncclCommAbort")) return "ncclCommAbort";
    if (!find(error_string, "ncclGetErrorString")) return "ncclGetErrorString";
    if (!find(last_error, "ncclGetLastError")) return "ncclGetLastError";
    return nullptr;
  }
};

std::size_t size(std::int64_t bytes) {
  return static_cast<std::size_t>(bytes);
}

class NcclLibrary final : public Nccl {
 public:
  NcclLibrary(const Functions& functions, int version) : f_(functions), version_(version) {}

  std::string describe() const override { return "NCCL " + version_text(version_); }
  NcclId make_id() override {
    Id id{};
    check(f_.get_id(&id), "an identity", nullptr);
    return id.bytes;
  }
  NcclComm init(int ranks, const NcclId& id, int rank) override {
    NcclComm comm = nullptr;
    Config config;
    check(f_.init(&comm, ranks, Id{id}, rank, &config), "making a communicator", comm);
    return comm;
  }
  bool settled(NcclComm comm) override {
    int state = kSuccess;
    check(f_.async_error(comm, &state), "the state of a communicator", comm);
    check(state, "work of a communicator", comm);
    return state == kSuccess;
  }
  void begin_group() override { check(f_.group_start(), "beginning a group", nullptr); }
  void end_group() override { check(f_.group_end(), "a group of calls", nullptr); }
  void all_gather(NcclComm comm, const void* in, void* out, std::int64_t bytes,
                  CUstream_st* stream) override {
    check(f_.all_gather(in, out, size(bytes), kUint8, comm, stream), "all-gather", comm);
  }
  void broadcast(NcclComm comm, void* data, std::int64_t bytes, int root, CUstream_st* stream) override {
    check(f_.broadcast(data, data, size(bytes), kUint8, root, comm, stream), "broadcast", comm);
  }
  void send(NcclComm comm, const void* data, std::int64_t bytes, int to, CUstream_st* stream) override {
    check(f_.send(data, size(bytes), kUint8, to, comm, stream), "send", comm);
  }
  void receive(NcclComm comm, void* data, std::int64_t bytes, int from, CUstream_st* stream) override {
    check(f_.receive(data, size(bytes), kUint8, from, comm, stream), "receive", comm);
  }
  void finalize(NcclComm comm) override { check(f_.finalize(comm), "ending a communicator", comm); }
  void destroy(NcclComm comm) override { warn(f_.destroy(comm), "destroying a communicator"); }
  void abort(NcclComm comm) override { warn(f_.abort(comm), "aborting a communicator"); }

 private:
  void check(int result, const char* what, NcclComm comm) const {
    if (result == kSuccess || result == kInProgress) return;
    const char* const last = f_.last_error(comm);
    throw Error(Errc::kComm, fmt::format("NCCL: {}", what),
                fmt::format("failed: {}{}{}", f_.error_string(result), last != nullptr && *last ? ": " : "",
                            last != nullptr ? last : ""),
                "NCCL says more with NCCL_DEBUG=INFO in the environment");
  }
  void warn(int result, const char* what) const {
    if (result != kSuccess && result != kInProgress)
      log::warning("NCCL: {}: {}", what, f_.error_string(result));
  }

  const Functions f_;
  const int version_;
};

}  // namespace

std::unique_ptr<Nccl> load_nccl(std::string* why, const std::string& library) {
  // NCCL reads these variables when it is loaded or makes a communicator; values set by the user stay. P2P
  // direct is off since the arena's memory is mapped only for its own GPU, so NCCL must not read it from
  // another GPU. Run-time connection is off so that connections are made with a communicator, while no stream
  // waits for the host, and not by some later call.
  setenv("NCCL_P2P_DIRECT_DISABLE", "1", 0);
  setenv("NCCL_RUNTIME_CONNECT", "0", 0);
  Functions f;
  f.handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (f.handle == nullptr) {
    const char* const text = dlerror();
    *why = fmt::format("NCCL is not installed: {}", text != nullptr ? text : library);
    return nullptr;
  }
  // The library stays loaded: it may have threads of its own.
  if (const char* const missing = f.find_all()) {
    *why = fmt::format("{} has no function {}", library, missing);
    return nullptr;
  }
  int version = 0;
  if (f.get_version(&version) != kSuccess || version < kOldest) {
    *why = fmt::format("{} is NCCL {}; {} or newer is needed", library, version_text(version),
                       version_text(kOldest));
    return nullptr;
  }
  return std::make_unique<NcclLibrary>(f, version);
}

}  // namespace zg::comm
