// The build looks for the headers of cuDNN's frontend (ZG_CUDNN); the library is loaded when it is asked
// for, so that the program runs without it.
#include "device/cuda/cudnn_attention.hpp"

#include "ziggurat/base/error.hpp"

#if defined(ZG_CUDNN)
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cmath>
#include <cstdlib>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

// The frontend requires this variable: the handle of cuDNN's library. Set once, by make_cudnn_attention().
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}
#endif

namespace zg::cuda {

#if defined(ZG_CUDNN)
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
using Pointers = std::unordered_map<std::int64_t, void*>;

enum Operand : std::int64_t { kQ = 1, kK, kV, kO, kStats, kDo, kDq, kDk, kDv };

[[noreturn]] void refuse(const char* what, const std::string& why) {
  throw Error(Errc::kDevice, fmt::format("cuDNN attention, {}", what), why);
}

// A matrix whose rows hold heads side by side; cuDNN sees it as [batch, heads, time, size].
struct Rows {
  std::int64_t heads, size, ld;
};

fe::graph::Tensor_attributes attributes(const CudnnProblem& p, const char* name, Operand operand, Rows rows) {
  const AttentionShape& s = p.shape;
  return fe::graph::Tensor_attributes()
      .set_name(name)
      .set_uid(operand)
      .set_dim({s.batch, rows.heads, s.time, rows.size})
      .set_stride({s.time * rows.ld, rows.size, rows.ld, 1});
}

fe::graph::Tensor_attributes stats_attributes(const CudnnProblem& p) {
  const AttentionShape& s = p.shape;
  return fe::graph::Tensor_attributes()
      .set_name("stats")
      .set_uid(kStats)
      .set_dim({s.batch, s.heads, s.time, 1})
      .set_stride({s.heads * s.time, s.time, 1, 1})
      .set_data_type(fe::DataType_t::FLOAT);
}

void set_output(const Tensor& tensor, const fe::graph::Tensor_attributes& as) {
  tensor->set_output(true).set_uid(as.get_uid()).set_dim(as.get_dim()).set_stride(as.get_stride());
}

float scale_of(const CudnnProblem& p) {
  const double asked = p.shape.rule.scale;
  return static_cast<float>(asked != 0 ? asked : 1 / std::sqrt(static_cast<double>(p.shape.head_size)));
}

// A plan of cuDNN's, or the reason why there is none.
struct Plan {
  fe::graph::Graph graph;
  std::string refusal;
  std::int64_t workspace = 0;

  explicit Plan(const CudnnProblem& p) {
    graph.set_io_data_type(p.dtype == DType::kBF16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }
  void build(cudnnHandle_t handle) {
    fe::error_t status = graph.build(handle, {fe::HeurMode_t::A});
    if (status.is_good()) status = graph.get_workspace_size(workspace);
    if (status.is_bad()) refusal = status.get_message().empty() ? "no reason given" : status.get_message();
  }
};

void describe_forward(fe::graph::Graph& graph, const CudnnProblem& p) {
  const AttentionShape& s = p.shape;
  const Tensor q = graph.tensor(attributes(p, "q", kQ, {s.heads, s.head_size, p.ld_qkv}));
  const Tensor k = graph.tensor(attributes(p, "k", kK, {s.kv_heads, s.head_size, p.ld_qkv}));
  const Tensor v = graph.tensor(attributes(p, "v", kV, {s.kv_heads, s.values(), p.ld_qkv}));
  auto [o, stats] = graph.sdpa(q, k, v,
                               fe::graph::SDPA_attributes()
                                   .set_name("attention")
                                   .set_generate_stats(true)
                                   .set_attn_scale(scale_of(p))
                                   .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                                   .set_diagonal_band_right_bound(0));
  set_output(o, attributes(p, "o", kO, {s.heads, s.values(), p.ld_o}));
  set_output(stats, stats_attributes(p));
  stats->set_data_type(fe::DataType_t::FLOAT);
}

void describe_backward(fe::graph::Graph& graph, const CudnnProblem& p) {
  const AttentionShape& s = p.shape;
  const Tensor q = graph.tensor(attributes(p, "q", kQ, {s.heads, s.head_size, p.ld_qkv}));
  const Tensor k = graph.tensor(attributes(p, "k", kK, {s.kv_heads, s.head_size, p.ld_qkv}));
  const Tensor v = graph.tensor(attributes(p, "v", kV, {s.kv_heads, s.values(), p.ld_qkv}));
  const Tensor o = graph.tensor(attributes(p, "o", kO, {s.heads, s.values(), p.ld_o}));
  const Tensor d_o = graph.tensor(attributes(p, "do", kDo, {s.heads, s.values(), p.ld_do}));
  const Tensor stats = graph.tensor(stats_attributes(p));
  auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, o, d_o, stats,
                                          fe::graph::SDPA_backward_attributes()
                                              .set_name("attention_backward")
                                              .set_attn_scale(scale_of(p))
                                              .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                                              .set_diagonal_band_right_bound(0)
                                              .set_deterministic_algorithm(p.deterministic));
  set_output(dq, attributes(p, "dq", kDq, {s.heads, s.head_size, p.ld_dqkv}));
  set_output(dk, attributes(p, "dk", kDk, {s.kv_heads, s.head_size, p.ld_dqkv}));
  set_output(dv, attributes(p, "dv", kDv, {s.kv_heads, s.values(), p.ld_dqkv}));
}

// The reason why no version of cuDNN supports the problem; empty if there is none.
std::string unfit(const CudnnProblem& p) {
  const AttentionShape& s = p.shape;
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) return "it takes bf16 and f16 alone";
  if (s.batch < 1 || s.time < 1 || s.heads < 1 || s.kv_heads < 1) return "there is nothing to compute";
  for (const std::int64_t size : {s.head_size, s.values()}) {
    if (size % 8 != 0) return fmt::format("heads of {} are not a multiple of 8", size);
  }
  for (const std::int64_t ld : {p.ld_qkv, p.ld_o, p.ld_do, p.ld_dqkv}) {
    if (ld % 8 != 0) return fmt::format("rows {} elements apart are not multiples of 16 bytes", ld);
  }
  return {};
}

