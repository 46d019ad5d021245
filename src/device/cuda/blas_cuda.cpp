// Products by cuBLASLt, which is column-major. A row-major matrix is its transpose in column-major order,
// so the row-major C = A B is computed as C^T = B^T A^T.
//
// The library is loaded when the first GPU is used: merely loading it takes 140 MiB of memory, which runs on
// the host device do not need.
#include <cublasLt.h>
#include <dlfcn.h>

#include <unordered_map>

#include "device/cuda/blas.hpp"
#include "device/cuda/device_buffer.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::cuda {
namespace {

constexpr std::int64_t kWorkspace = std::int64_t{32} << 20;  // bytes; NVIDIA's advice for sm_90 and later

// The library's functions, by the names that they have in its header.
struct Functions {
#define ZG_EACH_FUNCTION(DO)               \
  DO(cublasLtCreate)                       \
  DO(cublasLtDestroy)                      \
  DO(cublasLtGetVersion)                   \
  DO(cublasLtGetStatusString)              \
  DO(cublasLtMatrixLayoutCreate)           \
  DO(cublasLtMatrixLayoutDestroy)          \
  DO(cublasLtMatmulDescCreate)             \
  DO(cublasLtMatmulDescDestroy)            \
  DO(cublasLtMatmulDescSetAttribute)       \
  DO(cublasLtMatmulPreferenceCreate)       \
  DO(cublasLtMatmulPreferenceDestroy)      \
  DO(cublasLtMatmulPreferenceSetAttribute) \
  DO(cublasLtMatmulAlgoGetHeuristic)       \
  DO(cublasLtMatmul)
#define ZG_DECLARE(name) decltype(&::name) name = nullptr;
  ZG_EACH_FUNCTION(ZG_DECLARE)
#undef ZG_DECLARE

  Functions() {
    const std::string file = fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR);
    void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) refuse(file, dlerror());
    const auto find = [&](auto& function, const char* name) {
      void* const found = dlsym(library, name);
      if (found == nullptr) refuse(file, fmt::format("it has no {}", name));
      function = reinterpret_cast<std::decay_t<decltype(function)>>(found);
    };
#define ZG_FIND(name) find(name, #name);
    ZG_EACH_FUNCTION(ZG_FIND)
#undef ZG_FIND
#undef ZG_EACH_FUNCTION
  }
  [[noreturn]] static void refuse(const std::string& file, const std::string& why) {
    throw Error(
        Errc::kDevice, file, why,
        "install the CUDA toolkit that this program was built with, or add the library's directory to "
        "LD_LIBRARY_PATH");
  }
};
// Throws Error(kDevice) if the library cannot be loaded. It stays loaded until the process ends.
const Functions& lt() {
  static const Functions functions;
  return functions;
}

void check(cublasStatus_t status, const std::string& what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(Errc::kDevice, "cuBLASLt", fmt::format("{}: {}", what, lt().cublasLtGetStatusString(status)));
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

// A cuBLASLt object that is destroyed with its owner.
template <class Handle, auto kDestroy>
class Owned {
 public:
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (handle_ != nullptr) (lt().*kDestroy)(handle_);
  }
  Handle get() const { return handle_; }

 protected:
  Handle handle_ = nullptr;
};

class Layout : public Owned<cublasLtMatrixLayout_t, &Functions::cublasLtMatrixLayoutDestroy> {
 public:
  Layout(DType type, std::int64_t rows, std::int64_t cols, std::int64_t ld) {
    check(lt().cublasLtMatrixLayoutCreate(&handle_, type_of(type), static_cast<std::uint64_t>(rows),
                                          static_cast<std::uint64_t>(cols), ld),
          "a matrix layout");
  }
};

class Description : public Owned<cublasLtMatmulDesc_t, &Functions::cublasLtMatmulDescDestroy> {
 public:
  Description(DType in, bool tf32) {
    const cublasComputeType_t compute = in == DType::kF64           ? CUBLAS_COMPUTE_64F
                                        : in == DType::kF32 && tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                                    : CUBLAS_COMPUTE_32F;
    check(lt().cublasLtMatmulDescCreate(&handle_, compute, in == DType::kF64 ? CUDA_R_64F : CUDA_R_32F),
          "a product's description");
  }
  template <class V>
  void set(cublasLtMatmulDescAttributes_t attribute, const V& value) {
    check(lt().cublasLtMatmulDescSetAttribute(handle_, attribute, &value, sizeof(value)), "an attribute");
  }
};

class Preference : public Owned<cublasLtMatmulPreference_t, &Functions::cublasLtMatmulPreferenceDestroy> {
 public:
  Preference() { check(lt().cublasLtMatmulPreferenceCreate(&handle_), "a preference"); }
  template <class V>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const V& value) {
    check(lt().cublasLtMatmulPreferenceSetAttribute(handle_, attribute, &value, sizeof(value)),
          "a preference");
  }
};

class CublasLt : public Blas {
 public:
  CublasLt(Runtime& runtime, int device, const BlasOptions& options)
      : runtime_(runtime), device_(device), options_(options) {
    runtime_.use_device(device);
    check(lt().cublasLtCreate(&handle_), "cublasLtCreate");
  }
  ~CublasLt() override { lt().cublasLtDestroy(handle_); }

  std::unique_ptr<Plan> plan(const Product& product) override;

  std::string describe() const override {
    const std::size_t v = lt().cublasLtGetVersion();
    return fmt::format("cuBLASLt {}.{}.{}{}", v / 10000, v / 100 % 100, v % 100,
                       options_.tf32 ? ", TF32" : "");
  }

