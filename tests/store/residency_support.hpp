// What the tests of residency share: the actions that it decides, carried out without moving a byte.
#pragma once
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <vector>

#include "store/programs.hpp"
#include "ziggurat/store/residency.hpp"

namespace zg::test {

inline constexpr std::int64_t kPage = 4096;

// Tracks the effect of actions and checks that each is possible: memory is taken once and given back once,
// copies come from where the content is, budgets hold after every single action, and what an operation uses
// stays until it has got all of its accesses.
class Replay {
 public:
  Replay(const TensorTable& table, const Budgets& budgets)
      : table_(table), budgets_(budgets), copies_(static_cast<std::size_t>(table.segment_count())) {}

  void content(SegmentId id, Tier tier) { copies_[static_cast<std::size_t>(id)][index(tier)] = true; }

  void operator()(const std::vector<Action>& actions) {
    std::map<std::pair<SegmentId, Tier>, std::size_t> used;
    std::size_t last_use = 0;
    for (std::size_t i = 0; i < actions.size(); ++i) {
      const Action& a = actions[i];
      apply(a);
      if (a.kind == Action::Kind::kUse) {
        used[{a.segment, a.tier}] = i;
        last_use = i;
      }
    }
    for (std::size_t i = 0; i < last_use; ++i) {
      const Action& a = actions[i];
      const auto it = used.find({a.segment, a.tier});
      if (a.kind == Action::Kind::kFree && it != used.end()) {
        EXPECT_LT(i, it->second) << "what the operation uses is given away while it takes the rest";
      }
    }
  }

  std::int64_t used(Tier tier) const { return used_[index(tier)]; }
  const LinkBytes& traffic() const { return traffic_; }

 private:
  static std::size_t index(Tier tier) { return static_cast<std::size_t>(tier); }

  void apply(const Action& a) {
    const Segment& s = table_.segment(a.segment);
    auto& memory = memory_[{a.segment, a.tier}];
    auto& copies = copies_[static_cast<std::size_t>(a.segment)];
    switch (a.kind) {
      case Action::Kind::kAlloc:
        EXPECT_FALSE(memory);
        memory = true;
        used_[index(a.tier)] += s.charge_at(a.tier);
        EXPECT_LE(used_[index(a.tier)], a.tier == Tier::kDevice ? budgets_.device : budgets_.host);
        break;
      case Action::Kind::kFree:
        EXPECT_TRUE(memory);
        memory = false;
        copies[index(a.tier)] = false;
        used_[index(a.tier)] -= s.charge_at(a.tier);
        break;
      case Action::Kind::kCopy:
        EXPECT_TRUE(copies[index(a.from)]) << table_.segment_name(a.segment) << " from " << name_of(a.from);
        if (a.tier == Tier::kNvme) {
          EXPECT_EQ(s.lowest, Tier::kNvme);
        } else {
          EXPECT_TRUE(memory);
        }
        copies[index(a.tier)] = true;
        if (a.tier != Tier::kHost && a.from != Tier::kHost) {
          EXPECT_TRUE(budgets_.direct) << "no link between device and NVMe";
        }
        traffic_[link_between(a.from, a.tier)] +=
            a.from == Tier::kNvme || a.tier == Tier::kNvme ? s.charge : s.bytes;
        break;
      case Action::Kind::kUse:
        EXPECT_TRUE(memory);
        EXPECT_TRUE(a.access == Access::kOverwrite || copies[index(a.tier)]);
        if (a.access != Access::kRead) copies = {};
        copies[index(a.tier)] = true;
        break;
    }
  }

  const TensorTable& table_;
  Budgets budgets_;
  std::map<std::pair<SegmentId, Tier>, bool> memory_;
  std::vector<std::array<bool, kTiers>> copies_;
  std::array<std::int64_t, 2> used_{};
  LinkBytes traffic_;
};

inline Program trace_of(const std::vector<AccessStep>& accesses, int segments,
                        const std::string& name = "trace") {
  Program program(name);
  for (const AccessStep& a : accesses) program.add_op(std::vector<AccessStep>{a});
  program.finish(segments);
  return program;
}

// Why the operation has no room where all content lies at that tier; nullopt where it has room.
inline std::optional<NoRoom> fits(const TensorTable& table, const Budgets& budgets,
                                  const std::vector<AccessStep>& op, std::optional<Tier> content) {
  Program program("one");
  program.add_op(op);
  program.finish(table.segment_count());
  Residency residency(table, budgets);
  if (content) {
    for (SegmentId id = 0; id < table.segment_count(); ++id) residency.assume_content(id, *content);
  }
  residency.set_future(&program, nullptr);
  std::vector<Action> actions;
  const auto failure = residency.decide(0, 0, actions);
  if (!failure) residency.copies().check();
  return failure;
}

}  // namespace zg::test
