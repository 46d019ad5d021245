#include "ziggurat/store/open.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "ziggurat/base/units.hpp"
#include "ziggurat/io/depth.hpp"

namespace zg {
namespace {

constexpr std::int64_t kMostBytes = std::int64_t{1} << 60;  // a larger size must be a mistake

[[noreturn]] void refuse(const std::string& field, const std::string& what, const std::string& hint) {
  throw Error(Errc::kUsage, field, what, hint);
}

void check_bytes(const std::string& field, std::int64_t bytes, std::int64_t least, const char* hint) {
  if (bytes < least || bytes > kMostBytes) refuse(field, fmt::format("is {} bytes", bytes), hint);
}

// Whether both paths name the same directory.
bool same_place(const std::string& a, const std::string& b) {
  std::error_code ignored;
  return a == b || std::filesystem::equivalent(a, b, ignored);
}

void check_drives(const StoreConfig& c) {
  const bool ram = c.aio.backend == io::Backend::kRam;
  for (std::size_t i = 0; i < c.drives.size(); ++i) {
    const io::DriveOptions& drive = c.drives[i];
    const std::string field = fmt::format("drives[{}]", i);
    if (drive.path.empty() && !ram) refuse(field + ".path", "is empty", "name a directory on the drive");
    const bool sized_by_file = drive.kind == io::FileKind::kExisting && !ram;
    check_bytes(field + ".bytes", drive.bytes, sized_by_file ? 0 : io::Engine::alignment(),
                "say how much of the drive the store may take: a file of this size is made there");
    for (std::size_t j = 0; j < i && !ram; ++j) {
      if (same_place(drive.path, c.drives[j].path))
        refuse(field + ".path", fmt::format("{} is that of drives[{}] too", drive.path, j),
               "name one directory on each drive");
    }
  }
  if (!c.drive_shares.empty() && c.drive_shares.size() != c.drives.size())
    refuse("drive_shares", fmt::format("are {}, for {} drives", c.drive_shares.size(), c.drives.size()),
           "give one for each drive, or none");
}

void check(const StoreConfig& c) {
  check_bytes("device_bytes", c.device_bytes, 0, "expected a budget of device memory, or 0 for none");
  check_bytes("host_bytes", c.host_bytes, io::Engine::alignment(),
              "expected a budget of host memory: everything passes through it, so at least some of the "
              "largest segments");
  check_bytes("read_ahead", c.read_ahead, 0, "expected bytes, or 0 for half of each budget");
  if (!(c.warn_after_seconds > 0) || !std::isfinite(c.warn_after_seconds))
    refuse("warn_after_seconds", fmt::format("is {}", c.warn_after_seconds), "expected seconds, more than 0");
  check_drives(c);
}

}  // namespace

std::unique_ptr<OpenStore> open_store(const StoreConfig& config) {
  check(config);
  TensorStore::Options options;
  options.policy = config.own_policy ? config.own_policy : policy_by_name(config.policy);
  std::unique_ptr<OpenStore> opened(new OpenStore);
  opened->device_ = make_host_device(config.device_bytes, config.trace);
  opened->host_ = make_host_arena("host memory", config.host_bytes);
  if (!config.drives.empty()) {
    io::EngineOptions aio = config.aio;
    if (aio.trace == nullptr) aio.trace = config.trace;
    if (aio.queue_depth == 0) {
      const auto drives = static_cast<std::int64_t>(config.drives.size());
      aio.queue_depth = io::queue_depth_within(config.host_bytes, drives, aio.block_size);
    }
    opened->io_ = io::make_engine(aio, config.drives);
  }
  options.device = opened->device_.get();
  options.host = opened->host_.get();
  options.io = opened->io_.get();
  options.budgets = {config.device_bytes, config.host_bytes};
  options.read_ahead = config.read_ahead;
  options.verify = config.verify;
  options.drive_shares = config.drive_shares;
  options.trace = config.trace;
  options.warn_after_seconds = config.warn_after_seconds;
  options.write_ahead = config.write_ahead;
  options.record = config.record;
  opened->store_ = std::make_unique<TensorStore>(options);
  return opened;
}

TensorId OpenStore::tensor(const std::string& name) const {
  const TensorId id = store_->table().find(name);
  if (id >= 0) return id;
  std::vector<std::string> names;
  for (TensorId t = 0; t < store_->table().tensor_count(); ++t) {
    if (const Tensor& known = store_->table().tensor(t); !known.removed) names.push_back(known.spec.name);
  }
  const auto near = nearest_name(name, names);
  refuse(fmt::format("tensor \"{}\"", name), "is not in the store",
         near ? fmt::format("did you mean \"{}\"?", *near) : "add it first");
}

SegmentId OpenStore::segment(const std::string& name, std::int32_t index) const {
  const Tensor& t = store_->table().tensor(tensor(name));
  if (index < 0 || index >= t.segments)
    refuse(fmt::format("tensor \"{}\"", name),
           fmt::format("has no segment {}, but {} of them", index, t.segments), "count from 0");
  return t.first_segment + index;
}

std::int32_t OpenStore::segment_count(const std::string& name) const {
  return store_->table().tensor(tensor(name)).segments;
}

Lease OpenStore::acquire(const std::string& name, std::int32_t index, Tier tier, Access access,
                         Stream* consumer) {
  return store_->acquire(segment(name, index), tier, access, consumer);
}

}  // namespace zg
