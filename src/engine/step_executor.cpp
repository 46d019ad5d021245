#include "ziggurat/engine/step_executor.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <utility>

#include "engine/model_ops.hpp"
#include "engine/op_context.hpp"
#include "engine/router_ops.hpp"
#include "engine/staging.hpp"
#include "engine/state_stream.hpp"
#include "engine/weight_ops.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/step/pinned_weights.hpp"

namespace zg {

namespace {

std::uint64_t next_identity() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

// The sum of the ranks' first numbers, in the order of ranks.
double sum_of(const std::vector<std::vector<double>>& by_rank) {
  double sum = 0;
  for (const std::vector<double>& theirs : by_rank) sum += theirs[0];
  return sum;
}

// The squared norm of the gradient, from each rank's sum of squares of each unit. Adds up in the order of
// units, tensor-parallel ranks, ranks of an expert group and pieces, which depends neither on the number of
// shards nor on the stages; stages that do not have a unit add zero.
double squared_norm(const std::vector<std::vector<double>>& scalars, const Layout& layout) {
  const RankPlace place = layout.options.place();
  const std::vector<Unit>& units = layout.model->units();
  double sum = 0;
  for (std::size_t u = 0; u < units.size(); ++u) {
    const int groups = units[u].is_experts() ? place.parts.experts : 1;
    const Sharding sharding = units[u].is_experts() ? place.expert_sharding() : place.sharding;
    const auto add = [&](int stage, int part, int rank) {
      sum += scalars[static_cast<std::size_t>(place.rank_at(part, rank, stage))][1 + u];
    };
    for (int stage = 0; stage < place.parts.stages; ++stage) {
      for (int part = 0; part < place.parts.tensor; ++part) {
        for (int i = 0; i < groups; ++i) {
          for (int piece = 0; piece < sharding.ranks; ++piece)
            add(stage, part, sharding.rank_of_piece(piece) * groups + i);
        }
      }
    }
  }
  return sum;
}

}  // namespace

const char* name_of(StallCause cause) {
  static constexpr const char* kNames[] = {"reads",   "write-backs", "memory in order", "copies", "optimizer",
                                           "gathers", "ranks",       "stages",          "parts",  "other"};
  return kNames[static_cast<std::size_t>(cause)];
}

StepExecutor::StepExecutor(const Options& o)
    : programs_(*o.programs),
      context_(std::make_unique<OpContext>(o)),
      weights_(std::make_unique<WeightOps>(*context_, o.seed)),
      model_(std::make_unique<ModelOps>(*context_, o)),
      staging_(std::make_unique<Staging>(*o.device, *o.layout)),
      identity_(next_identity()),
      sequence_(programs_) {
  context_->store.observe_waits(&context_->stall);
}

StepExecutor::~StepExecutor() {
  OpContext& c = *context_;
  c.store.observe_waits(nullptr);
  c.leases.clear();
  // Work on the streams uses leases, so it must end before the store is destroyed. A failure of such work has
  // already been reported.
  std::vector<Stream*> streams{c.comm.get(), c.send.get(), c.receive.get(), c.compute.get(),
                               c.optimizer.get()};
  for (Stream* const stream : model_->streams()) streams.push_back(stream);
  for (Stream* const stream : streams) {
    try {
      if (stream != nullptr) stream->synchronize();
    } catch (...) {
    }
  }
}

TensorStore& StepExecutor::store() const {
  return context_->store;
}
RankPlace StepExecutor::place() const {
  return context_->place();
}

LinkBytes StepExecutor::settled_traffic() {
  context_->store.run(nullptr, nullptr);
  const Position::Waiting waiting(context_->position, Position::Waits::kForMoves);
  context_->store.drain();
  return context_->store.traffic() - initial_;
}

CommTraffics StepExecutor::comm() const {
  CommTraffics all;
  const auto add = [&](CommAxis axis, const std::unique_ptr<Communicator>& group) {
    if (group != nullptr) all[axis] += group->traffic();
  };
  const OpContext& c = *context_;
  for (const ShardingGroups* groups : {&c.of_all, &c.of_experts}) {
    add(CommAxis::kShards, groups->shards);
    add(CommAxis::kDataParallel, groups->pieces);
    add(CommAxis::kReplicas, groups->replicas);
  }
  add(CommAxis::kScalars, c.numbers);
  add(CommAxis::kReplicated, c.copies);
  add(CommAxis::kStages, c.stages);
  model_->add_traffic(all);
  all[CommAxis::kScalars] = all[CommAxis::kScalars] - asked_;
  return all;
}

std::vector<std::vector<double>> StepExecutor::exchange(std::span<const double> mine) {
  const auto n = mine.size();
  std::vector<double> all(n * static_cast<std::size_t>(context_->layout.options.place().ranks()));
  if (context_->numbers == nullptr) {
    all.assign(mine.begin(), mine.end());
  } else {
    const Position::Waiting waiting(context_->position, Position::Waits::kForRanks);
    context_->stall.mark(StallCause::kRanks);
    context_->timer.begin_comm(CommAxis::kScalars);
    context_->numbers->all_gather(numbers_, mine.data(), all.data(), static_cast<std::int64_t>(n),
                                  DType::kF64);
    context_->timer.end_comm(CommAxis::kScalars);
    context_->stall.mark(StallCause::kOther);
  }
  std::vector<std::vector<double>> by_rank;
  for (auto at = all.begin(); at != all.end(); at += static_cast<std::ptrdiff_t>(n))
    by_rank.emplace_back(at, at + static_cast<std::ptrdiff_t>(n));
  return by_rank;
}

std::vector<std::vector<double>> StepExecutor::of_all_ranks(std::span<const double> mine) {
  if (context_->numbers == nullptr) return exchange(mine);
  const CommTraffic before = context_->numbers->traffic();
  auto all = exchange(mine);
  asked_ += context_->numbers->traffic() - before;
  return all;
}

// Waits for the streams, and copies the scalars from the device. They are valid until inputs are loaded
// again.
std::span<const double> StepExecutor::read_scalars() {
  const std::int64_t bytes = Workspace::scalar_bytes(context_->layout);
  // The comm stream computes the gradients' sums of squares. Its synchronize() throws the error of a rank
  // that has failed.
  if (context_->comm != nullptr) {
    const Position::Waiting waiting(context_->position, Position::Waits::kForRanks);
    context_->stall.mark(StallCause::kRanks);
    context_->comm->synchronize();
    for (Stream* stream : model_->streams()) {
      if (stream != nullptr) stream->synchronize();
    }
    for (Stream* stream : {context_->receive.get(), context_->send.get()}) {
      if (stream == nullptr) continue;
      context_->stall.mark(StallCause::kStages);
      stream->synchronize();
    }
    context_->stall.mark(StallCause::kOther);
  }
  context_->device.copy_to_host(*context_->compute, staging_->data(), context_->workspace().inputs(), bytes);
  own_[kToHost] += bytes;
  const Position::Waiting waiting(context_->position, Position::Waits::kForStream);
  context_->compute->synchronize();
  return {static_cast<const double*>(staging_->data()), context_->layout.model->units().size() + 1};
}

LinkBytes engine_traffic_per_step(const Layout& layout) {
  LinkBytes t;
  t[kToDevice] = Workspace::input_bytes(layout, layout.options.micro_batches);
  t[kToHost] = Workspace::scalar_bytes(layout);
  const RoutedRowsShape routed(layout);
  const std::int64_t factors = layout.options.balance.has_term() ? routed.factors_bytes() : 0;
  for (std::int32_t l = 0; l < layout.layers(); ++l) {
    const auto unit = layout.routes(l) ? static_cast<std::int32_t>(layout.model->unit_of(l)) : -1;
    if (unit < 0 || !layout.has_unit(unit)) continue;
    t[kToHost] += layout.options.micro_batches * (routed.starts_bytes() + routed.sums_bytes());
    if (unit >= layout.first_trained()) t[kToDevice] += layout.options.micro_batches * factors;
  }
  return t;
}

LinkBytes StepExecutor::traffic() const {
  LinkBytes t = context_->store.traffic();
  if (const RouterOps* const routers = model_->routers()) {
    t[kToHost] += routers->rows().to_host();
    t[kToDevice] += routers->rows().to_device();
  }
  return t += own_;
}

std::string StepExecutor::state() const {
  return context_->position.text();
}
std::uint64_t StepExecutor::progress() const {
  return context_->position.progress();
}
std::string StepExecutor::work() const {
  return context_->position.work(context_->layout, context_->stall.awaited());
}
std::string StepExecutor::whereabouts() const {
  return context_->position.whereabouts(context_->layout, context_->stall.awaited());
}
StepExecutor::Meeting StepExecutor::meeting(CommAxis axis) const {
  Meeting meeting = context_->position.meeting(axis, context_->layout);
  const StepOp* const op = context_->position.met(axis);
  if (axis == CommAxis::kStages && op != nullptr)
    meeting.from = members_of(context_->layout.options.place(),
                              axis)[static_cast<std::size_t>(calls_of(context_->layout, *op).front().from)];
  return meeting;
}
bool StepExecutor::waiting() const {
  return context_->position.waiting();
}

// Returns the activity's first program; ProgramStart::program is null if it has none.
ProgramStart StepExecutor::begin_activity(Activity activity) {
  sequence_.begin(activity);
  note(history_, activity);
  return sequence_.next().value_or(ProgramStart{});
}

void StepExecutor::run_program(const ProgramStart& start) {
  const StepProgram& program = *start.program;
  OpContext& c = *context_;
  c.store.run(&program.program, start.next != nullptr ? &start.next->program : nullptr);
  c.position.begin_program(program);
  try {
    for (std::int32_t at = 0; at < program.program.op_count(); ++at)
      run_op(program.ops[static_cast<std::size_t>(at)], at);
  } catch (...) {
    model_->cancel();
    throw;
  }
  ZG_ASSERT(!model_->within_call(), "program {} ends within a call on a unit in tiles",
            program.program.name());
  c.position.end_program();
}

// Takes leases on the operands of an operation, enqueues the operation, and lets its stream release the
// leases. `at`: the operation's number in the program.
void StepExecutor::run_op(const StepOp& op, std::int32_t at) {
  OpContext& c = *context_;
  if (before_update_ && op.kind == OpKind::kUpdate) {
    const Position::Waiting waiting(c.position, Position::Waits::kForMoves);
    c.stall.mark(StallCause::kWriteBacks);
    std::exchange(before_update_, nullptr)();
    c.stall.mark(StallCause::kOther);
  }
  Stream& stream = c.stream_of(op);
  c.position.next_op(at);
  {
    const Position::Waiting waiting(c.position, Position::Waits::kForLease);
    c.store.acquire_op(&stream, c.leases);
  }
  c.timer.begin(stream, op);
  RouterOps* const routers = model_->routers();
  if (routers != nullptr) routers->prepare(op);
  issue_again(op);
  if (routers != nullptr && !model_->within_call()) routers->finish(op);
  c.timer.end(stream, op);
  const Event event = stream.record();
  for (Lease& lease : c.leases) lease.release_after(stream, event);
  c.position.issued();
}

// Enqueues the operation with Device::repeat(), which may replay the work that it has recorded for an equal
// key. So the key contains everything that issue() depends on. Some operations are never repeated: updates,
// which differ in every step; the operations of a unit in tiles, and operations between them; operations with
// dropout; and communication, since each call must meet the calls of the other ranks (with tensor
// parallelism, all operations).
void StepExecutor::issue_again(const StepOp& op) {
  OpContext& c = *context_;
  const bool repeats = &c.stream_of(op) == c.compute.get() && op.kind != OpKind::kUpdate &&
                       !model_->within_call() && model_->repeats(op);
  if (!repeats) return issue(op);
  const auto number = [](std::int32_t n) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(n));
  };
  const double scale = op.kind == OpKind::kHead ? model_->head_scale() : 0;
  key_.assign({identity_, static_cast<std::uint64_t>(op.kind) | (op.first ? 0x100u : 0), number(op.unit),
               number(op.tile), number(op.micro_batch), std::bit_cast<std::uint64_t>(scale)});
  for (const Lease& lease : c.leases) key_.push_back(reinterpret_cast<std::uint64_t>(lease.data()));
  c.device.repeat(*c.compute, key_, [this, &op] { issue(op); });
}

