#include "store/predictor.hpp"

#include <algorithm>

#include "ziggurat/base/error.hpp"

namespace zg {

std::shared_ptr<const Program> Predictor::find(const std::string& name) const {
  const auto it = known_.find(name);
  return it == known_.end() ? nullptr : it->second;
}

void Predictor::begin(const std::string& name) {
  ZG_ASSERT(!active_, "step \"{}\" has not ended", name_);
  if (!name_.empty()) successor_[name_] = name;
  active_ = true;
  name_ = name;
  program_ = find(name);
  log_.clear();
  cursor_ = -1;
  seen_ = 0;
  candidate_ = -2;
  const auto next = successor_.find(name);
  repeats_ = next == successor_.end() || next->second == name;
}

void Predictor::end(std::int32_t segment_count) {
  ZG_ASSERT(active_, "no step has begun");
  active_ = false;
  recorded_ = nullptr;
  if (!log_.empty()) {
    Program program(name_);
    for (const AccessStep& a : log_) program.add_op({&a, 1});
    program.finish(segment_count);
    recorded_ = std::make_shared<const Program>(std::move(program));
    // A step that ended early is a prefix of the known record, which is kept: it also predicts the rest.
    std::shared_ptr<const Program>& known = known_[name_];
    const auto same = [&](std::int32_t i) {
      return known->access(i).segment == recorded_->access(i).segment &&
             known->access(i).tier == recorded_->access(i).tier;
    };
    bool prefix = known != nullptr && recorded_->access_count() < known->access_count();
    for (std::int32_t i = 0; prefix && i < recorded_->access_count(); ++i) prefix = same(i);
    if (!prefix) known = recorded_;
  }
  const auto next = successor_.find(name_);
  program_ = find(next == successor_.end() ? name_ : next->second);
  repeats_ = false;
  cursor_ = -1;
  seen_ = 0;
}

void Predictor::expect(const Program& program, std::int32_t segment_count) {
  ZG_ASSERT(!active_, "a step is under way");
  Program copy(program.name());
  for (std::int32_t op = 0; op < program.op_count(); ++op) copy.add_op(program.op(op), program.time(op));
  copy.finish(segment_count);
  known_[program.name()] = std::make_shared<const Program>(std::move(copy));
  program_ = known_[program.name()];
  repeats_ = false;
  cursor_ = -1;
  seen_ = 0;
}

}  // namespace zg
