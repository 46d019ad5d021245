#include "device/cuda/device.hpp"

#include <algorithm>
#include <utility>

#include "device/checked_ops.hpp"
#include "device/cuda/arena.hpp"
#include "device/cuda/attention.hpp"
#include "device/cuda/direct_storage.hpp"
#include "device/cuda/graphs.hpp"
#include "device/cuda/pinned.hpp"
#include "device/cuda/stream.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::cuda {
namespace {

// What the ops of one device share.
struct Context {
  Runtime& runtime;
  Blas& blas;
  Attention& attention;
  int multiprocessors;
  bool deterministic;
};

// One op on one stream: what it launches is enqueued there, under its name for profilers. A failure is the
// stream's, and told by its synchronize().
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
  static constexpr std::int64_t kLogitsBytes = std::int64_t{384} << 20;
  static_assert(cuda::kSumPartials == Ops::kSumPartials);

  explicit CudaBackend(Context context) : c_(context) {}

  template <class In, class Out>
  void gemm(Stream& s, const GemmShape& shape, const In* a, const In* b, Out* c, const Epilogue<In>& e) {
    enqueue(c_, s, "gemm", [&](const Launch& on) {
      Product product{.shape = shape,
                      .in = dtype_of<In>,
                      .out = dtype_of<Out>,
                      .a = a,
                      .b = b,
                      .c = c,
                      .bias = e.bias,
                      .addend = e.addend.data,
                      .ld_addend = e.addend.ld};
      if constexpr (std::is_same_v<In, Out>) {
        const Extent extent{shape.m, shape.n};
        const Strided<In> out(c, shape.ldc);
        if (c_.blas.fuses_gelu(product.in)) {
          product.gelu_input = e.gelu_input.data;
          product.ld_gelu_input = e.gelu_input.ld;
          product.gelu_backward = e.gelu_backward.data;
          product.ld_gelu_backward = e.gelu_backward.ld;
          return c_.blas.multiply(on.stream, product);
        }
        if (e.gelu_input.data != nullptr) {
          product.c = e.gelu_input.data;
          product.shape.ldc = e.gelu_input.ld;
          c_.blas.multiply(on.stream, product);
          return cuda::gelu<In>(on, extent, e.gelu_input, out);
        }
        c_.blas.multiply(on.stream, product);
        if (e.gelu_backward.data != nullptr) cuda::gelu_backward<In>(on, extent, e.gelu_backward, out, out);
      } else {
        c_.blas.multiply(on.stream, product);
      }
    });
  }
  template <class T>
  void layernorm(Stream& s, Extent extent, const LayerNorm<T>& args) {
    enqueue(c_, s, "layernorm", [&](const Launch& on) { cuda::layernorm<T>(on, extent, args); });
  }
  template <class T>
  void layernorm_backward(Stream& s, Extent extent, const LayerNormBackward<T>& args) {
    enqueue(c_, s, "layernorm_backward",
            [&](const Launch& on) { cuda::layernorm_backward<T>(on, extent, args); });
  }
  template <class T>
  void rmsnorm(Stream& s, Extent extent, const RmsNorm<T>& args) {
    enqueue(c_, s, "rmsnorm", [&](const Launch& on) { cuda::rmsnorm<T>(on, extent, args); });
  }
  template <class T>
  void rmsnorm_backward(Stream& s, Extent extent, const RmsNormBackward<T>& args) {
    enqueue(c_, s, "rmsnorm_backward",
            [&](const Launch& on) { cuda::rmsnorm_backward<T>(on, extent, args); });
  }
  template <class T>
  void bias_backward(Stream& s, Extent extent, Strided<const T> dy, Acc<T>* db, Strided<Acc<T>> scratch) {
    enqueue(c_, s, "bias_backward",
            [&](const Launch& on) { cuda::bias_backward<T>(on, extent, dy, db, scratch); });
  }
  template <class T>
  void gelu(Stream& s, Extent extent, Strided<const T> x, Strided<T> y) {
    enqueue(c_, s, "gelu", [&](const Launch& on) { cuda::gelu<T>(on, extent, x, y); });
  }
  template <class T>
  void gelu_backward(Stream& s, Extent extent, Strided<const T> x, Strided<const T> dy, Strided<T> dx) {
    enqueue(c_, s, "gelu_backward", [&](const Launch& on) { cuda::gelu_backward<T>(on, extent, x, dy, dx); });
  }
  template <class T>
  void swiglu(Stream& s, Extent extent, Strided<const T> gate_up, Strided<T> y) {
    enqueue(c_, s, "swiglu", [&](const Launch& on) { cuda::swiglu<T>(on, extent, gate_up, y); });
  }
  template <class T>
  void swiglu_backward(Stream& s, Extent extent, Strided<const T> gate_up, Strided<const T> dy,
                       Strided<T> d_gate_up) {
    enqueue(c_, s, "swiglu_backward",
            [&](const Launch& on) { cuda::swiglu_backward<T>(on, extent, gate_up, dy, d_gate_up); });
  }
  template <class T>
  void add(Stream& s, Extent extent, Strided<const T> a, Strided<const T> b, Strided<T> out) {
    enqueue(c_, s, "add", [&](const Launch& on) { cuda::add<T>(on, extent, a, b, out); });
  }
  template <class T>
  void dropout(Stream& s, Extent extent, Strided<const T> x, const Dropout& dropout, Strided<T> y) {
    enqueue(c_, s, "dropout", [&](const Launch& on) { cuda::dropout<T>(on, extent, x, dropout, y); });
  }
  template <class T>
  void rope(Stream& s, T* x, std::int64_t ld, std::int64_t rows, std::int64_t time, std::int64_t heads,
            std::int64_t head_size, double theta, bool inverse) {
    enqueue(c_, s, "rope", [&](const Launch& on) {
      cuda::rope<T>(on, x, ld, rows, time, heads, head_size, theta, inverse);
    });
  }
  template <class T>
  void attention(Stream& s, const AttentionShape& shape, const T* qkv, std::int64_t ld_qkv, T* o,
                 std::int64_t ld_o, Acc<T>* lse, void* scratch) {
    enqueue(c_, s, "attention", [&](const Launch& on) {
      c_.attention.forward<T>(on, shape, qkv, ld_qkv, o, ld_o, lse, scratch);
    });
  }
  template <class T>
  void attention_backward(Stream& s, const AttentionShape& shape, const T* qkv, std::int64_t ld_qkv,
                          const T* o, std::int64_t ld_o, const Acc<T>* lse, const T* d_o, std::int64_t ld_do,
                          T* dqkv, std::int64_t ld_dqkv, void* scratch) {
    enqueue(c_, s, "attention_backward", [&](const Launch& on) {
      c_.attention.backward<T>(on, shape, qkv, ld_qkv, o, ld_o, lse, d_o, ld_do, dqkv, ld_dqkv, scratch);
    });
  }
  std::int64_t attention_scratch_bytes(DType dtype, const AttentionShape& shape) const {
    return c_.attention.scratch_bytes(dtype, shape);
  }
  template <class T>
  void embedding(Stream& s, Extent extent, const Embedding<T>& args) {
    enqueue(c_, s, "embedding", [&](const Launch& on) { cuda::embedding<T>(on, extent, args); });
  }
  template <class T>
  void embedding_backward(Stream& s, Extent extent, const EmbeddingBackward<T>& args) {
    enqueue(c_, s, "embedding_backward",
            [&](const Launch& on) { cuda::embedding_backward<T>(on, extent, args); });
  }
  template <class T>
  void cross_entropy(Stream& s, Extent extent, const CrossEntropy<T>& args, double* scratch) {
    enqueue(c_, s, "cross_entropy",
            [&](const Launch& on) { cuda::cross_entropy<T>(on, extent, args, scratch); });
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
  Context c_;
};

// One that the pinned memory, of which it copies, need not know for longer than it is there.
class DeviceStream final : public CudaStream {
 public:
  template <class... A>
  explicit DeviceStream(PinnedRegions& pinned, A&&... args)
      : CudaStream(std::forward<A>(args)...), pinned_(pinned) {}
  ~DeviceStream() override {
    finish();
    pinned_.forget(handle());
  }