 private:
  class Algorithm;

  void* workspace_of(StreamHandle stream) {
    auto& block = workspaces_[stream];
    if (block == nullptr) block = std::make_unique<DeviceBuffer>(runtime_, device_, kWorkspace);
    return block->data();
  }

  Runtime& runtime_;
  const int device_;
  const BlasOptions options_;
  cublasLtHandle_t handle_ = nullptr;
  std::unordered_map<StreamHandle, std::unique_ptr<DeviceBuffer>> workspaces_;
};

// cuBLASLt's A is our B, its B is our A, and its C and D have n rows.
class CublasLt::Algorithm : public Blas::Plan {
 public:
  Algorithm(CublasLt& library, const Product& p)
      : library_(library),
        description_(p.in, library.options_.tf32),
        a_(p.in, by(p.shape.tb, p.shape.n, p.shape.k), by(p.shape.tb, p.shape.k, p.shape.n), p.shape.ldb),
        b_(p.in, by(p.shape.ta, p.shape.k, p.shape.m), by(p.shape.ta, p.shape.m, p.shape.k), p.shape.lda),
        c_(p.out, p.shape.n, p.shape.m, p.addend != nullptr ? p.ld_addend : p.shape.ldc),
        d_(p.out, p.shape.n, p.shape.m, p.shape.ldc) {
    description_.set(CUBLASLT_MATMUL_DESC_TRANSA, by(p.shape.tb, CUBLAS_OP_N, CUBLAS_OP_T));
    description_.set(CUBLASLT_MATMUL_DESC_TRANSB, by(p.shape.ta, CUBLAS_OP_N, CUBLAS_OP_T));
    description_.set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p));
    if (bias_of(p) != nullptr) description_.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(p.out));
    if (auxiliary_of(p) != nullptr) {
      const std::int64_t ld = p.gelu_input != nullptr ? p.ld_gelu_input : p.ld_gelu_backward;
      description_.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, ld);
    }
    set_addresses(p);
  }

  // The first algorithm in cuBLASLt's own ranking. Nothing is timed, so that every run takes the same one.
  // cuBLASLt reads the alignment of the epilogue's operands from the addresses in the description.
  bool find(const Product& p) {
    Preference preference;
    preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kWorkspace));
    // With split-k, partial sums are added from the workspace in order, without atomics.
    preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                   static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.b));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.a));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(added_of(p)));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.c));
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    const cublasStatus_t status =
        lt().cublasLtMatmulAlgoGetHeuristic(library_.handle_, description_.get(), a_.get(), b_.get(),
                                            c_.get(), d_.get(), preference.get(), 1, &result, &found);
    // cuBLASLt reports an epilogue that the operands' types do not allow as an invalid value.
    if (status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE)
      check(status, fmt::format("an algorithm for {}", text_of(p)));
    algorithm_ = result.algo;
    return status == CUBLAS_STATUS_SUCCESS && found > 0 && result.state == CUBLAS_STATUS_SUCCESS;
  }

  void run(StreamHandle stream, const Product& p) override {
    set_addresses(p);
    const bool adds = p.shape.accumulate || p.addend != nullptr;
    const float one = 1, beta = adds ? 1.0f : 0.0f;
    const double one_f64 = 1, beta_f64 = beta;
    const bool wide = p.in == DType::kF64;
    check(lt().cublasLtMatmul(
              library_.handle_, description_.get(),
              wide ? static_cast<const void*>(&one_f64) : static_cast<const void*>(&one), p.b, a_.get(), p.a,
              b_.get(), wide ? static_cast<const void*>(&beta_f64) : static_cast<const void*>(&beta),
              added_of(p), c_.get(), p.c, d_.get(), &algorithm_, library_.workspace_of(stream), kWorkspace,
              reinterpret_cast<cudaStream_t>(stream)),
          text_of(p));
  }

 private:
  template <class V>
  static V by(Trans t, V no, V yes) {
    return t == Trans::kYes ? yes : no;
  }
  // cuBLASLt's C, the matrix that is added; its D is our C.
  static const void* added_of(const Product& p) { return p.addend != nullptr ? p.addend : p.c; }
  static const void* bias_of(const Product& p) {
    return p.bias_gradient != nullptr ? p.bias_gradient : p.bias;
  }
  static const void* auxiliary_of(const Product& p) {
    return p.gelu_input != nullptr ? p.gelu_input : p.gelu_backward;
  }
  static cublasLtEpilogue_t epilogue_of(const Product& p) {
    if (p.bias_gradient != nullptr) return CUBLASLT_EPILOGUE_BGRADB;
    if (p.gelu_backward != nullptr) return CUBLASLT_EPILOGUE_DGELU;
    if (p.gelu_input != nullptr)
      return p.bias != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    return p.bias != nullptr ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  }
  void set_addresses(const Product& p) {
    if (bias_of(p) != nullptr) description_.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias_of(p));
    if (auxiliary_of(p) != nullptr)
      description_.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, auxiliary_of(p));
  }

  CublasLt& library_;
  Description description_;
  const Layout a_, b_, c_, d_;
  cublasLtMatmulAlgo_t algorithm_{};
};

std::unique_ptr<Blas::Plan> CublasLt::plan(const Product& product) {
  auto plan = std::make_unique<Algorithm>(*this, product);
  if (!plan->find(product)) return nullptr;
  return plan;
}

}  // namespace

std::unique_ptr<Blas> make_cublaslt(Runtime& runtime, int device, const BlasOptions& options) {
  return std::make_unique<CublasLt>(runtime, device, options);
}

}  // namespace zg::cuda