void StepExecutor::issue(const StepOp& op) {
  model_->begin(op);
  switch (op.kind) {
    case OpKind::kUpdate:
      return weights_->update(op);
    case OpKind::kMaterialize:
      return weights_->materialize(op);
    case OpKind::kFinishGradient:
      return weights_->finish_gradient(op);
    case OpKind::kSend:
    case OpKind::kReceive:
      return pass_on(op);
    default:
      return model_->issue(op);
  }
}

// Sends a tensor to another stage of the pipeline, or receives one. The only operand is that tensor.
void StepExecutor::pass_on(const StepOp& op) {
  OpContext& c = *context_;
  void* const data = c.leases.front().data();
  const CommCall call = calls_of(c.layout, op).front();
  if (op.kind == OpKind::kSend) {
    c.stages->send(*c.send, data, call.count, call.dtype, call.to);
  } else {
    const OpTimer::Comm timed(c.timer, *c.receive, CommAxis::kStages, op);
    c.stages->receive(*c.receive, data, call.count, call.dtype, call.from);
  }
}

StepResult StepExecutor::train_step(std::int64_t step, const std::vector<MicroBatch>& micro_batches,
                                    const UpdateRule& rule, Then then) {
  ZG_ASSERT_EQ(static_cast<std::int64_t>(micro_batches.size()), context_->layout.options.micro_batches);
  const auto begin = Clock::now();
  context_->stall.begin();
  const LinkBytes before = traffic();
  const CommTraffics comm_before = comm();
  const std::int64_t first_written = context_->store.first_written_bytes();
  context_->timer.reset();
  context_->position.begin_step(step);
  model_->set_step(step);
  StepResult result;
  const RankPlace place = context_->layout.options.place();
  for (const MicroBatch& b : micro_batches) {
    if (!place.tells_tokens()) break;
    result.tokens += std::count_if(b.targets, b.targets + context_->layout.options.micro_batch.rows(),
                                   [](auto t) { return t >= 0; });
  }
  result.tokens = static_cast<std::int64_t>(sum_of(exchange(std::array{static_cast<double>(result.tokens)})));
  const double per_token = 1.0 / static_cast<double>(std::max<std::int64_t>(1, result.tokens));
  ProgramStart gradients = begin_activity(then == Then::kTrain ? Activity::kStep : Activity::kStepThenPause);
  if (gradients.program == &programs_.flush) {
    run_updates(gradients);  // the deferred updates of the step before
    gradients = *sequence_.next();
  }
  const bool early = programs_.timing == UpdateTiming::kEarly;
  const bool scaled = rule.loss_scale > 0;
  ZG_ASSERT(!early || (rule.clip == 0 && !scaled),
            "the verdict on all gradients comes after the first update");
  if (early) {
    weights_->rule = rule;
    weights_->rule.params.grad_scale = per_token;
  }
  // With loss scaling, the head computes the gradient of the mean loss times the scale, since scales are
  // chosen for the mean loss. Without it, the head computes the gradient of the summed loss.
  model_->set_head_scale(scaled ? rule.loss_scale * per_token : 1);
  const double unscale = scaled ? 1 / rule.loss_scale : per_token;
  for (std::size_t m = 0; m < micro_batches.size(); ++m)
    staging_->put(static_cast<std::int64_t>(m), micro_batches[m]);
  own_[kToDevice] +=
      staging_->load(*context_->compute, context_->workspace(), context_->layout.options.micro_batches);
  RouterOps* const routers = model_->routers();
  const RouterOps::Exchange sums_of_ranks = [this](std::span<const double> mine) {
    std::vector<double> sums(mine.size());
    for (const std::vector<double>& theirs : exchange(mine)) {
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += theirs[i];
    }
    return sums;
  };
  if (routers != nullptr) routers->begin_step(unscale, &sums_of_ranks);
  run_program(gradients);
  const std::span<const double> own = read_scalars();
  std::vector<double> mine(own.begin(), own.end());
  if (routers != nullptr) {
    const std::vector<double> numbers = routers->numbers();
    mine.insert(mine.end(), numbers.begin(), numbers.end());
  }
  const auto scalars = exchange(mine);
  std::vector<double> router_numbers;
  if (routers != nullptr) {
    std::vector<double> sums(mine.size() - own.size());
    for (const std::vector<double>& theirs : scalars) {
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += theirs[own.size() + i];
    }
    result.routers = RouterOps::result(context_->layout, sums);
    router_numbers = std::move(sums);
  }
  for (std::size_t r = 0; r < scalars.size(); r += static_cast<std::size_t>(place.parts.tensor))
    result.loss += scalars[r][0];
  result.loss *= per_token;
  result.grad_norm = std::sqrt(squared_norm(scalars, context_->layout)) * unscale;
  const bool finite = std::isfinite(result.loss) && std::isfinite(result.grad_norm);
  result.skipped = !finite;
  if (finite && context_->layout.options.balance.kind == BalanceKind::kBias) {
    routers->move_choice_biases(router_numbers);
    staging_->put_choice_biases(routers->choice_biases());
  }
  if (!early) {
    weights_->rule = rule;
    weights_->rule.params.skip = result.skipped;
    const double clip = rule.clip > 0 ? std::min(1.0, rule.clip / (result.grad_norm + 1e-6)) : 1.0;
    weights_->rule.params.grad_scale = result.skipped ? 0 : unscale * clip;
  }
  if (!finite && !scaled) {
    throw Error(
        Errc::kNumeric, fmt::format("step {}", step),
        fmt::format("the training diverged: loss {}, gradient norm {}", result.loss, result.grad_norm),
        "lower the learning rate, warm up longer, or clip gradients (gradient_clipping)");
  }
  if (const auto updates = sequence_.next()) run_updates(*updates);
  result.seconds = seconds_between(begin, Clock::now());
  result.stall_for = context_->stall.end();
  result.stall = result.stall_for.total();
  result.phases = context_->timer.phases();
  result.traffic = traffic() - before;
  result.first_written = context_->store.first_written_bytes() - first_written;
  result.comm = comm() - comm_before;
  result.comm_seconds = context_->timer.comm_seconds();
  return result;
}

