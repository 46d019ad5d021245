// The engine's position in its programs, for the watchdog and the progress line. The rank thread and the
// streams write it; any thread may read it without waiting. Members are read one after another, so a reader
// may see values of slightly different moments.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>

#include "ziggurat/base/units.hpp"
#include "ziggurat/engine/step_executor.hpp"

namespace zg {

// An operation as text, such as "backward 3.1": its kind, the number of its block from 0 (forward and
// backward) or of its unit, and its micro-batch or segment.
inline std::string text_of(const StepOp& op) {
  const bool of_block = op.kind == OpKind::kForward || op.kind == OpKind::kBackward ||
                        op.kind == OpKind::kBackwardInput || op.kind == OpKind::kBackwardWeight;
  const bool by_segment = is_by_segment(op.kind);
  const std::string tile = op.in_tiles() ? fmt::format(" tile {}", op.use.tile) : "";
  return fmt::format("{} {}.{}{}", name_of(op.kind), of_block ? op.unit - 1 : op.unit,
                     by_segment ? op.segment : op.micro_batch, tile);
}

class Position {
 public:
  enum class Waits : std::uint8_t { kNo, kForLease, kForMoves, kForStream, kForRanks };

  // Called by the rank thread. Programs and their operations must outlive this object.
  void begin_step(std::int64_t step) { step_.store(step); }
  void begin_program(const StepProgram& program) {
    program_.store(&program);
    op_.store(0);
    inside_.store(true);
  }
  void end_program() { inside_.store(false); }  // all operations of the program have been issued
  void next_op(std::int32_t op) { op_.store(op); }
  void issued() { issued_.fetch_add(1); }
  // While a Waiting exists, the rank thread counts as waiting.
  class Waiting {
   public:
    Waiting(Position& position, Waits what) : position_(position) { position_.waits_.store(what); }
    ~Waiting() { position_.waits_.store(Waits::kNo); }
    Waiting(const Waiting&) = delete;

   private:
    Position& position_;
  };

  // Called by a stream's thread. `stream`: 0 compute, 1 optimizer, 2 comm, 3 send, 4 receive.
  static constexpr int kWork = 5;
  void begin_work(int stream, const StepOp& op) { working_[stream].store(&op); }
  void end_work(int stream) {
    working_[stream].store(nullptr);
    done_[stream].fetch_add(1);
  }
  // Called by the thread that carries out a communication call, before and after it. `op` is null if the call
  // belongs to no operation.
  void enter(CommAxis axis, const StepOp* op) {
    meetings_[axis].op.store(op);
    meetings_[axis].entered.fetch_add(1);
  }
  void leave(CommAxis axis) { meetings_[axis].left.fetch_add(1); }

  std::uint64_t progress() const {
    std::uint64_t sum = issued_.load();
    for (const auto& done : done_) sum += done.load();
    return sum;
  }
  bool waiting() const { return waits_.load() != Waits::kNo; }
  std::string text() const;
  std::string work(const Layout& layout, std::optional<StallCause> awaited) const;
  std::string whereabouts(const Layout& layout, std::optional<StallCause> awaited) const;
  StepExecutor::Meeting meeting(CommAxis axis, const Layout& layout) const;
  // The operation of the latest communication call; null if there was no call, or it belonged to no
  // operation.
  const StepOp* met(CommAxis axis) const { return meetings_[axis].op.load(); }

