// Where the engine is in its programs, for who watches it: written by the rank thread and the streams, read
// by any thread, never waited for. The parts of a picture are read one after another, so they may be a moment
// apart.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include "ziggurat/base/units.hpp"
#include "ziggurat/engine/engine.hpp"

namespace zg {

// "backward 3.1": the kind, its layer or unit, and its micro-batch or segment.
inline std::string text_of(const StepOp& op) {
  return fmt::format("{} {}.{}", name_of(op.kind), op.unit,
                     op.kind == OpKind::kUpdate ? op.segment : op.micro_batch);
}

class Engine::Position {
 public:
  enum class Waits : std::uint8_t { kNo, kForLease, kForMoves, kForStream };

  // Rank thread. Programs and their operations outlive this.
  void begin_step(std::int64_t step) { step_.store(step); }
  void begin_program(const StepProgram& program) {
    program_.store(&program);
    op_.store(0);
  }
  void next_op(std::int32_t op) { op_.store(op); }
  void issued() { issued_.fetch_add(1); }
  // While it lives the rank thread is said to wait.
  class Waiting {
   public:
    Waiting(Position& position, Waits what) : position_(position) { position_.waits_.store(what); }
    ~Waiting() { position_.waits_.store(Waits::kNo); }
    Waiting(const Waiting&) = delete;

   private:
    Position& position_;
  };

  // A stream's thread: 0 compute, 1 optimizer.
  void begin_work(int stream, const StepOp& op) { working_[stream].store(&op); }
  void end_work(int stream) {
    working_[stream].store(nullptr);
    done_[stream].fetch_add(1);
  }

  std::uint64_t progress() const { return issued_.load() + done_[0].load() + done_[1].load(); }
  bool waiting() const { return waits_.load() != Waits::kNo; }
  std::string text() const;

 private:
  std::atomic<std::int64_t> step_{-1};  // from 0; -1: before the first
  std::atomic<const StepProgram*> program_{nullptr};
  std::atomic<std::int32_t> op_{0};
  std::atomic<Waits> waits_{Waits::kNo};
  std::atomic<std::uint64_t> issued_{0};
  std::atomic<std::uint64_t> done_[2] = {};
  std::atomic<const StepOp*> working_[2] = {};
};

inline std::string Engine::Position::text() const {
  static constexpr const char* kWaits[] = {"", "; waits for a lease", "; waits for all moves",
                                           "; waits for a stream"};
  static constexpr const char* kStreams[] = {"compute", "optimizer"};
  const std::int64_t step = step_.load();
  const StepProgram* program = program_.load();
  std::string text = step < 0 ? "before the first step" : fmt::format("step {}", step + 1);
  if (program != nullptr) {
    // Of another program for a moment when one follows the other.
    const auto op = static_cast<std::size_t>(op_.load());
    text += fmt::format(", program {}", program->program.name());
    if (op < program->ops.size())
      text += fmt::format(", operation {} of {}: {}", op + 1, program->ops.size(), text_of(program->ops[op]));
  }
  text += kWaits[static_cast<int>(waits_.load())];
  for (int i = 0; i < 2; ++i) {
    const StepOp* op = working_[i].load();
    text += fmt::format("\n{} stream: {} operations done, {}", kStreams[i], done_[i].load(),
                        op != nullptr ? "works on " + text_of(*op) : "idle");
  }
  return text;
}

}  // namespace zg
