// Injects faults into any queue (the inner queue), at random and by rule. Blocks that fail with an error are
// not passed on to the inner queue; of short and torn ones only a part is. A late block is held back after it
// has completed, so that others overtake it. Flipped bits are put into what was read, or into a copy of what
// is written, since a write must not change the caller's memory.
//
// The random faults of a queue's n-th block depend only on the seed, the drive, the queue and n. A block may
// have several faults, but an error excludes all others except a delay, and a torn write is not short as
// well.
//
// Threads: as the inner queue. Invariant: a block that has begun is in the inner queue, in held_ or in
// failed_.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "io/delayed_blocks.hpp"
#include "io/queue.hpp"
#include "ziggurat/base/buffer.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/units.hpp"

namespace zg::io {
namespace {

constexpr auto kLongestDelay = std::chrono::microseconds(2000);
// Partial transfers end at a multiple of this; but the inner queue gets whole pages only.
constexpr std::int64_t kSector = 512;

// The random decisions about one block.
class Dice {
 public:
  Dice(const NamedRandom& random, std::uint64_t block)
      : random_(random),
        block_(block),
        first_(random.block(4 * block)),
        second_(random.block(4 * block + 1)) {}
  bool error(double rate) const { return hits(first_[0], rate); }
  bool interrupt(double rate) const { return hits(first_[1], rate); }
  bool part(double rate) const { return hits(first_[2], rate); }
  bool delay(double rate) const { return hits(first_[3], rate); }
  bool torn(double rate) const { return hits(second_[0], rate); }
  bool flip(double rate) const { return hits(second_[1], rate); }
  // A number below `bound`, independent for each kind of fault.
  std::int64_t below(Fault kind, std::int64_t bound) const {
    const Philox4 draw = random_.block(4 * block_ + (kind == Fault::kDelay || kind == Fault::kFlip ? 2 : 3));
    const std::size_t at = kind == Fault::kDelay || kind == Fault::kTorn ? 0 : 2;
    const std::uint64_t x = (std::uint64_t{draw[at + 1]} << 32) | draw[at];
    return static_cast<std::int64_t>(x % static_cast<std::uint64_t>(bound));
  }

 private:
  // Never at rate 0, always at rate 1.
  static bool hits(std::uint32_t die, double rate) { return (die + 0.5) * 0x1p-32 < rate; }

  const NamedRandom& random_;
  const std::uint64_t block_;
  const Philox4 first_, second_;
};

struct Rate {
  const char* name;
  double value;
};
std::array<Rate, 6> rates_of(const FaultModel& m) {
  return {{{"errors", m.error_rate},
           {"interrupts", m.interrupt_rate},
           {"short", m.short_rate},
           {"late", m.delay_rate},
           {"torn", m.torn_rate},
           {"flipped", m.flip_rate}}};
}

void check(const FaultModel& m) {
  const auto refuse = [](std::string what, const char* hint) {
    throw Error(Errc::kUsage, "injected faults", std::move(what), hint);
  };
  for (const Rate& rate : rates_of(m)) {
    if (!(rate.value >= 0 && rate.value <= 1)) refuse(fmt::format("a rate of {}", rate.value), "0 to 1");
  }
  if (m.error <= 0) refuse(fmt::format("error {}", m.error), "an errno, above 0");
  for (const FaultRule& rule : m.rules) {
    if (rule.error <= 0) refuse(fmt::format("a rule with error {}", rule.error), "an errno, above 0");
    if (rule.fault == Fault::kTorn && rule.op == Op::kRead)
      refuse("a rule for torn reads", "writes are torn");
  }
}

class FaultQueue final : public Queue {
 public:
  FaultQueue(std::unique_ptr<Queue> inner, int depth, const FaultModel& model, int drive, int queue)
      : inner_(std::move(inner)),
        model_(model),
        drive_(drive),
        random_(model.seed, fmt::format("io faults of drive {}, queue {}", drive, queue)),
        order_(model.seed, fmt::format("io order of drive {}, queue {}", drive, queue)),
        hits_(model.rules.size()),
        flights_(static_cast<std::size_t>(depth)) {
    check(model);
    delays_ = model.delay_rate > 0;
    for (const FaultRule& rule : model.rules) delays_ |= rule.fault == Fault::kDelay;
    failed_.reserve(flights_.size());
    held_.reserve(flights_.size());
    from_inner_.reserve(flights_.size());
  }

