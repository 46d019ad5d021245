// Cuts an update into chunks for threads, and chunks into runs of whole blocks for the optimizer's pass.
#include "kernels/host/update.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/host/update_kernels.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/parallel.hpp"

namespace zg::host {
namespace {

constexpr std::int64_t kChunk = 64 * 1024;
static_assert(kChunk % kQuantBlock == 0);

std::int64_t bytes_of(DType type) {
  return static_cast<std::int64_t>(size_of(type));
}

template <class T>
T* advance(T* data, std::int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return data == nullptr ? nullptr : reinterpret_cast<T*>(reinterpret_cast<Byte*>(data) + bytes);
}

// The arrays of an update, with the bytes of an element of each.
class Arrays {
 public:
  Arrays(const UpdateArrays& arrays, const StateFormat& format)
      : arrays_(arrays),
        grad_(bytes_of(arrays.grad_type)),
        weight_(bytes_of(arrays.weight_type)),
        master_(bytes_of(stored_master_type(format))),
        moment_(bytes_of(stored_moment_type(format))),
        moments_(format.moment_count) {}

  // The memory whose NUMA node decides where the loop runs. One array suffices, since the state of a unit is
  // mostly contiguous.
  Near near(std::int64_t n) const {
    if (moments_ > 0) return {arrays_.moment[0], n * moment_};
    if (arrays_.master != nullptr) return {arrays_.master, n * master_};
    return {arrays_.weight, n * weight_};
  }
  // begin: a multiple of kQuantBlock.
  UpdateArrays from(std::int64_t begin) const {
    UpdateArrays a = arrays_;
    a.grad = advance(a.grad, begin * grad_);
    a.weight = advance(a.weight, begin * weight_);
    a.master = advance(a.master, begin * master_);
    for (int k = 0; k < moments_; ++k) {
      a.moment[k] = advance(a.moment[k], begin * moment_);
      a.scale[k] = advance(a.scale[k], begin / kQuantBlock * std::int64_t{sizeof(float)});
    }
    return a;
  }

  // The last n < kQuantBlock elements, from `begin` on, copied to a block whose other elements are zero.
  // Zeros stay zero in every optimizer, and do not change the largest value of the block.
  class Tail {
   public:
    Tail(const Arrays& whole, std::int64_t begin, std::int64_t n)
        : whole_(whole), from_(whole.from(begin)), n_(n) {
      copy(grad_, from_.grad, whole.grad_);
      copy(weight_, from_.weight, whole.weight_);
      copy(master_, from_.master, whole.master_);
      for (int k = 0; k < whole.moments_; ++k) copy(moment_[k], from_.moment[k], whole.moment_);
    }
    UpdateArrays arrays() {
      UpdateArrays a = from_;
      a.grad = grad_, a.weight = weight_, a.master = master_;
      a.moment[0] = moment_[0], a.moment[1] = moment_[1];
      return a;
    }
    void copy_back() {
      copy(from_.weight, weight_, whole_.weight_);
      copy(from_.master, master_, whole_.master_);
      for (int k = 0; k < whole_.moments_; ++k) copy(from_.moment[k], moment_[k], whole_.moment_);
    }

   private:
    using Buffer = char[kQuantBlock * sizeof(double)];
    void copy(void* to, const void* from, std::int64_t bytes) const {
      if (from != nullptr) std::memcpy(to, from, static_cast<std::size_t>(n_ * bytes));
    }
    const Arrays& whole_;
    UpdateArrays from_;
    std::int64_t n_;
    alignas(64) Buffer grad_ = {}, weight_ = {}, master_ = {}, moment_[2] = {};
  };

