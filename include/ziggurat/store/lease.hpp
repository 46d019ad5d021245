// What somebody has of a segment in a store: the right to its bytes, or to their staying at a tier.
//
// A lease or a pin may be used and ended by any thread, by one at a time.
#pragma once
#include <atomic>
#include <cstdint>
#include <utility>

#include "ziggurat/device/device.hpp"
#include "ziggurat/store/table.hpp"

namespace zg {

class LeaseTable;
struct Hot;
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

  // The bytes may not be touched any more from now on.
  void release();
  // ... from when `stream` has passed `event`, recorded on it after the work that uses the bytes. A
  // later acquire for the same stream need not wait for it.
  void release_after(Stream& stream, const Event& event);

 private:
  friend class LeaseTable;
  friend struct StoreParts;
  StoreParts* store_ = nullptr;
  ActionNode* node_ = nullptr;          // with a program
  std::atomic<Hot*>* entry_ = nullptr;  // without one: where its holder is noted
  SegmentId segment_ = 0;
  Tier tier_ = Tier::kHost;
  bool writes_ = false;
  bool made_ = false;  // there was no content before
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// Keeps a segment at a tier, once it is there, until the pin ends; gone before the store is. Move-only.
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
