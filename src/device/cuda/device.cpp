#include "device/cuda/device.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "device/checked_ops.hpp"
#include "device/cuda/arena.hpp"
#include "device/cuda/attention.hpp"
#include "device/cuda/direct_storage.hpp"
#include "device/cuda/first_uses.hpp"
#include "device/cuda/graphs.hpp"
#include "device/cuda/pinned.hpp"
#include "device/cuda/queue.hpp"
#include "device/cuda/stream.hpp"
#include "kernels/cuda/encode.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::cuda {
namespace {

// State shared by the ops of one device.
struct Context {
  Runtime& runtime;
  Products& products;
  Attention& attention;
  FirstUses& first_uses;
  int multiprocessors;
  bool deterministic;
};

// Enqueues one op on a stream, under its name for profilers. The stream's synchronize() throws its failure.
template <class F>
void enqueue(const Context& context, Stream& stream, const char* label, const F& work) {
  static_cast<CudaStream&>(stream).attempt([&](StreamHandle handle) {
    context.runtime.push_range(label);
    try {
      work(Launch{handle, context.multiprocessors, context.deterministic});
    } catch (...) {
      context.runtime.pop_range();
      throw;
    }
    context.runtime.pop_range();
  });
}

class CudaBackend {
 public:
  static constexpr std::int64_t kRowGroups = cuda::kRowGroups;
  // Some 7,000 rows of GPT-2's vocabulary in bf16: enough tiles for the product that gives dx, [rows, width],
  // to fill a GPU, and few additions to the output matrix's gradient, which each chunk reads and writes.
  static constexpr std::int64_t kLogitsBytes = std::int64_t{2} << 30;
  static constexpr bool kPadsLogits = true;
  static_assert(cuda::kSumPartials == Ops::kSumPartials);

  explicit CudaBackend(Context context) : c_(context) {}