 private:
  std::atomic<std::int64_t> step_{-1};  // from 0; -1: before the first step
  std::atomic<const StepProgram*> program_{nullptr};
  std::atomic<std::int32_t> op_{0};
  std::atomic<Waits> waits_{Waits::kNo};
  std::atomic<std::uint64_t> issued_{0};
  std::atomic<bool> inside_{false};  // the rank thread is within a program
  std::atomic<std::uint64_t> done_[kWork] = {};
  std::atomic<const StepOp*> working_[kWork] = {};
  struct Calls {
    std::atomic<std::uint64_t> entered{0}, left{0};
    std::atomic<const StepOp*> op{nullptr};  // the operation of the call entered last
  };
  ByAxis<Calls> meetings_;
};

inline std::string unit_text(std::int32_t unit, const Layout& layout) {
  if (unit == 0) return "the embedding";
  if (unit == layout.head_unit()) return "the head";
  const Unit& of = layout.model->units()[static_cast<std::size_t>(unit)];
  const std::string layer = fmt::format("layer {} of {}", of.layer + 1, layout.layers());
  if (!of.is_experts()) return layer;
  const std::int32_t last = of.first_expert + of.expert_count - 1;
  return last == of.first_expert ? fmt::format("expert {} of {}", last, layer)
                                 : fmt::format("experts {} to {} of {}", of.first_expert, last, layer);
}

// An operation as text for people who know the model but not the programs: "backward of layer 12 of 40".
inline std::string work_of(const StepOp& op, const Layout& layout) {
  const auto unit = [&] { return unit_text(op.unit, layout); };
  switch (op.kind) {
    case OpKind::kInitialize:
      return "first values of " + unit();
    case OpKind::kSave:
      return "checkpoint of " + unit();
    case OpKind::kUpdate:
      return "update of " + unit();
    case OpKind::kFinishGradient:
      return "gradient of " + unit();
    case OpKind::kMaterialize:
      return "weight of " + unit();
    case OpKind::kEmbedding:
      return "embedding";
    case OpKind::kForward:
      return "forward of " + unit();
    case OpKind::kHead:
    case OpKind::kHeadLoss:
      return "head";
    case OpKind::kBackward:
    case OpKind::kBackwardInput:
      return "backward of " + unit();
    case OpKind::kBackwardWeight:
      return "gradients of the weights of " + unit();
    case OpKind::kEmbeddingBackward:
      return "backward of the embedding";
    case OpKind::kSend:
      return "passing on " + unit();
    case OpKind::kReceive:
      return "receiving for " + unit();
  }
  return "?";
}

// The operation on the compute stream, or else on the comm or the receive stream. If these are idle: the
// update that runs at the end of a step, or the operation that is issued next and the cause of its wait.
inline std::string Position::work(const Layout& layout, std::optional<StallCause> awaited) const {
  for (const int which : {0, 2, 4}) {
    if (const StepOp* op = working_[which].load()) return work_of(*op, layout);
  }
  const Waits waits = waits_.load();
  const StepOp* const update = working_[1].load();
  if (waits == Waits::kForStream && update != nullptr) return work_of(*update, layout);
  const StepProgram* program = program_.load();
  const auto op = static_cast<std::size_t>(op_.load());
  if (program == nullptr || op >= program->ops.size()) return "";
  const bool waiting = waits == Waits::kForLease && awaited.has_value();
  return work_of(program->ops[op], layout) + (waiting ? std::string(" waits for ") + name_of(*awaited) : "");
}

inline std::string Position::whereabouts(const Layout& layout, std::optional<StallCause> awaited) const {
  const bool idle = std::none_of(std::begin(working_), std::end(working_),
                                 [](const auto& op) { return op.load() != nullptr; });
  if (inside_.load() || !idle || waiting()) return work(layout, awaited);
  const std::int64_t step = step_.load();
  return step < 0 ? "before the first step"
                  : fmt::format("in no operation; step {} was the last to begin", step + 1);
}

inline StepExecutor::Meeting Position::meeting(CommAxis axis, const Layout& layout) const {
  const Calls& calls = meetings_[axis];
  StepExecutor::Meeting m;
  const std::uint64_t left = calls.left.load();
  m.calls = calls.entered.load();
  m.inside = m.calls > left;
  const StepOp* op = calls.op.load();
  const std::string unit = op != nullptr ? unit_text(op->unit, layout) : "";
  if (op != nullptr && layout.model->units()[static_cast<std::size_t>(op->unit)].is_experts())
    m.weights = SharedWeights::kExperts;
  switch (axis) {
    case CommAxis::kShards:
      m.what = "gather of " + unit;
      break;
    case CommAxis::kDataParallel:
      m.what = "sum of the gradient of " + unit;
      break;
    case CommAxis::kReplicas:
      m.what = "gather of the gradient of " + unit;
      break;
    case CommAxis::kScalars:
      m.what = "exchange of numbers";
      break;
    case CommAxis::kReplicated:
      m.what = "sum of the gradients of " + unit + " that several parts hold";
      break;
    case CommAxis::kTensor:
    case CommAxis::kContext:
    case CommAxis::kExperts:
      m.what = "exchange with other parts of " + unit;
      break;
    case CommAxis::kStages:
      m.what = op == nullptr ? "" : work_of(*op, layout);
      break;
  }
  return m;
}

inline std::string Position::text() const {
  static constexpr const char* kWaits[] = {"", "; waits for a lease", "; waits for all moves",
                                           "; waits for a stream", "; waits for other ranks"};
  static constexpr const char* kStreams[] = {"compute", "optimizer", "comm", "send", "receive"};
  const std::int64_t step = step_.load();
  const StepProgram* program = program_.load();
  std::string text = step < 0 ? "before the first step" : fmt::format("step {}", step + 1);
  if (program != nullptr) {
    // Just after begin_program(), this may still be the operation number in the previous program.
    const auto op = static_cast<std::size_t>(op_.load());
    text += fmt::format(", program {}", program->program.name());
    if (op < program->ops.size())
      text += fmt::format(", operation {} of {}: {}", op + 1, program->ops.size(), text_of(program->ops[op]));
  }
  text += kWaits[static_cast<int>(waits_.load())];
  for (const CommAxis axis : {CommAxis::kTensor, CommAxis::kContext, CommAxis::kExperts}) {
    const std::uint64_t left = meetings_[axis].left.load(), entered = meetings_[axis].entered.load();
    if (entered == 0) continue;
    const StepOp* op = meetings_[axis].op.load();
    text += fmt::format("\n{} axis: {} exchanges done, {}", zg::name_of(axis), left,
                        entered > left ? "within one for " + text_of(*op) : "in none");
  }
  for (int i = 0; i < kWork; ++i) {
    const StepOp* op = working_[i].load();
    if (i >= 2 && op == nullptr && done_[i].load() == 0) continue;  // there is one rank or one stage
    text += fmt::format("\n{} stream: {} operations done, {}", kStreams[i], done_[i].load(),
                        op != nullptr ? "works on " + text_of(*op) : "idle");
  }
  return text;
}

}  // namespace zg
