#include "ziggurat/engine/step_program.hpp"

#include "ziggurat/base/error.hpp"
#include "ziggurat/engine/stall.hpp"

namespace zg {

const char* name_of(OpKind kind) {
  switch (kind) {
    case OpKind::kUpdate:
      return "update";
    case OpKind::kEmbedding:
      return "embedding";
    case OpKind::kForward:
      return "forward";
    case OpKind::kHead:
      return "head";
    case OpKind::kHeadLoss:
      return "loss";
    case OpKind::kBackward:
      return "backward";
    case OpKind::kEmbeddingBackward:
      return "embedding backward";
    case OpKind::kFinishGradient:
      return "finish gradient";
  }
  return "?";
}

const char* name_of(StallCause cause) {
  static constexpr const char* kNames[] = {"reads",  "write-backs", "memory in order",
                                           "copies", "optimizer",   "other"};
  return kNames[static_cast<std::size_t>(cause)];
}

namespace {

class Emitter {
 public:
  Emitter(const Layout& layout, const char* name) : layout_(layout), out_{Program(name), {}} {}

  StepProgram finish() {
    out_.program.finish(layout_.table.segment_count());
    return std::move(out_);
  }

  // All segments of a unit's state, one operation each. The gradient is dead after the last one. `time` of
  // each: 0 beside compute.
  void update(std::int32_t unit, std::int64_t time = 0) {
    const Tier tier = layout_.update_at(unit);
    const std::int32_t n = layout_.state_segments(unit);
    for (std::int32_t i = 0; i < n; ++i) {
      const bool overwrites = i == 0 && layout_.update_rebuilds_weight(unit);
      add({OpKind::kUpdate, unit, 0, i, i == 0},
          {{layout_.whole(layout_.unit(unit).gradient), tier, Access::kRead, i == n - 1},
           {weight(unit), tier, overwrites ? Access::kOverwrite : Access::kWrite, false},
           {layout_.state_segment(unit, i), tier, Access::kWrite, false}},
          time);
    }
  }

  void embedding(std::int32_t m, bool last_use = false) {
    add({OpKind::kEmbedding, 0, m, 0, false},
        {{weight(0), Tier::kDevice, Access::kRead, last_use && !tied() && dies(0)},
         overwrite(activation(0, m))});
  }

  void forward(std::int32_t layer, std::int32_t m) {
    std::vector<AccessStep> a{read(weight(layer + 1)), read(activation(layer, m)),
                              overwrite(activation(layer + 1, m))};
    if (!layout_.options.recompute) a.push_back(overwrite(saved(layer, m)));
    add({OpKind::kForward, layer, m, 0, false}, a, products(layer + 1));
  }

  void forward_only(std::int32_t layer, std::int32_t m) {
    add({OpKind::kForward, layer, m, 0, false},
        {read(weight(layer + 1)), last(activation(layer, m)), overwrite(activation(layer + 1, m))},
        products(layer + 1));
  }

  void head_loss(std::int32_t m) {
    std::vector<AccessStep> a{read(weight(layout_.head_unit()))};
    if (tied()) a.push_back(read(weight(0)));
    a.push_back(last(activation(static_cast<std::int32_t>(layout_.layers()), m)));
    add({OpKind::kHeadLoss, 0, m, 0, false}, a, head_products());
  }

  // last_use: nobody reads the weight before it is updated.
  void head(std::int32_t m, bool first, bool last_use) {
    const std::int32_t u = layout_.head_unit();
    std::vector<AccessStep> a{{weight(u), Tier::kDevice, Access::kRead, last_use && dies(u)}};
    if (tied()) a.push_back({weight(0), Tier::kDevice, Access::kRead, last_use && dies(0)});
    a.push_back(last(activation(static_cast<std::int32_t>(layout_.layers()), m)));
    a.push_back(overwrite(gradient_of_activation(m)));
    a.push_back(add_to(accumulator(layout_.head_unit()), first));
    if (tied()) a.push_back(add_to(accumulator(0), first));
    add({OpKind::kHead, 0, m, 0, first}, a, 3 * head_products());
  }

