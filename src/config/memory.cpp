// The sections for memory and I/O: activation checkpointing, the tiers, and asynchronous I/O.
#include <fmt/format.h>

#include <algorithm>

#include "config/sections.hpp"
#include "ziggurat/io/depth.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg::config {
namespace {

const Keys& activation_keys() {
  static const Keys keys({
      {"recompute", &RunConfig::recompute, BoolSpec{},
       "Keeps only the input of each block, and runs the block's forward again in the "
       "backward pass."},
      {"cpu_checkpointing", BoolSpec{},
       "Whether the inputs of blocks may be demoted to host memory; else they stay on the "
       "device.",
       "wherever there is room, with a `tiers` section; else `false`"},
      {"partition_activations", kIgnoredSwitch, "parallel.sequence is what partitions them"},
      {"contiguous_memory_optimization", kIgnoredSwitch, "checkpoints lie in one arena anyway"},
      {"number_checkpoints", kIgnoredNumber, "there is one checkpoint a block"},
      {"synchronize_checkpoint_boundary", kIgnoredSwitch, "events order the copies"},
      {"profile", kIgnoredSwitch, kTrace},
  });
  return keys;
}

const Keys& aio_keys() {
  using io::Backend;
  using A = AioConfig;
  static const AioConfig d;
  static const Keys keys({
      {"backend", &A::backend,
       ChoiceSpec(Backend::kAuto, {{"auto", Backend::kAuto},
                                   {"io_uring", Backend::kUring},
                                   {"libaio", Backend::kLibaio},
                                   {"threads", Backend::kThreads},
                                   {"ram", Backend::kRam}}),
       "What transfers blocks. `\"auto\"`: the first of `\"io_uring\"`, `\"libaio\"` and "
       "`\"threads\"` that works. A back end that is named must work, with O_DIRECT. `\"ram\"`: "
       "drives made of memory, for tests."},
      {"block_size", &A::block_size,
       IntSpec{.min = io::Engine::alignment(),
               .max = io::Engine::max_block_size(),
               .multiple_of = io::Engine::alignment(),
               .autos = Auto::kTakesFallback},
       "Bytes of one request."},
      {"queue_depth",
       IntSpec{.fallback = io::default_queue_depth(d.block_size),
               .min = 1,
               .max = 4096,
               .autos = Auto::kOwnMeaning},
       "Requests in flight on a drive.",
       fmt::format("as many blocks as fill a quarter of `tiers.host`, divided by the number of drives, "
                   "within {} to {} MiB for each; at least 4 and at most 128",
                   io::kBytesInFlight >> 20, io::kMostBytesInFlight >> 20)},
      {"queues", &A::queues, IntSpec{.min = 1, .max = 64},
       "Queues of a drive, each with an I/O thread. They share the drive's `queue_depth`."},
      {"sqpoll", &A::sqpoll, BoolSpec{},
       "io_uring: a thread of the kernel takes submissions, which costs processor time."},
      {"iopoll", &A::iopoll, BoolSpec{},
       "io_uring: completions are polled for. For drives with polled queues."},
      {"intra_op_parallelism", &A::threads, IntSpec{.min = 1, .max = 256, .autos = Auto::kTakesFallback},
       "Threads of the back end `\"threads\"` for each queue."},
      {"thread_count", AliasSpec{"intra_op_parallelism"}, "Older name of the same key."},
      {"verify", &A::verify, BoolSpec{}, "Compares the checksums of what is read back from NVMe."},
      {"use_gds", BoolSpec{}, "DeepSpeed's form of `\"gpudirect_storage\": \"on\"` in `cuda`."},
      {"single_submit", kIgnoredFlag, "requests are submitted in batches as large as they come"},
      {"overlap_events", kIgnoredFlag, "submission and completion always overlap"},
  });
  return keys;
}

const Keys& ram_keys() {
  using M = io::RamModel;
  static const Keys keys({
      {"bytes_per_second", &M::bytes_per_second, NumberSpec{.range = kRate},
       "Bandwidth; 0: as fast as memory."},
      {"latency_seconds", &M::latency_seconds, NumberSpec{.range = kSeconds}, "Latency of a block."},
      {"duplex", &M::duplex, BoolSpec{},
       "Reads and writes each have the whole bandwidth, instead of sharing it."},
      {"stall_every_seconds", &M::stall_every_seconds, NumberSpec{.range = kSeconds},
       "Seconds from the start of one stall to the next; 0: the drive never stalls."},
      {"stall_seconds", &M::stall_seconds, NumberSpec{.range = kSeconds},
       "How long a stall lasts, at most 0.99 of `stall_every_seconds`."},
      {"change_every_seconds", &M::change_every_seconds, NumberSpec{.range = kSeconds},
       "Seconds until the bandwidth changes, by turns to `bytes_per_second` divided by "
       "`change_factor` and back; 0: it never changes."},
      {"change_factor", &M::change_factor, NumberSpec{.range = kRate},
       "By how much the bandwidth is divided, 1 or more (`change_every_seconds`)."},
  });
  return keys;
}

const Keys& drive_keys() {
  static const Keys keys({
      {"path", &io::DriveOptions::path, TextSpec{}, "Directory on the drive.", "required"},
      {"bytes", BytesSpec{},
       "Most bytes that the run takes on the drive, 4096 or more. Drives need not be equal: "
       "what lies in the tier is spread over them in proportion to their measured bandwidth.",
       "what the run needs, if it is free; of several drives, up to 1.5 times an equal part "
       "each"},
      {"endurance", BytesSpec{std::int64_t{1} << 60},
       "Bytes that the drive's maker says may be written to it in its life, e.g. `\"600TB\"`. The report "
       "sets what was written against it.",
       "not reported"},
      {"ram", SectionSpec{ram_keys},
       "The keys of `tiers.ram`, for this drive alone; they replace all of `tiers.ram`.", "", "an object"},
  });
  return keys;
}

const Keys& tiers_keys() {
  using T = TierConfig;
  static const Keys keys({
      {"device", &T::device, BytesSpec{},
       "Budget of device memory of each rank. On a GPU it counts in steps of 2 MiB, in "
       "which CUDA allocates; CUDA's libraries take some 100 MiB besides.",
       "what the run can use, at most half of the memory that is free; on a GPU all that is free but 1 GiB"},
      {"host", &T::host, BytesSpec{}, "Budget of host memory, of all ranks of a machine together.",
       "what the run can use, at most a third of the memory that is free"},
      {"nvme", ListSpec{drive_keys}, "The drives of the NVMe tier, an object for each.", "no NVMe tier"},
      {"prefetch_depth", &T::prefetch_depth, IntSpec{.max = 4096},
       "Number of operations for which fetches and evictions are decided ahead. The budgets "
       "bound how much is fetched early."},
      {"read_ahead", NumberSpec{.range = kBelowOne, .autos = Auto::kOwnMeaning},
       "Share of each budget that stays free for what is on its way in or out, so that a fetch need not wait "
       "for the write-back that makes room for it. Less is taken where the budgets are too small for it.",
       "`\"auto\"`: what the links have in flight and the largest operation takes, at most a quarter"},
      {"tiles", &T::tiles,
       ChoiceSpec{T::Tiles::kAuto,
                  {{"auto", T::Tiles::kAuto}, {"on", T::Tiles::kOn}, {"off", T::Tiles::kOff}}},
       "Whether the weights of layers and tables come to the device in tiles, some rows of a matrix each: "
       "where whole ones do not fit, always, or never. Tiles round differently from whole layers."},
      {"weights", &T::weights,
       ChoiceSpec{StoredWeights::kComputed,
                  {{"computed", StoredWeights::kComputed}, {"fp8", StoredWeights::kFp8}}},
       "How the weights of trained layers are kept between their uses, and travel. `\"computed\"`: as they "
       "are "
       "computed with; `\"fp8\"`: matrices in FP8, with a scale for each 128 elements, which changes "
       "results."},
      {"ram", SectionSpec{ram_keys}, "What the back end `\"ram\"` pretends to be."},
  });
  return keys;
}

// The most bytes to use on a drive; 0: not given.
std::int64_t read_drive_bytes(Section& entry) {
  const std::int64_t bytes = entry.bytes("bytes").value_or(0);
  if (!entry.has("bytes") || bytes >= io::Engine::alignment()) return bytes;
  entry.wrong("bytes", fmt::format("{} bytes or more", io::Engine::alignment()),
              entry.find("bytes")->is_number()
                  ? fmt::format("without a unit these are bytes: did you mean \"{}GiB\"?", bytes)
                  : std::string("leave it out to give the drive what the run needs"));
}

// Reads the section `ram`, for all drives or for one: the speed that a drive simulated in memory pretends to
// have. Warns if no drive is simulated. None if the section is absent.
std::optional<io::RamModel> read_ram(Section& parent, const RunConfig& run) {
  auto ram = parent.section("ram");
  if (!ram) return {};
  if (run.aio.backend != io::Backend::kRam) parent.notice("ram", "has no effect: aio.backend is not \"ram\"");
  io::RamModel model;
  ram->read_into(model);
  ram->finish();
  try {
    (void)io::mean_bytes_per_second(model);  // refuses stalls and changes that make no sense
  } catch (const Error& e) {
    ram->fail("", "has " + e.message(), e.hint());
  }
  return model;
}

// Checks that all drives are duplex, or none. The plan bounds a step's time on the drives by the longer of
// reading and writing if they are duplex, else by the sum of both.
void check_duplex(const Section& tiers, const RunConfig& run) {
  if (run.aio.backend != io::Backend::kRam) return;
  const auto duplex = [&](std::size_t i) { return run.tiers.nvme[i].ram.value_or(run.tiers.ram).duplex; };
  for (std::size_t i = 1; i < run.tiers.nvme.size(); ++i) {
    if (duplex(i) == duplex(0)) continue;
    tiers.fail(fmt::format("nvme.{}.ram.duplex", i),
               fmt::format("is {}, and that of nvme.0 is {}", duplex(i), duplex(0)),
               "make all drives the same; a drive's own \"ram\" replaces all of tiers.ram");
  }
}

void read_drives(Section& tiers, RunConfig& run) {
  constexpr std::size_t kMostDrives = 256;
  std::vector<io::DriveOptions>& out = run.tiers.nvme;
  for (Section& entry : tiers.sections("nvme", "a list: [{\"path\": \"directory\", \"bytes\": \"1GiB\"}]")) {
    io::DriveOptions drive;
    entry.read_into(drive);
    if (drive.path.empty()) entry.fail("path", "is missing", "a directory on the drive");
    drive.bytes = read_drive_bytes(entry);
    drive.endurance_bytes = static_cast<double>(entry.bytes("endurance").value_or(0));
    drive.ram = read_ram(entry, run);
    entry.finish();
    const auto same = [&](const io::DriveOptions& other) { return other.path == drive.path; };
    if (std::any_of(out.begin(), out.end(), same)) {
      entry.fail("path", "found " + drive.path + " a second time, expected a directory a drive");
    }
    if (out.size() == kMostDrives)
      tiers.fail("nvme", fmt::format("names more than {} drives", kMostDrives), "name fewer directories");
    out.push_back(drive);
  }
}

}  // namespace

