#include "ziggurat/optim/state.hpp"

#include <bit>

#include "kernels/host/fp8.hpp"
#include "kernels/host/update_int8.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

constexpr int kMaster = 0, kMoment = 1, kScale = 3;  // indices of parts; two moments, and the scales of each

DType moment_type(const StateFormat& f) {
  switch (f.moments) {
    case MomentFormat::kFull:
      return f.full;
    case MomentFormat::kBf16:
      return DType::kBF16;
    case MomentFormat::kInt8:
      return DType::kU8;
  }
  return f.full;
}

DType master_type(const StateFormat& f) {
  return f.master == MasterFormat::kSplit ? DType::kU16 : f.full;
}

// Calls f(i, value) for each value of a contiguous view, converted to float.
template <class F>
void for_values(const View& v, const F& f) {
  const auto each = [&](const auto* data) {
    for (std::int64_t i = 0; i < v.count(); ++i) f(i, static_cast<float>(data[i]));
  };
  switch (v.dtype) {
    case DType::kF64:
      return each(v.as<double>());
    case DType::kF32:
      return each(v.as<float>());
    case DType::kBF16:
      return each(v.as<bf16>());
    case DType::kF16:
      return each(v.as<fp16>());
    default:
      ZG_ASSERT(false, "values in {}", name_of(v.dtype));
  }
}

}  // namespace

StateLayout::Part StateLayout::bytes_of(int part) const {
  if (part == kMaster) return {static_cast<std::int64_t>(size_of(master_type(format_))), 1};
  if (part < kScale) {
    const bool there = part - kMoment < format_.moment_count;
    return {there ? static_cast<std::int64_t>(size_of(moment_type(format_))) : 0, 1};
  }
  const bool there = format_.moments == MomentFormat::kInt8 && part - kScale < format_.moment_count;
  return {there ? static_cast<std::int64_t>(sizeof(float)) : 0, kQuantBlock};
}

std::int64_t StateLayout::offset(int part, std::int64_t elements) const {
  std::int64_t at = 0;
  for (int p = 0; p < part; ++p) {
    const Part each = bytes_of(p);
    if (each.numerator > 0) at += round_up(elements / each.denominator * each.numerator, 64) + kStagger;
  }
  return at;
}

std::int64_t StateLayout::bytes(std::int64_t elements) const {
  ZG_ASSERT_EQ(elements % kQuantBlock, 0);
  return offset(kParts, elements) - kStagger;  // there is no gap after the last array
}

std::int64_t StateLayout::elements_within(std::int64_t limit) const {
  std::int64_t blocks = limit / (bytes(2 * kQuantBlock) - bytes(kQuantBlock)) + 1;
  while (blocks > 1 && bytes(blocks * kQuantBlock) > limit) --blocks;
  return blocks * kQuantBlock;
}

double StateLayout::bytes_per_element() const {
  double sum = 0;
  for (int p = 0; p < kParts; ++p) {
    const Part each = bytes_of(p);
    sum += static_cast<double>(each.numerator) / static_cast<double>(each.denominator);
  }
  return sum;
}

OptimizerState StateLayout::part(void* data, std::int64_t elements, std::int64_t first,
                                 std::int64_t count) const {
  ZG_ASSERT_EQ(first % kQuantBlock, 0);
  ZG_ASSERT_LE(first + count, elements);
  OptimizerState state;
  const auto view = [&](int p, DType type, std::int64_t per_element) {
    if (bytes_of(p).numerator == 0) return View();
    char* begin = static_cast<char*>(data) + offset(p, elements);
    const std::int64_t from = first / per_element;
    return View(begin + from * static_cast<std::int64_t>(size_of(type)), type, 1,
                (count + per_element - 1) / per_element);
  };
  state.master = view(kMaster, master_type(format_), 1);
  for (int i = 0; i < 2; ++i) {
    state.moment[i] = view(kMoment + i, moment_type(format_), 1);
    state.scale[i] = view(kScale + i, DType::kF32, kQuantBlock);
  }
  return state;
}

void read_masters(const StateFormat& format, const OptimizerState& state, const View& weight, float* out) {
  if (format.master == MasterFormat::kFull) {
    for_values(state.master, [&](std::int64_t i, float value) { out[i] = value; });
    return;
  }
  const auto* low = static_cast<const std::uint16_t*>(state.master.data);
  const bf16* high = weight.as<bf16>();
  for (std::int64_t i = 0; i < state.master.count(); ++i) out[i] = join_master(high[i], low[i]);
}

void read_weights(const View& weight, float* out) {
  for_values(weight, [&](std::int64_t i, float value) { out[i] = value; });
}

void write_weights(const View& weight, const float* values) {
  const auto each = [&](auto* out, const auto& convert) {
    for (std::int64_t i = 0; i < weight.count(); ++i) out[i] = convert(values[i]);
  };
  switch (weight.dtype) {
    case DType::kF64:
      return each(weight.as<double>(), [](float x) { return static_cast<double>(x); });
    case DType::kF32:
      return each(weight.as<float>(), [](float x) { return x; });
    case DType::kBF16:
      return each(weight.as<bf16>(), round_master);
    case DType::kF16:
      return each(weight.as<fp16>(), [](float x) { return fp16(x); });
    default:
      ZG_ASSERT(false, "weights in {}", name_of(weight.dtype));
  }
}

void encode_weights(const View& master, const View& codes, const View& scales) {
  ZG_ASSERT_EQ(codes.count(), master.count());
  host::encode_fp8(master.count(), master.as<float>(), codes.as<std::uint8_t>(), scales.as<float>());
}

void write_masters(const StateFormat& format, const OptimizerState& state, const View& weight,
                   const float* values) {
  const std::int64_t n = state.master.count();
  ZG_ASSERT_EQ(weight.count(), n);
  write_weights(weight, values);
  for (std::int64_t i = 0; i < n; ++i) {
    if (format.master == MasterFormat::kSplit) {
      static_cast<std::uint16_t*>(state.master.data)[i] = low_of_master(values[i]);
    } else if (format.full == DType::kF64) {
      state.master.as<double>()[i] = static_cast<double>(values[i]);
    } else {
      state.master.as<float>()[i] = values[i];
    }
  }
}

void read_moments(const StateFormat& format, const OptimizerState& state, int which, std::int64_t count,
                  float* out) {
  const View& moment = state.moment[which];
  ZG_ASSERT(which < format.moment_count && moment.count() >= count, "moment {} of {}", which,
            format.moment_count);
  if (format.moments != MomentFormat::kInt8) {
    for_values(View(moment.data, moment.dtype, 1, count),
               [&](std::int64_t i, float value) { out[i] = value; });
    return;
  }
  const auto* codes = static_cast<const std::uint8_t*>(moment.data);
  const float* scales = state.scale[which].as<float>();
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = host::int8::decode(which, codes[i], scales[i / kQuantBlock]);
  }
}

}  // namespace zg
