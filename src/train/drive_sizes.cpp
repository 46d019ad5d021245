#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <numeric>

#include "train/drives.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

constexpr std::int64_t kPage = io::Engine::alignment();
// With several drives, each file is larger than its equal share by this factor.
constexpr double kSpare = 1.5;
// The largest share of the free space to use: a file needs a little more space than its bytes.
constexpr double kUsable = 1 - 1.0 / 256;

using Sizes = std::vector<std::int64_t>;

std::int64_t whole_pages(std::int64_t bytes) {
  return bytes / kPage * kPage;
}

std::int64_t sum_of(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

// File sizes that grow evenly, up to their targets and to the space of their file systems.
class Files {
 public:
  explicit Files(const std::vector<DriveSpace>& space) : space_(space), sizes_(space.size()) {
    for (const DriveSpace& s : space) {
      const auto [at, is_new] = free_.emplace(s.file_system, s.free_bytes);
      if (!is_new) at->second = std::min(at->second, s.free_bytes);
    }
  }

  // Grows the files by at most `bytes` together, and uses at most this share of the free space.
  void grow(const Sizes& targets, std::int64_t bytes, double share) {
    while (bytes > 0) {
      std::map<std::uint64_t, std::int64_t> growing;
      std::int64_t all = 0;
      for (std::size_t i = 0; i < sizes_.size(); ++i) {
        if (targets[i] > sizes_[i] && room(i, share) > 0) ++growing[space_[i].file_system], ++all;
      }
      if (all == 0) return;
      const std::int64_t each = part_of(bytes, all);
      std::map<std::uint64_t, std::int64_t> parts;
      for (std::size_t i = 0; i < sizes_.size(); ++i) {
        if (const auto n = growing.find(space_[i].file_system); n != growing.end())
          parts.emplace(n->first, part_of(room(i, share), n->second));
      }
      for (std::size_t i = 0; i < sizes_.size(); ++i) {
        if (targets[i] <= sizes_[i] || room(i, share) <= 0) continue;
        const std::int64_t more =
            std::min({each, parts.at(space_[i].file_system), targets[i] - sizes_[i], room(i, share), bytes});
        sizes_[i] += more;
        taken_[space_[i].file_system] += more;
        bytes -= more;
      }
    }
  }
  const Sizes& sizes() const { return sizes_; }

 private:
  static std::int64_t part_of(std::int64_t bytes, std::int64_t n) {
    return std::max(kPage, whole_pages(bytes / n));
  }
  std::int64_t room(std::size_t i, double share) {
    const std::uint64_t fs = space_[i].file_system;
    return whole_pages(static_cast<std::int64_t>(share * static_cast<double>(free_.at(fs)))) - taken_[fs];
  }

  const std::vector<DriveSpace>& space_;
  Sizes sizes_;
  std::map<std::uint64_t, std::int64_t> free_, taken_;
};

[[noreturn]] void throw_no_room(const std::vector<io::DriveOptions>& drives,
                                const std::vector<DriveSpace>& space, const Sizes& sizes,
                                std::int64_t bytes) {
  std::string places;
  for (std::size_t i = 0; i < drives.size(); ++i) {
    places += fmt::format("; {}: {} free", drives[i].path, format_bytes(space[i].free_bytes));
    for (std::size_t k = 0; k < i; ++k) {
      if (space[k].file_system != space[i].file_system) continue;
      places += fmt::format(", shared with {}", drives[k].path);
      break;
    }
    if (drives[i].bytes > 0) places += fmt::format(", its \"bytes\" allow {}", format_bytes(drives[i].bytes));
    if (sizes[i] < kPage) places += ", not even a page of it for this drive";
  }
  throw Error(Errc::kIo, "tiers.nvme",
              fmt::format("this run needs {} ({} bytes) there and can have {}{}: {}", format_bytes(bytes),
                          bytes, format_bytes(sum_of(sizes)), places, errno_text(ENOSPC)),
              "free some space, leave a full path out, or name another one");
}

}  // namespace

std::vector<DriveSpace> space_of(const std::vector<io::DriveOptions>& drives) {
  std::vector<DriveSpace> space;
  for (const io::DriveOptions& drive : drives) {
    struct stat info {};
    struct statvfs volume {};
    if (stat(drive.path.c_str(), &info) != 0 || statvfs(drive.path.c_str(), &volume) != 0) {
      throw Error(Errc::kIo, drive.path, fmt::format("cannot be asked what is free: {}", errno_text(errno)));
    }
    space.push_back({static_cast<std::int64_t>(volume.f_bavail) * static_cast<std::int64_t>(volume.f_frsize),
                     static_cast<std::uint64_t>(info.st_dev)});
  }
  return space;
}

void check_stated_sizes(const std::vector<io::DriveOptions>& drives, std::int64_t bytes) {
  std::int64_t room = 0;
  for (const io::DriveOptions& drive : drives) {
    if (drive.bytes == 0) return;
    room += whole_pages(std::min(drive.bytes, round_up(bytes, kPage)));
  }
  if (drives.empty() || room >= bytes) return;
  throw Error(Errc::kMemory,
              drives.size() == 1 ? fmt::format("tiers.nvme {}", drives[0].path) : std::string("tiers.nvme"),
              fmt::format("has {}, this run needs {} there ({} bytes)", format_bytes(room),
                          format_bytes(bytes), bytes),
              "raise its \"bytes\"");
}

std::vector<io::DriveOptions> drives_for(std::vector<io::DriveOptions> drives,
                                         const std::vector<DriveSpace>& space, std::int64_t bytes) {
  ZG_ASSERT_EQ(drives.size(), space.size());
  check_stated_sizes(drives, bytes);
  const auto count = static_cast<std::int64_t>(drives.size());
  if (count == 0) return drives;
  const std::int64_t all = std::max(kPage, round_up(bytes, kPage));

  std::int64_t stated = 0, open = 0;
  Sizes most;  // the largest size of each file
  for (const io::DriveOptions& d : drives) {
    most.push_back(d.bytes == 0 ? all : std::clamp(whole_pages(d.bytes), kPage, all));
    if (d.bytes == 0) ++open;
    if (d.bytes > 0) stated += most.back();
  }
  // The target of each file: its stated size; without one, the larger of kSpare equal shares and its share of
  // the bytes that stated sizes leave.
  const double part = static_cast<double>(all) / static_cast<double>(count) * (count > 1 ? kSpare : 1);
  const std::int64_t rest = open > 0 ? (std::max<std::int64_t>(0, all - stated) + open - 1) / open : 0;
  const std::int64_t each = std::min(all, round_up(std::max(static_cast<std::int64_t>(part), rest), kPage));
  Sizes wanted = most;
  for (std::size_t i = 0; i < drives.size(); ++i) {
    if (drives[i].bytes == 0) wanted[i] = each;
  }

  Files files(space);
  files.grow(Sizes(drives.size(), kPage), count * kPage, kUsable);
  files.grow(wanted, sum_of(wanted), kTaken);
  // If that is not enough, files with room grow beyond their targets; at last all free space is used.
  files.grow(most, all - sum_of(files.sizes()), kTaken);
  files.grow(most, all - sum_of(files.sizes()), kUsable);
  const Sizes& sizes = files.sizes();
  if (sum_of(sizes) < all || *std::min_element(sizes.begin(), sizes.end()) < kPage)
    throw_no_room(drives, space, sizes, bytes);
  for (std::size_t i = 0; i < drives.size(); ++i) drives[i].bytes = sizes[i];
  return drives;
}

}  // namespace zg
