#include "ziggurat/train/rank.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "train/agreement.hpp"
#include "train/watch.hpp"
#include "ziggurat/base/parallel.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/model/adapter_files.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg {

namespace {

// What the directories model.from and lora.from have for a rank's parameters.
class GivenModel {
 public:
  explicit GivenModel(const RunPlan& plan) : plan_(plan), weights_(plan.config.model_from, *plan.model) {
    if (!plan.config.lora.from.empty()) adapters_.emplace(plan.config.lora.from, plan.model_config);
  }

  std::vector<float> choice_biases() const { return weights_.choice_biases(*plan_.model); }
  void fill(const StateTile& tile) const {
    fill_tile(
        tile,
        [this](const Param& p, std::int64_t begin, std::int64_t end, float* out) {
          p.adapter ? read_adapter(p, begin, end, out) : read(p, begin, end, out);
        },
        [this](const StateTile& t) {
          weights_.read_codes(*t.param, t.first_row(), t.rows(), t.places, t.codes.as<std::byte>());
        });
  }

 private:
  void read(const Param& p, std::int64_t begin, std::int64_t end, float* out) const {
    weights_.read(p, begin, end, out);
    // Ties go to even here, as where codes are decoded on the device; masters round them away from zero.
    if (weights_.is_coded(p) && plan_.model->dtype() == DType::kBF16)
      std::transform(out, out + (end - begin), out, [](float v) { return static_cast<float>(bf16(v)); });
  }

  // Initial values as in PEFT: A is uniform between -1 / sqrt(columns) and 1 / sqrt(columns), B is zero.
  void read_adapter(const Param& p, std::int64_t begin, std::int64_t end, float* out) const {
    if (adapters_) return adapters_->read(p, begin, end, out);
    std::fill(out, out + (end - begin), 0.0f);
    if (p.init == Init::kZero) return;
    const NamedRandom random(plan_.config.seed, p.name);
    const auto bound = static_cast<float>(1 / std::sqrt(static_cast<double>(p.whole_cols)));
    for (std::int64_t i = begin; i < end; ++i)
      out[i - begin] = bound * (2 * random.uniform(static_cast<std::uint64_t>(p.whole_element(i))) - 1);
  }

  const RunPlan& plan_;
  const HfWeights weights_;
  std::optional<AdapterWeights> adapters_;
};

}  // namespace

Rank::Rank(const RunPlan& plan, Node& node, Device* gpu, CommRank* comm, Trace* trace, Watchdog* watchdog,
           const AdoptedVersions* adopted)
    : plan_(plan),
      host_device_(gpu == nullptr ? make_host_device(plan.budgets.device, trace) : nullptr),
      device_(gpu == nullptr ? *host_device_ : *gpu) {
  TensorStore::Options o;
  o.table = &plan.layout->table;
  o.device = &device_;
  o.host = &node.host();
  o.io = node.io();
  o.volume = node.volume();
  o.adopted = adopted;
  o.budgets = plan.resident;
  o.host_quota = plan.budgets.host;
  o.prefetch_depth = plan.config.tiers.prefetch_depth;
  o.verify = plan.config.aio.verify;
  o.trace = trace;
  store_ = std::make_unique<TensorStore>(o);
  engine_ = std::make_unique<StepExecutor>(StepExecutor::Options{
      plan.layout.get(), plan.programs.get(), &device_, store_.get(), trace, plan.config.seed, comm});
  if (watchdog != nullptr) {
    const std::string suffix = comm != nullptr ? fmt::format(" of rank {}", plan.rank) : "";
    for (WatchedPart part : {part_of(*store_), part_of(*engine_)}) {
      part.name += suffix;
      watched_.push_back(watchdog->watch(std::move(part)));
    }
  }
}

void Rank::initialize() {
  agree(*engine_, agreement_of(plan_));
  const ModelConfig& model = plan_.model_config;
  if (!plan_.config.model_from.empty()) {
    const GivenModel given(plan_);
    engine_->restore_state([&](const StateTile& tile) { given.fill(tile); });
    if (model.experts.choice_bias) engine_->set_choice_biases(given.choice_biases());
    return;
  }
  const double std_residual = model.init_std / std::sqrt(2.0 * static_cast<double>(model.layers));
  engine_->initialize([&](const Param& p, std::int64_t begin, std::int64_t end, float* out) {
    if (p.init == Init::kZero || p.init == Init::kOne) {
      std::fill(out, out + (end - begin), p.init == Init::kOne ? 1.0f : 0.0f);
      return;
    }
    const NamedRandom random(plan_.config.seed, p.name);
    const auto std_dev = static_cast<float>(p.init == Init::kNormal ? model.init_std : std_residual);
    // Random numbers are indexed by the element's place in the whole parameter, so that the weights do not
    // depend on how it is split.
    parallel_for(end - begin, 16384, [&](std::int64_t from, std::int64_t to) {
      p.for_runs(begin + from, begin + to, [&](std::int64_t at, std::int64_t whole, std::int64_t n) {
        for (std::int64_t i = 0; i < n; ++i)
          out[at - begin + i] = std_dev * random.normal(static_cast<std::uint64_t>(whole + i));
      });
    });
  });
}

void Rank::restore(const TileVisitor& fill) {
  agree(*engine_, agreement_of(plan_));
  if (plan_.config.lora.base != LoraConfig::Base::kCodes) return engine_->restore_state(fill);
  const GivenModel given(plan_);
  engine_->restore_state([&](const StateTile& tile) {
    const bool in_codes = tile.frozen && plan_.layout->has_codes(tile.unit);
    in_codes ? given.fill(tile) : fill(tile);
  });
}

void Rank::adopt() {
  agree(*engine_, agreement_of(plan_));
  if (plan_.config.lora.base != LoraConfig::Base::kCodes) return engine_->adopt_state();
  const GivenModel given(plan_);
  engine_->adopt_state([&](const StateTile& tile) { given.fill(tile); });
}

LinkBytes Rank::forecast() const {
  return zg::forecast(*plan_.layout, *plan_.programs, plan_.resident, engine_->history());
}

}  // namespace zg
