// A whole training run, small: model, layout, budgets, tiers and engine from one description, and what came
// out of it down to the bit.
//
// Single-threaded, one run per TinyRun. Weights and data are by formula (support/reference.hpp), so that two
// descriptions which differ only in placement must give the same result.
#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "store/rig.hpp"
#include "support/errors.hpp"
#include "support/granule_device.hpp"
#include "support/reference.hpp"
#include "support/test_device.hpp"
#include "ziggurat/engine/step_executor.hpp"
#include "ziggurat/plan/plan.hpp"

namespace zg::test {

// Odd sizes, several state segments a unit; milliseconds a step.
inline ModelConfig tiny_gpt2() {
  ModelConfig c = reference_gpt2();
  c.width = 36, c.head_size = 9, c.inner = 144;
  return c;
}
inline ModelConfig tiny_llama() {
  ModelConfig c = reference_llama();
  c.width = 40, c.head_size = 10, c.heads = 4, c.kv_heads = 2, c.inner = 52, c.layers = 4;
  return c;
}

enum class Room { kEverything, kSmallest, kGiven };
enum class Verify { kYes, kNo };

struct TinySetup {
  ModelConfig model = tiny_gpt2();
  DType dtype = DType::kF32;
  // With context parallelism micro_batch has whole sequences all the same.
  LayoutOptions layout = {.micro_batch = {2, 13}, .micro_batches = 3, .state_segment_bytes = 48 << 10};
  UpdateTiming timing = UpdateTiming::kDeferred;
  double clip = 0.5;
  double lr = 1e-3;
  Room room = Room::kEverything;
  Budgets budgets = {};  // kGiven: workspace not included
  bool graphs = false;   // operations that repeat are launched as a whole, where the device can
  bool direct = false;   // else than kGiven: NVMe and the device have a link of their own (host device only)
  Nvme nvme = Nvme::kRam;  // where the drives are, if the layout has any
  io::FaultModel faults = {};
  MemoryIo::Faults memory_faults = {};  // Nvme::kMemory
  int prefetch = 64;
  Verify verify = Verify::kYes;
  std::function<Batch(std::int64_t step, std::int64_t micro_batch)> data =
      {};  // empty: other tokens each step
  std::int64_t eval_micro_batches = 5;
  CommRank* comm = nullptr;  // of layout.place(), if there are several ranks
  bool sequence = false;     // TensorShard::sequence
  BlockTiling blocks = BlockTiling::kWhole;
  std::int32_t gather_ahead = 0;
  std::optional<DType> gradient = {};  // on its way to the optimizer; none: the model's
  // Changes what the step of this number, from 0, applies.
  std::function<void(std::int64_t step, UpdateRule& rule)> rule = {};
  // The initial value of an element of the whole parameter; empty: reference_element.
  std::function<double(const Param& p, std::int64_t element)> initial = {};
  std::uint64_t seed = 0;      // of stochastic rounding
  std::string directory = {};  // of the drives; empty: one for this run alone
};

// The ways to keep the state of an optimizer.
struct NamedFormat {
  std::string name;
  DType dtype;  // of the model
  StateFormat format;
};
inline std::vector<NamedFormat> state_formats(OptimizerKind kind, int moment_count) {
  using enum MomentFormat;
  const auto of = [&](MasterFormat master, MomentFormat moments) {
    return StateFormat{.kind = kind, .master = master, .moments = moments, .moment_count = moment_count};
  };
  std::vector<NamedFormat> all{{"f32", DType::kF32, of(MasterFormat::kFull, kFull)},
                               {"bf16", DType::kBF16, of(MasterFormat::kFull, kFull)},
                               {"f16", DType::kF16, of(MasterFormat::kFull, kFull)},
                               {"bf16_split", DType::kBF16, of(MasterFormat::kSplit, kFull)}};
  if (moment_count == 0) return all;
  all.push_back({"f32_bf16_moments", DType::kF32, of(MasterFormat::kFull, kBf16)});
  all.push_back({"f32_int8", DType::kF32, of(MasterFormat::kFull, kInt8)});
  all.push_back({"bf16_split_bf16_moments", DType::kBF16, of(MasterFormat::kSplit, kBf16)});
  all.push_back({"bf16_split_int8", DType::kBF16, of(MasterFormat::kSplit, kInt8)});
  return all;
}

// A weight as it is rounded from its master.
inline float rounded(float master, DType dtype) {
  float weight = 0;
  double memory = 0;
  const View v(&memory, dtype, 1, 1);
  write_weights(v, &master);
  read_weights(v, &weight);
  return weight;
}

inline const char* name_of(UpdateTiming timing) {
  static constexpr const char* kNames[] = {"deferred", "early", "separate"};
  return kNames[static_cast<int>(timing)];
}

// All tokens of all steps differ; the number of valid targets does too.
inline Batch tiny_batch(const TinySetup& s, std::int64_t step, std::int64_t m) {
  Batch b{s.layout.micro_batch, {}, {}};
  const std::int64_t rows = b.shape.rows();
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto n = static_cast<std::uint64_t>((step * 64 + m) * rows + i);
    const auto vocab = static_cast<std::uint64_t>(s.model.vocab_size);
    b.ids.push_back(static_cast<std::int32_t>(reference_hash("tokens", n) % vocab));
    const bool valid = (i + m + step) % 5 != 0;
    b.targets.push_back(valid ? static_cast<std::int32_t>(reference_hash("targets", n) % vocab) : -100);
    if (!b.shape.documents) continue;
    // A document of 6 rows on average, of which some are one long, and one goes over half of the sequence.
    const std::int64_t t = i % b.shape.time;
    const bool begins = t == 0 || (4 * t < b.shape.time && reference_hash("documents", n) % 3 == 0) ||
                        (4 * t >= 3 * b.shape.time && reference_hash("documents", n) % 2 == 0);
    b.documents.push_back(begins ? static_cast<std::int32_t>(t) : b.documents.back());
  }
  return b;
}

