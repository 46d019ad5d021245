#include "ziggurat/engine/step_executor.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "engine/context_parts.hpp"
#include "engine/part_exchange.hpp"
#include "engine/staging.hpp"
#include "engine/stall_meter.hpp"
#include "engine/timer.hpp"
#include "engine/workspace.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/philox.hpp"

namespace zg {

namespace {

std::uint64_t next_identity() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

// The sum of one number of each rank, in the order of ranks.
double sum_of(const std::vector<std::vector<double>>& by_rank) {
  double sum = 0;
  for (const std::vector<double>& theirs : by_rank) sum += theirs[0];
  return sum;
}

// The sum of the squares that each rank has found in each unit's gradient. Sums in the order of units, parts
// and pieces, which neither shards nor stages change; stages that do not have a unit add zero.
double squared_norm(const std::vector<std::vector<double>>& scalars, const RankPlace& place) {
  double sum = 0;
  for (std::size_t u = 1; u < scalars[0].size(); ++u) {
    for (int stage = 0; stage < place.parts.stages; ++stage) {
      for (int part = 0; part < place.parts.tensor; ++part) {
        for (int piece = 0; piece < place.sharding.ranks; ++piece) {
          const int rank = place.rank_at(part, place.sharding.rank_of_piece(piece), stage);
          sum += scalars[static_cast<std::size_t>(rank)][u];
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
    : layout_(*o.layout),
      programs_(*o.programs),
      device_(*o.device),
      store_(*o.store),
      trace_(o.trace),
      compute_(device_.make_stream("compute")),
      optimizer_(device_.is_host()
                     ? device_.make_stream("optimizer")
                     : std::make_unique<HostStream>("optimizer", HostStream::Mode::kThread, trace_)),
      position_(std::make_unique<Position>()),
      timer_(std::make_unique<Timer>(o.trace, *position_, layout_.options.place(), *compute_)),
      stall_(
          std::make_unique<StallMeter>(*compute_, *optimizer_, [this] { return timer_->waited_seconds(); })),
      identity_(next_identity()),
      sequence_(programs_) {
  const std::int64_t bytes = layout_.workspace_bytes();
  workspace_ = {device_.arena().allocate(bytes),
                [this, bytes](void* memory) { device_.arena().release(memory, bytes); }};
  if (workspace_ == nullptr) {
    throw Error(Errc::kMemory, "device tier", "no room for the workspace of " + format_bytes(bytes),
                "raise tiers.device");
  }
  staging_ = std::make_unique<Staging>(device_, layout_);
  for (const Unit& unit : layout_.model->units()) {
    random_.emplace_back();
    // The suffix makes these numbers independent of those that initialise the parameter.
    for (const Param& p : unit.params) {
      const std::array<std::uint32_t, 2> key = NamedRandom(o.seed, p.name + ".update").key();
      random_.back().push_back({{key[0], key[1]}});
    }
  }
  if (const ModelConfig& c = layout_.model->config(); c.dropout != DropoutRates{} || c.lora.dropout > 0) {
    for (std::size_t u = 0; u < layout_.model->units().size(); ++u) {
      dropout_keys_.push_back(layout_.model->dropout_keys(o.seed, u));
      adapter_keys_.push_back(layout_.model->adapter_dropout_key(o.seed, u));
    }
  }
  store_.observe_waits(stall_.get());
  const RankPlace place = layout_.options.place();
  if (o.comm == nullptr) {
    ZG_ASSERT_EQ(place.ranks(), 1);
    return;
  }
  ZG_ASSERT_EQ(o.comm->size(), place.ranks());
  ZG_ASSERT_EQ(o.comm->rank(), place.rank());
  comm_ = device_.make_stream("comm");
  const auto group = [&](CommAxis axis) {
    const std::vector<int> members = members_of(place, axis);
    return members.size() > 1 ? o.comm->group(members, name_of(axis)) : nullptr;
  };
  // First the one that all ranks have, however they shard, so that agree() finds out if they differ in that.
  groups_.numbers = group(CommAxis::kNumbers);
  groups_.shards = group(CommAxis::kShards);
  groups_.replicas = group(CommAxis::kReplicas);
  groups_.pieces = group(CommAxis::kPieces);
  groups_.copies = group(CommAxis::kCopies);
  if (auto parts = group(CommAxis::kTensor)) {
    exchange_ = std::make_unique<Exchange>(device_, std::move(parts), *timer_);
    model_ = &part_.emplace(layout_.model->with(*exchange_));
  }
  if (place.parts.context > 1)
    context_ = std::make_unique<ContextParts>(device_, group(CommAxis::kContext), *timer_);
  groups_.stages = group(CommAxis::kStages);
  if (groups_.stages == nullptr) return;
  send_ = device_.make_stream("send");
  receive_ = device_.make_stream("receive");
  stall_->set_stages(*send_, *receive_);
}

StepExecutor::~StepExecutor() {
  store_.observe_waits(nullptr);
  leases_.clear();
  // Work on the streams uses leases, so it must end before the store does. If it failed, that has been
  // reported.
  Stream* const context = context_ != nullptr ? &context_->stream() : nullptr;
  Stream* const exchange = exchange_ != nullptr ? &exchange_->stream() : nullptr;
  for (Stream* stream :
       {comm_.get(), context, exchange, send_.get(), receive_.get(), compute_.get(), optimizer_.get()}) {
    try {
      if (stream != nullptr) stream->synchronize();
    } catch (...) {
    }
  }
}

Traffic StepExecutor::settled_traffic() {
  store_.run(nullptr, nullptr);
  const Position::Waiting waiting(*position_, Position::Waits::kForMoves);
  store_.drain();
  return store_.traffic() - initial_;
}

CommTraffics StepExecutor::comm() const {
  CommTraffics all;
  const auto add = [&](CommAxis axis, const std::unique_ptr<Communicator>& group) {
    if (group != nullptr) all[axis] = group->traffic();
  };
  add(CommAxis::kShards, groups_.shards);
  add(CommAxis::kPieces, groups_.pieces);
  add(CommAxis::kReplicas, groups_.replicas);
  add(CommAxis::kNumbers, groups_.numbers);
  add(CommAxis::kCopies, groups_.copies);
  if (exchange_ != nullptr) all[CommAxis::kTensor] = exchange_->traffic();
  add(CommAxis::kStages, groups_.stages);
  if (context_ != nullptr) all[CommAxis::kContext] = context_->traffic();
  all[CommAxis::kNumbers] = all[CommAxis::kNumbers] - asked_;
  return all;
}

std::vector<std::vector<double>> StepExecutor::exchange(std::span<const double> mine) {
  const auto n = mine.size();
  std::vector<double> all(n * static_cast<std::size_t>(layout_.options.place().ranks()));
  if (groups_.numbers == nullptr) {
    all.assign(mine.begin(), mine.end());
  } else {
    const Position::Waiting waiting(*position_, Position::Waits::kForRanks);
    stall_->mark(StallCause::kRanks);
    timer_->begin_comm(CommAxis::kNumbers);
    groups_.numbers->all_gather(numbers_, mine.data(), all.data(), static_cast<std::int64_t>(n), DType::kF64);
    timer_->end_comm(CommAxis::kNumbers);
    stall_->mark(StallCause::kOther);
  }
  std::vector<std::vector<double>> by_rank;
  for (auto at = all.begin(); at != all.end(); at += static_cast<std::ptrdiff_t>(n))
    by_rank.emplace_back(at, at + static_cast<std::ptrdiff_t>(n));
  return by_rank;
}

std::vector<std::vector<double>> StepExecutor::of_all_ranks(std::span<const double> mine) {
  if (groups_.numbers == nullptr) return exchange(mine);
  const CommTraffic before = groups_.numbers->traffic();
  auto all = exchange(mine);
  asked_ += groups_.numbers->traffic() - before;
  return all;
}

// The scalars are valid until inputs are loaded again.
std::span<const double> StepExecutor::read_scalars() {
  const std::int64_t bytes = Workspace::scalar_bytes(layout_);
  if (comm_ != nullptr) {  // it sums the squares of the gradients; throws the error of a rank that has failed
    const Position::Waiting waiting(*position_, Position::Waits::kForRanks);
    stall_->mark(StallCause::kRanks);
    comm_->synchronize();
    if (context_ != nullptr) context_->stream().synchronize();
    if (exchange_ != nullptr) exchange_->stream().synchronize();
    for (Stream* stream : {receive_.get(), send_.get()}) {
      if (stream == nullptr) continue;
      stall_->mark(StallCause::kStages);
      stream->synchronize();
    }
    stall_->mark(StallCause::kOther);
  }
  device_.copy_to_host(*compute_, staging_->data(), Workspace(layout_, workspace_.get()).inputs(), bytes);
  own_.device_to_host += bytes;
  const Position::Waiting waiting(*position_, Position::Waits::kForStream);
  compute_->synchronize();
  return {static_cast<const double*>(staging_->data()), layout_.model->units().size() + 1};
}

Traffic engine_traffic_per_step(const Layout& layout) {
  Traffic t;
  t.host_to_device = Workspace::input_bytes(layout, layout.options.micro_batches);
  t.device_to_host = Workspace::scalar_bytes(layout);
  return t;
}

Traffic StepExecutor::traffic() const {
  Traffic t = store_.traffic();
  return t += own_;
}

std::string StepExecutor::state() const {
  return position_->text();
}
std::uint64_t StepExecutor::progress() const {
  return position_->progress();
}
std::string StepExecutor::work() const {
  return position_->work(layout_.layers(), stall_->awaited());
}
std::string StepExecutor::whereabouts() const {
  return position_->whereabouts(layout_.layers(), stall_->awaited());
}
StepExecutor::Meeting StepExecutor::meeting(CommAxis axis) const {
  Meeting meeting = position_->meeting(axis, layout_.layers());
  const StepOp* const op = position_->met(axis);
  if (axis == CommAxis::kStages && op != nullptr)
    meeting.from = members_of(layout_.options.place(),
                              axis)[static_cast<std::size_t>(calls_of(layout_, *op).front().from)];
  return meeting;
}
bool StepExecutor::waiting() const {
  return position_->waiting();
}

// Returns the activity's first program; ProgramStart::program is null if it has none.
ProgramStart StepExecutor::begin_activity(Activity activity) {
  sequence_.begin(activity);
  note(history_, activity);
  return sequence_.next().value_or(ProgramStart{});
}

void StepExecutor::run_program(const ProgramStart& start) {
  const StepProgram& program = *start.program;
  store_.run(&program.program, start.next != nullptr ? &start.next->program : nullptr);
  position_->begin_program(program);
  running_ = &program;
  for (at_ = 0; at_ < program.program.op_count(); ++at_) {
    if (before_update_ && current_op().kind == OpKind::kUpdate) {
      const Position::Waiting waiting(*position_, Position::Waits::kForMoves);
      stall_->mark(StallCause::kWriteBacks);
      std::exchange(before_update_, nullptr)();
      stall_->mark(StallCause::kOther);
    }
    begin_op();
    issue_again(current_op());
    end_op();
  }
  position_->end_program();
}

void StepExecutor::begin_op() {
  const StepOp& op = current_op();
  Stream& stream = stream_of(op);
  position_->next_op(at_);
  {
    const Position::Waiting waiting(*position_, Position::Waits::kForLease);
    store_.acquire_op(&stream, leases_);
  }
  timer_->begin(stream, op);
}

void StepExecutor::end_op() {
  const StepOp& op = current_op();
  Stream& stream = stream_of(op);
  timer_->end(stream, op);
  const Event event = stream.record();
  for (Lease& lease : leases_) lease.release_after(stream, event);
  position_->issued();
}

// Updates on the host run on a stream of their own. Updates on a GPU run on the compute stream: they are
// limited by the bandwidth of its memory, which compute shares, so nothing is gained by running both at once;
// and in one stream no thread has to wait between an update and the forward that reads its result.
Stream& StepExecutor::stream_of(const StepOp& op) {
  if (op.kind == OpKind::kUpdate)
    return !device_.is_host() && layout_.update_at(op.unit) == Tier::kDevice ? *compute_ : *optimizer_;
  if (joins_stages(op.kind)) return op.kind == OpKind::kSend ? *send_ : *receive_;
  return comm_ != nullptr && joins_ranks(op.kind) ? *comm_ : *compute_;
}

StepResult StepExecutor::train_step(std::int64_t step, const std::vector<MicroBatch>& micro_batches,
                                    const UpdateRule& rule, Then then) {
  ZG_ASSERT_EQ(static_cast<std::int64_t>(micro_batches.size()), layout_.options.micro_batches);
  const auto begin = Clock::now();
  stall_->begin();
  const Traffic before = traffic();
  const CommTraffics comm_before = comm();
  const std::int64_t first_written = store_.first_written_bytes();
  timer_->reset();
  position_->begin_step(step);
  dropout_step_ = step;
  StepResult result;
  const RankPlace place = layout_.options.place();
  for (const MicroBatch& b : micro_batches) {
    if (!place.tells_tokens()) break;
    result.tokens += std::count_if(b.targets, b.targets + layout_.options.micro_batch.rows(),
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
    update_ = rule;
    update_.params.grad_scale = per_token;
  }
  // With loss scaling, the gradients are those of the mean loss, whose range the scale is made for. Without
  // it they are those of the summed loss.
  head_scale_ = scaled ? rule.loss_scale * per_token : 1;
  const double unscale = scaled ? 1 / rule.loss_scale : per_token;
  for (std::size_t m = 0; m < micro_batches.size(); ++m)
    staging_->put(static_cast<std::int64_t>(m), micro_batches[m]);
  own_.host_to_device += staging_->load(*compute_, workspace_.get(), layout_.options.micro_batches);
  run_program(gradients);
  const auto scalars = exchange(read_scalars());
  for (std::size_t r = 0; r < scalars.size(); r += static_cast<std::size_t>(place.parts.tensor))
    result.loss += scalars[r][0];
  result.loss *= per_token;
  result.grad_norm = std::sqrt(squared_norm(scalars, place)) * unscale;
  const bool finite = std::isfinite(result.loss) && std::isfinite(result.grad_norm);
  result.skipped = !finite;
  if (!early) {
    update_ = rule;
    update_.params.skip = result.skipped;
    const double clip = rule.clip > 0 ? std::min(1.0, rule.clip / (result.grad_norm + 1e-6)) : 1.0;
    update_.params.grad_scale = result.skipped ? 0 : unscale * clip;
  }
  if (!finite && !scaled) {
    throw Error(
        Errc::kNumeric, fmt::format("step {}", step),
        fmt::format("the training diverged: loss {}, gradient norm {}", result.loss, result.grad_norm),
        "lower the learning rate, warm up longer, or clip gradients (gradient_clipping)");
  }
  if (const auto updates = sequence_.next()) run_updates(*updates);
  result.seconds = seconds_between(begin, Clock::now());
  result.stall_for = stall_->end();
  result.stall = result.stall_for.total();
  result.phases = timer_->phases();
  result.traffic = traffic() - before;
  result.first_written = store_.first_written_bytes() - first_written;
  result.comm = comm() - comm_before;
  result.comm_seconds = timer_->comm_seconds();
  return result;
}

void StepExecutor::run_updates(const ProgramStart& start) {
  run_program(start);
  const Position::Waiting waiting(*position_, Position::Waits::kForStream);
  stall_->mark(StallCause::kOptimizer);
  optimizer_->synchronize();
  stall_->mark(StallCause::kOther);
  compute_->synchronize();
}

void StepExecutor::flush() {
  if (sequence_.pending()) run_updates(begin_activity(Activity::kFlush));
}

double StepExecutor::evaluate(std::int64_t micro_batches,
                              const std::function<MicroBatch(std::int64_t)>& batch) {
  flush();
  dropout_step_.reset();
  const std::int64_t group = layout_.options.live_micro_batches();
  const auto rows = static_cast<std::size_t>(layout_.options.micro_batch.rows());
  const auto numbers = static_cast<std::size_t>(layout_.options.micro_batch.document_numbers());
  const std::vector<std::int32_t> nothing(std::max(rows, numbers), 0), ignored(rows, -1);
  const MicroBatch empty{nothing.data(), ignored.data(),
                         layout_.options.micro_batch.documents ? nothing.data() : nullptr};
  double loss = 0;
  std::int64_t tokens = 0;
  const RankPlace place = layout_.options.place();
  const std::int64_t step = group * place.data_ranks();
  for (std::int64_t first = 0; first < micro_batches; first += step) {
    for (std::int64_t m = 0; m < group; ++m) {
      const std::int64_t i = first + place.micro_batch(m);
      const MicroBatch b = i < micro_batches ? batch(i) : empty;
      if (place.tells_tokens())
        tokens += std::count_if(b.targets, b.targets + rows, [](auto t) { return t >= 0; });
      staging_->put(m, b);
    }
    own_.host_to_device += staging_->load(*compute_, workspace_.get(), group);
    const bool more = first + step < micro_batches;
    run_program(begin_activity(more ? Activity::kEvaluateMore : Activity::kEvaluate));
    const double sum = read_scalars()[0];
    if (place.tells_loss()) loss += sum;
  }
  // The same arithmetic as in train_step(), so that a step and an evaluation of the same data give the same
  // bits.
  loss = sum_of(exchange(std::array{loss}));
  tokens = static_cast<std::int64_t>(sum_of(exchange(std::array{static_cast<double>(tokens)})));
  return loss * (1.0 / static_cast<double>(std::max<std::int64_t>(1, tokens)));
}

}  // namespace zg
