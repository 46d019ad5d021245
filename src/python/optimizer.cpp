// Optimizer state in a store, and updates of parameters that lie in memory of the caller. The classes of
// ziggurat.torch are built on this. This file knows nothing of torch: weights and gradients are addresses.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <tuple>
#include <vector>

#include "kernels/host/update_int8.hpp"
#include "python/module.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/optim/state.hpp"

namespace zg::python {
namespace {

char* at(std::uintptr_t address) {
  return reinterpret_cast<char*>(address);
}

OptimizerKind kind_named(const std::string& name) {
  if (name == "adam") return OptimizerKind::kAdam;
  if (name == "sgd") return OptimizerKind::kSgd;
  if (name == "lion") return OptimizerKind::kLion;
  refuse("kind", "\"" + name + "\" is none", "adam, sgd or lion");
}

// One parameter, and the place of its state. An fp32 parameter is its own master weight, so its blocks hold
// only moments: they are StateLayout's blocks without the first array.
struct Param {
  std::int64_t count = 0;  // elements
  DType weight = DType::kF32;
  StateFormat format;
  std::int64_t per_segment = 0;  // elements, a multiple of kQuantBlock
  TensorId tensor = -1;          // -1: the optimizer keeps no state for this parameter
  RandomKey random;

  bool own_master() const { return weight == DType::kF32; }
  std::int32_t segments() const { return static_cast<std::int32_t>((count + per_segment - 1) / per_segment); }
  std::int64_t first(std::int32_t segment) const { return segment * per_segment; }
  std::int64_t elements(std::int32_t segment) const { return std::min(per_segment, count - first(segment)); }
  // Bytes at the start of StateLayout's block that this parameter's blocks lack.
  std::int64_t head(std::int64_t block) const {
    return own_master() ? round_up(block * 4, 64) + StateLayout::kStagger : 0;
  }
  std::int64_t bytes(std::int32_t segment) const {
    const std::int64_t block = round_up(elements(segment), kQuantBlock);
    return StateLayout(format).bytes(block) - head(block);
  }
  View weights(char* data, std::int32_t segment) const {
    return {data + first(segment) * static_cast<std::int64_t>(size_of(weight)), weight, 1, elements(segment)};
  }
  // `data`: the segment's bytes. `all_weights`: the parameter's weights, from its first element.
  OptimizerState state(void* data, char* all_weights, std::int32_t segment) const {
    OptimizerState out;
    if (tensor >= 0) {
      const std::int64_t block = round_up(elements(segment), kQuantBlock);
      const auto begin = reinterpret_cast<std::uintptr_t>(data) - static_cast<std::uintptr_t>(head(block));
      out = StateLayout(format).part(at(begin), block, 0, elements(segment));
    }
    if (own_master()) out.master = weights(all_weights, segment);
    return out;
  }
};

// Encodes one quantisation block of moment `which`: `count` values become the nearest codes, with a scale.
void encode_block(int which, const float* values, std::int64_t count, std::uint8_t* codes, float* scale) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i)
    largest = std::max(largest, std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffffu);
  constexpr std::uint32_t kHalf = 1u << (host::int8::kShift - 1);
  *scale = host::int8::scale_of(which, largest);
  for (std::int64_t i = 0; i < count; ++i) codes[i] = host::int8::encode(which, values[i], *scale, kHalf);
}

void write_moments(const StateFormat& format, const OptimizerState& state, int which, std::int64_t count,
                   const float* values) {
  const View& moment = state.moment[which];
  if (format.moments == MomentFormat::kFull) {
    std::memcpy(moment.data, values, static_cast<std::size_t>(count) * sizeof(float));
  } else if (format.moments == MomentFormat::kBf16) {
    auto* out = moment.as<bf16>();
    for (std::int64_t i = 0; i < count; ++i) out[i] = bf16(values[i]);
  } else {
    auto* codes = static_cast<std::uint8_t*>(moment.data);
    for (std::int64_t i = 0; i < count; i += kQuantBlock)
      encode_block(which, values + i, std::min(kQuantBlock, count - i), codes + i,
                   state.scale[which].as<float>() + i / kQuantBlock);
  }
}

