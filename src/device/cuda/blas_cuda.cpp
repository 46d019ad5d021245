// Products by cuBLASLt, which is column-major. A row-major matrix is its transpose in column-major order,
// so the row-major C = A B is computed as C^T = B^T A^T.
#include <cublasLt.h>

#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>

#include "device/cuda/blas.hpp"
#include "device/cuda/device_buffer.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::cuda {
namespace {

constexpr std::int64_t kWorkspace = std::int64_t{32} << 20;  // bytes; NVIDIA's advice for sm_90 and later

void check(cublasStatus_t status, const std::string& what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(Errc::kDevice, "cuBLASLt", fmt::format("{}: {}", what, cublasLtGetStatusString(status)));
}

cudaDataType_t type_of(DType t) {
  switch (t) {
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF16:
      return CUDA_R_16F;
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kF64:
      return CUDA_R_64F;
    default:
      ZG_ASSERT(false, "no product of {}", name_of(t));
  }
  return CUDA_R_32F;
}

// The largest power of two up to 256 that divides the address: the alignment that cuBLASLt may assume.
std::uint32_t alignment_of(const void* p) {
  const auto bits = reinterpret_cast<std::uintptr_t>(p) | 256u;
  return static_cast<std::uint32_t>(bits & ~(bits - 1));
}

// An object of cuBLASLt's that is destroyed with its owner.
template <class Handle, cublasStatus_t (*kDestroy)(Handle)>
class Owned {
 public:
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (handle_ != nullptr) kDestroy(handle_);
  }
  Handle get() const { return handle_; }

 protected:
  Handle handle_ = nullptr;
};

class Layout : public Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy> {
 public:
  Layout(DType type, std::int64_t rows, std::int64_t cols, std::int64_t ld) {
    check(cublasLtMatrixLayoutCreate(&handle_, type_of(type), static_cast<std::uint64_t>(rows),
                                     static_cast<std::uint64_t>(cols), ld),
          "a matrix layout");
  }
};

class Description : public Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy> {
 public:
  Description(DType in, bool tf32) {
    const cublasComputeType_t compute = in == DType::kF64           ? CUBLAS_COMPUTE_64F
                                        : in == DType::kF32 && tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                    : CUBLAS_COMPUTE_32F;
    check(cublasLtMatmulDescCreate(&handle_, compute, in == DType::kF64 ? CUDA_R_64F : CUDA_R_32F),
          "a product's description");
  }
  template <class V>
  void set(cublasLtMatmulDescAttributes_t attribute, const V& value) {
    check(cublasLtMatmulDescSetAttribute(handle_, attribute, &value, sizeof(value)), "an attribute");
  }
};

class Preference : public Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy> {
 public:
  Preference() { check(cublasLtMatmulPreferenceCreate(&handle_), "a preference"); }
  template <class V>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const V& value) {
    check(cublasLtMatmulPreferenceSetAttribute(handle_, attribute, &value, sizeof(value)), "a preference");
  }
};

// Everything that the choice of an algorithm may depend on.
using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, bool, bool, std::int64_t, std::int64_t,
                       std::int64_t, bool, DType, DType, int, std::int64_t, std::uint64_t>;

class CublasLt : public Blas {
 public:
  CublasLt(Runtime& runtime, int device, const BlasOptions& options)
      : runtime_(runtime), device_(device), options_(options) {
    runtime_.use_device(device);
    check(cublasLtCreate(&handle_), "cublasLtCreate");
  }
  ~CublasLt() override { cublasLtDestroy(handle_); }

  bool fuses_gelu(DType in) const override { return in == DType::kBF16 || in == DType::kF16; }

  std::string describe() const override {
    const std::size_t v = cublasLtGetVersion();
    return fmt::format("cuBLASLt {}.{}.{}{}", v / 10000, v / 100 % 100, v % 100,
                       options_.tf32 ? ", TF32" : "");
  }