 private:
  PinnedRegions& pinned_;
};

class CudaDevice : public Device {
 public:
  CudaDevice(const CudaOptions& options, std::unique_ptr<Runtime> runtime, const MakeBlas& make_blas,
             std::string cufile)
      : options_(options),
        cufile_(std::move(cufile)),
        runtime_(std::move(runtime)),
        info_(checked_info(*runtime_, options.device)),
        blas_(make_blas(*runtime_, options.device, {.tf32 = options.tf32})),
        arena_(*runtime_, {.device = options.device, .budget = options.budget}),
        attention_(options.attention, options.deterministic),
        pinned_(*runtime_, {.device = options.device}),
        completions_(*runtime_, options.device, fmt::format("zg-cuda-{}", options.device)),
        graphs_(*runtime_, pinned_, completions_),
        ops_(Context{*runtime_, *blas_, attention_, info_.multiprocessors, options.deterministic}) {}

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
  // The engine's compute is what must never wait behind a copy's kernels or an update.
  std::unique_ptr<Stream> make_stream(const std::string& name) override {
    return std::make_unique<DeviceStream>(pinned_, *runtime_, completions_, options_.device, name,
                                          name == "compute", info_.wait_values);
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
      direct_ = std::make_shared<CudaDirectStorage>(*runtime_, completions_, options_.device, info_,
                                                    std::move(gds));
    } catch (const Error& e) {
      *why = e.message();
    }
    return direct_;
  }
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
      PinnedRegions::Hold hold = pinned_.hold();
      for (std::int64_t done = 0; done < bytes;) {
        const auto at = [&](const void* p) { return const_cast<char*>(static_cast<const char*>(p)) + done; };
        char* const host = at(down ? to : from);
        const PinnedRegions::Part part = pinned_.part(hold, host, bytes - done);
        runtime_->copy(handle, at(to), at(from), part.bytes, direction);
        if (part.pinned) pinned_.used(hold, host, handle);
        done += part.bytes;
      }
    });
  }

  const CudaOptions options_;
  const std::string cufile_;
  std::unique_ptr<Runtime> runtime_;
  const DeviceInfo info_;
  std::unique_ptr<Blas> blas_;
  CudaArena arena_;
  Attention attention_;
  PinnedRegions pinned_;
  Completions completions_;
  Graphs graphs_;
  std::shared_ptr<CudaDirectStorage> direct_;
  CheckedOps<CudaBackend> ops_;
};

}  // namespace

std::unique_ptr<Device> make_device(const CudaOptions& options, std::unique_ptr<Runtime> runtime,
                                    const MakeBlas& make_blas, const std::string& cufile) {
  return std::make_unique<CudaDevice>(options, std::move(runtime), make_blas, cufile);
}

}  // namespace zg::cuda
