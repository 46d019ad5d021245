#include "ziggurat/step/schedule.hpp"

#include <algorithm>

#include "ziggurat/step/layout.hpp"

namespace zg {
namespace {

OpKind forward_of(const ScheduleShape& shape, std::int32_t unit, OpKind head) {
  return unit == 0 ? OpKind::kEmbedding : unit == shape.head() ? head : OpKind::kForward;
}

Schedule each_unit(const ScheduleShape& shape, OpKind kind) {
  Schedule s;
  for (std::int32_t u = 0; u <= shape.head(); ++u) s.push_back({kind, u});
  return s;
}

// The unit whose Materialize mode decides Slot::drop: the unit itself, but for a tied head whose own weight
// is not materialized, the embedding.
std::int32_t made_for(const ScheduleShape& shape, std::int32_t unit) {
  ZG_ASSERT(unit != shape.head() || !shape.tied || !shape.materializes(unit) || !shape.materializes(0) ||
                shape.of(unit) == shape.of(0),
            "a slot of the head drops its weight and the embedding's together");
  return unit == shape.head() && shape.tied && !shape.materializes(unit) ? 0 : unit;
}

}  // namespace

const char* name_of(OpKind kind) {
  static constexpr const char* kNames[] = {"initialize",
                                           "save",
                                           "update",
                                           "embedding",
                                           "forward",
                                           "head",
                                           "loss",
                                           "backward",
                                           "backward input",
                                           "backward weight",
                                           "embedding backward",
                                           "finish gradient",
                                           "materialize",
                                           "send",
                                           "receive"};
  return kNames[static_cast<std::size_t>(kind)];
}

Schedule initialize_schedule(const ScheduleShape& shape) {
  return each_unit(shape, OpKind::kInitialize);
}

Schedule save_schedule(const ScheduleShape& shape) {
  return each_unit(shape, OpKind::kSave);
}

Schedule flush_schedule(const ScheduleShape& shape) {
  return each_unit(shape, OpKind::kUpdate);
}

// Micro-batches pass through the layers in groups; a whole group passes each layer before the next layer.
// With layer-major accumulation, all micro-batches are one group; with micro-batch-major, each is a group of
// its own.
Schedule train_schedule(const ScheduleShape& shape, bool updates) {
  Schedule s;
  const std::int32_t blocks = shape.blocks, all = shape.micro_batches, ahead = shape.gather_ahead;
  const std::int32_t group = shape.accumulation == Accumulation::kLayerMajor ? all : 1;
  const bool deferred = updates && shape.timing == UpdateTiming::kDeferred;
  const bool early = updates && shape.timing == UpdateTiming::kEarly;
  const auto update = [&](std::int32_t unit) {
    if (unit <= shape.head()) s.push_back({OpKind::kUpdate, unit});
  };
  for (std::int32_t begin = 0; begin < all; begin += group) {
    const bool first_group = begin == 0, last_group = begin + group == all;
    const auto again = [&](std::int32_t unit) { return shape.of(unit) == Materialize::kForEachPass; };
    // `last`: the weight is made for the last time in the step.
    const auto make_now = [&](std::int32_t unit, bool last) {
      s.push_back({OpKind::kMaterialize, unit, 0, false, last && shape.timing != UpdateTiming::kEarly});
    };
    const auto make = [&](std::int32_t unit) {
      if (unit > shape.head()) return;
      // The head's weight is made once for all passes of a group. So are the embedding's, unless it is tied,
      // and the weights of units that no backward passes.
      const bool once = unit == shape.head() || unit < shape.lowest || (unit == 0 && !shape.tied);
      if (shape.materializes(unit) && (again(unit) || first_group))
        make_now(unit, !again(unit) || (last_group && once));
      if (unit == shape.head() && shape.tied && again(0)) make_now(0, last_group);
    };
    const auto make_again = [&](std::int32_t unit) {
      if (unit > 0 && unit >= shape.lowest && again(unit)) make_now(unit, last_group);
    };
    const auto pass = [&](OpKind kind, std::int32_t unit, bool backward) {
      // A weight that is kept is used until the last backward. The embedding's backward does not read its
      // weight; only a tied head does.
      const bool below = unit < shape.lowest;  // no backward follows
      const bool forward = (kind == OpKind::kForward && !below) || (kind == OpKind::kEmbedding && shape.tied);
      const std::int32_t made = made_for(shape, unit);
      for (std::int32_t m = begin; m < begin + group; ++m) {
        const bool drop = shape.materializes(made) && kind != OpKind::kEmbeddingBackward &&
                          m == (again(made) ? begin + group : all) - 1 && (again(made) || !forward);
        // Whether this is the last read of the weight before its update. An early update comes within the
        // step, and the weight that it writes is read by the next step.
        const bool last = kind == OpKind::kForward ? below
                                                   : kind != OpKind::kEmbeddingBackward && m == all - 1 &&
                                                         shape.timing != UpdateTiming::kEarly;
        s.push_back({kind, unit, m, backward && m == 0, last, drop});
      }
    };
    const auto finish = [&](std::int32_t unit) {
      if (last_group) s.push_back({OpKind::kFinishGradient, unit});
    };
    for (std::int32_t u = 0; u < ahead; ++u) {
      if (deferred && first_group) update(u);
      make(u);
    }
    if (deferred && first_group) update(ahead);
    for (std::int32_t u = 0; u <= shape.head(); ++u) {
      // A deferred update is issued one unit before its weight is needed, so that it runs while the unit
      // before is computed.
      if (deferred && first_group) update(u + ahead + 1);
      make(u + ahead);
      for (std::int32_t v = blocks; u == shape.head() && v > blocks - ahead; --v) make_again(v);
      pass(forward_of(shape, u, OpKind::kHead), u, u == shape.head());
    }
    finish(shape.head());
    // An early update is issued one unit after the backward, so that both run at the same time.
    for (std::int32_t u = blocks; u > 0 && u >= shape.lowest; --u) {
      make_again(u - ahead);
      pass(OpKind::kBackward, u, true);
      finish(u);
      if (early && last_group) update(u + 1);
    }
    if (shape.lowest > 0) continue;
    pass(OpKind::kEmbeddingBackward, 0, true);
    finish(0);
  }
  if (early) update(std::max(1, shape.lowest)), update(0);
  return s;
}

Schedule evaluate_schedule(const ScheduleShape& shape) {
  Schedule s;
  const auto make = [&](std::int32_t unit) {
    if (unit > shape.head()) return;
    if (shape.materializes(unit)) s.push_back({OpKind::kMaterialize, unit});
    if (unit == shape.head() && shape.tied && shape.materializes(0)) s.push_back({OpKind::kMaterialize, 0});
  };
  for (std::int32_t u = 0; u < shape.gather_ahead; ++u) make(u);
  for (std::int32_t u = 0; u <= shape.head(); ++u) {
    make(u + shape.gather_ahead);
    const OpKind kind = forward_of(shape, u, OpKind::kHeadLoss);
    const bool made = shape.materializes(made_for(shape, u));
    for (std::int32_t m = 0; m < shape.micro_batches; ++m)
      s.push_back({kind, u, m, false, kind == OpKind::kForward, made && m + 1 == shape.micro_batches});
  }
  return s;
}

}  // namespace zg
