// Pinned state, mapped into memory: each segment's pieces one after the other, as they lie in the drives'
// files. Private to src/train.
//
// Nobody writes to what is pinned, so the mapping is as good as the file. Any thread may read.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "train/pinned_state.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {

class PinnedMap {
 public:
  // `path`: of the rank's file in the checkpoint, for messages. Throws Error(kUsage) where a drive's file is
  // missing or too short.
  PinnedMap(PinnedState state, std::string path);
  ~PinnedMap();
  PinnedMap(const PinnedMap&) = delete;
  PinnedMap& operator=(const PinnedMap&) = delete;

  // The elements of a piece as an entry of a file, and those of its scales.
  struct Entries {
    const PinnedPiece* piece = nullptr;
    SafeTensors::Entry elements, scales;
    const void* high = nullptr;  // of split masters, whose lower halves are at elements.data
  };
  const std::deque<Entries>& entries() const { return entries_; }
  const PinnedState& state() const { return state_; }
  const std::string& path() const { return path_; }
  // Reads all pieces of all segments, and compares their checksums; calls `progress` with the bytes of each.
  void verify(const std::function<void(std::int64_t bytes)>& progress) const;
  // Drops these bytes from the process's resident memory.
  void drop(const void* data, std::int64_t bytes) const;

 private:
  void map(const PinnedSegment& segment, const std::vector<int>& files);
  void unmap();
  const PinnedState state_;
  const std::string path_;
  std::vector<char*> segments_;  // the address of each
  std::deque<Entries> entries_;
};

}  // namespace zg