// All that a run leaves behind, to be compared bit by bit.
struct TinyResult {
  std::vector<double> losses, norms, evals;
  std::vector<std::string> names;          // of weight and parts of the state, by unit
  std::vector<std::vector<char>> tensors;  // what they hold, gaps included
};

inline void expect_same_bits(const TinyResult& a, const TinyResult& b) {
  const auto same = [](const std::vector<double>& x, const std::vector<double>& y) {
    return x.size() == y.size() &&
           (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(double)) == 0);
  };
  EXPECT_TRUE(same(a.losses, b.losses)) << testing::PrintToString(a.losses) << "\n"
                                        << testing::PrintToString(b.losses);
  EXPECT_TRUE(same(a.norms, b.norms)) << testing::PrintToString(a.norms) << "\n"
                                      << testing::PrintToString(b.norms);
  EXPECT_TRUE(same(a.evals, b.evals)) << testing::PrintToString(a.evals) << "\n"
                                      << testing::PrintToString(b.evals);
  ASSERT_EQ(a.names, b.names);
  for (std::size_t i = 0; i < a.tensors.size(); ++i) EXPECT_TRUE(a.tensors[i] == b.tensors[i]) << a.names[i];
}

// The same for runs whose evaluations group their micro-batches differently: their losses are added in
// another order, five numbers in fp64.
inline void expect_same_bits_but_for_evaluations(TinyResult a, TinyResult b) {
  ASSERT_EQ(a.evals.size(), b.evals.size());
  for (std::size_t i = 0; i < a.evals.size(); ++i)
    EXPECT_NEAR(a.evals[i], b.evals[i], 2 * 5 * 0x1p-53 * a.evals[i]);
  a.evals.clear();
  b.evals.clear();
  expect_same_bits(a, b);
}

// Element `i` of the whole parameter.
inline double reference_element(const Param& p, std::int64_t i) {
  return reference_weight(p, i / p.whole_cols, i % p.whole_cols);
}

// Adapters, which alone are trained.
inline TinySetup with_lora(TinySetup s, const Lora& lora) {
  s.model.lora = lora;
  const Model model(s.model, s.dtype, host_ops());
  s.layout.groups.clear();
  for (const Unit& unit : model.units()) {
    s.layout.groups.emplace_back();
    for (const Param& p : unit.params) s.layout.groups.back().push_back(p.adapter ? 0 : kFrozen);
  }
  return s;
}
// Adapters beside the modules of the model's layers.
inline TinySetup with_adapters(TinySetup s, const std::string& modules = "all-linear") {
  const Lora lora{.rank = 3, .alpha = 5, .modules = match_modules(s.model, modules)};
  return with_lora(std::move(s), lora);
}

