// Where things lie and how they get there: activation checkpointing, the tiers, and asynchronous I/O.
#include <fmt/format.h>

#include <algorithm>

#include "config/sections.hpp"
#include "ziggurat/io/engine.hpp"

namespace zg::config {
namespace {

const RunConfig& defaults() {
  static const RunConfig run;
  return run;
}

const Keys& activation_keys() {
  static const Keys keys({
      {"recompute", BoolSpec{defaults().recompute},
       "Keeps only the input of each block, and runs the block's forward again in the backward."},
      {"cpu_checkpointing", BoolSpec{},
       "Whether those inputs may sink to host memory; else they stay on the device.",
       "wherever there is room, with a `tiers` section; else `false`"},
      {"partition_activations", IgnoredSwitchSpec{}, "there is no model parallelism to partition them over"},
      {"contiguous_memory_optimization", IgnoredSwitchSpec{}, "checkpoints lie in one arena anyway"},
      {"number_checkpoints", IgnoredSpec{Shape::kNumber}, "there is one checkpoint a block"},
      {"synchronize_checkpoint_boundary", IgnoredSwitchSpec{}, "events order the copies"},
      {"profile", IgnoredSwitchSpec{}, kTrace},
  });
  return keys;
}

const Keys& aio_keys() {
  using io::Backend;
  static const AioConfig d;
  static const Keys keys({
      {"backend",
       ChoiceSpec(Backend::kAuto, {{"auto", Backend::kAuto},
                                   {"io_uring", Backend::kUring},
                                   {"libaio", Backend::kLibaio},
                                   {"threads", Backend::kThreads},
                                   {"ram", Backend::kRam}}),
       "What moves blocks. `\"auto\"` takes the first of the next three that works; one that is named must "
       "work, with "
       "O_DIRECT. `\"ram\"` is for tests."},
      {"block_size",
       IntSpec{.fallback = d.block_size,
               .min = io::Engine::alignment(),
               .max = io::Engine::max_block_size(),
               .multiple_of = io::Engine::alignment(),
               .autos = Auto::kTakesFallback},
       "Bytes of one request."},
      {"queue_depth",
       IntSpec{.fallback = io::default_queue_depth(d.block_size),
               .min = 1,
               .max = 4096,
               .autos = Auto::kTakesFallback},
       "Requests in flight on a drive.",
       fmt::format("as many blocks as are {} MiB, at least 4 and at most 256", io::kBytesInFlight >> 20)},
      {"adaptive_depth", BoolSpec{d.adaptive_depth},
       "From `queue_depth` on, each queue looks for the shallowest depth that loses little bandwidth. For "
       "those to whom "
       "latency counts for more than the last percents of bandwidth."},
      {"max_queue_depth", IntSpec{.fallback = d.max_queue_depth, .min = 1, .max = 4096},
       "The most that `adaptive_depth` may take; `queue_depth` or more.",
       fmt::format("`{}`, or `queue_depth` if that is more", d.max_queue_depth)},
      {"queues", IntSpec{.fallback = d.queues, .min = 1, .max = 64},
       "Rings on a drive, each with an I/O thread. They share the drive's depth."},
      {"sqpoll", BoolSpec{d.sqpoll},
       "io_uring: a thread of the kernel takes submissions, which costs its processor time."},
      {"iopoll", BoolSpec{d.iopoll}, "io_uring: completions are polled for. For drives with polled queues."},
      {"intra_op_parallelism",
       IntSpec{.fallback = d.threads, .min = 1, .max = 256, .autos = Auto::kTakesFallback},
       "Threads of the back end `\"threads\"` for each queue."},
      {"thread_count", AliasSpec{"intra_op_parallelism"}, "Its older name."},
      {"verify", BoolSpec{d.verify}, "Compares checksums of what comes back from NVMe."},
      {"use_gds", BoolSpec{}, "DeepSpeed's form of `\"gpudirect_storage\": \"on\"` in `cuda`."},
      {"single_submit", IgnoredSpec{Shape::kBool}, "requests are submitted in batches as large as they come"},
      {"overlap_events", IgnoredSpec{Shape::kBool}, "submission and completion always overlap"},
  });
  return keys;
}

const Keys& ram_keys() {
  static const io::RamModel d;
  static const Keys keys({
      {"bytes_per_second", NumberSpec{.fallback = d.bytes_per_second}, "Bandwidth; 0: as fast as memory."},
      {"latency_seconds", NumberSpec{.fallback = d.latency_seconds}, "Latency of a block."},
      {"duplex", BoolSpec{d.duplex}, "Reads and writes have the bandwidth each, instead of sharing it."},
      {"stall_every_seconds", NumberSpec{.fallback = d.stall_every_seconds},
       "How often the drive stalls; 0: never."},
      {"stall_seconds", NumberSpec{.fallback = d.stall_seconds}, "How long a stall lasts."},
      {"change_every_seconds", NumberSpec{.fallback = d.change_every_seconds},
       "How often the bandwidth changes between all of it and all of it divided by `change_factor`; 0: "
       "never."},
      {"change_factor", NumberSpec{.fallback = d.change_factor}, "See `change_every_seconds`."},
  });
  return keys;
}

const Keys& drive_keys() {
  static const Keys keys({
      {"path", TextSpec{}, "Directory on the drive.", "required"},
      {"bytes", BytesSpec{},
       "The most that the drive gives, 4096 or more. Drives need not be equal: what lies in the tier is "
       "spread over them "
       "by the bandwidth that they are measured to give.",
       "as much as the run needs and is free; of several drives up to half more than an equal part each"},
      {"endurance", BytesSpec{},
       "Bytes that the drive's maker says may be written to it in its life, e.g. `\"600TB\"`. The report "
       "sets what was "
       "written against it.",
       "not reported"},
      {"ram", SectionSpec{ram_keys},
       "The keys of `tiers.ram`, for this drive alone; they replace all of `tiers.ram`.", "", "an object"},
  });
  return keys;
}

const Keys& tiers_keys() {
  static const TierConfig d;
  static const Keys keys({
      {"device", BytesSpec{},
       "Budget of device memory. On a GPU in steps of 2 MiB, which is how CUDA gives memory, and besides "
       "some 100 MiB for "
       "its libraries.",
       "what the run can use, at most half of the memory that is free; on a GPU all that is free but 1 GiB"},
      {"host", BytesSpec{}, "Budget of host memory.",
       "what the run can use, at most a third of the memory that is free"},
      {"nvme", ListSpec{drive_keys}, "The drives of the NVMe tier, an object each.", "no NVMe tier"},
      {"prefetch_depth", IntSpec{.fallback = d.prefetch_depth, .max = 4096},
       "Operations of the program that are decided ahead. How much is fetched early is bounded by the "
       "budgets."},
      {"read_ahead", NumberSpec{.range = NumberSpec::Range::kBelowOne, .autos = Auto::kOwnMeaning},
       "Share of each budget that stays free for what is on its way in or out, so that a fetch need not wait "
       "for the "
       "write-back that makes room for it. Less is taken where the budgets are too small for it.",
       "`\"auto\"`: what the links have in flight and the largest operation takes, at most a quarter"},
      {"ram", SectionSpec{ram_keys}, "What the back end `\"ram\"` pretends to be."},
  });
  return keys;
}

// 0: not stated.
std::int64_t read_drive_bytes(Section& entry) {
  const std::int64_t bytes = entry.bytes("bytes").value_or(0);
  if (!entry.has("bytes") || bytes >= io::Engine::alignment()) return bytes;
  entry.wrong("bytes", fmt::format("{} bytes or more", io::Engine::alignment()),
              entry.find("bytes")->is_number()
                  ? fmt::format("without a unit these are bytes: did you mean \"{}GiB\"?", bytes)
                  : std::string("leave it out to give the drive what the run needs"));
}

// What a drive made of memory pretends to be.
io::RamModel read_ram(Section& ram) {
  io::RamModel model;
  model.bytes_per_second = ram.number("bytes_per_second");
  model.latency_seconds = ram.number("latency_seconds");
  model.duplex = ram.boolean("duplex");
  model.stall_every_seconds = ram.number("stall_every_seconds");
  model.stall_seconds = ram.number("stall_seconds");
  model.change_every_seconds = ram.number("change_every_seconds");
  model.change_factor = ram.number("change_factor");
  ram.finish();
  try {
    (void)io::mean_bytes_per_second(model);  // refuses stalls and changes without meaning
  } catch (const Error& e) {
    ram.fail("", "has " + e.message(), e.hint());
  }
  return model;
}

// One `ram` section, of all drives or of one; a warning where no drive is made of memory.
std::optional<io::RamModel> find_ram(Section& parent, const RunConfig& run) {
  auto ram = parent.section("ram");
  if (!ram) return {};
  if (run.aio.backend != io::Backend::kRam) parent.notice("ram", "has no effect: aio.backend is not \"ram\"");
  return read_ram(*ram);
}

// A step's time on the drives is that of its longer way, or of both: of all drives the same.
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
  constexpr const char* kExpected = "a list: [{\"path\": \"directory\", \"bytes\": \"1GiB\"}]";
  const Json* list = tiers.find("nvme");
  if (list == nullptr) return;
  std::vector<io::DriveOptions>& out = run.tiers.nvme;
  if (!list->is_array()) tiers.wrong("nvme", kExpected);
  for (std::size_t i = 0; i < list->size(); ++i) {
    if (!(*list)[i].is_object()) {
      tiers.fail(fmt::format("nvme.{}", i),
                 "found " + describe((*list)[i]) + ", expected an object in " + kExpected);
    }
    Section entry = tiers.entry("nvme", i, (*list)[i]);
    io::DriveOptions drive;
    drive.path = entry.text("path");
    if (drive.path.empty()) entry.fail("path", "is missing", "a directory on the drive");
    drive.bytes = read_drive_bytes(entry);
    drive.endurance_bytes = static_cast<double>(entry.bytes("endurance").value_or(0));
    drive.ram = find_ram(entry, run);
    entry.finish();
    const auto same = [&](const io::DriveOptions& other) { return other.path == drive.path; };
    if (std::any_of(out.begin(), out.end(), same)) {
      entry.fail("path", "found " + drive.path + " a second time, expected a directory a drive");
    }
    out.push_back(drive);
  }
}

}  // namespace