void StepExecutor::run_updates(const ProgramStart& start) {
  run_program(start);
  const Position::Waiting waiting(context_->position, Position::Waits::kForStream);
  context_->stall.mark(StallCause::kOptimizer);
  context_->optimizer->synchronize();
  context_->stall.mark(StallCause::kOther);
  context_->compute->synchronize();
}

void StepExecutor::set_choice_biases(const std::vector<float>& values) {
  RouterOps* const routers = model_->routers();
  ZG_ASSERT(routers != nullptr && routers->choice_biases().size() == values.size(), "{} choice biases",
            values.size());
  routers->choice_biases() = values;
  staging_->put_choice_biases(values);
}

std::vector<float> StepExecutor::choice_biases() const {
  RouterOps* const routers = model_->routers();
  return routers != nullptr ? routers->choice_biases() : std::vector<float>();
}

void StepExecutor::flush() {
  if (sequence_.pending()) run_updates(begin_activity(Activity::kFlush));
}

double StepExecutor::evaluate(std::int64_t micro_batches,
                              const std::function<MicroBatch(std::int64_t)>& batch) {
  flush();
  model_->set_step({});
  if (RouterOps* const routers = model_->routers()) routers->begin_evaluation();
  const std::int64_t group = context_->layout.options.live_micro_batches();
  const auto rows = static_cast<std::size_t>(context_->layout.options.micro_batch.rows());
  const auto numbers = static_cast<std::size_t>(context_->layout.options.micro_batch.document_numbers());
  const std::vector<std::int32_t> nothing(std::max(rows, numbers), 0), ignored(rows, -1);
  const MicroBatch empty{nothing.data(), ignored.data(),
                         context_->layout.options.micro_batch.documents ? nothing.data() : nullptr};
  double loss = 0;
  std::int64_t tokens = 0;
  const RankPlace place = context_->layout.options.place();
  const std::int64_t step = group * place.data_ranks();
  for (std::int64_t first = 0; first < micro_batches; first += step) {
    for (std::int64_t m = 0; m < group; ++m) {
      const std::int64_t i = first + place.micro_batch(m);
      const MicroBatch b = i < micro_batches ? batch(i) : empty;
      if (place.tells_tokens())
        tokens += std::count_if(b.targets, b.targets + rows, [](auto t) { return t >= 0; });
      staging_->put(m, b);
    }
    own_[kToDevice] += staging_->load(*context_->compute, context_->workspace(), group);
    const bool more = first + step < micro_batches;
    run_program(begin_activity(more ? Activity::kEvaluateMore : Activity::kEvaluate));
    const double sum = read_scalars()[0];
    if (place.tells_loss()) loss += sum;
  }
  // The same arithmetic as in train_step(), so that a step and an evaluation of the same data return the same
  // bits.
  loss = sum_of(exchange(std::array{loss}));
  tokens = static_cast<std::int64_t>(sum_of(exchange(std::array{static_cast<double>(tokens)})));
  return loss * (1.0 / static_cast<double>(std::max<std::int64_t>(1, tokens)));
}

