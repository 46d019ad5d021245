// Leases and pins of a store's segments: the right to access the bytes, and the right that they stay at a
// tier.
//
// Any thread may use and end a lease or a pin, but only one at a time.
#pragma once
#include <atomic>
#include <cstdint>
#include <utility>

#include "ziggurat/device/device.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

class LeaseTable;
struct CopyWord;
struct ActionNode;
struct StoreParts;

// Access to the bytes of one segment at one tier, until released. Move-only.
class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept { *this = std::move(other); }
  Lease& operator=(Lease&& other) noexcept;
  ~Lease() { release(); }

  explicit operator bool() const { return store_ != nullptr; }
  void* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

  // Ends the lease: the bytes must not be accessed any more.
  void release();
  // Passes the lease to `stream`. The lease ends when the stream has reached `event`, which was recorded on
  // it after the work that uses the bytes. A later acquire for the same stream need not wait for that.
  void release_after(Stream& stream, const Event& event);

 private:
  friend class LeaseTable;
  friend class FreeFront;
  StoreParts* store_ = nullptr;
  ActionNode* node_ = nullptr;               // with a program
  std::atomic<CopyWord*>* entry_ = nullptr;  // without one: the holder's entry for it
  SegmentId segment_ = 0;
  Tier tier_ = Tier::kHost;
  bool writes_ = false;
  bool made_ = false;  // the segment had no content before this lease
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// Keeps a segment at a tier, once it is there, until the pin ends. Ends before the store does. Move-only.
class Pin {
 public:
  Pin() = default;
  Pin(Pin&& other) noexcept { *this = std::move(other); }
  Pin& operator=(Pin&& other) noexcept;
  ~Pin() { release(); }
  explicit operator bool() const { return store_ != nullptr; }
  void release();

 private:
  friend class TensorStore;
  StoreParts* store_ = nullptr;
  SegmentId segment_ = 0;
  Tier tier_ = Tier::kHost;
};

}  // namespace zg
