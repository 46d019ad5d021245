// Runs programs on a store, with work on two streams that checks and modifies contents, and compares with a
// sequential model.
#pragma once
#include <mutex>
#include <string>

#include "store/programs.hpp"
#include "store/rig.hpp"

namespace zg::test {

// Programs that run one after the other, between two stretches without a program.
struct Scenario {
  TensorTable table{0};
  std::vector<bool> given;
  std::vector<Program> distinct;
  std::vector<int> order;  // indices into distinct

  std::vector<const Program*> programs() const {
    std::vector<const Program*> all;
    for (const int i : order) all.push_back(&distinct[static_cast<std::size_t>(i)]);
    return all;
  }
};

inline Scenario random_scenario(Random& random, int drives, int segments, const ProgramShape& shape) {
  Scenario s;
  s.table = random_table(random, drives, segments, std::max(some_granule(random), test_granule()));
  s.given = random_given(random, segments);
  for (const char* name : {"p", "q"})
    s.distinct.push_back(random_program(random, name, s.table, s.given, shape));
  s.order = {0, 0, 0, 1, 0, 1, 1};
  return s;
}

inline Tier home_of(const TensorTable& table, SegmentId id) {
  return table.segment(id).lowest == Tier::kDevice ? Tier::kDevice : Tier::kHost;
}

// The traffic of the whole scenario; nullopt if it does not fit.
inline std::optional<LinkBytes> dry_run(const Scenario& s, const Budgets& budgets) {
  Residency residency(s.table, budgets);
  std::vector<Action> ignored;
  const auto never_held = [](SegmentId, Tier) { return false; };
  const auto touch_all = [&](Access access, auto&& wanted) {
    for (SegmentId id = 0; id < s.table.segment_count(); ++id) {
      if (wanted(id) && residency.decide_free({id, home_of(s.table, id), access, false}, never_held, ignored))
        return false;
    }
    return true;
  };
  if (!touch_all(Access::kOverwrite, [&](SegmentId id) { return s.given[static_cast<std::size_t>(id)]; }))
    return std::nullopt;
  if (decide_all(residency, s.programs(), 0, [](const auto&...) {})) return std::nullopt;
  residency.set_future(nullptr, nullptr);
  if (!touch_all(Access::kRead, [&](SegmentId id) { return residency.copies().has_content(id); }))
    return std::nullopt;
  return residency.copies().traffic();
}

// A multiple of the unit that fits where one unit less does not, found by halving: a GPU's segments are of
// megabytes, and page by page there are tens of thousands of dry runs.
template <class Fits>
std::int64_t smallest_that_fits(std::int64_t unit, Fits&& fits) {
  if (fits(0)) return 0;
  std::int64_t low = 0, high = 1;
  for (; !fits(high * unit); high *= 2) low = high;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (fits(middle * unit) ? high : low) = middle;
  }
  return high * unit;
}

// The smallest device budget with which host memory for everything suffices, and the smallest host budget for
// it.
inline Budgets smallest_budgets(const Scenario& s, bool direct = false) {
  Budgets budgets{0, s.table.total_charge(Tier::kHost), direct};
  const auto search = [&](std::int64_t& budget, std::int64_t unit) {
    budget = smallest_that_fits(unit, [&](std::int64_t bytes) {
      budget = bytes;
      return dry_run(s, budgets).has_value();
    });
  };
  search(budgets.device, s.table.device_granule());
  search(budgets.host, 4096);
  return budgets;
}

class ModelRun {
 public:
  ModelRun(Rig& rig, const Scenario& scenario, std::uint64_t seed)
      : rig_(rig),
        scenario_(scenario),
        random_(seed),
        versions_(scenario.given.size()),
        valid_(scenario.given) {}

  void operator()() {
    TensorStore& store = *rig_.store;
    const Deadline deadline(60, [&] { return store.state(); });
    for (std::size_t id = 0; id < valid_.size(); ++id) {
      if (valid_[id]) outside(static_cast<SegmentId>(id), Access::kOverwrite);
    }
    const auto programs = scenario_.programs();
    for (std::size_t i = 0; i < programs.size(); ++i) {
      store.run(programs[i], i + 1 < programs.size() ? programs[i + 1] : nullptr);
      for (std::int32_t op = 0; op < programs[i]->op_count(); ++op) run_op(programs[i]->op(op));
    }
    store.run(nullptr, nullptr);
    for (WorkStream& s : streams_) s.synchronize();
    for (std::size_t id = 0; id < valid_.size(); ++id) {
      EXPECT_EQ(store.has_content(static_cast<SegmentId>(id)), valid_[id])
          << rig_.table.segment_name(static_cast<SegmentId>(id));
      if (valid_[id]) outside(static_cast<SegmentId>(id), Access::kRead);
    }
    store.drain();
    rig_.within_budgets();
    std::lock_guard lock(mutex_);
    EXPECT_EQ(wrong_, 0) << first_wrong_;
  }

 private:
  struct Task {
    SegmentId id;
    Leased at;
    std::uint64_t before, after;
  };

  void outside(SegmentId id, Access access) {
    Lease lease = rig_.store->acquire(id, home_of(rig_.table, id), access);
    work_now(task_of({id, home_of(rig_.table, id), access, false}, lease));
  }

  void run_op(std::span<const AccessStep> accesses) {
    const int where = below(random_, 5);  // 2 of 5 go to each stream, 1 to the caller
    WorkStream* stream = where == 4 ? nullptr : &streams_[static_cast<std::size_t>(where % 2)];
    std::vector<Lease> leases;
    rig_.store->acquire_op(stream != nullptr ? stream->get() : nullptr, leases);
    std::vector<Task> tasks;
    for (std::size_t i = 0; i < accesses.size(); ++i) tasks.push_back(task_of(accesses[i], leases[i]));
    if (stream == nullptr) {
      for (const Task& t : tasks) work_now(t);
      return;
    }
    for (const Task& t : tasks) stream->enqueue(t.at, [this, t](void* data) { work(t, data); });
    for (Lease& lease : leases) stream->release(lease);
  }

  Task task_of(const AccessStep& a, const Lease& lease) {
    const auto at = static_cast<std::size_t>(a.segment);
    const std::uint64_t before = versions_[at];
    if (a.access != Access::kRead) ++versions_[at];
    valid_[at] = !a.last;
    return {a.segment, {a, lease}, before, versions_[at]};
  }

  void work_now(const Task& t) {
    work_on(*rig_.device, t.at, [&](void* data) { work(t, data); });
  }
  void work(const Task& t, void* data) {
    if (t.at.access != Access::kOverwrite && !holds(data, t.at.bytes, t.id, t.before)) {
      std::lock_guard lock(mutex_);
      if (wrong_++ == 0)
        first_wrong_ = fmt::format("{} is not version {}", rig_.table.segment_name(t.id), t.before);
    }
    if (t.at.access != Access::kRead) fill(data, t.at.bytes, t.id, t.after);
  }

  Rig& rig_;
  const Scenario& scenario_;
  Random random_;
  std::vector<std::uint64_t> versions_;
  std::vector<bool> valid_;
  std::mutex mutex_;
  int wrong_ = 0;
  std::string first_wrong_;
  WorkStream streams_[2] = {WorkStream(*rig_.device, "work 0"), WorkStream(*rig_.device, "work 1")};
};

}  // namespace zg::test
