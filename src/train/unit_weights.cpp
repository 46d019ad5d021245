#include "train/unit_weights.hpp"

#include <algorithm>

#include "ziggurat/base/log.hpp"
#include "ziggurat/base/memory_limits.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

std::int64_t bytes_of(const Unit& unit) {
  return unit.count * static_cast<std::int64_t>(sizeof(float));
}

}  // namespace

UnitWeights::UnitWeights(const std::string& directory, const Model& model, std::int64_t memory,
                         const std::string& adapters)
    : model_(model),
      source_(directory, model),
      choice_biases_(source_.choice_biases(model)),
      residents_(model.units().size()) {
  if (!adapters.empty()) adapters_.emplace(adapters, model.config());
  choose_residents(memory);
  for (std::size_t unit = 0; unit < residents_.size(); ++unit) {
    if (is_resident(unit)) read(unit, residents_[unit]);
  }
}

UnitWeights::~UnitWeights() {
  if (reading_.valid()) reading_.wait();
}

void UnitWeights::choose_residents(std::int64_t memory) {
  const std::vector<Unit>& units = model_.units();
  const std::size_t blocks = units.size() - 2;
  std::int64_t all = 0;
  for (const Unit& unit : units) all += bytes_of(unit);
  // Leaves a quarter of the free memory to the keys and values of long texts, and to the page cache.
  const std::int64_t left = read_memory_limits().left();
  const std::int64_t room = memory > 0 ? memory : left == MemoryLimits::kNone ? all : left / 4 * 3;
  if (model_.config().experts.on()) return make_room_for_experts(std::min(room, all));
  resident_blocks_ = blocks;
  if (all <= room || blocks == 0) return;
  const std::int64_t block = bytes_of(units[1]);
  const std::int64_t ends = bytes_of(units.front()) + bytes_of(units.back());
  const std::int64_t least = ends + std::min<std::int64_t>(2, static_cast<std::int64_t>(blocks)) * block;
  if (room < least) {
    throw Error(
        Errc::kMemory, memory > 0 ? "--memory" : "memory",
        fmt::format("{} found; this model needs at least {}, of {} for all its weights in fp32",
                    format_bytes(room), format_bytes(least), format_bytes(all)),
        fmt::format("give it --memory {}MiB, or a machine that has as much", (least + kMiB - 1) / kMiB));
  }
  resident_blocks_ = std::min(blocks - 1, static_cast<std::size_t>((room - least) / block));
  log::info("weights: {} of {} layers stay in memory ({}); {} are read from the model's files for each token",
            resident_blocks_, blocks, format_bytes(room), read_anew());
}

void UnitWeights::make_room_for_experts(std::int64_t room) {
  std::int64_t others = 0, experts = 0, largest = 0;
  for (const Unit& unit : model_.units()) {
    (unit.is_experts() ? experts : others) += bytes_of(unit);
    if (unit.is_experts()) largest = std::max(largest, bytes_of(unit));
  }
  if (room < others + largest) {
    throw Error(
        Errc::kMemory, "memory",
        fmt::format("{} found; this model needs at least {}: {} for all but its experts, and {} for one unit "
                    "of experts, in fp32",
                    format_bytes(room), format_bytes(others + largest), format_bytes(others),
                    format_bytes(largest)),
        fmt::format("give it --memory {}MiB, or a machine that has as much",
                    (others + largest + kMiB - 1) / kMiB));
  }
  cache_bytes_ = room - others;
  if (cache_bytes_ >= experts) return;
  log::info(
      "weights: {} of the {} of experts stay in memory; the others are read from the model's files when a "
      "token needs them",
      format_bytes(cache_bytes_), format_bytes(experts));
}

View UnitWeights::use_experts(std::size_t unit) {
  const std::int64_t bytes = bytes_of(model_.units()[unit]);
  const auto cached = std::find(cached_.begin(), cached_.end(), unit);
  if (cached != cached_.end()) {
    cached_.splice(cached_.begin(), cached_, cached);
  } else {
    for (; cached_bytes_ + bytes > cache_bytes_; cached_.pop_back()) {
      cached_bytes_ -= bytes_of(model_.units()[cached_.back()]);
      residents_[cached_.back()] = {};
    }
    read(unit, residents_[unit]);
    cached_.push_front(unit);
    cached_bytes_ += bytes;
    ++experts_read_;
  }
  return {residents_[unit].data(), DType::kF32, 1, model_.units()[unit].count};
}

void UnitWeights::read(std::size_t unit, Buffer& into) const {
  const Unit& u = model_.units()[unit];
  into.reserve(bytes_of(u));
  auto* const flat = reinterpret_cast<float*>(into.data());
  std::fill(flat, flat + u.count, 0.0f);
  for (const Param& p : u.params) {
    source_.read(p, 0, p.count(), flat + p.offset);
    if (adapters_) adapters_->merge(p, 0, p.count(), flat + p.offset);
  }
}

std::size_t UnitWeights::behind(std::size_t unit) const {
  return unit + 2 < residents_.size() ? unit + 1 : resident_blocks_ + 1;
}

View UnitWeights::use(std::size_t unit) {
  const auto view = [&](const Buffer& b) {
    return View(b.data(), DType::kF32, 1, model_.units()[unit].count);
  };
  if (is_resident(unit)) return view(residents_[unit]);
  if (model_.units()[unit].is_experts()) return use_experts(unit);
  const auto begin = [&](std::size_t next, int slot) {
    reading_ = std::async(std::launch::async, [this, next, slot] { read(next, slots_[slot]); });
    coming_ = next, coming_slot_ = slot;
  };
  if (used_ == unit) return view(slots_[1 - coming_slot_]);
  if (coming_ != unit) {  // the first block that is read, or a unit out of order
    coming_ = used_ = 0;
    if (reading_.valid()) reading_.get();
    begin(unit, 0);
  }
  const int slot = coming_slot_;
  coming_ = used_ = 0;  // no block is valid if reading fails
  reading_.get();
  used_ = unit;
  begin(behind(unit), 1 - slot);
  return view(slots_[slot]);
}

}  // namespace zg
