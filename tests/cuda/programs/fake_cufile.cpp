// A libcufile.so.0 for tests: cuFile's functions over pread and pwrite, on memory of the host. Tests reach
// `zg_fake_cufile` to make it fail, and to see what it was asked for.
#include "tests/cuda/programs/fake_cufile.hpp"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>

// Only as much as the interface of cuFile says; written apart from src/device/cuda/gds.cpp, so that the two
// check each other.
extern "C" {

struct CuFileError {
  int err;
  int cu_err;
};
struct CuFileDescr {
  int type;
  union {
    int fd;
    void* handle;
  } handle;
  const void* fs_ops;
};
struct CuFileDrvProps {
  struct {
    unsigned int major_version, minor_version;
    size_t poll_thresh_size, max_direct_io_size;
    unsigned int dstatusflags, dcontrolflags;
  } nvfs;
  unsigned int fflags, max_device_cache_size, per_buffer_cache_size, max_device_pinned_mem_size,
      max_batch_io_size, max_batch_io_timeout_msecs;
};

FakeCuFile zg_fake_cufile;
}

namespace {

struct Handle {
  int fd;
};
std::mutex g_mutex;
std::condition_variable g_gathered;
std::set<void*> g_handles;
std::map<const void*, size_t> g_memories;  // registered

CuFileError result(int error) {
  return {error, error == 5011 ? 999 : 0};
}
// The next failure that the test asked for, of this call.
int failure(int& wanted) {
  const int error = wanted;
  wanted = 0;
  return error;
}

template <class Move>
ssize_t transfer(void* fh, const void* base, size_t size, off_t buffer_offset, const Move& move) {
  int fd = -1;
  {
    std::unique_lock lock(g_mutex);
    ++zg_fake_cufile.transfers;
    if (g_handles.count(fh) == 0) return -5027;
    const auto at = reinterpret_cast<long>(base) + buffer_offset, granule = zg_fake_cufile.granule;
    const auto memory = g_memories.find(base);
    const bool registered = memory != g_memories.end();
    if (registered && static_cast<size_t>(buffer_offset) + size > memory->second) return -5017;
    if (!registered && granule > 0 && at / granule != (at + static_cast<long>(size) - 1) / granule)
      return -5014;
    if (const int error = failure(zg_fake_cufile.fail_transfer); error != 0) {
      if (error > 5000) return -error;
      errno = error;
      return -1;
    }
    fd = static_cast<Handle*>(fh)->fd;
    const auto most = static_cast<size_t>(zg_fake_cufile.most_bytes);
    if (most > 0 && size > most) size = most;
    zg_fake_cufile.largest = std::max(zg_fake_cufile.largest, static_cast<long>(size));
    zg_fake_cufile.most_running = std::max(zg_fake_cufile.most_running, ++zg_fake_cufile.running);
    g_gathered.notify_all();
    const auto gathered = [] { return zg_fake_cufile.most_running >= zg_fake_cufile.gather; };
    g_gathered.wait_for(lock, std::chrono::seconds(10), gathered);
  }
  const ssize_t moved = move(fd, size);
  std::lock_guard lock(g_mutex);
  --zg_fake_cufile.running;
  return moved;
}

}  // namespace

extern "C" {

CuFileError cuFileDriverOpen() {
  if (const int error = failure(zg_fake_cufile.fail_open); error != 0) return result(error);
  if (zg_fake_cufile.allow_compat == 0 && zg_fake_cufile.nvfs_major == 0 && zg_fake_cufile.features == 0)
    return result(5001);
  ++zg_fake_cufile.drivers;
  return result(0);
}
#if !defined(ZG_FAKE_CUFILE_INCOMPLETE)
CuFileError cuFileDriverClose_v2() {
  --zg_fake_cufile.drivers;
  return result(g_handles.empty() ? 0 : 5022);
}
#endif
CuFileError cuFileDriverGetProperties(CuFileDrvProps* properties) {
  *properties = {};
  properties->nvfs.major_version = static_cast<unsigned>(zg_fake_cufile.nvfs_major);
  properties->nvfs.minor_version = zg_fake_cufile.nvfs_major != 0 ? 26 : 0;
  properties->fflags = static_cast<unsigned>(zg_fake_cufile.features);
  return result(0);
}
#if !defined(ZG_FAKE_CUFILE_INCOMPLETE)
CuFileError cuFileSetParameterBool(int parameter, bool value) {
  if (parameter != 1) return result(5022);
  zg_fake_cufile.allow_compat = value ? 1 : 0;
  return result(0);
}
#endif
CuFileError cuFileHandleRegister(void** fh, CuFileDescr* descr) {
  std::lock_guard lock(g_mutex);
  if (const int error = failure(zg_fake_cufile.fail_file); error != 0) return result(error);
  if (zg_fake_cufile.odd_files != 0 && zg_fake_cufile.allow_compat == 0) return result(5008);
  if (descr->type != 1 || descr->fs_ops != nullptr) return result(5022);
  *fh = new Handle{descr->handle.fd};
  g_handles.insert(*fh);
  ++zg_fake_cufile.files;
  return result(0);
}
void cuFileHandleDeregister(void* fh) {
  std::lock_guard lock(g_mutex);
  if (g_handles.erase(fh) == 0) return;
  delete static_cast<Handle*>(fh);
  --zg_fake_cufile.files;
}
CuFileError cuFileBufRegister(const void* base, size_t length, int flags) {
  std::lock_guard lock(g_mutex);
  if (const int error = failure(zg_fake_cufile.fail_memory); error != 0) return result(error);
  if (flags != 0 || length == 0) return result(5022);
  if (!g_memories.emplace(base, length).second) return result(5023);
  ++zg_fake_cufile.memories;
  return result(0);
}
CuFileError cuFileBufDeregister(const void* base) {
  std::lock_guard lock(g_mutex);
  if (g_memories.erase(base) == 0) return result(5024);
  --zg_fake_cufile.memories;
  return result(0);
}
ssize_t cuFileRead(void* fh, void* base, size_t size, off_t file_offset, off_t buffer_offset) {
  return transfer(fh, base, size, buffer_offset, [&](int fd, size_t n) {
    return pread(fd, static_cast<char*>(base) + buffer_offset, n, file_offset);
  });
}
ssize_t cuFileWrite(void* fh, const void* base, size_t size, off_t file_offset, off_t buffer_offset) {
  return transfer(fh, base, size, buffer_offset, [&](int fd, size_t n) {
    return pwrite(fd, static_cast<const char*>(base) + buffer_offset, n, file_offset);
  });
}
}