  void backward(std::int32_t layer, std::int32_t m, bool first, bool last_use) {
    std::vector<AccessStep> a{{weight(layer + 1), Tier::kDevice, Access::kRead, last_use && dies(layer + 1)},
                              last(activation(layer, m)),
                              {gradient_of_activation(m), Tier::kDevice, Access::kWrite, false},
                              add_to(accumulator(layer + 1), first)};
    if (!layout_.options.recompute) a.push_back(last(saved(layer, m)));
    add({OpKind::kBackward, layer, m, 0, first}, a,
        (layout_.options.recompute ? 3 : 2) * products(layer + 1));
  }

  void embedding_backward(std::int32_t m, bool first) {
    add({OpKind::kEmbeddingBackward, 0, m, 0, first && !tied()},
        {last(gradient_of_activation(m)), add_to(accumulator(0), first && !tied())});
  }

  // Of a unit that is not trained the sum is dropped: its kernels make it all the same.
  void finish_gradient(std::int32_t unit) {
    std::vector<AccessStep> a{last(accumulator(unit))};
    if (layout_.unit(unit).gradient != Layout::kNone) {
      a.push_back(overwrite(layout_.whole(layout_.unit(unit).gradient)));
    }
    add({OpKind::kFinishGradient, unit, 0, 0, false}, a);
  }

 private:
  static AccessStep read(SegmentId s) { return {s, Tier::kDevice, Access::kRead, false}; }
  static AccessStep last(SegmentId s) { return {s, Tier::kDevice, Access::kRead, true}; }
  static AccessStep overwrite(SegmentId s) { return {s, Tier::kDevice, Access::kOverwrite, false}; }
  static AccessStep add_to(SegmentId s, bool first) {
    return {s, Tier::kDevice, first ? Access::kOverwrite : Access::kWrite, false};
  }
  SegmentId weight(std::int32_t unit) const { return layout_.whole(layout_.unit(unit).weight); }
  SegmentId accumulator(std::int32_t unit) const { return layout_.whole(layout_.unit(unit).accumulator); }
  // Whether an update makes the weight anew, without looking at it.
  bool dies(std::int32_t unit) const { return layout_.update_rebuilds_weight(unit); }
  // Micro-batch-major: all micro-batches use the same buffers, one after the other.
  std::size_t slot(std::int32_t m) const {
    return static_cast<std::size_t>(m % layout_.live_micro_batches());
  }
  SegmentId activation(std::int32_t layer, std::int32_t m) const {
    return layout_.whole(layout_.activation[static_cast<std::size_t>(layer)][slot(m)]);
  }
  SegmentId saved(std::int32_t layer, std::int32_t m) const {
    return layout_.whole(layout_.saved[static_cast<std::size_t>(layer)][slot(m)]);
  }
  SegmentId gradient_of_activation(std::int32_t m) const {
    return layout_.whole(layout_.activation_gradient[slot(m)]);
  }
  bool tied() const { return layout_.model->config().tied; }
  // What a forward through the unit takes: it multiplies each row by each of its parameters. All else counts
  // as nothing.
  std::int64_t products(std::int32_t unit) const {
    return layout_.model->units()[static_cast<std::size_t>(unit)].count;
  }
  std::int64_t head_products() const { return products(tied() ? 0 : layout_.head_unit()); }

  void add(const StepOp& op, const std::vector<AccessStep>& accesses, std::int64_t time = 0) {
    out_.program.add_op(accesses, time);
    out_.ops.push_back(op);
  }

