// Faults on top of any queue, by seed: errors, short transfers, and completions held back so that they come
// late and out of order. What befalls the n-th block of a drive depends on the seed, the drive and n alone.
#include <algorithm>

#include "io/queue.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg::io {
namespace {

constexpr auto kLongestDelay = std::chrono::microseconds(2000);

class FaultQueue final : public Queue {
 public:
  FaultQueue(std::unique_ptr<Queue> inner, int depth, const FaultModel& model, int stream)
      : inner_(std::move(inner)),
        model_(model),
        random_(model.seed, fmt::format("io faults of drive {}", stream)),
        late_(static_cast<std::size_t>(depth)) {
    failed_.reserve(late_.size());
    held_.reserve(late_.size());
    from_inner_.reserve(late_.size());
  }

  void begin(const Block& block) override {
    const auto n = static_cast<std::uint64_t>(begun_++);
    const auto dice = [&](int k) { return random_.uniform(4 * n + static_cast<std::uint64_t>(k)); };
    const bool fails = (model_.fail_after >= 0 && begun_ > model_.fail_after) || dice(0) < model_.error_rate;
    if (fails) {
      failed_.push_back({block.id, -std::int64_t{model_.error}});
      return;
    }
    late_[block.id] = dice(1) < model_.delay_rate
                          ? Clock::duration(kLongestDelay) / 256 * (1 + static_cast<int>(255 * dice(2)))
                          : Clock::duration(0);
    Block shortened = block;
    const std::int64_t pages = block.bytes / Engine::alignment();
    if (pages > 1 && dice(3) < model_.short_rate) {
      shortened.bytes = (1 + static_cast<std::int64_t>(n * 7919 % static_cast<std::uint64_t>(pages - 1))) *
                        Engine::alignment();
    }
    inner_->begin(shortened);
  }

  void reap(std::vector<BlockDone>& done, Clock::time_point deadline) override {
    for (const Held& held : held_) deadline = std::min(deadline, held.due);
    inner_->reap(from_inner_, failed_.empty() ? deadline : kNoWait);
    const auto now = Clock::now();
    for (const BlockDone& block : from_inner_) {
      if (late_[block.id] == Clock::duration(0)) {
        done.push_back(block);
      } else {
        held_.push_back({now + late_[block.id], block});
      }
    }
    from_inner_.clear();
    std::erase_if(held_, [&](const Held& held) {
      if (held.due > now) return false;
      done.push_back(held.done);
      return true;
    });
    done.insert(done.end(), failed_.begin(), failed_.end());
    failed_.clear();
  }

  void wake() override { inner_->wake(); }
  std::string register_memory(void* data, std::int64_t bytes) override {
    return inner_->register_memory(data, bytes);
  }
  void unregister_memory(void* data) override { inner_->unregister_memory(data); }
  void end() override { inner_->end(); }
  std::string features() const override {
    return fmt::format("{}, injected faults (seed {}, errors {}, short {}, late {}, failing after {})",
                       inner_->features(), model_.seed, model_.error_rate, model_.short_rate,
                       model_.delay_rate, model_.fail_after);
  }

 private:
  struct Held {
    Clock::time_point due;
    BlockDone done;
  };
  const std::unique_ptr<Queue> inner_;
  const FaultModel model_;
  const NamedRandom random_;
  std::int64_t begun_ = 0;
  std::vector<Clock::duration> late_;  // by block id: how long its completion will be held back
  std::vector<BlockDone> failed_, from_inner_;
  std::vector<Held> held_;
};

}  // namespace

bool injects_anything(const FaultModel& model) {
  return model.error_rate > 0 || model.short_rate > 0 || model.delay_rate > 0 || model.fail_after >= 0;
}

std::unique_ptr<Queue> make_fault_queue(std::unique_ptr<Queue> inner, int depth, const FaultModel& model,
                                        int drive, int queue) {
  return std::make_unique<FaultQueue>(std::move(inner), depth, model, drive + 1000 * queue);
}

}  // namespace zg::io
