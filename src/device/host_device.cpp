// The host device: arena, streams and copies in host memory, and ops that run the kernels of kernels/host on
// the threads of its streams.
#include <cstring>

#include "device/checked_ops.hpp"
#include "kernels/host/elementwise.hpp"
#include "kernels/host/fp8.hpp"
#include "kernels/host/matrix.hpp"
#include "kernels/host/update.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/device/ops.hpp"

namespace zg {
namespace {

template <class F>
void enqueue(Stream& stream, const char* label, F&& work) {
  static_cast<HostStream&>(stream).enqueue(label, std::forward<F>(work));
}

struct HostBackend {
  static constexpr std::int64_t kRowGroups = host::kRowGroups;
  static constexpr std::int64_t kLogitsBytes = std::int64_t{32} << 20;
  static constexpr bool kPadsLogits = false;

  template <class In, class Out>
  void gemm(Stream& s, const GemmShape& shape, const In* a, const In* b, Out* c,
            const Epilogue<In>& epilogue) {
    enqueue(s, "gemm", [shape, a, b, c, bias = epilogue.bias, gelu_input = epilogue.gelu_input] {
      if constexpr (std::is_same_v<In, Out>) {
        if (gelu_input.data != nullptr) {
          GemmShape into = shape;
          into.ldc = gelu_input.ld;
          host::gemm<In, Out>(into, a, b, gelu_input.data, bias);
          host::gelu<In>({shape.m, shape.n}, gelu_input, {c, shape.ldc});
          return;
        }
      }
      host::gemm<In, Out>(shape, a, b, c, bias);
    });
    if constexpr (std::is_same_v<In, Out>) {
      const Extent extent{shape.m, shape.n};
      const Strided<In> out(c, shape.ldc);
      if (epilogue.addend.data != nullptr) add<In>(s, extent, out, epilogue.addend, out);
      if (epilogue.gelu_backward.data != nullptr)
        gelu_backward<In>(s, extent, epilogue.gelu_backward, out, out);
    }
    if (epilogue.bias_gradient == nullptr) return;
    if (!shape.accumulate) {
      const auto bytes = shape.m * static_cast<std::int64_t>(sizeof(Acc<In>));
      zero(s, {1, bytes}, {reinterpret_cast<char*>(epilogue.bias_gradient), bytes});
    }
    bias_backward<In>(s, Extent{shape.k, shape.m}, Strided<const In>(a, shape.lda), epilogue.bias_gradient,
                      epilogue.scratch);
  }

#define ZG_OP(name)                                     \
  template <class T, class... Args>                     \
  void name(Stream& s, const Args&... args) {           \
    enqueue(s, #name, [=] { host::name<T>(args...); }); \
  }
  ZG_FOR_PLAIN_OPS(ZG_OP)
  ZG_OP(attention)
  ZG_OP(attention_backward)
#undef ZG_OP

  std::int64_t attention_scratch_bytes(DType, const AttentionShape&) const {
    return 0;
  }
  std::int64_t attention_block_scratch_bytes(DType, const AttentionBlock&) const {
    return 0;
  }
  void sort_slots(Stream& s, Extent extent, const SortSlots& args) {
    enqueue(s, "sort_slots", [=] { host::sort_slots(extent, args); });
  }
  void zero(Stream& s, Extent extent, Strided<char> bytes) {
    enqueue(s, "zero", [=] { host::zero(extent, bytes); });
  }
  void encode_fp8(Stream& s, std::int64_t n, const float* in, std::uint8_t* codes, float* scales) {
    enqueue(s, "encode_fp8", [=] { host::encode_fp8(n, in, codes, scales); });
  }
  template <class In, class Out>
  void cast(Stream& s, Extent extent, Strided<const In> in, Strided<Out> out) {
    enqueue(s, "cast", [=] { host::cast<In, Out>(extent, in, out); });
  }
  template <class In, class Out>
  void finish_gradient(Stream& s, std::int64_t n, const In* in, Out* out, double* norm_sq, double* scratch) {
    // Uses the scratch memory, as a GPU does, so that tests notice other data there being overwritten.
    enqueue(s, "finish_gradient", [=] {
      *scratch = host::finish_gradient<In, Out>(n, in, out);
      *norm_sq += *scratch;
    });
  }
  void update(Stream& s, std::int64_t n, const UpdateArrays& arrays, const StateFormat& format,
              const UpdateParams& params) {
    enqueue(s, "update", [=] { host::update(n, arrays, format, params); });
  }
};

// Its "device memory" is an arena separate from the host tier's, so that tiers, copies and budgets work as on
// a GPU.
class HostDevice : public Device {
 public:
  HostDevice(std::int64_t budget, Trace* trace)
      : arena_(make_host_arena("device memory", budget)), trace_(trace) {}

  std::string describe() const override {
    return fmt::format("host device ({} threads, budget {})", parallelism(), format_bytes(arena_->budget()));
  }
  bool is_host() const override { return true; }
  Arena& arena() override { return *arena_; }
  Ops& ops() override { return host_ops(); }
  std::unique_ptr<Stream> make_stream(const std::string& name) override {
    return std::make_unique<HostStream>(name, HostStream::Mode::kThread, trace_);
  }
  void copy_to_device(Stream& stream, void* device, const void* host, std::int64_t bytes) override {
    copy(stream, "copy to device", device, host, bytes);
  }
  void copy_to_host(Stream& stream, void* host, const void* device, std::int64_t bytes) override {
    copy(stream, "copy to host", host, device, bytes);
  }

 private:
  static void copy(Stream& stream, const char* label, void* to, const void* from, std::int64_t bytes) {
    enqueue(stream, label, [=] { std::memcpy(to, from, static_cast<std::size_t>(bytes)); });
  }

  std::unique_ptr<Arena> arena_;
  Trace* trace_;
};

}  // namespace

Ops& host_ops() {
  static checked::CheckedOps<HostBackend> ops;  // stateless
  return ops;
}

std::unique_ptr<Device> make_host_device(std::int64_t budget, Trace* trace) {
  return std::make_unique<HostDevice>(budget, trace);
}

}  // namespace zg
