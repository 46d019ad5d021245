// Finds out what this machine and a path can do, by trying it.
#include <algorithm>
#include <cstring>

#include "io/drive_file.hpp"
#include "io/noise_memory.hpp"
#include "io/open.hpp"
#include "io/queue.hpp"
#include "io/topology.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

constexpr std::int64_t kChunk = 4 * kMiB;  // size of a measured transfer
constexpr int kChunks = 16;                // transfers in flight

constexpr NoiseMemory::Purpose kPurpose = {.where = "probe", .what = "buffers", .hint = "free some memory"};

void check(const Result& result, const std::string& path, Op op) {
  if (result.ok()) return;
  throw Error(
      Errc::kIo, path,
      fmt::format("{} failed: {}", op == Op::kRead ? "reading" : "writing", errno_text(result.error)));
}

// Reads or writes the whole file once, in order; returns bytes per second.
double stream_through(Engine& engine, Op op, const std::string& path, std::int64_t bytes,
                      const NoiseMemory& noise) {
  Ticket tickets[kChunks];
  Result first_failure;
  const auto settle = [&](Ticket& ticket) {
    if (!ticket) return;
    const Result result = engine.wait(ticket);
    ticket = Ticket();
    if (first_failure.ok()) first_failure = result;
  };
  const auto begin = Clock::now();
  int k = 0;
  for (std::int64_t at = 0; at < bytes && first_failure.ok(); at += kChunk, k = (k + 1) % kChunks) {
    settle(tickets[k]);
    tickets[k] = engine.submit(
        {.op = op, .offset = at, .data = noise.data() + k * kChunk, .bytes = std::min(kChunk, bytes - at)});
  }
  for (Ticket& ticket : tickets) settle(ticket);
  check(first_failure, path, op);
  return static_cast<double>(bytes) / seconds_between(begin, Clock::now());
}

BackendProbe probe_kernel(Backend backend) {
  BackendProbe probe{backend, true, "pread and pwrite work everywhere"};
  if (backend == Backend::kRam) probe.reason = "memory, for tests and benchmarks";
  try {
    if (backend == Backend::kUring) probe.reason = make_uring_queue(-1, 1, {})->features();
    if (backend == Backend::kLibaio) probe.reason = make_aio_queue(-1, 1)->features();
  } catch (const Error& e) {
    probe = {backend, false, e.what()};
  }
  return probe;
}

BackendProbe probe_with_file(Backend backend, const std::string& path) {
  try {
    constexpr std::int64_t kBytes = 64 * kKiB;
    EngineOptions options;
    options.backend = backend;
    const Opened opened = open_engine(options, {{.path = path, .bytes = kBytes, .kind = FileKind::kScratch}});
    Engine& engine = *opened.engine;
    if (engine.backend() != backend) return {backend, false, opened.notices.at(0)};
    const NoiseMemory out(kBytes, true, kPurpose), back(kBytes, true, kPurpose);
    std::memset(back.data(), 0, kBytes);
    check(engine.wait(engine.submit({.op = Op::kWrite, .data = out.data(), .bytes = kBytes})), path,
          Op::kWrite);
    check(engine.wait(engine.submit({.op = Op::kRead, .data = back.data(), .bytes = kBytes})), path,
          Op::kRead);
    if (std::memcmp(out.data(), back.data(), kBytes) != 0)
      return {backend, false, "read other bytes than were written"};
    return {backend, true, engine.describe()};
  } catch (const Error& e) {
    return {backend, false, e.what()};
  }
}

}  // namespace

std::vector<BackendProbe> probe_backends(const std::string& path) {
  std::vector<BackendProbe> probes;
  for (const Backend backend : {Backend::kUring, Backend::kLibaio, Backend::kThreads, Backend::kRam}) {
    BackendProbe probe = probe_kernel(backend);
    if (probe.works && !path.empty() && backend != Backend::kRam) probe = probe_with_file(backend, path);
    probes.push_back(std::move(probe));
  }
  // They are in the order of their speed; those that do not work go to the end.
  std::stable_partition(probes.begin(), probes.end(), [](const BackendProbe& probe) { return probe.works; });
  return probes;
}

std::string why_not_direct(DirectStorage& storage, const std::string& directory) {
  try {
    const DriveFile file({.path = directory, .bytes = Engine::alignment(), .kind = FileKind::kScratch});
    if (!file.buffered_because().empty()) return "no O_DIRECT: " + file.buffered_because();
    (void)storage.open(file.fd());
    return {};
  } catch (const Error& e) {
    return e.message();
  }
}

PathProbe probe_path(const std::string& path, std::int64_t measure_bytes) {
  const Mount mount = mount_of(path);
  PathProbe probe;
  probe.path = path;
  probe.filesystem = mount.filesystem;
  probe.device = mount.device;
  {
    const DriveFile file({.path = path, .bytes = Engine::alignment(), .kind = FileKind::kScratch});
    probe.direct = file.buffered_because().empty();
    probe.direct_reason = probe.direct ? "O_DIRECT works" : file.buffered_because();
  }
  probe.free_bytes = free_bytes_of(path);
  probe.numa_node = numa_node_of(path);
  if (measure_bytes <= 0) return probe;
  const std::int64_t bytes = round_up(measure_bytes, Engine::alignment());
  const NoiseMemory noise(kChunk * kChunks, true, kPurpose);
  const Opened opened = open_engine({}, {{.path = path, .bytes = bytes, .kind = FileKind::kScratch}});
  // The first pass over a new file includes the allocation of its blocks, which a tier does only once. So it
  // does not count.
  stream_through(*opened.engine, Op::kWrite, path, bytes, noise);
  probe.write_bytes_per_second = stream_through(*opened.engine, Op::kWrite, path, bytes, noise);
  probe.read_bytes_per_second = stream_through(*opened.engine, Op::kRead, path, bytes, noise);
  return probe;
}

}  // namespace zg::io
