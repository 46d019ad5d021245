// A thread of the model test: random operations on a ModelStore, with every content compared.
#pragma once
#include <optional>

#include "store/store_model.hpp"

namespace zg::test {

class ModelWorker {
 public:
  ModelWorker(ModelStore& rig, int number, std::uint64_t seed)
      : rig_(rig),
        store_(*rig.store),
        number_(number),
        random_(seed),
        segments_(rig.segments()),
        stream_(*rig.device) {}

  // Works until so many operations are done or the store has failed; says whether it has failed.
  bool run(std::int64_t operations, std::atomic<std::int64_t>& counter) {
    try {
      while (count.operations < operations) {
        if (number_ == 0 && below(random_, 20) == 0) {
          step();
        } else {
          operation();
        }
        counter.fetch_add(1);
      }
      stream_.synchronize();
    } catch (const Error& e) {
      if (e.code() != Errc::kIo) rig_.truth->wrong(e.what());
      failed_ = true;
    }
    stream_.synchronize();
    counter = -1;
    return failed_;
  }

  ModelCount count;

 private:
  SegmentId pick() {
    return segments_[static_cast<std::size_t>(below(random_, static_cast<int>(segments_.size())))];
  }
  AccessStep some_access() {
    const SegmentId id = pick();
    const int kind = below(random_, 10);
    return {id, rig_.some_tier(random_, id),
            kind < 5   ? Access::kRead
            : kind < 8 ? Access::kWrite
                       : Access::kOverwrite,
            false};
  }

  void operation() {
    ++count.operations;
    const int what = below(random_, 100);
    if (what < 60) {
      single(some_access());
    } else if (what < 75) {
      together();
    } else if (what < 83) {
      nested();
    } else if (what < 92) {
      const SegmentId id = pick();
      store_.prefetch(id, rig_.some_tier(random_, id));
      ++count.prefetches;
    } else if (what < 96) {
      pin();
    } else {
      discard();
    }
  }

  // Null where the segment is volatile and has no content now. Other errors are thrown.
  std::optional<Lease> take(const AccessStep& a, Stream* consumer) {
    try {
      Lease lease = store_.acquire(a.segment, a.tier, a.access, consumer);
      ++count.leases;
      return lease;
    } catch (const Error& e) {
      if (!is_absent(e) || !rig_.is_volatile(a.segment)) throw;
      ++count.no_content;
      return std::nullopt;
    }
  }
  static bool is_absent(const Error& e) {
    return e.code() == Errc::kUsage && std::string(e.what()).find("has no content") != std::string::npos;
  }

  void single(const AccessStep& a) {
    const bool on_stream = below(random_, 3) == 0;
    std::optional<Lease> lease = take(a, on_stream ? stream_.get() : nullptr);
    if (!lease) return;
    use({&a, 1}, {&*lease, 1}, on_stream);
  }

  void use(std::span<const AccessStep> accesses, std::span<Lease> leases, bool on_stream) {
    for (std::size_t i = 0; i < leases.size(); ++i) {
      const AccessStep& a = accesses[i];
      const Leased at(a, leases[i]);
      const auto work = [truth = rig_.truth.get(), a, bytes = at.bytes](void* data) {
        truth->work(a.segment, a.access, data, bytes);
      };
      on_stream ? stream_.enqueue(at, work) : work_on(*rig_.device, at, work);
    }
    for (Lease& lease : leases) on_stream ? stream_.release(lease) : lease.release();
  }