  template <class In, class Out>
  void gemm(Stream& s, const GemmShape& shape, const In* a, const In* b, Out* c, const Epilogue<In>& e) {
    const auto quiet =
        first_use(s,
                  {shape.m, shape.n, shape.k, shape.lda, shape.ldb, shape.ldc, static_cast<int>(dtype_of<In>),
                   static_cast<int>(dtype_of<Out>), static_cast<int>(shape.ta), static_cast<int>(shape.tb),
                   shape.accumulate, e.addend.ld, e.gelu_input.ld, e.gelu_backward.ld},
                  {a, b, c, e.bias, e.addend.data, e.gelu_input.data, e.gelu_backward.data, e.bias_gradient});
    enqueue(c_, s, "gemm", [&](const Launch& on) {
      // The product overwrites the bias gradient; if it is to be added to, the product writes to scratch.
      Acc<In>* const gradient =
          e.bias_gradient != nullptr && shape.accumulate ? e.scratch.data : e.bias_gradient;
      const unsigned left = c_.products.multiply(on.stream, {.shape = shape,
                                                             .in = dtype_of<In>,
                                                             .out = dtype_of<Out>,
                                                             .a = a,
                                                             .b = b,
                                                             .c = c,
                                                             .bias = e.bias,
                                                             .addend = e.addend.data,
                                                             .ld_addend = e.addend.ld,
                                                             .gelu_input = e.gelu_input.data,
                                                             .ld_gelu_input = e.gelu_input.ld,
                                                             .gelu_backward = e.gelu_backward.data,
                                                             .ld_gelu_backward = e.gelu_backward.ld,
                                                             .bias_gradient = gradient});
      if constexpr (std::is_same_v<In, Out>) {
        const Extent extent{shape.m, shape.n};
        const Strided<In> out(c, shape.ldc), sum = (left & kGeluInput) != 0 ? e.gelu_input : out;
        // A leading dimension of zero repeats the bias for each row.
        if ((left & kBias) != 0) cuda::add<In>(on, extent, sum, Strided<const In>(e.bias, 0), sum);
        if ((left & kGeluInput) != 0) cuda::gelu<In>(on, extent, sum, out);
        if ((left & kGeluBackward) != 0) cuda::gelu_backward<In>(on, extent, e.gelu_backward, out, out);
      }
      if (e.bias_gradient == nullptr) return;
      if ((left & kBiasGradient) != 0) {
        const auto bytes = shape.m * static_cast<std::int64_t>(sizeof(Acc<In>));
        if (!shape.accumulate) c_.runtime.fill(on.stream, e.bias_gradient, 0, bytes);
        cuda::bias_backward<In>(on, {shape.k, shape.m}, {a, shape.lda}, e.bias_gradient, e.scratch);
      } else if (shape.accumulate) {
        const Strided<Acc<In>> sum(e.bias_gradient, shape.m);
        cuda::add<Acc<In>>(on, {1, shape.m}, sum, Strided<const Acc<In>>(gradient, shape.m), sum);
      }
    });
  }

#define ZG_OP(name)                                                               \
  template <class T, class... Args>                                               \
  void name(Stream& s, const Args&... args) {                                     \
    enqueue(c_, s, #name, [&](const Launch& on) { cuda::name<T>(on, args...); }); \
  }
  ZG_FOR_PLAIN_OPS(ZG_OP)
#undef ZG_OP

  template <class T>
  void attention(Stream& s, const AttentionShape& shape, const CausalAttention<T>& args) {
    const auto quiet = first_attention<T>(s, shape, {args.qkv.ld, args.o.ld});
    enqueue(c_, s, "attention", [&](const Launch& on) { c_.attention.forward(on, shape, args); });
  }
  template <class T>
  void attention_backward(Stream& s, const AttentionShape& shape, const CausalAttentionBackward<T>& args) {
    const auto quiet = first_attention<T>(s, shape, {args.qkv.ld, args.o.ld, args.d_o.ld, args.dqkv.ld});
    enqueue(c_, s, "attention_backward", [&](const Launch& on) { c_.attention.backward(on, shape, args); });
  }
  std::int64_t attention_scratch_bytes(DType dtype, const AttentionShape& shape) const {
    return c_.attention.scratch_bytes(dtype, shape);
  }
  std::int64_t attention_block_scratch_bytes(DType dtype, const AttentionBlock& block) const {
    return cuda::attention_block_scratch_bytes(dtype, block);
  }
  void sort_slots(Stream& s, Extent extent, const SortSlots& args) {
    enqueue(c_, s, "sort_slots", [&](const Launch& on) { cuda::sort_slots(on, extent, args); });
  }
  void zero(Stream& s, Extent extent, Strided<char> bytes) {
    enqueue(c_, s, "zero", [&](const Launch& on) {
      if (extent.rows * extent.cols == 0) return;
      if (extent.rows == 1 || bytes.ld == extent.cols) {
        c_.runtime.fill(on.stream, bytes.data, 0, extent.rows * extent.cols);
      } else {
        c_.runtime.fill_rows(on.stream, bytes.data, bytes.ld, 0, extent.cols, extent.rows);
      }
    });
  }
  void encode_fp8(Stream& s, std::int64_t n, const float* in, std::uint8_t* codes, float* scales) {
    enqueue(c_, s, "encode_fp8", [&](const Launch& on) { cuda::encode_fp8(on, n, in, codes, scales); });
  }
  template <class In, class Out>
  void cast(Stream& s, Extent extent, Strided<const In> in, Strided<Out> out) {
    enqueue(c_, s, "cast", [&](const Launch& on) { cuda::cast<In, Out>(on, extent, in, out); });
  }
  template <class In, class Out>
  void finish_gradient(Stream& s, std::int64_t n, const In* in, Out* out, double* norm_sq, double* scratch) {
    enqueue(c_, s, "finish_gradient",
            [&](const Launch& on) { cuda::finish_gradient<In, Out>(on, n, in, out, norm_sq, scratch); });
  }
  void update(Stream& s, std::int64_t n, const UpdateArrays& arrays, const StateFormat& format,
              const UpdateParams& params) {
    enqueue(c_, s, "update", [&](const Launch& on) { cuda::update(on, n, arrays, format, params); });
  }

 private:
  using Quiet = std::unique_lock<std::shared_mutex>;
  // Returns a lock to hold while NVIDIA's libraries enqueue a problem, described by `values`. They may also
  // choose kernels by the alignment of the pointers.
  Quiet first_use(Stream& s, std::initializer_list<std::int64_t> values,
                  std::initializer_list<const void*> pointers) {
    FirstUses::Key key{};
    std::copy(values.begin(), values.end(), key.begin());
    for (const void* p : pointers) {
      const auto zeros = std::countr_zero(reinterpret_cast<std::uintptr_t>(p) | 256);
      key.back() = key.back() << 4 | (p == nullptr ? 15 : zeros);
    }
    return c_.first_uses.begin(static_cast<CudaStream&>(s), key);
  }
  template <class T>
  Quiet first_attention(Stream& s, const AttentionShape& shape, std::array<std::int64_t, 4> lds) {
    return first_use(
        s,
        {static_cast<int>(dtype_of<T>), shape.batch, shape.time, shape.heads, shape.kv_heads, shape.head_size,
         shape.values(), lds[0], lds[1], lds[2], lds[3], std::bit_cast<std::int64_t>(shape.rule.scale)},
        {});
  }

  Context c_;
};

class CudaDevice : public Device, public CudaAccess {
 public:
  CudaDevice(const CudaOptions& options, std::shared_ptr<Runtime> runtime, const MakeBlas& make_blas,
             std::string cufile)
      : options_(options),
        cufile_(std::move(cufile)),
        runtime_(std::move(runtime)),
        info_(checked_info(*runtime_, options.device)),
        blas_(make_blas(*runtime_, options.device, {.tf32 = options.tf32})),
        products_(*blas_),
        arena_(*runtime_, {.device = options.device, .budget = options.budget}),
        attention_(options.attention, options.deterministic),
        pinned_(*runtime_, {.device = options.device}),
        completions_(*runtime_, options.device, fmt::format("zg-cuda-{}", options.device)),
        graphs_(*runtime_, completions_),
        first_uses_(completions_),
        ops_(Context{*runtime_, products_, attention_, first_uses_, info_.multiprocessors,
                     options.deterministic}) {
    if (info_.wait_values) return;
    log::warning(
        "cuda:{}: the host waits for what its threads do before it issues operations that need it, "
        "since the device must not: {}",
        options.device, info_.why_no_wait_values);
  }

