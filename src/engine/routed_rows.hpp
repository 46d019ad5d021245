// What the host must know of the routers' decisions, in host memory: the numbers of rows of each expert
// (Model::starts_in()), which are the sizes of matrix products, and the sums that balance terms need
// (Model::router_sums_in()). They are copied from the device after each forward of a router, and kept until
// the forward of the same layer and micro-batch in the next pass. Calls on experts wait for the copy, and the
// device goes on with the routers of other micro-batches meanwhile.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "ziggurat/base/error.hpp"
#include "ziggurat/device/memory.hpp"
#include "ziggurat/step/layout.hpp"

namespace zg {

// Sizes of what is copied for a layer with experts and a micro-batch.
struct RoutedRowsShape {
  std::int64_t experts = 0, sequences = 0;
  DType sums_type = DType::kF32;
  bool balances = false;

  explicit RoutedRowsShape(const Layout& layout)
      : experts(layout.model->config().experts.count),
        sequences(layout.options.micro_batch.sequences),
        sums_type(layout.model->accumulator_dtype()),
        balances(layout.options.balance.on()) {}
  std::int64_t starts_bytes() const {
    return (experts + 1) * static_cast<std::int64_t>(sizeof(std::int32_t));
  }
  std::int64_t number_bytes(std::int64_t numbers) const {
    return balances ? numbers * static_cast<std::int64_t>(size_of(sums_type)) : 0;
  }
  // Of the sums that are copied to the host, and of the factors that are copied to the device.
  std::int64_t sums_bytes() const { return number_bytes(sequences * (2 * experts + 1)); }
  std::int64_t factors_bytes() const { return number_bytes(sequences * experts); }
};

class RoutedRows {
 public:
  // The device must outlive it. Throws Error(kMemory) as make_host_memory() does.
  RoutedRows(Device& device, const Layout& layout)
      : device_(device), shape_(layout), micro_batches_(layout.options.micro_batches) {
    const std::int64_t tables = layout.layers() * micro_batches_;
    sums_at_ = round_up(shape_.starts_bytes(), 8);
    factors_at_ = sums_at_ + round_up(shape_.sums_bytes(), 8);
    table_bytes_ = factors_at_ + round_up(shape_.factors_bytes(), 8);
    bytes_ = arena_charge(tables * table_bytes_);
    memory_ = make_host_memory({.name = "decisions of routers", .budget = bytes_, .huge_pages = false});
    memory_->set_hooks(device.host_hooks());
    data_ = static_cast<char*>(memory_->allocate(bytes_));
    ZG_ASSERT(data_ != nullptr, "an empty arena of {} bytes has no room for them", bytes_);
    copied_.resize(static_cast<std::size_t>(tables));
  }
  ~RoutedRows() {
    for (const Event& event : copied_) event.wait();
    memory_->release(data_, bytes_);
  }
  RoutedRows(const RoutedRows&) = delete;
  RoutedRows& operator=(const RoutedRows&) = delete;

  // Enqueues the copies behind the forward that has written `starts` and, unless they are null, `sums`.
  void fetch(Stream& stream, std::int32_t layer, std::int32_t m, const View& starts, const View& sums) {
    char* const to = table(layer, m);
    device_.copy_to_host(stream, to, starts.data, shape_.starts_bytes());
    to_host_ += shape_.starts_bytes();
    if (sums) {
      device_.copy_to_host(stream, to + sums_at_, sums.data, shape_.sums_bytes());
      to_host_ += shape_.sums_bytes();
    }
    copied_[index(layer, m)] = stream.record();
  }
  // The numbers of rows, and the sums, once they are here.
  const std::int32_t* starts(std::int32_t layer, std::int32_t m) const {
    copied_[index(layer, m)].wait();
    return reinterpret_cast<const std::int32_t*>(table(layer, m));
  }
  RouterSums sums(std::int32_t layer, std::int32_t m) const {
    copied_[index(layer, m)].wait();
    RouterSums sums{shape_.experts, shape_.sequences, {}};
    const std::int64_t count = shape_.sequences * (2 * shape_.experts + 1);
    with_numbers(table(layer, m) + sums_at_, count,
                 [&](auto* numbers) { sums.values.assign(numbers, numbers + count); });
    return sums;
  }
  // Enqueues a copy of factors to the device.
  void put(Stream& stream, std::int32_t layer, std::int32_t m, const std::vector<double>& factors,
           const View& to) {
    char* const from = table(layer, m) + factors_at_;
    const auto count = static_cast<std::int64_t>(factors.size());
    with_numbers(from, count, [&]<class T>(T* numbers) {
      for (std::int64_t i = 0; i < count; ++i)
        numbers[i] = static_cast<T>(factors[static_cast<std::size_t>(i)]);
    });
    device_.copy_to_device(stream, to.data, from, shape_.factors_bytes());
    to_device_ += shape_.factors_bytes();
  }
  std::int64_t to_host() const { return to_host_; }      // bytes copied so far
  std::int64_t to_device() const { return to_device_; }  // likewise

 private:
  std::size_t index(std::int32_t layer, std::int32_t m) const {
    return static_cast<std::size_t>(layer * micro_batches_ + m);
  }
  char* table(std::int32_t layer, std::int32_t m) const {
    return data_ + static_cast<std::int64_t>(index(layer, m)) * table_bytes_;
  }
  template <class F>
  void with_numbers(char* at, std::int64_t, const F& f) const {
    if (shape_.sums_type == DType::kF64) return f(reinterpret_cast<double*>(at));
    f(reinterpret_cast<float*>(at));
  }

  Device& device_;
  const RoutedRowsShape shape_;
  const std::int64_t micro_batches_;
  std::int64_t sums_at_ = 0, factors_at_ = 0, table_bytes_ = 0, bytes_ = 0, to_host_ = 0, to_device_ = 0;
  std::unique_ptr<HostMemory> memory_;
  char* data_ = nullptr;
  std::vector<Event> copied_;  // by layer and micro-batch
};

}  // namespace zg
