// What the functions of ziggurat.h share: error codes, versioned structs, handles, and the zg_store itself.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "ziggurat/store/open.hpp"
#include "ziggurat/ziggurat.h"

namespace zg::c_api {

// The code of the current exception, whose text becomes this thread's last error.
int failure() noexcept;

// Runs `call`; an exception becomes an error code.
template <class Call>
int guarded(Call&& call) noexcept {
  try {
    call();
    return ZG_OK;
  } catch (...) {
    return failure();
  }
}

[[noreturn]] void refuse(const std::string& where, const std::string& what, const std::string& hint = {});

template <class T>
T& required(T* pointer, const char* name) {
  if (pointer == nullptr) refuse(name, "is NULL", "hand in where it is");
  return *pointer;
}

// An out parameter: must not be NULL, and is cleared at once, so that it is clear also where the call fails
// later.
template <class T>
T& cleared(T* pointer, const char* name) {
  required(pointer, name) = T{};
  return *pointer;
}

constexpr std::size_t kLargestStruct = 4096;  // a larger size field was never initialised

// Checks the caller's size of a struct. `least`: the struct's size in the first version of the API.
void check_size(const char* name, std::size_t size, std::size_t least);
// `rest`: the fields of the caller's struct that this library does not know yet. Refuses any that is not 0.
void check_unknown(const char* name, const char* rest, std::size_t bytes);

// The caller's struct as this library's; fields that the caller's lacks are 0.
template <class T>
T read_struct(const T* from, const char* name, std::size_t least) {
  const std::size_t size = required(from, name).size;
  check_size(name, size, least);
  if (size > sizeof(T))
    check_unknown(name, reinterpret_cast<const char*>(from) + sizeof(T), size - sizeof(T));
  T out{};
  std::memcpy(&out, from, std::min(size, sizeof(T)));
  return out;
}

// Copies a struct into the caller's as far as that goes; fields that only the caller's has become 0.
template <class T>
void write_struct(T* to, T value, const char* name, std::size_t least) {
  const std::size_t size = required(to, name).size;
  check_size(name, size, least);
  value.size = size;
  std::memset(static_cast<void*>(to), 0, size);
  std::memcpy(to, &value, std::min(size, sizeof(T)));
}

// As snprintf() does.
void write_text(const std::string& text, char* buffer, std::size_t capacity, std::size_t* length);

// Values by handle. A handle is never 0, and the handle of a value that was taken is recognised as stale,
// until its slot has been used 2^32 times. Thread-safe; threads use different shards, so they seldom contend.
template <class T>
class HandleTable {
 public:
  std::uint64_t put(T value) {
    static std::atomic<std::uint64_t> threads{0};
    thread_local const std::uint64_t mine = threads++ % kShards;
    Shard& shard = shards_[mine];
    std::lock_guard lock(shard.mutex);
    if (shard.unused.empty()) {
      shard.unused.reserve(shard.slots.size() + 1);  // so that take(), which must not fail, allocates nothing
      shard.slots.emplace_back();
      shard.unused.push_back(static_cast<std::uint32_t>(shard.slots.size() - 1));
    }
    const std::uint32_t index = shard.unused.back();
    shard.unused.pop_back();
    Slot& slot = shard.slots[index];
    slot.value = std::move(value);
    slot.used = true;
    ++shard.count;
    return std::uint64_t{slot.generation} << 32 | std::uint64_t{index} * kShards | mine;
  }

  // Removes and returns the value. Empty: the handle is stale, or was never given out.
  std::optional<T> take(std::uint64_t id) {
    Shard& shard = shards_[id % kShards];
    const std::uint64_t index = (id & 0xffffffff) / kShards;
    std::lock_guard lock(shard.mutex);
    if (index >= shard.slots.size()) return std::nullopt;
    Slot& slot = shard.slots[index];
    if (!slot.used || slot.generation != id >> 32) return std::nullopt;
    slot.used = false;
    if (++slot.generation == 0) slot.generation = 1;
    --shard.count;
    shard.unused.push_back(static_cast<std::uint32_t>(index));
    return std::move(slot.value);
  }

  std::size_t size() const {
    std::size_t sum = 0;
    for (const Shard& shard : shards_) {
      std::lock_guard lock(shard.mutex);
      sum += shard.count;
    }
    return sum;
  }

 private:
  static constexpr std::uint64_t kShards = 16;
  struct Slot {
    T value;
    std::uint32_t generation = 1;
    bool used = false;
  };
  struct alignas(64) Shard {
    mutable std::mutex mutex;
    std::vector<Slot> slots;
    std::vector<std::uint32_t> unused;
    std::size_t count = 0;
  };
  std::array<Shard, kShards> shards_;
};

struct HeldPin {
  Pin pin;
  std::pair<SegmentId, Tier> place;
};

}  // namespace zg::c_api

struct zg_store {
  std::unique_ptr<zg::OpenStore> opened;
  // Held shared by every call, and exclusively by the calls that need the store alone. These only try to take
  // it and never wait for it, so it cannot be part of a deadlock with threads that wait for leases inside.
  std::shared_mutex inside;
  zg::c_api::HandleTable<zg::Lease> leases;
  zg::c_api::HandleTable<zg::c_api::HeldPin> pins;
  std::mutex pins_mutex;
  std::map<std::pair<zg::SegmentId, zg::Tier>, int> pin_counts;
  std::mutex step_mutex;
  bool in_step = false;
};

namespace zg::c_api {

// Holds the store's lock shared during a call.
class Inside {
 public:
  explicit Inside(zg_store* store) : store_(required(store, "store")), lock_(store_.inside) {}
  TensorStore& store() const { return store_.opened->store(); }
  zg_store& handle() const { return store_; }

 private:
  zg_store& store_;
  std::shared_lock<std::shared_mutex> lock_;
};

// Holds it exclusively during a call; refuses where another thread is inside.
class Alone {
 public:
  Alone(zg_store* store, const char* call);
  TensorStore& store() const { return store_.opened->store(); }
  // Refuses the call while leases or pins exist.
  void no_leases_or_pins(const char* call) const;

 private:
  zg_store& store_;
  std::unique_lock<std::shared_mutex> lock_;
};

Tier tier_of(int tier);
const Tensor& tensor_of(const TensorStore& store, std::int32_t tensor);
SegmentId segment_of(const TensorStore& store, std::int32_t tensor, std::int32_t segment);

}  // namespace zg::c_api
