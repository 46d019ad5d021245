// Saves the trained model, or its adapters, gathered from all ranks, as one directory.
#pragma once
#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ziggurat/model/adapter_files.hpp"
#include "ziggurat/model/hf.hpp"
#include "ziggurat/step/tile_elements.hpp"
#include "ziggurat/train/trainer.hpp"

namespace zg {

// Rank 0 writes the model. It requests tile after tile. The ranks that together hold every element once send
// it the elements that they hold of each requested tile. All ranks follow its requests, so that all learn
// when it is done or has failed.
class Trainer::Saver {
 public:
  Saver(Trainer& trainer, int local)
      : rank_(trainer.rank(local)),
        plan_(trainer.plans_[static_cast<std::size_t>(local)]),
        place_(plan_.layout->options.place()) {
    std::vector<int> all(static_cast<std::size_t>(trainer.ranks()));
    std::iota(all.begin(), all.end(), 0);
    comm_ = trainer.comm_[static_cast<std::size_t>(local)]->group(all, "save");
    find_saved();
    rank_.engine().flush();
  }

  void write(const std::string& directory) {
    const auto& units = saved().units();
    save(directory, plan_, saved(), rank_.engine().choice_biases(),
         [&](const Unit& unit, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
           ask({&unit - units.data(), &p - unit.params.data(), begin, end});
           read().write_to(out);
           for (int stage = 0; stage < place_.parts.stages; ++stage) {
             for (int shard = 0; shard < holders(); ++shard) {
               for (int part = 0; part < place_.parts.tensor; ++part)
                 receive(place_.rank_at(part, shard, stage), out);
             }
           }
         });
    ask({kDone, 0, 0, 0});
  }
  // Writes the model or, if the run trains adapters, only these. choice_biases: those of all layers, of which
  // every rank has all; `read` is asked for parameters of `model` alone, which has all experts.
  static void save(const std::string& directory, const RunPlan& plan, const Model& model,
                   const std::vector<float>& choice_biases, const ReadParam& read) {
    if (!plan.model_config.lora.on()) {
      return save_hf(directory, model, DType::kF32,
                     [&](const Unit& unit, const Param& p, std::int64_t begin, std::int64_t end, float* out) {
                       if (p.offset >= 0) return read(unit, p, begin, end, out);
                       std::copy_n(choice_biases.begin() + unit.layer * p.cols + begin, end - begin, out);
                     });
    }
    save_adapters(directory, model, plan.config.base_name(), read);
  }
  void follow() {
    while (ask({}), request_[0] != kDone) {
      if (place_.sharding.rank >= holders()) continue;
      const Held held = read();
      const auto runs = static_cast<std::int64_t>(held.runs.size());
      comm_->send(stream_, &runs, 1, DType::kI64, 0);
      comm_->send(stream_, held.runs.data(), 2 * runs, DType::kI64, 0);
      comm_->send(stream_, held.values.data(), static_cast<std::int64_t>(held.values.size()), DType::kF32, 0);
    }
  }

 private:
  static constexpr std::int64_t kDone = -1;
  // Unit and parameter of saved(), elements [begin, end) of the whole parameter.
  using Request = std::array<std::int64_t, 4>;
  // The requested elements that a rank holds: runs of elements, whose `first` counts from the request's
  // begin, and their values.
  struct Run {
    std::int64_t first, count;
  };
  struct Held {
    std::vector<Run> runs;
    std::vector<float> values;
    void write_to(float* out) const {
      const float* from = values.data();
      for (const Run& run : runs) std::copy_n(from, run.count, out + run.first), from += run.count;
    }
  };