  void begin(const Block& block) override {
    const Dice dice(random_, static_cast<std::uint64_t>(begun_));
    const int error = error_of(block, dice);
    const bool late = rule_hits(Fault::kDelay, block) || dice.delay(model_.delay_rate);
    const auto delay = late ? kLongestDelay / 256 * (1 + dice.below(Fault::kDelay, 256)) : Clock::duration(0);
    if (error == 0) {
      begin_inner(block, dice, delay);
    } else if (late) {
      held_.push(Clock::now() + delay, {block.id, -std::int64_t{error}});
    } else {
      failed_.push_back({block.id, -std::int64_t{error}});
    }
    ++begun_;
  }

  void reap(std::vector<BlockDone>& done, Clock::time_point deadline) override {
    const auto first_new = static_cast<std::ptrdiff_t>(done.size());
    done.insert(done.end(), failed_.begin(), failed_.end());
    if (!failed_.empty()) deadline = kNoWait;
    failed_.clear();
    if (!held_.empty()) deadline = std::min(deadline, held_.next_due());
    inner_->reap(from_inner_, deadline);
    const auto now = delays_ ? Clock::now() : Clock::time_point();
    for (BlockDone& block : from_inner_) {
      const auto delay = end_inner(block);
      if (delay == Clock::duration(0)) {
        done.push_back(block);
      } else {
        held_.push(now + delay, block);
      }
    }
    from_inner_.clear();
    held_.pop_due(now, done);
    if (delays_) shuffle(done, first_new);
  }

  void wake() override { inner_->wake(); }
  std::string register_memory(void* data, std::int64_t bytes) override {
    return inner_->register_memory(data, bytes);
  }
  void unregister_memory(void* data) override { inner_->unregister_memory(data); }
  void end() override { inner_->end(); }
  std::string features() const override {
    std::string text = fmt::format("{}, injected faults (seed {}", inner_->features(), model_.seed);
    for (const Rate& rate : rates_of(model_)) {
      if (rate.value > 0) text += fmt::format(", {} {}", rate.name, rate.value);
    }
    if (model_.fail_after >= 0) text += fmt::format(", failing after {}", model_.fail_after);
    if (!model_.rules.empty())
      text += fmt::format(", {} rule{}", model_.rules.size(), model_.rules.size() == 1 ? "" : "s");
    return text + ")";
  }

 private:
  // A block in the inner queue.
  struct Flight {
    Block block;               // as it was begun there
    std::int64_t moved = 0;    // bytes to report if the inner queue moves the whole block
    Clock::duration delay{0};  // how long it is held back after that
    std::int64_t flip = -1;    // chooses the bit to flip in what was read; -1: none
    Buffer copy;               // written instead of the caller's bytes
  };

  // Whether a rule injects this fault into this block. Only the first rule that matches counts the block.
  bool rule_hits(Fault fault, const Block& block) {
    for (std::size_t i = 0; i < hits_.size(); ++i) {
      const FaultRule& rule = model_.rules[i];
      if (rule.fault != fault || !is_for(rule, block) || hits_[i] == rule.count) continue;
      ++hits_[i];
      last_hit_ = &rule;
      return true;
    }
    return false;
  }
  bool is_for(const FaultRule& rule, const Block& block) const {
    return (rule.drive < 0 || rule.drive == drive_) && rule.op.value_or(block.op) == block.op &&
           block.offset + block.bytes > rule.from && (rule.to < 0 || block.offset < rule.to) &&
           begun_ >= rule.first_block;
  }

  // The errno to fail with; 0: none.
  int error_of(const Block& block, const Dice& dice) {
    // EAGAIN and EINTR alternate, also if the block fails for another reason, so that the errno depends on
    // the dice alone.
    const bool interrupted = dice.interrupt(model_.interrupt_rate);
    if (interrupted) again_ = !again_;
    if (rule_hits(Fault::kError, block)) return last_hit_->error;
    if ((model_.fail_after >= 0 && begun_ >= model_.fail_after) || dice.error(model_.error_rate))
      return model_.error;
    if (!interrupted) return 0;
    return again_ ? EAGAIN : EINTR;
  }

  void begin_inner(const Block& block, const Dice& dice, Clock::duration delay) {
    Flight& flight = flights_[block.id];
    flight.block = block;
    flight.moved = block.bytes;
    flight.delay = delay;
    flight.flip = -1;
    if (block.op == Op::kWrite && (rule_hits(Fault::kTorn, block) || dice.torn(model_.torn_rate))) {
      tear(flight, dice);
    } else if (rule_hits(Fault::kShort, block) || dice.part(model_.short_rate)) {
      shorten(flight, dice);
    }
    if (rule_hits(Fault::kFlip, block) || dice.flip(model_.flip_rate)) {
      flight.flip = dice.below(Fault::kFlip, INT64_MAX);
      if (block.op == Op::kWrite) {
        copy_bytes(flight);
        flip_bit(flight, std::min(flight.moved, flight.block.bytes));
      }
    }
    inner_->begin(flight.block);
  }