// Where keys and values begin in each row of qkv, behind the queries.
struct Columns {
  std::int64_t k, v;  // bytes
  explicit Columns(const AttentionShape& s)
      : k(2 * s.heads * s.head_size), v(k + 2 * s.kv_heads * s.head_size) {}
};
void* at(const void* matrix, std::int64_t bytes) {
  return const_cast<char*>(static_cast<const char*>(matrix)) + bytes;
}

class Loaded final : public CudnnAttention {
 public:
  explicit Loaded(cudnnHandle_t handle) : handle_(handle) {}
  ~Loaded() override {
    plans_.clear();
    fe::detail::destroy_handle(handle_);
  }
  Loaded(const Loaded&) = delete;
  Loaded& operator=(const Loaded&) = delete;

  std::int64_t version() const override {
    return static_cast<std::int64_t>(fe::detail::get_backend_version());
  }

  bool supports(const CudnnProblem& p, std::string* why) override {
    std::string refusal = unfit(p);
    if (refusal.empty()) {
      const std::lock_guard lock(mutex_);
      for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
        if (refusal.empty()) refusal = plan(p, direction).refusal;
      }
    }
    if (why != nullptr) *why = refusal;
    return refusal.empty();
  }

  std::int64_t forward_workspace_bytes(const CudnnProblem& p) override {
    const std::lock_guard lock(mutex_);
    return usable(p, Direction::kForward).workspace;
  }
  std::int64_t backward_workspace_bytes(const CudnnProblem& p) override {
    const std::lock_guard lock(mutex_);
    return usable(p, Direction::kBackward).workspace;
  }

  void forward(StreamHandle stream, const CudnnProblem& p, const CudnnForward& x) override {
    const Columns columns(p.shape);
    Pointers pointers = {{kQ, at(x.qkv, 0)},
                         {kK, at(x.qkv, columns.k)},
                         {kV, at(x.qkv, columns.v)},
                         {kO, x.o},
                         {kStats, x.lse}};
    execute(stream, p, Direction::kForward, pointers, x.workspace);
  }

  void backward(StreamHandle stream, const CudnnProblem& p, const CudnnBackward& x) override {
    const Columns columns(p.shape);
    Pointers pointers = {{kQ, at(x.qkv, 0)}, {kK, at(x.qkv, columns.k)},   {kV, at(x.qkv, columns.v)},
                         {kO, at(x.o, 0)},   {kStats, at(x.lse, 0)},       {kDo, at(x.d_o, 0)},
                         {kDq, x.dqkv},      {kDk, at(x.dqkv, columns.k)}, {kDv, at(x.dqkv, columns.v)}};
    execute(stream, p, Direction::kBackward, pointers, x.workspace);
  }

 private:
  enum class Direction { kForward, kBackward };
  static const char* name_of(Direction d) { return d == Direction::kForward ? "forward" : "backward"; }

  // The caller holds the mutex, here and in usable().
  Plan& plan(const CudnnProblem& p, Direction direction) {
    for (const auto& [known, of, built] : plans_) {
      if (of == direction && known == p) return *built;
    }
    auto made = std::make_unique<Plan>(p);
    try {
      direction == Direction::kForward ? describe_forward(made->graph, p) : describe_backward(made->graph, p);
      made->build(handle_);
    } catch (const std::exception& e) {  // the frontend throws if the library lacks a function
      made->refusal = e.what();
    }
    return *plans_.emplace_back(p, direction, std::move(made)).built;
  }
  Plan& usable(const CudnnProblem& p, Direction direction) {
    Plan& found = plan(p, direction);
    if (!found.refusal.empty()) refuse(name_of(direction), found.refusal);
    return found;
  }

  void execute(StreamHandle stream, const CudnnProblem& p, Direction direction, Pointers& pointers,
               void* workspace) {
    const std::lock_guard lock(mutex_);
    Plan& of = usable(p, direction);
    const cudnnStatus_t status = fe::detail::set_stream(handle_, stream);
    if (status != CUDNN_STATUS_SUCCESS) refuse(name_of(direction), fe::detail::get_error_string(status));
    const fe::error_t result = of.graph.execute(handle_, pointers, workspace);
    if (result.is_bad()) refuse(name_of(direction), result.err_msg);
  }

  struct Known {
    CudnnProblem problem;
    Direction direction;
    std::unique_ptr<Plan> built;
    Known(const CudnnProblem& p, Direction d, std::unique_ptr<Plan> b)
        : problem(p), direction(d), built(std::move(b)) {}
  };
  std::mutex mutex_;
  cudnnHandle_t handle_;
  std::vector<Known> plans_;  // a run has few problems
};