std::vector<Key> memory_keys() {
  return {{"accumulation",
           ChoiceSpec(defaults().accumulation, {{"layer_major", Accumulation::kLayerMajor},
                                                {"micro_batch_major", Accumulation::kMicroBatchMajor}}),
           "The order in which micro-batches pass through the layers. Layer-major: weights cross each link "
           "twice a step; "
           "micro-batch-major: twice a micro-batch, with less memory for activations."},
          {"tiers", SectionSpec{tiers_keys}, "Budgets of the tiers."},
          {"zero_optimization", SectionSpec{zero_keys}, "DeepSpeed's ZeRO: what may be offloaded."},
          {"activation_checkpointing", SectionSpec{activation_keys}, "What is kept of the forward."},
          {"aio", SectionSpec{aio_keys}, "How drives are read and written."}};
}

void read_activation_checkpointing(Section& root, RunConfig& run) {
  run.offload_activation = has_tiers(root) ? Placement::kAuto : Placement::kDevice;
  auto section = root.section("activation_checkpointing");
  if (!section) return;
  run.recompute = section->boolean("recompute");
  if (section->has("cpu_checkpointing")) {
    run.offload_activation = section->boolean("cpu_checkpointing") ? Placement::kHost : Placement::kDevice;
  }
  section->finish();
}