class TinyRun {
 public:
  explicit TinyRun(TinySetup setup)
      : setup_(with_gradient(std::move(setup))),
        ops_device_(make_test_device(any_budget(), nullptr, setup_.graphs)),
        model_(setup_.model, setup_.dtype, ops_device_->ops(), 0,
               {setup_.layout.parts.tensor,
                setup_.layout.parts.tensor_part,
                setup_.sequence,
                {setup_.layout.parts.experts, setup_.layout.place().expert_part()}},
               setup_.blocks),
        layout_(model_, of_part(setup_.layout)),
        programs_(layout_, setup_.timing, setup_.gather_ahead),
        budgets_(budgets_of(setup_)) {
    // Any host device may use the ops of another; a CUDA device's ops are its own.
    const std::int64_t granule = layout_.options.device_granule;
    const std::int64_t budget = budgets_.device + layout_.workspace_charge();
    device_ = ops_device_->is_host() ? in_granules(make_test_device(budget), granule)
                                     : within(std::move(ops_device_), granule, budget);
    host_ = make_host_arena("host memory", budgets_.host);
    if (setup_.nvme == Nvme::kMemory && layout_.table.drives() > 0) {
      MemoryIo::Options o;
      o.max_delay = std::chrono::microseconds(20);
      o.faults = setup_.memory_faults;
      io_ = std::make_unique<MemoryIo>(layout_.table.drives(),
                                       std::max<std::int64_t>(layout_.table.drive_bytes(), 4096), o);
    } else {
      io_ =
          make_nvme(setup_.nvme, layout_.table,
                    setup_.directory.empty() ? directory_.emplace().path() : setup_.directory, setup_.faults);
    }
    TensorStore::Options o;
    o.table = &layout_.table;
    o.device = device_.get();
    o.host = host_.get();
    o.io = io_.get();
    o.budgets = budgets_;
    o.prefetch_depth = setup_.prefetch;
    o.verify = setup_.verify == Verify::kYes;
    store_ = std::make_unique<TensorStore>(o);
    engine_ = std::make_unique<StepExecutor>(StepExecutor::Options{
        &layout_, &programs_, device_.get(), store_.get(), nullptr, setup_.seed, setup_.comm});
    deadline_ = std::make_unique<Deadline>(device_->is_host() ? 60 : 500, [this] { return store_->state(); });
  }

  void initialize() {
    engine_->initialize([this](const Param& p, std::int64_t begin, std::int64_t end, float* out) {
      for (std::int64_t i = begin; i < end; ++i) out[i - begin] = initial(p, p.whole_element(i));
    });
    std::vector<float> biases = engine_->choice_biases();
    if (biases.empty()) return;
    const std::vector<Unit>& units = model().units();
    for (const Unit& unit : units) {
      if (!unit.choice_bias) continue;
      const std::int64_t experts = unit.choice_bias->cols;
      for (std::int64_t e = 0; e < experts; ++e)
        biases[static_cast<std::size_t>(unit.layer * experts + e)] =
            static_cast<float>(initial(*unit.choice_bias, e));
    }
    engine_->set_choice_biases(biases);
  }
  float initial(const Param& p, std::int64_t element) const {
    return static_cast<float>(setup_.initial ? setup_.initial(p, element) : reference_element(p, element));
  }

  Batch batch(std::int64_t step, std::int64_t m) const {
    return cut(setup_.data ? setup_.data(step, m) : tiny_batch(setup_, step, m));
  }
  UpdateRule rule() const {
    UpdateRule r;
    r.params.lr = setup_.lr;
    r.params.beta2 = 0.95;
    r.params.weight_decay = 0.1;
    r.params.step = updates_ + 1;
    r.clip = setup_.clip;
    if (setup_.rule) setup_.rule(steps_, r);
    return r;
  }