  std::string describe() const override {
    return fmt::format("cuda:{} {} (sm_{}{}, {} multiprocessors, budget {} of {}; {}; {}; {}{})",
                       options_.device, info_.name, info_.major, info_.minor, info_.multiprocessors,
                       format_bytes(arena_.budget()), format_bytes(info_.memory), blas_->describe(),
                       attention_.describe(), options_.deterministic ? "deterministic" : "not deterministic",
                       options_.graphs ? "; operations as CUDA graphs" : "");
  }
  bool is_host() const override { return false; }
  int numa_node() const override { return info_.numa_node; }
  void bind_threads(const std::vector<int>& cpus) override { completions_.bind(cpus); }
  Arena& arena() override { return arena_; }
  Ops& ops() override { return ops_; }
  // The compute stream has the highest priority: it must never wait for kernels of copies or updates.
  std::unique_ptr<Stream> make_stream(const std::string& name) override {
    return std::make_unique<CudaStream>(*runtime_, completions_, options_.device, name, name == "compute",
                                        info_.wait_values);
  }
  void repeat(Stream& stream, std::span<const std::uint64_t> key,
              const std::function<void()>& work) override {
    if (!options_.graphs) return work();
    graphs_.run(static_cast<CudaStream&>(stream), key, work);
  }
  Arena::Hooks host_hooks() override {
    if (!options_.pin) return {};
    return pinned_.hooks();
  }
  std::shared_ptr<io::DirectStorage> direct_storage(bool wanted, std::string* why) override {
    if (direct_ != nullptr) return direct_;
    try {
      auto gds = Gds::load(why, wanted, cufile_);
      if (gds == nullptr) return nullptr;
      runtime_->use_device(options_.device);
      const std::int64_t others = runtime_->memory_info().free - (arena_.budget() - arena_.report().taken);
      direct_ = std::make_shared<CudaDirectStorage>(*runtime_, completions_, options_.device, info_,
                                                    std::move(gds), others);
    } catch (const Error& e) {
      *why = e.message();
    }
    return direct_;
  }
  int index() const override { return options_.device; }
  void use() override { runtime_->use_device(options_.device); }
  std::unique_ptr<CudaQueue> make_queue() override {
    return std::make_unique<Queue>(*runtime_, options_.device, info_.multiprocessors);
  }
  void fail(std::exception_ptr cause) override { completions_.fail(std::move(cause)); }
  void check() const override { completions_.rethrow(); }
  std::unique_lock<std::shared_mutex> quiet() override { return completions_.quiet(); }
  void copy_to_device(Stream& stream, void* device, const void* host, std::int64_t bytes) override {
    copy(stream, device, host, bytes, Direction::kToDevice);
  }
  void copy_to_host(Stream& stream, void* host, const void* device, std::int64_t bytes) override {
    copy(stream, host, device, bytes, Direction::kToHost);
  }

