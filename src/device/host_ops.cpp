// The op set on the host: kernels enqueued on the stream's thread.
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
  }
  template <class T>
  void layernorm(Stream& s, Extent extent, const LayerNorm<T>& args) {
    enqueue(s, "layernorm", [=] { host::layernorm<T>(extent, args); });
  }
  template <class T>
  void layernorm_backward(Stream& s, Extent extent, const LayerNormBackward<T>& args) {
    enqueue(s, "layernorm_backward", [=] { host::layernorm_backward<T>(extent, args); });
  }
  template <class T>
  void rmsnorm(Stream& s, Extent extent, const RmsNorm<T>& args) {
    enqueue(s, "rmsnorm", [=] { host::rmsnorm<T>(extent, args); });
  }
  template <class T>
  void rmsnorm_backward(Stream& s, Extent extent, const RmsNormBackward<T>& args) {
    enqueue(s, "rmsnorm_backward", [=] { host::rmsnorm_backward<T>(extent, args); });
  }
  template <class T>
  void bias_backward(Stream& s, Extent extent, Strided<const T> dy, Acc<T>* db, Strided<Acc<T>> scratch) {
    enqueue(s, "bias_backward", [=] { host::bias_backward<T>(extent, dy, db, scratch); });
  }
  template <class T>
  void gelu(Stream& s, Extent extent, Strided<const T> x, Strided<T> y) {
    enqueue(s, "gelu", [=] { host::gelu<T>(extent, x, y); });
  }
  template <class T>
  void gelu_backward(Stream& s, Extent extent, Strided<const T> x, Strided<const T> dy, Strided<T> dx) {
    enqueue(s, "gelu_backward", [=] { host::gelu_backward<T>(extent, x, dy, dx); });
  }
  template <class T>
  void swiglu(Stream& s, Extent extent, Strided<const T> gate_up, Strided<T> y) {
    enqueue(s, "swiglu", [=] { host::swiglu<T>(extent, gate_up, y); });
  }
  template <class T>
  void swiglu_backward(Stream& s, Extent extent, Strided<const T> gate_up, Strided<const T> dy,
                       Strided<T> d_gate_up) {
    enqueue(s, "swiglu_backward", [=] { host::swiglu_backward<T>(extent, gate_up, dy, d_gate_up); });
  }
  template <class T>
  void add(Stream& s, Extent extent, Strided<const T> a, Strided<const T> b, Strided<T> out) {
    enqueue(s, "add", [=] { host::add<T>(extent, a, b, out); });
  }
  template <class T>
  void dropout(Stream& s, Extent extent, Strided<const T> x, const Dropout& dropout, Strided<T> y) {
    enqueue(s, "dropout", [=] { host::dropout<T>(extent, x, dropout, y); });
  }
  template <class T>
  void rope(Stream& s, T* x, std::int64_t ld, std::int64_t rows, std::int64_t time, std::int64_t heads,
            std::int64_t head_size, double theta, bool inverse) {
    enqueue(s, "rope", [=] { host::rope<T>(x, ld, rows, time, heads, head_size, theta, inverse); });
  }
  template <class T>
  void attention(Stream& s, const AttentionShape& shape, const T* qkv, std::int64_t ld_qkv, T* o,
                 std::int64_t ld_o, Acc<T>* lse, void* /*scratch*/) {
    enqueue(s, "attention", [=] { host::attention<T>(shape, qkv, ld_qkv, o, ld_o, lse); });
  }
  template <class T>
  void attention_backward(Stream& s, const AttentionShape& shape, const T* qkv, std::int64_t ld_qkv,
                          const T* o, std::int64_t ld_o, const Acc<T>* lse, const T* d_o, std::int64_t ld_do,
                          T* dqkv, std::int64_t ld_dqkv, void* /*scratch*/) {
    enqueue(s, "attention_backward", [=] {
      host::attention_backward<T>(shape, qkv, ld_qkv, o, ld_o, lse, d_o, ld_do, dqkv, ld_dqkv);
    });
  }
  std::int64_t attention_scratch_bytes(DType, const AttentionShape&) const { return 0; }
  template <class T>
  void embedding(Stream& s, Extent extent, const Embedding<T>& args) {
    enqueue(s, "embedding", [=] { host::embedding<T>(extent, args); });
  }
  template <class T>
  void embedding_backward(Stream& s, Extent extent, const EmbeddingBackward<T>& args) {
    enqueue(s, "embedding_backward", [=] { host::embedding_backward<T>(extent, args); });
  }
  template <class T>
  void cross_entropy(Stream& s, Extent extent, const CrossEntropy<T>& args, double* /*scratch*/) {
    enqueue(s, "cross_entropy", [=] { host::cross_entropy<T>(extent, args); });
  }
  void zero(Stream& s, Extent extent, Strided<char> bytes) {
    enqueue(s, "zero", [=] { host::zero(extent, bytes); });
  }
  template <class In, class Out>
  void cast(Stream& s, Extent extent, Strided<const In> in, Strided<Out> out) {
    enqueue(s, "cast", [=] { host::cast<In, Out>(extent, in, out); });
  }
  template <class In, class Out>
  void finish_gradient(Stream& s, std::int64_t n, const In* in, Out* out, double* norm_sq,
                       double* /*scratch*/) {
    enqueue(s, "finish_gradient", [=] { *norm_sq += host::finish_gradient<In, Out>(n, in, out); });
  }
  void update(Stream& s, std::int64_t n, const UpdateArrays& arrays, const StateFormat& format,
              const UpdateParams& params) {
    enqueue(s, "update", [=] { host::update(n, arrays, format, params); });
  }
};

}  // namespace

Ops& host_ops() {
  static CheckedOps<HostBackend> ops;  // no state
  return ops;
}

}  // namespace zg