std::vector<Key> memory_keys() {
  return {{"accumulation", &RunConfig::accumulation,
           ChoiceSpec(Accumulation::kLayerMajor, {{"layer_major", Accumulation::kLayerMajor},
                                                  {"micro_batch_major", Accumulation::kMicroBatchMajor}}),
           "The order in which micro-batches pass through the layers. `\"layer_major\"`: weights "
           "cross each link twice a step; `\"micro_batch_major\"`: twice a micro-batch, but "
           "activations take less memory."},
          {"tiers", SectionSpec{tiers_keys}, "Budgets of the tiers."},
          {"zero_optimization", SectionSpec{zero_keys}, "DeepSpeed's ZeRO: what may be offloaded."},
          {"activation_checkpointing", SectionSpec{activation_keys}, "What is kept of the forward."},
          {"aio", SectionSpec{aio_keys}, "How drives are read and written."}};
}

void read_activation_checkpointing(Section& root, RunConfig& run) {
  run.offload_activation = has_tiers(root) ? OffloadTarget::kAuto : OffloadTarget::kDevice;
  auto section = root.section("activation_checkpointing");
  if (!section) return;
  section->read_into(run);
  if (section->has("cpu_checkpointing")) {
    run.offload_activation =
        section->boolean("cpu_checkpointing") ? OffloadTarget::kHost : OffloadTarget::kDevice;
  }
  section->finish();
}