  static MicroBatch micro_batch_of(const Batch& b) {
    return {b.ids.data(), b.targets.data(), b.documents.empty() ? nullptr : b.documents.data()};
  }
  StepResult step(Then then) {
    std::vector<Batch> batches;
    std::vector<MicroBatch> micro_batches;
    const RankPlace place = setup_.layout.place();
    for (std::int64_t m = 0; m < setup_.layout.micro_batches; ++m)
      batches.push_back(batch(steps_, place.micro_batch(m)));
    for (const Batch& b : batches) micro_batches.push_back(micro_batch_of(b));
    const UpdateRule now = rule();
    const StepResult result = engine_->train_step(steps_++, micro_batches, now, then);
    updates_ += result.skipped ? 0 : 1;
    return result;
  }
  double evaluate() {
    Batch now;
    return engine_->evaluate(setup_.eval_micro_batches, [&](std::int64_t i) {
      now = cut(tiny_batch(setup_, 1000, i));
      return micro_batch_of(now);
    });
  }
  // `evaluate_after`: evaluations follow the steps of these numbers, counted from 1.
  TinyResult train(std::int64_t steps, const std::vector<std::int64_t>& evaluate_after = {}) {
    TinyResult result;
    initialize();
    for (std::int64_t i = 1; i <= steps; ++i) {
      const bool evaluation =
          std::find(evaluate_after.begin(), evaluate_after.end(), i) != evaluate_after.end();
      const StepResult r = step(evaluation || i == steps ? Then::kPause : Then::kTrain);
      result.losses.push_back(r.loss);
      result.norms.push_back(r.grad_norm);
      if (evaluation) result.evals.push_back(evaluate());
    }
    add_state(result);
    return result;
  }

  void add_state(TinyResult& result) {
    static constexpr const char* kParts[] = {"master", "moment 0", "moment 1", "scales 0", "scales 1"};
    settle();
    for (std::size_t t = 0; t < layout_.tiles.size(); ++t) {
      const std::string weight = layout_.table.tensor(layout_.tiles[t].weight).spec.name;
      result.names.push_back(weight);
      result.tensors.push_back(content(layout_.tiles[t].weight));
      if (layout_.tiles[t].state == Layout::kNone) continue;
      for (int part = 0; part < 5; ++part) {
        result.names.push_back(weight + "'s " + kParts[part]);
        result.tensors.push_back(state_part(t, part));
      }
    }
  }
  // Applies deferred updates and waits until nothing moves. After a step with Then::kPause.
  void settle() {
    engine_->flush();
    (void)engine_->settled_traffic();
  }
  // All bytes of a tensor. After settle().
  std::vector<char> content(TensorId id) {
    std::vector<char> all;
    const Tensor& t = layout_.table.tensor(id);
    for (std::int32_t i = 0; i < t.segments; ++i) {
      const SegmentId s = t.first_segment + i;
      const auto [lease, tier] = lease_of(s, Access::kRead);
      all.resize(all.size() + static_cast<std::size_t>(lease.bytes()));
      char* const to = all.data() + all.size() - lease.bytes();
      if (tier == Tier::kDevice) {
        to_host(*device_, to, lease.data(), lease.bytes());
      } else {
        std::memcpy(to, lease.data(), static_cast<std::size_t>(lease.bytes()));
      }
    }
    return all;
  }

  // Sets all bytes of a tensor. Outside of programs.
  void set_content(TensorId id, const std::vector<char>& all) {
    const Tensor& t = layout_.table.tensor(id);
    const char* from = all.data();
    for (std::int32_t i = 0; i < t.segments; ++i) {
      const SegmentId s = t.first_segment + i;
      const auto [lease, tier] = lease_of(s, Access::kOverwrite);
      ZG_ASSERT(from + lease.bytes() <= all.data() + all.size(), "{} has more bytes", t.spec.name);
      if (tier == Tier::kDevice) {
        to_device(*device_, lease.data(), from, lease.bytes());
      } else {
        std::memcpy(lease.data(), from, static_cast<std::size_t>(lease.bytes()));
      }
      from += lease.bytes();
    }
  }
  std::int64_t steps() const { return steps_; }
  // The engine goes on as if so many steps had been done and applied.
  void go_on_from(std::int64_t steps) { steps_ = updates_ = steps; }

  // A part of a unit's or tile's state: 0 the masters, 1 and 2 the moments, 3 and 4 their scales; all of its
  // elements, as they are kept. Empty: there is no such part. Call it when the store has settled.
  std::vector<char> state_part(std::size_t unit, int which) {
    std::vector<char> part;
    std::vector<char> all = content(layout_.tiles[unit].state);
    const auto u = static_cast<std::int32_t>(unit);
    char* segment = all.data();
    for (std::int32_t i = 0; i < layout_.state_segments(u); ++i) {
      const std::int64_t n = layout_.state_elements(u, i).count;
      const OptimizerState state = layout_.state().part(segment, n, 0, n);
      const View v[] = {state.master, state.moment[0], state.moment[1], state.scale[0], state.scale[1]};
      const auto* data = static_cast<const char*>(v[which].data);
      const auto element = static_cast<std::int64_t>(size_of(v[which].dtype));
      if (data != nullptr) part.insert(part.end(), data, data + v[which].count() * element);
      segment += layout_.table.segment(layout_.state_segment(u, i)).bytes;
    }
    return part;
  }

