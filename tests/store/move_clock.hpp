// A driver of a MoveGraph whose moves take as long as their bytes over a link's bandwidth, by a clock of its
// own: no byte moves, no thread runs, and a day passes in as long as its decisions take.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "store/move_graph.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::test {

class MoveClock final : public MoveDriver, public MoveEvents {
 public:
  struct Machine {
    Budgets budgets;
    std::array<double, kLinks> bytes_per_second;  // by Link
    std::int64_t piece_bytes = std::int64_t{1} << 40;
    double memory_seconds = 0;  // until the system has given memory; 0: it is at hand
  };
  struct Start {  // of a copy
    double at = 0;
    Action action;
    bool operator==(const Start& o) const {
      return at == o.at && action.segment == o.action.segment && action.tier == o.action.tier &&
             action.from == o.action.from;
    }
  };

  MoveClock(const TensorTable& table, const Machine& machine)
      : residency(table, machine.budgets),
        graph(table, {.piece_bytes = machine.piece_bytes, .copies_in_flight = std::int64_t{1} << 40}, *this,
              *this),
        table_(table),
        machine_(machine) {
    graph.grow(table.segment_count());
  }

  // Runs the programs one after the other; each operation begins when its copies are there, and takes
  // `op_seconds`. Returns when the last one ends; moves may then still be under way. Negative: no room.
  double run(const std::vector<const Program*>& programs, std::int64_t depth, double op_seconds) {
    std::vector<Action> actions;
    std::int64_t decided = 0;
    for (std::size_t i = 0; i < programs.size(); ++i) {
      const Program& p = *programs[i];
      const Program* const next = i + 1 < programs.size() ? programs[i + 1] : nullptr;
      residency.set_future(&p, next);
      const std::int64_t total = std::int64_t{p.op_count()} + (next != nullptr ? next->op_count() : 0);
      for (std::int32_t op = 0; op < p.op_count(); ++op) {
        for (; decided < std::min(total, op + 1 + depth); ++decided) {
          const bool ahead = decided >= p.op_count();
          const auto number = static_cast<std::int32_t>(ahead ? decided - p.op_count() : decided);
          if (residency.decide(ahead ? 1 : 0, number, actions)) return -1;
          graph.decided(actions, Urgency::kProgram);
        }
        std::vector<ActionNode*> uses;
        for (const AccessStep& a : p.op(op)) uses.push_back(&graph.claim_use(a, nullptr));
        graph.settle();
        for (const ActionNode* use : uses) {
          while (use->state == ActionNode::State::kPending) {
            if (!step()) {
              ADD_FAILURE() << p.name() << " waits for ever at operation " << op;
              return -1;
            }
          }
        }
        const double ends = now + op_seconds;
        while (!events_.empty() && events_.begin()->first <= ends) step();
        now = ends;
        for (ActionNode* use : uses) graph.end(*use);
      }
      decided -= p.op_count();
    }
    return now;
  }

  // Carries out the next thing that happens; false: nothing will.
  bool step() {
    if (events_.empty()) return false;
    const auto first = events_.begin();
    now = first->first;
    const std::function<void()> happens = std::move(first->second);
    events_.erase(first);
    happens();
    return true;
  }
  double drain() {
    while (step()) {
    }
    return now;
  }

  Residency residency;
  MoveGraph graph;
  double now = 0;                              // seconds
  std::vector<Start> started;                  // copies, in their order
  std::array<std::int64_t, 2> used{}, peak{};  // bytes of memory, by Tier

 private:
  struct Fed {
    std::int64_t left = 0;  // bytes that are still to come
    double ends = 0;        // when those that came will have been copied
  };

  Memory take_memory(const ActionNode& node) override {
    const Tier tier = node.action.tier;
    const std::size_t t = index_of(tier);
    const std::int64_t bytes = table_.segment(node.action.segment).charge_at(tier);
    if (used[t] + bytes > (tier == Tier::kDevice ? machine_.budgets.device : machine_.budgets.host))
      return Memory::kNoRoom;
    used[t] += bytes;
    peak[t] = std::max(peak[t], used[t]);
    if (machine_.memory_seconds == 0) return Memory::kGiven;
    at(now + machine_.memory_seconds, [this, tier] { graph.memory_given(tier); });
    return Memory::kLater;
  }
  void free_memory(const ActionNode& node) override {
    expect_unused(node);
    used[index_of(node.action.tier)] -= table_.segment(node.action.segment).charge_at(node.action.tier);
  }
  bool begin(ActionNode& copy, const ActionNode* fed_by) override {
    started.push_back({now, copy.action});
    expect_unused(copy);
    const Link link = link_of(copy.action);
    const std::int64_t bytes = table_.segment(copy.action.segment).bytes;
    if (fed_by != nullptr) {
      fed_[&copy] = {bytes, now};
      for (const auto& [first, piece] : graph.queue(copy.action.segment).arrived) feed(copy, piece);
      return false;
    }
    const std::int64_t most = copy.in_pieces ? machine_.piece_bytes : bytes;
    for (std::int64_t first = 0; first < bytes; first += most) {
      const std::int64_t piece = std::min(most, bytes - first);
      const double there = occupy(link, piece);
      if (!copy.in_pieces) break;
      at(there, [this, &copy, first, piece] {
        if (ActionNode* const fed = graph.piece_arrived(copy, first, piece)) feed(*fed, piece);
      });
    }
    at(free_at_[link], [this, &copy] { graph.end(copy); });
    return false;
  }
  bool fed_whole(ActionNode& copy) override {
    at(fed_.at(&copy).ends, [this, &copy] { graph.end(copy); });
    return false;
  }
  void hurry(const ActionNode&) override {}
  void evicting(const Action&) override {}
  void granted(const ActionNode&) override {}
  void changed(SegmentId) override {}

  // What a move frees or writes is used by no operation that was decided before it, and what it reads is not
  // written by one.
  void expect_unused(const ActionNode& move) const {
    for (const ActionNode* n = move.before; n != nullptr; n = n->before) {
      if (!n->uses() || n->state == ActionNode::State::kDone) continue;
      const bool reads_it = move.copies() && move.action.from == n->action.tier;
      EXPECT_TRUE(n->action.tier != move.action.tier && (!reads_it || n->action.access == Access::kRead))
          << table_.segment_name(move.action.segment) << " is in use";
    }
  }

  void feed(ActionNode& copy, std::int64_t bytes) {
    Fed& fed = fed_.at(&copy);
    const Link link = link_of(copy.action);
    fed.ends = occupy(link, bytes);
    fed.left -= bytes;
    if (fed.left == 0 && writes_drives(link)) at(fed.ends, [this, &copy] { graph.end(copy); });
  }
  // The link moves one after the other. Returns when these bytes are there.
  double occupy(Link link, std::int64_t bytes) {
    free_at_[link] =
        std::max(now, free_at_[link]) + static_cast<double>(bytes) / machine_.bytes_per_second[link];
    return free_at_[link];
  }
  void at(double time, std::function<void()> happens) { events_.emplace(time, std::move(happens)); }

  const TensorTable& table_;
  const Machine machine_;
  std::array<double, kLinks> free_at_{};
  std::map<const ActionNode*, Fed> fed_;
  std::multimap<double, std::function<void()>> events_;
};

}  // namespace zg::test