  const Layout& layout_;
  StepProgram out_;
};

struct Emission {
  const Layout& layout;
  UpdateTiming timing;
  bool updates;  // whether the program updates
  // An update that follows overwrites weights before the next program reads them.
  bool weights_die() const { return timing != UpdateTiming::kEarly; }
};

// All micro-batches through a layer, then the next layer.
StepProgram layer_major(const Emission& e, const char* name) {
  Emitter out(e.layout, name);
  const auto layers = static_cast<std::int32_t>(e.layout.layers());
  const auto micro_batches = static_cast<std::int32_t>(e.layout.options.micro_batches);
  const std::int32_t units = layers + 2;
  const bool deferred = e.updates && e.timing == UpdateTiming::kDeferred;
  const bool early = e.updates && e.timing == UpdateTiming::kEarly;
  // A deferred update is one unit ahead of the compute, so that it runs beside it.
  if (deferred) out.update(0), out.update(1);
  const auto final = [&](std::int32_t m) { return e.weights_die() && m == micro_batches - 1; };
  for (std::int32_t m = 0; m < micro_batches; ++m) out.embedding(m, final(m));
  for (std::int32_t l = 0; l < layers; ++l) {
    if (deferred) out.update(l + 2);
    for (std::int32_t m = 0; m < micro_batches; ++m) out.forward(l, m);
  }
  for (std::int32_t m = 0; m < micro_batches; ++m) out.head(m, m == 0, final(m));
  out.finish_gradient(units - 1);
  // An early update is one unit behind the backward, for the same reason.
  for (std::int32_t l = layers - 1; l >= 0; --l) {
    for (std::int32_t m = 0; m < micro_batches; ++m) out.backward(l, m, m == 0, final(m));
    out.finish_gradient(l + 1);
    if (early) out.update(l + 2);
  }
  for (std::int32_t m = 0; m < micro_batches; ++m) out.embedding_backward(m, m == 0);
  out.finish_gradient(0);
  if (early) out.update(1), out.update(0);
  return out.finish();
}

// One micro-batch through all layers, then the next micro-batch.
StepProgram micro_batch_major(const Emission& e, const char* name) {
  Emitter out(e.layout, name);
  const auto layers = static_cast<std::int32_t>(e.layout.layers());
  const auto micro_batches = static_cast<std::int32_t>(e.layout.options.micro_batches);
  const bool deferred = e.updates && e.timing == UpdateTiming::kDeferred;
  const bool early = e.updates && e.timing == UpdateTiming::kEarly;
  for (std::int32_t m = 0; m < micro_batches; ++m) {
    const bool first = m == 0, final = m == micro_batches - 1;
    if (deferred && first) out.update(0), out.update(1);
    out.embedding(m, final && e.weights_die());
    for (std::int32_t l = 0; l < layers; ++l) {
      if (deferred && first) out.update(l + 2);
      out.forward(l, m);
    }
    out.head(m, first, final && e.weights_die());
    if (final) out.finish_gradient(layers + 1);
    for (std::int32_t l = layers - 1; l >= 0; --l) {
      out.backward(l, m, first, final && e.weights_die());
      if (final) out.finish_gradient(l + 1);
      if (final && early) out.update(l + 2);
    }
    out.embedding_backward(m, first);
    if (final) out.finish_gradient(0);
  }
  if (early) out.update(1), out.update(0);
  return out.finish();
}

StepProgram train_program(const Emission& e, const char* name) {
  return e.layout.options.accumulation == Accumulation::kLayerMajor ? layer_major(e, name)
                                                                    : micro_batch_major(e, name);
}

StepProgram flush_program(const Layout& layout) {
  Emitter out(layout, "flush");
  for (std::int32_t u = 0; u <= layout.head_unit(); ++u) out.update(u, 1);
  return out.finish();
}

StepProgram evaluate_program(const Layout& layout) {
  Emitter out(layout, "evaluate");
  const auto layers = static_cast<std::int32_t>(layout.layers());
  const auto group = static_cast<std::int32_t>(layout.live_micro_batches());
  for (std::int32_t m = 0; m < group; ++m) out.embedding(m);
  for (std::int32_t l = 0; l < layers; ++l) {
    for (std::int32_t m = 0; m < group; ++m) out.forward_only(l, m);
  }
  for (std::int32_t m = 0; m < group; ++m) out.head_loss(m);
  return out.finish();
}

}  // namespace

StepPrograms::StepPrograms(const Layout& layout, UpdateTiming t)
    : timing(t),
      first(train_program({layout, t, t == UpdateTiming::kEarly}, "first step")),
      step(train_program({layout, t, true}, "step")),
      flush(flush_program(layout)),
      evaluate(evaluate_program(layout)) {}

}  // namespace zg
