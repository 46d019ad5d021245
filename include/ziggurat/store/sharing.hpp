// What stores are given to share host memory and drives with each other, and to find and leave versions of
// segments in the drives' files.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "ziggurat/device/device.hpp"
#include "ziggurat/io/engine.hpp"
#include "ziggurat/io/volume.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

// Options of a volume for the NVMe copies of one store, or of several that share the drives. `drive_shares`:
// the drives' bandwidths, in any unit; empty: they are learned. `verify`: whether copies have checksums.
io::VolumeOptions store_volume(const std::vector<double>& drive_shares, bool verify);
// Hooks for a host arena that register its memory with the devices and the drives (`io` null: there are none)
// once it is mapped, and unregister it before it is unmapped. Empty where none of them needs registration.
// Devices and drives outlive the arena's use of the hooks.
Arena::Hooks host_memory_hooks(const std::vector<Device*>& devices, io::Engine* io);

// Versions of segments that lie in the drives' files already, by the segment's name: at places that the
// volume has taken (io::Volume::take), and in its first slots.
using AdoptedVersions = std::map<std::string, std::vector<io::StoredSlot>>;

// A version of a segment that is pinned on NVMe, until it is unpinned: write-backs go to other slots.
struct PinnedVersion {
  SegmentId segment = -1;
  int slot = -1;
};

}  // namespace zg
