#include "ziggurat/engine/schedule.hpp"

#include "ziggurat/engine/layout.hpp"

namespace zg {

const char* name_of(OpKind kind) {
  static constexpr const char* kNames[] = {
      "initialize", "update",   "embedding",          "forward",         "head",
      "loss",       "backward", "embedding backward", "finish gradient", "gather"};
  return kNames[static_cast<std::size_t>(kind)];
}

Schedule initialize_schedule(const ScheduleShape& shape) {
  Schedule s;
  for (std::int32_t u = 0; u <= shape.head(); ++u) s.push_back({OpKind::kInitialize, u});
  return s;
}

Schedule flush_schedule(const ScheduleShape& shape) {
  Schedule s;
  for (std::int32_t u = 0; u <= shape.head(); ++u) s.push_back({OpKind::kUpdate, u});
  return s;
}

// Micro-batches pass through the layers in groups; a whole group passes each layer before the next one.
// Layer-major, all micro-batches are one group; micro-batch-major, each is a group of its own.
Schedule train_schedule(const ScheduleShape& shape, bool updates) {
  Schedule s;
  const std::int32_t layers = shape.layers, all = shape.micro_batches;
  const std::int32_t group = shape.accumulation == Accumulation::kLayerMajor ? all : 1;
  const bool deferred = updates && shape.timing == UpdateTiming::kDeferred;
  const bool early = updates && shape.timing == UpdateTiming::kEarly;
  const auto update = [&](std::int32_t unit) { s.push_back({OpKind::kUpdate, unit}); };
  for (std::int32_t begin = 0; begin < all; begin += group) {
    const bool first_group = begin == 0, last_group = begin + group == all;
    const bool again = shape.sharded && !shape.keep_weights;  // gathered for each pass
    const auto gather = [&](std::int32_t unit, bool backward = false) {
      if (!shape.sharded || !(again || (first_group && !backward))) return;
      // Head and embedding are gathered once for all passes of a group, unless the embedding is tied.
      const bool once = unit == shape.head() || (unit == 0 && !shape.tied);
      const bool last =
          shape.timing != UpdateTiming::kEarly && (!again || (last_group && (backward || once)));
      s.push_back({OpKind::kGather, unit, 0, false, last});
    };
    const auto pass = [&](OpKind kind, std::int32_t unit, bool backward) {
      // Kept weights are used until the last backward; the embedding's, unless tied, are not used there.
      const bool forward = kind == OpKind::kForward || (kind == OpKind::kEmbedding && shape.tied);
      for (std::int32_t m = begin; m < begin + group; ++m) {
        const bool drop = shape.sharded && kind != OpKind::kEmbeddingBackward &&
                          m == (again ? begin + group : all) - 1 && (again || !forward);
        // Whether this is the last read of the weight before its update. An early update comes within the
        // step, and the weight that it writes is read by the next step.
        const bool last = kind != OpKind::kForward && kind != OpKind::kEmbeddingBackward && m == all - 1 &&
                          shape.timing != UpdateTiming::kEarly;
        s.push_back({kind, unit, m, backward && m == 0, last, drop});
      }
    };
    const auto finish = [&](std::int32_t unit) {
      if (last_group) s.push_back({OpKind::kFinishGradient, unit});
    };
    // A deferred update is one unit ahead of the forward, so that both run at the same time.
    if (deferred && first_group) update(0), update(1);
    gather(0);
    pass(OpKind::kEmbedding, 0, false);
    for (std::int32_t l = 0; l < layers; ++l) {
      if (deferred && first_group) update(l + 2);
      gather(l + 1);
      pass(OpKind::kForward, l + 1, false);
    }
    gather(shape.head());
    if (shape.tied) gather(0, true);
    pass(OpKind::kHead, shape.head(), true);
    finish(shape.head());
    // An early update is one unit behind the backward, so that both run at the same time.
    for (std::int32_t l = layers - 1; l >= 0; --l) {
      gather(l + 1, true);
      pass(OpKind::kBackward, l + 1, true);
      finish(l + 1);
      if (early && last_group) update(l + 2);
    }
    pass(OpKind::kEmbeddingBackward, 0, true);
    finish(0);
  }
  if (early) update(1), update(0);
  return s;
}

Schedule evaluate_schedule(const ScheduleShape& shape) {
  Schedule s;
  const auto gather = [&](std::int32_t unit) {
    if (shape.sharded) s.push_back({OpKind::kGather, unit});
  };
  const auto pass = [&](OpKind kind, std::int32_t unit, bool last) {
    for (std::int32_t m = 0; m < shape.micro_batches; ++m)
      s.push_back({kind, unit, m, false, last, shape.sharded && m + 1 == shape.micro_batches});
  };
  gather(0);
  pass(OpKind::kEmbedding, 0, false);
  for (std::int32_t l = 0; l < shape.layers; ++l) {
    gather(l + 1);
    pass(OpKind::kForward, l + 1, true);
  }
  gather(shape.head());
  if (shape.tied) gather(0);
  pass(OpKind::kHeadLoss, shape.head(), false);
  return s;
}

}  // namespace zg