void read_aio(Section& root, RunConfig& run) {
  auto aio = root.section("aio");
  if (!aio) return;
  AioConfig& out = run.aio;
  using io::Backend;
  aio->read_into(out);
  out.require = out.backend != Backend::kAuto;
  // Without the key the depth stays 0, "not given", and the plan chooses one.
  if (aio->is_auto("queue_depth")) {
    aio->notice("queue_depth", "\"auto\": the plan finds it");
  } else if (aio->has("queue_depth")) {
    out.queue_depth = static_cast<int>(aio->integer("queue_depth"));
  }
  const bool can_be_uring = out.backend == Backend::kAuto || out.backend == Backend::kUring;
  for (const auto& [key, on] : {std::pair{"sqpoll", out.sqpoll}, std::pair{"iopoll", out.iopoll}}) {
    if (on && !can_be_uring) aio->notice(key, "has no effect: aio.backend is not \"io_uring\"");
  }
  if (aio->boolean("use_gds")) {
    using Direct = DeviceConfig::Direct;
    if (run.device.direct == Direct::kOff) {
      aio->wrong("use_gds", "false where cuda.gpudirect_storage is \"off\"",
                 "remove the key: data goes through pinned memory");
    }
    run.device.direct = Direct::kOn;
  }
  aio->finish();
}

void read_tiers(Section& root, RunConfig& run) {
  auto tiers = root.section("tiers");
  if (!tiers) return;
  tiers->read_into(run.tiers);
  read_drives(*tiers, run);
  if (tiers->is_auto("read_ahead")) {
    tiers->notice("read_ahead", "\"auto\": the plan finds it");
  } else if (tiers->has("read_ahead")) {
    run.tiers.read_ahead = tiers->number("read_ahead");
  }
  run.tiers.ram = read_ram(*tiers, run).value_or(io::RamModel{});
  check_duplex(*tiers, run);
  tiers->finish();
}

bool has_tiers(Section& root) {
  return root.has("tiers");
}

}  // namespace zg::config
