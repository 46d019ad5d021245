// Worlds that tests run in: ranks as threads of this process, on the processor or with a GPU each, as the
// program is linked; or, where an MPI launcher started it, this process's ranks of the launcher's world.
#pragma once
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "support/deadline.hpp"
#include "support/test_device.hpp"
#include "ziggurat/comm/comm.hpp"

namespace zg::test {

struct World {
  std::vector<std::unique_ptr<Device>> devices;  // by rank; empty: operands are where the processor's are
  std::vector<std::unique_ptr<CommRank>> ranks;
};
// A world of `size` ranks that are threads of this process.
World make_world(int size, const CommOptions& options);
std::vector<int> world_sizes();  // that there can be
std::int64_t large_count();      // elements of an operand that takes several chunks

// Where a rank's operands and streams are.
class Place {
 public:
  explicit Place(Device* device) : device_(device) {}
  Device* device() const { return device_; }  // null: the processor
  std::unique_ptr<Stream> stream(const char* name) const {
    if (device_ != nullptr) return device_->make_stream(name);
    return std::make_unique<HostStream>(name, HostStream::Mode::kThread);
  }

 private:
  Device* device_;
};

// An operand of calls, which a test reads and writes while no stream uses it.
template <class T>
class Operand {
 public:
  Operand(const Place& place, std::vector<T> values) : device_(place.device()), host_(std::move(values)) {
    if (device_ == nullptr) return;
    data_ = device_->arena().allocate(room());
    ZG_ASSERT(data_ != nullptr, "no room for an operand");
    write(host_);
  }
  Operand(const Place& place, std::int64_t count)
      : Operand(place, std::vector<T>(static_cast<std::size_t>(count))) {}
  Operand(const Operand&) = delete;
  ~Operand() {
    if (device_ != nullptr) device_->arena().release(data_, room());
  }
  T* data() { return device_ == nullptr ? host_.data() : static_cast<T*>(data_); }
  const std::vector<T>& read() {
    if (device_ != nullptr && bytes() > 0) to_host(*device_, host_.data(), data_, bytes());
    return host_;
  }
  void write(const std::vector<T>& values) {
    host_ = values;
    if (device_ != nullptr && bytes() > 0) to_device(*device_, data_, host_.data(), bytes());
  }
  // change(values), behind the stream's work so far and before what comes later.
  template <class Change>
  void change(Stream& stream, Change change) {
    if (device_ == nullptr) {
      static_cast<HostStream&>(stream).enqueue("change", [this, change] { change(host_); });
      return;
    }
    stream.synchronize();
    std::vector<T> values = read();
    change(values);
    write(values);
  }

 private:
  std::int64_t bytes() const { return static_cast<std::int64_t>(host_.size() * sizeof(T)); }
  std::int64_t room() const { return std::max<std::int64_t>(bytes(), 1); }
  Device* device_;
  std::vector<T> host_;
  void* data_ = nullptr;
};

// The ranks of this process, made once: MPI cannot be initialised again.
inline std::vector<std::unique_ptr<CommRank>>& mpi_ranks() {
  static std::vector<std::unique_ptr<CommRank>> ranks = [] {
    const char* const each = std::getenv("ZG_TEST_RANKS_PER_PROCESS");
    return make_mpi_ranks(each != nullptr ? std::atoi(each) : 1, {.timeout_seconds = 60});
  }();
  return ranks;
}

// Runs body(rank, place) on a thread for each rank of this process. `size`: of a world of threads.
inline void in_world(int size, const std::function<void(CommRank&, const Place&)>& body,
                     const CommOptions& options = {60}) {
  World made;
  if (!is_under_mpi()) made = make_world(size, options);
  auto& ranks = is_under_mpi() ? mpi_ranks() : made.ranks;
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back(
        [&, i] { body(*ranks[i], Place(made.devices.empty() ? nullptr : made.devices[i].get())); });
  }
  for (std::thread& thread : threads) thread.join();
}

inline std::vector<int> all_of(const CommRank& rank) {
  std::vector<int> all(static_cast<std::size_t>(rank.size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace zg::test