  // Masters of a parameter (the weight, where it is frozen). After a step with Then::kPause.
  std::vector<float> masters(std::size_t unit, const Param& p) {
    std::vector<float> values(static_cast<std::size_t>(p.count()));
    engine_->read_master(static_cast<std::int32_t>(unit), p, 0, p.count(), values.data());
    return values;
  }

  void expect_within_budgets() const {
    EXPECT_LE(device_->arena().peak(), budgets_.device + layout_.workspace_charge());
    EXPECT_LE(host_->peak(), budgets_.host);
  }

  // The budgets of the store.
  Budgets peak() const { return {device_->arena().peak() - layout_.workspace_charge(), host_->peak()}; }

  const TinySetup& setup() const { return setup_; }
  const Model& model() const { return model_; }
  const Layout& layout() const { return layout_; }
  const StepPrograms& programs() const { return programs_; }
  const Budgets& budgets() const { return budgets_; }
  StepExecutor& engine() { return *engine_; }
  TensorStore& store() { return *store_; }
  // Bytes that device and host have copied to each other; of a device that is not the host.
  std::int64_t copied() const {
    const auto* const device = dynamic_cast<const GranuleDevice*>(device_.get());
    ZG_ASSERT(device != nullptr, "the copies of a host device are not counted");
    return device->copied();
  }
  io::Engine* io() { return io_.get(); }
  std::int64_t everything(Tier tier = Tier::kHost) const { return layout_.table.total_charge(tier); }

 private:
  // A lease at the host if there is room, else one at the device.
  struct Placed {
    Lease lease;
    Tier tier;
  };
  Placed lease_of(SegmentId id, Access access) {
    if (layout_.table.segment(id).lowest == Tier::kDevice)
      return {store_->acquire(id, Tier::kDevice, access), Tier::kDevice};
    try {
      return {store_->acquire(id, Tier::kHost, access), Tier::kHost};
    } catch (const Error& e) {
      if (e.code() != Errc::kMemory) throw;
      return {store_->acquire(id, Tier::kDevice, access), Tier::kDevice};
    }
  }
  // This rank's part of the sequences.
  // More than any run takes: a GPU gives each segment 2 MiB at least.
  static std::int64_t any_budget() {
    return std::int64_t{1} << (test_device() == TestDevice::kGpu ? 34 : 28);
  }
  // For a part of a layer, and for the device that the program tests.
  static LayoutOptions of_part(LayoutOptions o) {
    ZG_ASSERT_EQ(o.micro_batch.time % o.parts.context, 0);
    o.micro_batch.time /= o.parts.context;
    o.device_granule = std::max(o.device_granule, test_granule());
    return o;
  }
  Batch cut(Batch whole) const {
    const BatchShape shape = layout_.options.micro_batch;
    return {shape, shape.sequence_shard.cut(whole.ids, shape.time),
            shape.sequence_shard.cut(whole.targets, shape.time),
            shape.sequence_shard.cut_documents(whole.documents, shape.time)};
  }
  static TinySetup with_gradient(TinySetup s) {
    s.layout.gradient = s.gradient.value_or(s.dtype);
    return s;
  }
  Budgets budgets_of(const TinySetup& s) const {
    if (s.room == Room::kGiven) return s.budgets;
    if (s.room == Room::kEverything) return {everything(Tier::kDevice), everything(Tier::kHost), s.direct};
    const auto least = smallest_budgets(layout_, programs_, 0, s.direct);
    ZG_ASSERT(least.has_value(), "this run fits no budgets");
    return *least;
  }

  TinySetup setup_;
  std::unique_ptr<Device> ops_device_;  // of the model, which is there before budgets are known
  Model model_;
  Layout layout_;
  StepPrograms programs_;
  Budgets budgets_;
  std::optional<TempDir> directory_;  // of drives for which the setup names none
  std::unique_ptr<Device> device_;
  std::unique_ptr<Arena> host_;
  std::unique_ptr<io::Engine> io_;
  std::unique_ptr<TensorStore> store_;
  std::unique_ptr<StepExecutor> engine_;
  std::unique_ptr<Deadline> deadline_;
  std::int64_t steps_ = 0, updates_ = 0;
};

}  // namespace zg::test