 private:
  static DeviceInfo checked_info(Runtime& runtime, int device) {
    const int count = runtime.device_count();
    if (device < 0 || device >= count) {
      throw Error(Errc::kDevice, fmt::format("cuda:{}", device),
                  count == 0 ? "there is no GPU" : fmt::format("there are {} GPUs, counted from 0", count),
                  count == 0 ? "train on the processor: --devices host"
                             : "see ziggurat probe, and CUDA_VISIBLE_DEVICES");
    }
    DeviceInfo info = runtime.device_info(device);
    check_device(info);
    runtime.use_device(device);
    return info;
  }

  void copy(Stream& stream, void* to, const void* from, std::int64_t bytes, Direction direction) {
    if (bytes == 0) return;
    const bool down = direction == Direction::kToHost;
    static_cast<CudaStream&>(stream).attempt([&](StreamHandle handle) {
      const PinnedRegions::Hold hold = pinned_.hold();
      for (std::int64_t done = 0; done < bytes;) {
        const auto at = [&](const void* p) { return const_cast<char*>(static_cast<const char*>(p)) + done; };
        char* const host = at(down ? to : from);
        const PinnedRegions::Part part = pinned_.part(hold, host, bytes - done);
        runtime_->copy(handle, at(to), at(from), part.bytes, direction);
        done += part.bytes;
      }
    });
  }

  const CudaOptions options_;
  const std::string cufile_;
  std::shared_ptr<Runtime> runtime_;
  const DeviceInfo info_;
  std::unique_ptr<Blas> blas_;
  Products products_;
  CudaArena arena_;
  Attention attention_;
  PinnedRegions pinned_;
  Completions completions_;
  Graphs graphs_;
  FirstUses first_uses_;
  std::shared_ptr<CudaDirectStorage> direct_;
  checked::CheckedOps<CudaBackend> ops_;
};

}  // namespace

std::unique_ptr<Device> make_device(const CudaOptions& options, std::shared_ptr<Runtime> runtime,
                                    const MakeBlas& make_blas, const std::string& cufile) {
  return std::make_unique<CudaDevice>(options, std::move(runtime), make_blas, cufile);
}

}  // namespace zg::cuda
