// The op set of the host device: kernels of kernels/host, run on the stream's thread.
#include "device/checked_ops.hpp"
#include "kernels/host/elementwise.hpp"
#include "kernels/host/matrix.hpp"
#include "kernels/host/update.hpp"

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

// The op `name` is the kernel of that name, with the same operands.
#define ZG_OP(name)                                     \
  template <class T, class... Args>                     \
  void name(Stream& s, const Args&... args) {           \
    enqueue(s, #name, [=] { host::name<T>(args...); }); \
  }
  ZG_OP(layernorm)
  ZG_OP(layernorm_backward)
  ZG_OP(rmsnorm)
  ZG_OP(rmsnorm_backward)
  ZG_OP(head_rmsnorm)
  ZG_OP(head_rmsnorm_backward)
  ZG_OP(bias_backward)
  ZG_OP(gelu)
  ZG_OP(gelu_backward)
  ZG_OP(swiglu)
  ZG_OP(swiglu_backward)
  ZG_OP(add)
  ZG_OP(scale)
  ZG_OP(dropout)
  ZG_OP(quantize)
  ZG_OP(dequantize)
  ZG_OP(rope)
  ZG_OP(embedding)
  ZG_OP(embedding_backward)
  ZG_OP(attention_block)
  ZG_OP(attention_sinks_backward)
  ZG_OP(softmax_part)
#undef ZG_OP

  template <class T>
  void attention(Stream& s, const AttentionShape& shape, const T* qkv, std::int64_t ld_qkv, T* o,
                 std::int64_t ld_o, Acc<T>* lse, void* /*scratch*/, const std::int32_t* first_keys,
                 const T* sinks) {
    enqueue(s, "attention", [=] { host::attention<T>(shape, qkv, ld_qkv, o, ld_o, lse, first_keys, sinks); });
  }
  template <class T>
  void attention_backward(Stream& s, const AttentionShape& shape, const T* qkv, std::int64_t ld_qkv,
                          const T* o, std::int64_t ld_o, const Acc<T>* lse, const T* d_o, std::int64_t ld_do,
                          T* dqkv, std::int64_t ld_dqkv, void* /*scratch*/, const std::int32_t* first_keys) {
    enqueue(s, "attention_backward", [=] {
      host::attention_backward<T>(shape, qkv, ld_qkv, o, ld_o, lse, d_o, ld_do, dqkv, ld_dqkv, first_keys);
    });
  }
  std::int64_t attention_scratch_bytes(DType, const AttentionShape&) const {
    return 0;
  }
  template <class T>
  void attention_block_backward(Stream& s, const AttentionBlock& block, const AttentionBlockBackward<T>& args,
                                void* /*scratch*/, const std::int32_t* first_keys) {
    enqueue(s, "attention_block_backward",
            [=] { host::attention_block_backward<T>(block, args, first_keys); });
  }
  std::int64_t attention_block_scratch_bytes(DType, const AttentionBlock&) const {
    return 0;
  }
  template <class T>
  void cross_entropy(Stream& s, Extent extent, const CrossEntropy<T>& args, double* /*scratch*/) {
    enqueue(s, "cross_entropy", [=] { host::cross_entropy<T>(extent, args); });
  }
  template <class T>
  void cross_entropy_part(Stream& s, Extent extent, const CrossEntropyPart<T>& args, double* /*scratch*/) {
    enqueue(s, "cross_entropy_part", [=] { host::cross_entropy_part<T>(extent, args); });
  }
  void zero(Stream& s, Extent extent, Strided<char> bytes) {
    enqueue(s, "zero", [=] { host::zero(extent, bytes); });
  }
  template <class In, class Out>
  void cast(Stream& s, Extent extent, Strided<const In> in, Strided<Out> out) {
    enqueue(s, "cast", [=] { host::cast<In, Out>(extent, in, out); });
  }
  template <class In, class Out>
  void finish_gradient(Stream& s, std::int64_t n, const In* in, Out* out, double* norm_sq, double* scratch) {
    // Through the scratch memory, as on a GPU: so that what else lies there is seen to be lost here, too.
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

}  // namespace

Ops& host_ops() {
  static checked::CheckedOps<HostBackend> ops;  // stateless
  return ops;
}

}  // namespace zg