void read_aio(Section& root, RunConfig& run) {
  auto aio = root.section("aio");
  if (!aio) return;
  AioConfig& out = run.aio;
  using io::Backend;
  out.backend = aio->choice<Backend>("backend");
  out.require = out.backend != Backend::kAuto;
  out.block_size = aio->integer("block_size");
  // 0, "not stated", where the file says nothing: the engine then finds it, within the cap of a depth that
  // adapts.
  if (aio->has("queue_depth")) {
    IntSpec depth = aio->spec_of<IntSpec>("queue_depth");
    depth.fallback = io::default_queue_depth(out.block_size);
    out.queue_depth = static_cast<int>(aio->integer("queue_depth", depth));
  }
  out.adaptive_depth = aio->boolean("adaptive_depth");
  IntSpec cap = aio->spec_of<IntSpec>("max_queue_depth");
  cap.fallback = std::max<std::int64_t>(cap.fallback, out.queue_depth);
  cap.min = std::max<std::int64_t>(cap.min, out.queue_depth);
  out.max_queue_depth = static_cast<int>(aio->integer("max_queue_depth", cap));
  out.queues = static_cast<int>(aio->integer("queues"));
  out.sqpoll = aio->boolean("sqpoll");
  out.iopoll = aio->boolean("iopoll");
  const bool can_be_uring = out.backend == Backend::kAuto || out.backend == Backend::kUring;
  for (const auto& [key, on] : {std::pair{"sqpoll", out.sqpoll}, std::pair{"iopoll", out.iopoll}}) {
    if (on && !can_be_uring) aio->notice(key, "has no effect: aio.backend is not \"io_uring\"");
  }
  if (aio->has("thread_count") && aio->has("intra_op_parallelism")) {
    aio->fail("thread_count", "is the old name of intra_op_parallelism, which is given too",
              "remove one of the two");
  }
  out.threads =
      static_cast<int>(aio->integer(aio->has("thread_count") ? "thread_count" : "intra_op_parallelism"));
  out.verify = aio->boolean("verify");
  if (aio->boolean("use_gds")) {
    using Direct = DeviceConfig::Direct;
    if (run.device.kind != DeviceConfig::Kind::kCuda || run.device.direct == Direct::kOff) {
      aio->wrong("use_gds", "false where no GPU is trained on, or cuda.gpudirect_storage is \"off\"",
                 "remove the key: data goes through pinned memory");
    }
    run.device.direct = Direct::kOn;
  }
  aio->finish();
}

void read_tiers(Section& root, RunConfig& run) {
  auto tiers = root.section("tiers");
  if (!tiers) return;
  run.tiers.device = tiers->bytes("device");
  run.tiers.host = tiers->bytes("host");
  read_drives(*tiers, run);
  run.tiers.prefetch_depth = static_cast<int>(tiers->integer("prefetch_depth"));
  if (tiers->is_auto("read_ahead")) {
    tiers->notice("read_ahead", "\"auto\": the plan finds it");
  } else if (tiers->has("read_ahead")) {
    run.tiers.read_ahead = tiers->number("read_ahead");
  }
  run.tiers.ram = find_ram(*tiers, run).value_or(io::RamModel{});
  check_duplex(*tiers, run);
  tiers->finish();
}

bool has_tiers(Section& root) {
  return root.has("tiers");
}

}  // namespace zg::config