  // Where there is little room: two segments of one tier, which always fit.
  void together() {
    std::vector<AccessStep> accesses;
    const int wanted = rig_.tight() ? 2 : 2 + below(random_, 3);
    const Tier tier = below(random_, 2) == 0 ? Tier::kDevice : Tier::kHost;
    for (int tries = 0; tries < 20 && static_cast<int>(accesses.size()) < wanted; ++tries) {
      AccessStep a = some_access();
      if (rig_.tight() && rig_.segment(a.segment).lowest != Tier::kNvme) continue;
      if (rig_.tight()) a.tier = tier;
      const auto same = [&](const AccessStep& b) { return b.segment == a.segment; };
      if (std::none_of(accesses.begin(), accesses.end(), same)) accesses.push_back(a);
    }
    const bool on_stream = below(random_, 3) == 0;
    std::vector<Lease> leases;
    try {
      store_.acquire(accesses, leases, on_stream ? stream_.get() : nullptr);
    } catch (const Error& e) {
      const auto comes_and_goes = [&](const AccessStep& a) { return rig_.is_volatile(a.segment); };
      if (!is_absent(e) || std::none_of(accesses.begin(), accesses.end(), comes_and_goes)) throw;
      if (!leases.empty()) rig_.truth->wrong("leases came with an error");
      ++count.no_content;
      return;
    }
    count.leases += static_cast<std::int64_t>(leases.size());
    ++count.together;
    use(accesses, leases, on_stream);
  }

  // Holds one lease and asks for another: an error where that closes a circle of waits, or exceeds the room.
  void nested() {
    const AccessStep outer = some_access(), inner = some_access();
    std::optional<Lease> first = take(outer, nullptr);
    if (!first) return;
    ++count.nested;
    try {
      std::optional<Lease> second = take(inner, nullptr);
      if (second && outer.segment == inner.segment &&
          (outer.access != Access::kRead || inner.access != Access::kRead))
        rig_.truth->wrong("two leases at once, of which one writes");
      if (second) use({&inner, 1}, {&*second, 1}, false);
    } catch (const Error& e) {
      if (e.code() == Errc::kUsage &&
          std::string(e.what()).find("release leases first") != std::string::npos) {
        ++count.circles;
      } else if (e.code() == Errc::kMemory && rig_.tight()) {
        ++count.no_room;
      } else {
        throw;
      }
    }
    use({&outer, 1}, {&*first, 1}, false);
  }

  void pin() {
    const auto most = static_cast<std::size_t>(number_ == 0 ? rig_.most_pins() : 0);
    if (!pins_.empty() && (pins_.size() >= most || below(random_, 2) == 0)) {
      pins_.erase(pins_.begin());
    } else if (most > 0) {
      const SegmentId id = pick();
      pins_.push_back(store_.pin(id, rig_.some_tier(random_, id)));
      ++count.pins;
    }
  }

  void discard() {
    const SegmentId id = pick();
    if (!rig_.is_volatile(id)) return;
    store_.discard(id);
    ++count.discards;
  }

  // A step repeats most of the one before.
  void step() {
    if (script_.empty()) {
      for (int i = 0; i < 24; ++i) script_.push_back(some_access());
      for (int i = 0; i < 6; ++i) other_script_.push_back(some_access());
    }
    ++count.steps;
    const bool other = below(random_, 4) == 0;
    std::vector<AccessStep> now = other ? other_script_ : script_;
    if (below(random_, 3) == 0)
      std::swap(now[static_cast<std::size_t>(below(random_, 6))],
                now[static_cast<std::size_t>(below(random_, 6))]);
    const std::size_t end = below(random_, 6) == 0
                                ? static_cast<std::size_t>(below(random_, static_cast<int>(now.size())))
                                : now.size();
    store_.step_begin(other ? "evaluation" : "step");
    for (std::size_t i = 0; i < end; ++i) {
      const int deviation = below(random_, 30);
      if (deviation == 0) continue;
      if (deviation == 1) single(some_access());
      if (deviation == 2) discard();
      single(now[i]);
      ++count.operations;
    }
    store_.step_end();
  }

  ModelStore& rig_;
  TensorStore& store_;
  const int number_;
  Random random_;
  const std::vector<SegmentId> segments_;
  std::vector<AccessStep> script_, other_script_;
  std::vector<Pin> pins_;
  bool failed_ = false;
  WorkStream stream_;
};

}  // namespace zg::test