// For masters of format kFull: a master whose weight was changed by other code takes that weight's value.
template <class Weight>
void absorb(const float* /*of the type*/, const Weight* weights, float* masters, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    Weight rounded;
    if constexpr (std::is_same_v<Weight, bf16>) {
      rounded = round_master(masters[i]);
    } else {
      rounded = Weight(masters[i]);
    }
    if (!(rounded == weights[i])) masters[i] = static_cast<float>(weights[i]);
  }
}

// The sum of squares in fp64, in an order that depends only on the size.
template <class T>
double norm_sq(const T* values, std::int64_t count) {
  constexpr std::int64_t kPart = 1 << 16;
  std::vector<double> sums(static_cast<std::size_t>((count + kPart - 1) / kPart));
  parallel_for(count, kPart, [&](std::int64_t begin, std::int64_t end) {
    constexpr std::int64_t kLanes = 8;  // sums side by side, so that the loop is as fast as memory
    double lanes[kLanes] = {};
    std::int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (std::int64_t k = 0; k < kLanes; ++k) {
        const double x = static_cast<double>(static_cast<float>(values[i + k]));
        lanes[k] += x * x;
      }
    }
    for (; i < end; ++i) {
      const double x = static_cast<double>(static_cast<float>(values[i]));
      lanes[0] += x * x;
    }
    double& sum = sums[static_cast<std::size_t>(begin / kPart)];
    for (const double lane : lanes) sum += lane;
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

double norm_sq(const View& v) {
  switch (v.dtype) {
    case DType::kF32:
      return norm_sq(v.as<float>(), v.count());
    case DType::kBF16:
      return norm_sq(v.as<bf16>(), v.count());
    case DType::kF16:
      return norm_sq(v.as<fp16>(), v.count());
    default:
      refuse("gradient", std::string("is in ") + name_of(v.dtype), "f32, bf16 or f16");
  }
}

// Begins to record the accesses of an update, so that the next update's segments are fetched ahead. False if
// the user is already recording a step; the accesses then belong to it.
bool begin_recording(const Inside& inside) {
  std::lock_guard lock(inside.handle().mutex);
  if (inside.handle().in_step) return false;
  inside.store().step_begin("optimizer");
  inside.handle().in_step = true;
  return true;
}

void end_recording(const Inside& inside) {
  std::lock_guard lock(inside.handle().mutex);
  inside.handle().in_step = false;
  try {
    inside.store().step_end();
  } catch (const Error&) {  // the store has failed, and the update has reported it
  }
}

class RecordedStep {
 public:
  RecordedStep(const Inside& inside, bool wanted)
      : inside_(inside), began_(wanted && begin_recording(inside)) {}
  ~RecordedStep() {
    if (began_) end_recording(inside_);
  }

 private:
  const Inside& inside_;
  const bool began_;
};

class Optimizer {
 public:
  Optimizer(const Store& store, const std::string& kind, const std::string& state, int moments,
            std::int64_t segment_bytes, std::uint64_t seed)
      : handle_(store.handle),
        kind_(kind_named(kind)),
        state_(state),
        moments_(moments),
        segment_bytes_(segment_bytes),
        seed_(seed) {
    static constexpr const char* kStates[] = {"fp32", "split", "bf16", "int8"};
    if (std::none_of(std::begin(kStates), std::end(kStates), [&](const char* s) { return state == s; }))
      refuse("state", "\"" + state + "\" is no format", "fp32, split, bf16 or int8");
    if (segment_bytes < 4096 || segment_bytes > std::int64_t{1} << 40)
      refuse("segment_bytes", fmt::format("is {}", segment_bytes), "some MiB are a good size");
  }

  ~Optimizer() { drop(handle_); }

  // `name`: the tensor's name in the store. `key`: the parameter's key, which seeds its random numbers.
  int add(const std::string& name, const std::string& key, std::int64_t count, const std::string& weight) {
    Param p;
    p.count = count;
    p.weight = dtype_named(weight);
    if (p.weight != DType::kF32 && p.weight != DType::kBF16 && p.weight != DType::kF16)
      refuse("parameter " + key, "is in " + weight, "f32, bf16 or f16");
    p.format.kind = kind_;
    p.format.moment_count = moments_;
    if (state_ != "fp32" && p.weight == DType::kBF16) p.format.master = MasterFormat::kSplit;
    if (state_ == "bf16") p.format.moments = MomentFormat::kBf16;
    if (state_ == "int8") p.format.moments = MomentFormat::kInt8;
    p.per_segment = StateLayout(p.format).elements_within(segment_bytes_);
    const auto random = NamedRandom(seed_, key + ".update").key();
    p.random = {{random[0], random[1]}};
    if (count > 0 && (moments_ > 0 || !p.own_master())) {
      TensorSpec spec;
      spec.name = name;
      spec.dtype = DType::kU8;
      spec.role = Role::kOptimizerState;
      for (std::int32_t s = 0; s < p.segments(); ++s) spec.count += p.bytes(s);
      spec.segment_elements = p.bytes(0);
      WithoutGil released;
      p.tensor = Alone(released, handle_, "an optimizer's parameter").store().add(spec);
    }
    params_.push_back(p);
    return static_cast<int>(params_.size()) - 1;
  }

  void remove(int index) {
    Param& p = param(index);
    if (p.tensor < 0) return;
    const TensorId tensor = p.tensor;
    waiting([&](const WithoutGil& released) {
      Alone(released, handle_, "an optimizer's parameter").store().remove(tensor);
    });
    p.tensor = -1;
  }

  std::int64_t bytes(int index) const {
    const Param& p = param(index);
    std::int64_t sum = 0;
    for (std::int32_t s = 0; p.tensor >= 0 && s < p.segments(); ++s) sum += p.bytes(s);
    return sum;
  }

  // Sets the moments to zero and the masters to the weights.
  void reset(int index, std::uintptr_t weights) {
    each(index, Access::kOverwrite, weights, kAll,
         [](const Param& p, const OptimizerState& s, View w, Lease& lease) {
           std::memset(lease.data(), 0, static_cast<std::size_t>(lease.bytes()));
           if (p.own_master()) return;
           std::vector<float> values(static_cast<std::size_t>(w.count()));
           read_weights(w, values.data());
           write_masters(p.format, s, w, values.data());
         });
  }

  // Call after other code has written the weights: the masters take their values.
  void weights_changed(int index, std::uintptr_t weights) {
    if (param(index).own_master()) return;
    each(index, Access::kWrite, weights, kAll, [](const Param& p, const OptimizerState& s, View w, Lease&) {
      if (p.format.master == MasterFormat::kSplit) {
        std::memset(s.master.data, 0, static_cast<std::size_t>(w.count()) * 2);
      } else if (w.dtype == DType::kBF16) {
        absorb(s.master.as<float>(), w.as<bf16>(), s.master.as<float>(), w.count());
      } else {
        absorb(s.master.as<float>(), w.as<fp16>(), s.master.as<float>(), w.count());
      }
    });
  }

  // Numbers of elements: of the parameter, of each of its segments but the last, and of a quantisation block
  // (elements that share a scale in 8 bits).
  std::tuple<std::int64_t, std::int64_t, std::int64_t> extent(int index) const {
    const Param& p = param(index);
    return {p.count, p.per_segment, kQuantBlock};
  }

  // Reads "master", or moment "0" or "1", as fp32: for one segment, or for all (-1).
  void read(int index, const std::string& part, std::uintptr_t weights, std::uintptr_t out,
            std::int32_t segment) {
    std::int64_t done = 0;
    each(index, Access::kRead, weights, segment,
         [&](const Param& p, const OptimizerState& s, View w, Lease&) {
           float* to = reinterpret_cast<float*>(out) + done;
           if (part == "master") {
             read_masters(p.format, s, w, to);
           } else {
             read_moments(p.format, s, part == "1" ? 1 : 0, w.count(), to);
           }
           done += w.count();
         });
  }
  void write(int index, const std::string& part, std::uintptr_t weights, std::uintptr_t from,
             std::int32_t segment) {
    std::int64_t done = 0;
    each(index, Access::kWrite, weights, segment,
         [&](const Param& p, const OptimizerState& s, View w, Lease&) {
           const float* values = reinterpret_cast<const float*>(from) + done;
           if (part == "master") {
             write_masters(p.format, s, w, values);
           } else {
             write_moments(p.format, s, part == "1" ? 1 : 0, w.count(), values);
           }
           done += w.count();
         });
  }

  // Copies a moment of a segment in its 8-bit form: codes in whole blocks, and a scale for each block.
  void copy_codes(int index, int which, bool out, std::uintptr_t codes, std::uintptr_t scales,
                  std::int32_t segment) {
    if (param(index).format.moments != MomentFormat::kInt8 || which < 0 || which >= moments_)
      refuse("codes", fmt::format("moment {} is not kept in 8 bits", which), "read it as fp32");
    each(index, out ? Access::kRead : Access::kWrite, 0, segment,
         [&](const Param& p, const OptimizerState& s, View, Lease&) {
           const std::int64_t n = round_up(p.elements(segment), kQuantBlock), blocks = n / kQuantBlock;
           const auto copy = [&](const View& kept, std::uintptr_t other, std::int64_t bytes) {
             if (out) std::memcpy(at(other), kept.data, static_cast<std::size_t>(bytes));
             if (!out) std::memcpy(kept.data, at(other), static_cast<std::size_t>(bytes));
           };
           copy(s.moment[which], codes, n);
           copy(s.scale[which], scales, blocks * 4);
         });
  }

  // Copies the state's blocks as they are stored, byte by byte.
  void copy_blocks(int index, bool out, std::uintptr_t address) {
    each(index, out ? Access::kRead : Access::kOverwrite, 0, kAll,
         [&](const Param&, const OptimizerState&, View, Lease& lease) {
           const auto n = static_cast<std::size_t>(lease.bytes());
           if (out) std::memcpy(at(address), lease.data(), n);
           if (!out) std::memcpy(lease.data(), at(address), n);
           address += n;
         });
  }

  // A step's update of one parameter, or of one of its segments (kAll: of all segments): index, weights,
  // gradient, the gradient's type, rule, segment. The addresses point to the first element to update.
  using Item = std::tuple<int, std::uintptr_t, std::uintptr_t, std::string, UpdateParams, std::int32_t>;

  // Makes one step for these items. Ctrl-C does not interrupt it: a step is made fully or not at all.
  void update(const std::vector<Item>& items, bool record) {
    std::vector<const Param*> params;  // looked up with the GIL, under which others are added
    for (const auto& [index, weights, grad, dtype, rule, only] : items) {
      params.push_back(&param(index));
      check(*params.back(), dtype, rule);
      check_segment(*params.back(), only);
    }
    WithoutGil released;
    InterruptibleWaits until_the_end(interpreter_ends);
    const Inside inside(released, handle_);
    const RecordedStep step(inside, record);
    HostStream stream("update", HostStream::Mode::kInline);
    for (std::size_t i = 0; i < items.size(); ++i) {
      const auto& [index, weights, grad, dtype, rule, only] = items[i];
      const Param& p = *params[i];
      const DType type = dtype_named(dtype);
      const std::int32_t begin = std::max(only, 0), end = only < 0 ? p.segments() : only + 1;
      // The address where the whole parameter would begin.
      const auto skipped = static_cast<std::uintptr_t>(p.first(begin));
      char* const all_weights = at(weights - skipped * size_of(p.weight));
      for (std::int32_t s = begin; p.count > 0 && s < end; ++s) {
        Lease lease;
        if (p.tensor >= 0)
          lease = inside.store().acquire(inside.segment(p.tensor, s), Tier::kHost, Access::kWrite);
        UpdateParams now = rule;
        now.random = p.random;
        now.first_element = p.first(s);
        const auto before = static_cast<std::uintptr_t>(p.first(s)) - skipped;
        const View g(at(grad + before * size_of(type)), type, 1, p.elements(s));
        host_ops().update(stream, g, p.weights(all_weights, s), p.state(lease.data(), all_weights, s),
                          p.format, now);
      }
    }
    stream.synchronize();
  }

  // Begins a step that consists of several calls of update(). False if the user is already recording a step.
  bool begin_step() {
    WithoutGil released;
    return begin_recording(Inside(released, handle_));
  }
  void end_step() {
    WithoutGil released;
    end_recording(Inside(released, handle_));
  }

  // The sum of the squares of a gradient's elements, in fp64.
  static double gradient_square(std::uintptr_t address, std::int64_t count, const std::string& dtype) {
    const View gradient(at(address), dtype_named(dtype), 1, count);
    WithoutGil released;
    return norm_sq(gradient);
  }

 private:
  const Param& param(int index) const {
    if (index < 0 || index >= static_cast<int>(params_.size()))
      refuse("parameter", fmt::format("there is no number {}", index));
    return params_[static_cast<std::size_t>(index)];
  }
  Param& param(int index) { return const_cast<Param&>(std::as_const(*this).param(index)); }

  void check(const Param& p, const std::string& grad, const UpdateParams& rule) const {
    const DType type = dtype_named(grad);
    if (type != DType::kF32 && type != DType::kBF16 && type != DType::kF16)
      refuse("gradient", "is in " + grad, "f32, bf16 or f16");
    if (p.format.kind == OptimizerKind::kAdam && !(static_cast<float>(rule.eps) > 0))
      refuse("eps", fmt::format("is {}", rule.eps), "a number above 0, in fp32 too");
    if (rule.step < 1) refuse("step", fmt::format("is {}", rule.step), "1 or more");
  }

  static constexpr std::int32_t kAll = -1;
  static void check_segment(const Param& p, std::int32_t only) {
    if (only < kAll || only >= std::max(p.segments(), 1))
      refuse("segment", fmt::format("is {} of {}", only, p.segments()));
  }

  // call(parameter, state, weights, lease) for each segment (kAll), or for one.
  template <class Call>
  void each(int index, Access access, std::uintptr_t weights, std::int32_t only, const Call& call) {
    const Param& p = param(index);
    check_segment(p, only);
    if (p.tensor < 0) return;
    waiting([&](const WithoutGil& released) {
      const Inside inside(released, handle_);
      const std::int32_t end = only < 0 ? p.segments() : only + 1;
      for (std::int32_t s = std::max(only, 0); s < end; ++s) {
        Lease lease = inside.store().acquire(inside.segment(p.tensor, s), Tier::kHost, access);
        call(p, p.state(lease.data(), at(weights), s), p.weights(at(weights), s), lease);
      }
    });
  }

  std::shared_ptr<StoreHandle> handle_;
  const OptimizerKind kind_;
  const std::string state_;
  const int moments_;
  const std::int64_t segment_bytes_;
  const std::uint64_t seed_;
  std::deque<Param> params_;  // references to its entries stay valid
};

}  // namespace

void bind_optimizer(nb::module_& m) {
  nb::class_<UpdateParams>(m, "Rule")
      .def(nb::init<>())
      .def_rw("lr", &UpdateParams::lr)
      .def_rw("beta1", &UpdateParams::beta1)
      .def_rw("beta2", &UpdateParams::beta2)
      .def_rw("eps", &UpdateParams::eps)
      .def_rw("weight_decay", &UpdateParams::weight_decay)
      .def_rw("decoupled", &UpdateParams::decoupled)
      .def_rw("momentum", &UpdateParams::momentum)
      .def_rw("dampening", &UpdateParams::dampening)
      .def_rw("nesterov", &UpdateParams::nesterov)
      .def_rw("step", &UpdateParams::step)
      .def_rw("grad_scale", &UpdateParams::grad_scale);
  nb::class_<Optimizer>(m, "Optimizer")
      .def(nb::init<const Store&, const std::string&, const std::string&, int, std::int64_t, std::uint64_t>())
      .def("add", &Optimizer::add)
      .def("remove", &Optimizer::remove)
      .def("bytes", &Optimizer::bytes)
      .def("reset", &Optimizer::reset)
      .def("weights_changed", &Optimizer::weights_changed)
      .def("extent", &Optimizer::extent)
      .def("read", &Optimizer::read, nb::arg("index"), nb::arg("part"), nb::arg("weights"), nb::arg("out"),
           nb::arg("segment") = -1)
      .def("write", &Optimizer::write, nb::arg("index"), nb::arg("part"), nb::arg("weights"),
           nb::arg("from_"), nb::arg("segment") = -1)
      .def("copy_codes", &Optimizer::copy_codes)
      .def("copy_blocks", &Optimizer::copy_blocks)
      .def("update", &Optimizer::update)
      .def("begin_step", &Optimizer::begin_step)
      .def("end_step", &Optimizer::end_step)
      .def_static("gradient_square", &Optimizer::gradient_square);
}

}  // namespace zg::python