// Loads libcudnn, of the major version that this was compiled for.
bool load_library(std::string& why) {
  if (fe::cudnn_dlhandle != nullptr) return true;
  // If the machine has several CUDA runtimes, the frontend must use ours.
  setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", fmt::format("libcudart.so.{}", CUDART_VERSION / 1000).c_str(), 0);
  const std::string name = fmt::format("libcudnn.so.{}", CUDNN_MAJOR);
  fe::cudnn_dlhandle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (fe::cudnn_dlhandle == nullptr) {
    const char* error = dlerror();
    why = fmt::format("{} cannot be loaded: {}", name, error == nullptr ? "no reason given" : error);
  }
  return fe::cudnn_dlhandle != nullptr;
}

}  // namespace

std::unique_ptr<CudnnAttention> make_cudnn_attention(std::string* why) {
  std::string reason;
  try {
    cudnnHandle_t handle = nullptr;
    if (load_library(reason)) {
      const cudnnStatus_t status = fe::detail::create_handle(&handle);
      if (status == CUDNN_STATUS_SUCCESS) return std::make_unique<Loaded>(handle);
      reason = fmt::format("cuDNN {} does not start: {}", fe::detail::get_backend_version(),
                           fe::detail::get_error_string(status));
    }
  } catch (const std::exception& e) {
    reason = e.what();
  }
  if (why != nullptr) *why = reason;
  return nullptr;
}

std::string cudnn_objection(const CudnnProblem& problem, int capability) {
  std::string why = unfit(problem);
  if (!why.empty()) return why;
  if (!load_library(why)) refuse("library", why);
  for (const auto describe : {describe_forward, describe_backward}) {
    Plan plan(problem);
    plan.graph.set_sm_version(capability);
    describe(plan.graph, problem);
    if (fe::error_t status = plan.graph.validate(); status.is_bad()) return status.get_message();
  }
  return {};
}

#else

namespace {
constexpr const char* kAbsent =
    "this build has no cuDNN: cudnn_frontend.h was not found when it was configured";
}

std::unique_ptr<CudnnAttention> make_cudnn_attention(std::string* why) {
  if (why != nullptr) *why = kAbsent;
  return nullptr;
}
std::string cudnn_objection(const CudnnProblem&, int) {
  throw Error(Errc::kDevice, "cuDNN attention", kAbsent);
}

#endif

}  // namespace zg::cuda