void fill_tile(const StateTile& tile, const ParamSource& source, const TileVisitor& codes) {
  if (tile.codes) return codes(tile);
  constexpr std::int64_t kPart = 1 << 20;  // elements at a time
  std::vector<float> values;
  for (std::int64_t at = 0; at < tile.count; at += kPart) {
    const std::int64_t n = std::min(kPart, tile.count - at), first = tile.first + at;
    values.assign(static_cast<std::size_t>(n), 0);
    source(*tile.param, first, first + n, values.data());
    write_weights(tile.master.col_range(at, n), values.data());
  }
}

void StepExecutor::initialize(const ParamSource& source) {
  restore_state([&](const StateTile& tile) { fill_tile(tile, source); });
}

void StepExecutor::restore_state(const TileVisitor& fill) {
  context_->store.run(nullptr, nullptr);
  StateStream state(*context_);
  initial_ = state.initialize(begin_activity(Activity::kInitialize),
                              [&](const StepOp& op) { state.restore(op, fill); });
}

void StepExecutor::adopt_state(const TileVisitor& base) {
  context_->store.run(nullptr, nullptr);
  StateStream state(*context_);
  initial_ =
      state.initialize(begin_activity(Activity::kAdopt), [&](const StepOp& op) { state.adopt(op, base); });
}