 private:
  UpdateArrays arrays_;
  std::int64_t grad_, weight_, master_, moment_;
  int moments_;
};

template <class S>
UpdateKernel<S> kernel_of(const StateFormat& format, const UpdateParams& p) {
  UpdateKernels<S> kernels;
  switch (format.kind) {
    case OptimizerKind::kAdam:
      kernels = std::get<UpdateKernels<S>>(adam_passes(p.decoupled));
      break;
    case OptimizerKind::kSgd:
      kernels = std::get<UpdateKernels<S>>(sgd_passes(format.moment_count == 1, p.nesterov));
      break;
    case OptimizerKind::kLion:
      kernels = std::get<UpdateKernels<S>>(lion_passes());
      break;
  }
  return kernels.of[static_cast<int>(format.master)][static_cast<int>(format.moments)];
}

template <class S>
void run(std::int64_t n, const UpdateArrays& arrays, const StateFormat& format, const UpdateParams& p,
         UpdateKernel<S> kernel) {
  ZG_ASSERT(kernel != nullptr, "no kernel for master format {} with moment format {}",
            static_cast<int>(format.master), static_cast<int>(format.moments));
  const UpdateConstants<S> constants(format.kind, p);
  const Arrays whole(arrays, format);
  UpdateJob<S> job;
  job.constants = &constants;
  job.random = p.random;
  job.step = p.step;
  parallel_for(whole.near(n), n, kChunk, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t rest = (end - begin) % kQuantBlock;
    UpdateJob<S> part = job;
    part.arrays = whole.from(begin);
    part.blocks = (end - begin) / kQuantBlock;
    part.first_block = (p.first_element + begin) / kQuantBlock;
    if (part.blocks > 0) kernel(part);
    if (rest == 0) return;
    Arrays::Tail tail(whole, end - rest, rest);
    part.first_block += part.blocks;
    part.arrays = tail.arrays();
    part.blocks = 1;
    kernel(part);
    tail.copy_back();
  });
}

// A skipped step: rewrites the weights from their masters.
void skip(std::int64_t n, const UpdateArrays& arrays, const StateFormat& format, const UpdateParams& p) {
  if (format.master == MasterFormat::kSplit) return;
  if (format.full == DType::kF32) {
    run<float>(n, arrays, format, p, weight_kernel());
  } else {
    std::memcpy(arrays.weight, arrays.master, static_cast<std::size_t>(n) * sizeof(double));
  }
}

bool is_storage(DType type) {
  return type == DType::kF32 || type == DType::kBF16 || type == DType::kF16;
}

}  // namespace

void check_update(const UpdateArrays& a, const StateFormat& f, const UpdateParams& p) {
  ZG_ASSERT_GE(p.step, 1);
  // For elements that have always been zero (padding) the update must be 0 / eps, not 0 / 0.
  const bool positive = f.full == DType::kF64 ? p.eps > 0 : static_cast<float>(p.eps) > 0;
  ZG_ASSERT(p.skip || f.kind != OptimizerKind::kAdam || positive, "eps {}", p.eps);
  ZG_ASSERT(f.full == DType::kF32 || f.full == DType::kF64, "state in {}", name_of(f.full));
  const int most = f.kind == OptimizerKind::kAdam ? 2 : 1;
  const int least = f.kind == OptimizerKind::kSgd ? 0 : most;
  ZG_ASSERT(f.moment_count >= least && f.moment_count <= most, "{} moments", f.moment_count);
  if (f.full == DType::kF64) {
    ZG_ASSERT(a.grad_type == DType::kF64 && a.weight_type == DType::kF64,
              "state in f64, gradient in {}, weight in {}", name_of(a.grad_type), name_of(a.weight_type));
    ZG_ASSERT(f.master == MasterFormat::kFull && f.moments == MomentFormat::kFull, "f64 is kept whole alone");
  } else {
    ZG_ASSERT(is_storage(a.grad_type) && is_storage(a.weight_type), "gradient in {}, weight in {}",
              name_of(a.grad_type), name_of(a.weight_type));
  }
  if (f.master == MasterFormat::kSplit) {
    ZG_ASSERT(a.weight_type == DType::kBF16, "the weight of a split master in {}", name_of(a.weight_type));
  }
  // Blocks and random numbers are counted from the parameter's first element.
  ZG_ASSERT(f.moments == MomentFormat::kFull || p.first_element % kQuantBlock == 0, "first element {}",
            p.first_element);
}

void update(std::int64_t n, const UpdateArrays& arrays, const StateFormat& format, const UpdateParams& p) {
  check_update(arrays, format, p);
  if (p.skip) return skip(n, arrays, format, p);
  StateFormat f = format;
  // Without moments the moments' format does not matter.
  if (f.moment_count == 0) f.moments = MomentFormat::kFull;
  if (f.full == DType::kF64) {
    run<double>(n, arrays, f, p, kernel_of<double>(f, p));
  } else {
    run<float>(n, arrays, f, p, kernel_of<float>(f, p));
  }
}

}  // namespace zg::host