  void ask(const Request& request) {
    request_ = request;
    comm_->broadcast(stream_, request_.data(), static_cast<std::int64_t>(request_.size()), DType::kI64, 0);
  }
  void receive(int holder, float* out) {
    if (holder == 0) return;
    Held held;
    std::int64_t runs = 0, values = 0;
    comm_->receive(stream_, &runs, 1, DType::kI64, holder);
    held.runs.resize(static_cast<std::size_t>(runs));
    comm_->receive(stream_, held.runs.data(), 2 * runs, DType::kI64, holder);
    for (const Run& run : held.runs) values += run.count;
    held.values.resize(static_cast<std::size_t>(values));
    comm_->receive(stream_, held.values.data(), values, DType::kF32, holder);
    held.write_to(out);
  }
  // A rank of an expert group has some of the experts. So requests are numbered in a model with all of them.
  const Model& saved() const { return all_experts_ ? *all_experts_ : *plan_.model; }
  void find_saved() {
    if (plan_.model->shard().experts.degree == 1) return;
    all_experts_ = plan_.model->with_all_experts();
    for (std::size_t u = 0; u < plan_.model->units().size(); ++u) {
      const std::vector<Param>& params = plan_.model->units()[u].params;
      for (std::size_t i = 0; i < params.size(); ++i)
        own_.try_emplace(params[i].name, static_cast<std::int32_t>(u), &params[i]);
    }
  }
  // The ranks of a stage and tensor part, the first ones, that together hold every element.
  int holders() const { return std::max(place_.sharding.shards, place_.parts.experts); }
  // This rank's unit with the requested parameter; -1 if the rank does not have it.
  std::pair<std::int32_t, const Param*> requested() const {
    const auto unit = static_cast<std::size_t>(request_[0]);
    const Param& p = saved().units()[unit].params[static_cast<std::size_t>(request_[1])];
    if (!all_experts_) return {static_cast<std::int32_t>(unit), &p};
    const auto found = own_.find(p.name);
    return found != own_.end() ? found->second : std::pair<std::int32_t, const Param*>{-1, nullptr};
  }
  // Reads the requested elements that this rank holds. Of elements that several tensor-parallel ranks have
  // copies of, only one rank's are counted.
  Held read() {
    const auto [unit, param] = requested();
    const std::int64_t begin = request_[2], end = request_[3];
    Held held;
    if (unit < 0 || !plan_.layout->gives(unit)) return held;
    for (const Layout::Elements& shard : held_of_unit(*plan_.layout, unit))
      read(unit, *param, shard, begin, end, held);
    return held;
  }
  // Appends the requested elements that lie in this shard of the unit.
  void read(std::int32_t unit, const Param& p, const Layout::Elements& shard, std::int64_t begin,
            std::int64_t end, Held& held) {
    const std::int64_t whole_line = p.vector ? 1 : p.whole_cols;
    std::vector<float> lines;
    for (const Band& band : p.bands) {
      if (!band.counted) continue;
      // The lines that contain requested elements and lie in the shard.
      const std::int64_t from = std::clamp(begin / whole_line - band.whole_line, std::int64_t{0}, band.lines),
                         to = std::clamp((end - 1) / whole_line + 1 - band.whole_line, from, band.lines);
      const std::int64_t first = std::max((band.line + from) * p.line(), shard.first - p.offset),
                         last = std::min((band.line + to) * p.line(), shard.first + shard.count - p.offset);
      if (first >= last) continue;
      lines.resize(static_cast<std::size_t>(last - first));
      rank_.engine().read_master(unit, p, first, last, lines.data());
      p.for_runs(first, last, [&](std::int64_t at, std::int64_t whole, std::int64_t n) {
        const std::int64_t skip = std::max<std::int64_t>(0, begin - whole),
                           count = std::min(n, end - whole) - skip;
        if (count <= 0) return;
        held.runs.push_back({whole + skip - begin, count});
        const auto value = lines.begin() + (at - first + skip);
        held.values.insert(held.values.end(), value, value + count);
      });
    }
  }

  Rank& rank_;
  const RunPlan& plan_;
  const RankPlace place_;
  HostStream stream_{"save", HostStream::Mode::kInline};
  std::unique_ptr<Communicator> comm_;
  std::optional<Model> all_experts_;  // none: this rank's model has all
  std::unordered_map<std::string, std::pair<std::int32_t, const Param*>> own_;  // by name, with all_experts_
  Request request_{};
};

}  // namespace zg