  void multiply(StreamHandle stream, const Product& p) override {
    const kernels::GemmShape& s = p.shape;
    if (s.m == 0 || s.n == 0) return;
    ZG_ASSERT(s.k > 0, "{}", text_of(p));
    // cuBLASLt's A is our B, its B is our A, and its C has n rows.
    Description description(p.in, options_.tf32);
    description.set(CUBLASLT_MATMUL_DESC_TRANSA, s.tb == Trans::kYes ? CUBLAS_OP_T : CUBLAS_OP_N);
    description.set(CUBLASLT_MATMUL_DESC_TRANSB, s.ta == Trans::kYes ? CUBLAS_OP_T : CUBLAS_OP_N);
    const Layout a = s.tb == Trans::kYes ? Layout(p.in, s.k, s.n, s.ldb) : Layout(p.in, s.n, s.k, s.ldb);
    const Layout b = s.ta == Trans::kYes ? Layout(p.in, s.m, s.k, s.lda) : Layout(p.in, s.k, s.m, s.lda);
    const Layout d(p.out, s.n, s.m, s.ldc);
    const Layout c(p.out, s.n, s.m, p.addend != nullptr ? p.ld_addend : s.ldc);
    set_epilogue(description, p);
    const void* const added = p.addend != nullptr ? p.addend : p.c;  // cuBLASLt's C; its D is ours
    const bool adds = s.accumulate || p.addend != nullptr;
    const cublasLtMatmulAlgo_t algorithm = choose(p, description, a, b, c, d, added);
    const float one = 1, beta = adds ? 1.0f : 0.0f;
    const double one_f64 = 1, beta_f64 = beta;
    const bool wide = p.in == DType::kF64;
    check(cublasLtMatmul(handle_, description.get(),
                         wide ? static_cast<const void*>(&one_f64) : static_cast<const void*>(&one), p.b,
                         a.get(), p.a, b.get(),
                         wide ? static_cast<const void*>(&beta_f64) : static_cast<const void*>(&beta), added,
                         c.get(), p.c, d.get(), &algorithm, workspace_of(stream), kWorkspace,
                         reinterpret_cast<cudaStream_t>(stream)),
          text_of(p));
  }

 private:
  static void set_epilogue(Description& description, const Product& p) {
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    if (p.gelu_input != nullptr) {
      epilogue = p.bias != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
      description.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.gelu_input);
      description.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.ld_gelu_input);
    } else if (p.gelu_backward != nullptr) {
      epilogue = CUBLASLT_EPILOGUE_DGELU;
      description.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.gelu_backward);
      description.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.ld_gelu_backward);
    } else if (p.bias != nullptr) {
      epilogue = CUBLASLT_EPILOGUE_BIAS;
    }
    if (p.bias != nullptr) {
      description.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
      description.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(p.in));
    }
    description.set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
  }

  // The first algorithm in cuBLASLt's own ranking. Nothing is timed, so that every run takes the same one.
  cublasLtMatmulAlgo_t choose(const Product& p, const Description& description, const Layout& a,
                              const Layout& b, const Layout& c, const Layout& d, const void* added) {
    const kernels::GemmShape& s = p.shape;
    const int epilogue = (p.bias != nullptr ? 1 : 0) | (p.addend != nullptr ? 2 : 0) |
                         (p.gelu_input != nullptr ? 4 : 0) | (p.gelu_backward != nullptr ? 8 : 0);
    const std::int64_t other_ld = p.ld_addend + p.ld_gelu_input + p.ld_gelu_backward;
    const std::uint32_t align[] = {alignment_of(p.b), alignment_of(p.a), alignment_of(added),
                                   alignment_of(p.c)};
    std::uint64_t alignments = 0;
    for (const std::uint32_t bytes : align) alignments = alignments << 16 | bytes;
    const Key key{s.m,   s.n,      s.k,      s.ta == Trans::kYes, s.tb == Trans::kYes,
                  s.lda, s.ldb,    s.ldc,    s.accumulate,        p.in,
                  p.out, epilogue, other_ld, alignments};
    std::lock_guard lock(mutex_);
    const auto known = algorithms_.find(key);
    if (known != algorithms_.end()) return known->second;
    Preference preference;
    preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kWorkspace));
    // A sum that is split is added up from the workspace in order, without atomics.
    preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                   static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align[0]);
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align[1]);
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align[2]);
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align[3]);
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle_, description.get(), a.get(), b.get(), c.get(), d.get(), preference.get(), 1, &result, &found);
    check(found > 0 ? CUBLAS_STATUS_SUCCESS
                    : (status == CUBLAS_STATUS_SUCCESS ? CUBLAS_STATUS_NOT_SUPPORTED : status),
          fmt::format("no algorithm for {}", text_of(p)));
    return algorithms_.emplace(key, result.algo).first->second;
  }

  void* workspace_of(StreamHandle stream) {
    std::lock_guard lock(mutex_);
    auto& block = workspaces_[stream];
    if (block == nullptr) block = std::make_unique<DeviceBuffer>(runtime_, device_, kWorkspace);
    return block->data();
  }

  Runtime& runtime_;
  const int device_;
  const BlasOptions options_;
  cublasLtHandle_t handle_ = nullptr;
  std::mutex mutex_;
  std::map<Key, cublasLtMatmulAlgo_t> algorithms_;
  std::unordered_map<StreamHandle, std::unique_ptr<DeviceBuffer>> workspaces_;
};

}  // namespace

std::unique_ptr<Blas> make_cublaslt(Runtime& runtime, int device, const BlasOptions& options) {
  return std::make_unique<CublasLt>(runtime, device, options);
}

}  // namespace zg::cuda