void StepExecutor::save_state(const TileVisitor& take) {
  ZG_ASSERT(context_->layout.options.saves, "the programs of this run have none that saves");
  flush();
  finish_streams();
  StateStream state(*context_);
  state.for_each_op(begin_activity(Activity::kSave), [&](const StepOp& op) { state.save(op, take); });
}

std::int64_t StepExecutor::write_state() {
  ZG_ASSERT(context_->layout.options.pins, "the programs of this run know of no pins");
  flush();
  finish_streams();
  (void)begin_activity(Activity::kPin);
  const Position::Waiting waiting(context_->position, Position::Waits::kForMoves);
  return context_->store.write_back(pinned_segments(context_->layout));
}

void StepExecutor::read_master(std::int32_t unit, const Param& param, std::int64_t begin, std::int64_t end,
                               float* out) {
  ZG_ASSERT_GE(param.offset, 0);
  std::vector<float> values;
  const bool split = context_->layout.state().format().master == MasterFormat::kSplit;
  using Weights = StateStream::Weights;
  flush();
  StateStream(*context_).visit(unit, param, begin, end, split ? Weights::kNeeded : Weights::kNotNeeded,
                               [&](const OptimizerState& state, View weight, std::int64_t first,
                                   std::int64_t skip, std::int64_t count) {
                                 values.resize(static_cast<std::size_t>(skip + count));
                                 if (state.master) {
                                   read_masters(context_->layout.state().format(), state, weight,
                                                values.data());
                                 } else {
                                   read_weights(weight, values.data());
                                 }
                                 std::copy_n(values.begin() + skip, count, out + first);
                               });
}

void StepExecutor::read_moment(int which, std::int32_t unit, const Param& param, std::int64_t begin,
                               std::int64_t end, float* out) {
  std::vector<float> values;
  flush();
  StateStream(*context_).visit(
      unit, param, begin, end, StateStream::Weights::kNotNeeded,
      [&](const OptimizerState& state, View, std::int64_t first, std::int64_t skip, std::int64_t count) {
        ZG_ASSERT(static_cast<bool>(state.master), "{} is not trained", param.name);
        values.resize(static_cast<std::size_t>(skip + count));
        read_moments(context_->layout.state().format(), state, which, skip + count, values.data());
        std::copy_n(values.begin() + skip, count, out + first);
      });
}

// Waits until the optimizer and compute streams are idle.
void StepExecutor::finish_streams() {
  context_->optimizer->synchronize();
  context_->compute->synchronize();
}

}  // namespace zg