  // Drops the last pages of a block, which keep their old contents. Of a block of one page, whose old
  // contents are not known here, the last sectors get wrong bytes instead.
  void tear(Flight& flight, const Dice& dice) {
    const std::int64_t pages = flight.block.bytes / Engine::alignment();
    if (pages > 1) {
      flight.block.bytes = (1 + dice.below(Fault::kTorn, pages - 1)) * Engine::alignment();
      return;
    }
    const std::int64_t kept = (1 + dice.below(Fault::kTorn, flight.block.bytes / kSector - 1)) * kSector;
    copy_bytes(flight);
    for (std::int64_t i = kept; i < flight.block.bytes; ++i)
      flight.block.data[i] = static_cast<char>(~flight.block.data[i]);
  }

  // Reports any smaller number of sectors; at least a page, if the block has several, so that the engine
  // advances even when all blocks are short. The inner queue moves whole pages, so the end of the last one
  // moves twice.
  void shorten(Flight& flight, const Dice& dice) {
    const std::int64_t most = flight.block.bytes - kSector;
    const std::int64_t least = flight.block.bytes > Engine::alignment() ? Engine::alignment() : kSector;
    flight.moved = least + kSector * dice.below(Fault::kShort, (most - least) / kSector + 1);
    flight.block.bytes = round_up(flight.moved, Engine::alignment());
  }

  void copy_bytes(Flight& flight) {
    if (flight.copy.data() != nullptr) return;
    if (!spare_.empty()) {
      flight.copy = std::move(spare_.back());
      spare_.pop_back();
    }
    flight.copy.reserve(flight.block.bytes);
    std::memcpy(flight.copy.data(), flight.block.data, static_cast<std::size_t>(flight.block.bytes));
    flight.block.data = flight.copy.data();
  }

  static void flip_bit(Flight& flight, std::int64_t within) {
    const std::int64_t bit = flight.flip % (8 * within);
    flight.block.data[bit / 8] = static_cast<char>(flight.block.data[bit / 8] ^ (1 << (bit % 8)));
  }

  // Changes the inner queue's report into the one for the caller; returns how long it is held back.
  Clock::duration end_inner(BlockDone& done) {
    Flight& flight = flights_[done.id];
    done.result = done.result == flight.block.bytes ? flight.moved : std::min(done.result, flight.moved);
    if (flight.flip >= 0 && flight.block.op == Op::kRead && done.result > 0) flip_bit(flight, done.result);
    if (flight.copy.data() != nullptr) spare_.push_back(std::exchange(flight.copy, Buffer()));
    return flight.delay;
  }

  void shuffle(std::vector<BlockDone>& done, std::ptrdiff_t from) {
    for (auto i = static_cast<std::ptrdiff_t>(done.size()) - 1; i > from; --i) {
      const auto other =
          static_cast<std::ptrdiff_t>(order_.below(shuffled_++, static_cast<std::uint64_t>(i - from + 1)));
      std::swap(done[static_cast<std::size_t>(i)], done[static_cast<std::size_t>(from + other)]);
    }
  }

  const std::unique_ptr<Queue> inner_;
  const FaultModel model_;
  const int drive_;
  const NamedRandom random_, order_;
  std::int64_t begun_ = 0;
  std::uint64_t shuffled_ = 0;
  bool delays_ = false;             // the model has delays
  bool again_ = false;              // the last interrupt was EAGAIN
  std::vector<std::int64_t> hits_;  // by rule
  const FaultRule* last_hit_ = nullptr;
  std::vector<Flight> flights_;  // by block id
  std::vector<Buffer> spare_;    // unused copies
  std::vector<BlockDone> failed_, from_inner_;
  DelayedBlocks held_;
};

}  // namespace

bool injects_anything(const FaultModel& model) {
  const auto rates = rates_of(model);
  return model.fail_after >= 0 || !model.rules.empty() ||
         std::any_of(rates.begin(), rates.end(), [](const Rate& rate) { return rate.value > 0; });
}

std::unique_ptr<Queue> make_fault_queue(std::unique_ptr<Queue> inner, int depth, const FaultModel& model,
                                        int drive, int queue) {
  return std::make_unique<FaultQueue>(std::move(inner), depth, model, drive, queue);
}

}  // namespace zg::io
