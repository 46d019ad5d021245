// Measurements for Python: drives, the search for their best settings, and what the machine has.
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "python/module.hpp"
#include "ziggurat/base/system.hpp"
#include "ziggurat/device/probe.hpp"
#include "ziggurat/io/bench.hpp"
#include "ziggurat/io/tune.hpp"

namespace zg::python {
namespace {

io::Backend backend_named(const std::string& name) {
  if (const auto backend = io::backend_named(name)) return *backend;
  refuse("backend", "\"" + name + "\" is none", "auto, io_uring, libaio, threads or ram");
}

template <class Enums>
auto named(const char* what, const std::string& name, const Enums& all) {
  std::string known;
  for (const auto e : all) {
    if (name == io::name_of(e)) return e;
    known += (known.empty() ? "" : ", ") + std::string(io::name_of(e));
  }
  refuse(what, "\"" + name + "\" is none", "one of " + known);
}

nb::dict count_of(const io::BenchCount& c) {
  nb::dict out;
  out["bytes"] = c.bytes, out["requests"] = c.requests, out["mean"] = c.latency.mean,
  out["p50"] = c.latency.p50;
  out["p99"] = c.latency.p99, out["p999"] = c.latency.p999, out["max"] = c.latency.max;
  return out;
}

// `files`: existing files instead of directories. Ctrl-C ends the measurement, whatever the phase.
nb::dict io_bench(const std::vector<std::string>& paths, bool files, std::int64_t size, const std::string& op,
                  const std::string& pattern, std::int64_t block_size, int queue_depth, int queues,
                  const std::string& backend, double seconds, double ramp_seconds, bool verify) {
  io::BenchOptions o;
  o.op = named("op", op, io::kBenchOps);
  for (const std::string& path : paths)
    o.drives.push_back(
        {.path = path, .bytes = size, .kind = files ? io::FileKind::kExisting : io::FileKind::kScratch});
  if (o.op == io::BenchOp::kCopy && !o.drives.empty()) o.drives.back().kind = io::FileKind::kScratch;
  o.pattern = named("pattern", pattern, std::array{io::Pattern::kSequential, io::Pattern::kRandom});
  o.engine.block_size = block_size;
  o.engine.queue_depth = queue_depth;
  o.engine.queues = queues;
  o.engine.backend = backend_named(backend);
  o.engine.require = o.engine.backend != io::Backend::kAuto;
  o.seconds = seconds;
  o.ramp_seconds = ramp_seconds;
  o.verify = verify;
  bool interrupted = false;
  o.progress = [&](const io::BenchProgress&) { return !(interrupted = interrupted || signal_raised()); };
  io::BenchResult r;
  {
    WithoutGil released;
    r = io::run_bench(o);
  }
  if (interrupted) throw_interrupted();
  nb::dict out;
  out["seconds"] = r.seconds, out["read"] = count_of(r.read), out["write"] = count_of(r.write);
  out["cpu_seconds"] = r.cpu_seconds, out["bytes_per_second"] = r.bytes_per_second();
  out["requests_per_second"] = r.requests_per_second(), out["cpu_seconds_per_gb"] = r.cpu_seconds_per_gb();
  nb::list rates, depths;
  for (const double rate : r.drive_bytes_per_second) rates.append(rate);
  for (const int depth : r.drive_depth) depths.append(depth);
  out["drive_bytes_per_second"] = rates, out["drive_depth"] = depths;
  out["backend"] = io::name_of(r.backend), out["engine"] = r.engine, out["written_bytes"] = r.written_bytes;
  return out;
}

nb::dict point_of(const io::TunePoint& p) {
  nb::dict out;
  out["backend"] = io::name_of(p.backend), out["block_size"] = p.block_size;
  out["queue_depth"] = p.queue_depth, out["queues"] = p.queues, out["text"] = io::text_of(p);
  return out;
}

// measure(point, round) -> (read bytes/s, CPU s/GB, p50, p99, and the same of writes), or None to stop.
nb::dict io_tune(const std::string& path, int paths, std::int64_t file_bytes, const std::string& goal,
                 double seconds, nb::callable measure) {
  io::TuneOptions o;
  std::vector<io::Backend> works;
  std::int64_t available = 0;
  {
    WithoutGil released;
    available = available_memory();
    for (const io::BackendProbe& p : io::probe_backends(path)) {
      if (p.works && p.backend != io::Backend::kRam) works.push_back(p.backend);
    }
  }
  if (works.empty()) refuse(path, "no back end works there", "see ziggurat.probe()");
  o.space = io::TuneSpace::usual(works, 1);
  o.space.paths = paths;
  o.space.file_bytes = file_bytes;
  o.space.memory_bytes = std::min<std::int64_t>(o.space.memory_bytes, available / 4);
  o.goal = named("purpose", goal, std::array{io::TuneGoal::kBoth, io::TuneGoal::kRead, io::TuneGoal::kWrite});
  o.seconds = seconds;
  const auto begin = std::chrono::steady_clock::now();
  io::TuneMeter meter;
  meter.seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  meter.measure = [&](const io::TunePoint& point, int round) -> std::optional<io::TuneSample> {
    if (interpreter_ends()) return std::nullopt;
    nb::gil_scoped_acquire held;
    const nb::object result = measure(point_of(point), round);
    if (result.is_none()) return std::nullopt;
    const auto v = nb::cast<std::vector<double>>(result);
    if (v.size() != 8) refuse("measure", "returned no sample", "eight numbers");
    return io::TuneSample{{v[0], v[1], v[2], v[3]}, {v[4], v[5], v[6], v[7]}};
  };
  const io::TuneOutcome found = [&] {
    WithoutGil released;
    return io::tune(o, meter);
  }();
  nb::dict out;
  nb::list candidates;
  for (const io::TuneCandidate& c : found.candidates) {
    nb::dict d = point_of(c.point);
    d["read_bytes_per_second"] = c.typical.read.bytes_per_second;
    d["write_bytes_per_second"] = c.typical.write.bytes_per_second;
    d["score"] = c.median, d["spread"] = c.mad, d["rounds"] = c.samples.size();
    candidates.append(d);
  }
  out["found"] = found.found, out["chosen"] = found.chosen, out["candidates"] = candidates;
  out["sure"] = found.sure, out["verdict"] = found.verdict, out["measured"] = found.records.size();
  return out;
}

nb::dict probe(const std::vector<std::string>& paths, std::int64_t measure_bytes) {
  MachineProbe m;
  std::int64_t available = 0;
  std::vector<io::BackendProbe> backends;
  std::vector<io::PathProbe> places;
  {
    WithoutGil released;
    m = probe_machine();
    available = available_memory();
    backends = io::probe_backends(paths.empty() ? "" : paths.front());
    for (const std::string& path : paths) places.push_back(io::probe_path(path, measure_bytes));
  }
  nb::dict out;
  out["processor"] = m.cpu, out["instructions"] = m.isa, out["bf16"] = m.bf16, out["cores"] = m.cores;
  out["numa_nodes"] = m.numa_nodes, out["memory"] = m.memory, out["available_memory"] = available;
  out["gpus"] = nb::cast(m.gpus), out["gpu_reason"] = m.gpu_reason, out["drives"] = nb::cast(m.drives);
  nb::list back, all;
  for (const io::BackendProbe& b : backends) {
    nb::dict d;
    d["name"] = io::name_of(b.backend), d["works"] = b.works, d["reason"] = b.reason;
    back.append(d);
  }
  for (const io::PathProbe& p : places) {
    nb::dict d;
    d["path"] = p.path, d["filesystem"] = p.filesystem, d["device"] = p.device,
    d["free_bytes"] = p.free_bytes;
    d["direct"] = p.direct, d["direct_reason"] = p.direct_reason;
    d["read_bytes_per_second"] = p.read_bytes_per_second;
    d["write_bytes_per_second"] = p.write_bytes_per_second;
    all.append(d);
  }
  out["backends"] = back, out["paths"] = all;
  return out;
}

}  // namespace

void bind_measure(nb::module_& m) {
  m.def("io_bench", io_bench, nb::arg("paths"), nb::arg("files"), nb::arg("size"), nb::arg("op"),
        nb::arg("pattern"), nb::arg("block_size"), nb::arg("queue_depth"), nb::arg("queues"),
        nb::arg("backend"), nb::arg("seconds"), nb::arg("ramp_seconds"), nb::arg("verify"));
  m.def("io_tune", io_tune, nb::arg("path"), nb::arg("paths"), nb::arg("file_bytes"), nb::arg("goal"),
        nb::arg("seconds"), nb::arg("measure"));
  m.def("probe", probe, nb::arg("paths"), nb::arg("measure_bytes"));
}

}  // namespace zg::python
