#include "ziggurat/engine/engine.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/timer.hpp"
#include "engine/workspace.hpp"
#include "ziggurat/base/error.hpp"

namespace zg {

Engine::Engine(const Options& o)
    : layout_(*o.layout),
      programs_(*o.programs),
      device_(*o.device),
      store_(*o.store),
      trace_(o.trace),
      compute_(device_.make_stream("compute")),
      optimizer_(device_.make_stream("optimizer")),
      workspace_bytes_(layout_.workspace_bytes()),
      position_(std::make_unique<Position>()),
      timer_(std::make_unique<Timer>(o.trace, *position_)) {
  workspace_memory_ = device_.arena().allocate(workspace_bytes_);
  if (workspace_memory_ == nullptr) {
    throw Error(Errc::kMemory, "device tier",
                "no room for the workspace of " + format_bytes(workspace_bytes_), "raise tiers.device");
  }
  const BatchShape shape = layout_.options.micro_batch;
  token_staging_.resize(static_cast<std::size_t>(2 * layout_.options.micro_batches * shape.rows()));
  scalar_staging_.resize(layout_.units.size() + 1);
}

Engine::~Engine() {
  leases_.clear();
  // Work that is under way uses leases; it must end before the store does. Its failure was reported, or
  // is being so.
  for (Stream* stream : {compute_.get(), optimizer_.get()}) {
    try {
      stream->synchronize();
    } catch (...) {
    }
  }
  device_.arena().release(workspace_memory_, workspace_bytes_);
}

void Engine::leave_program() {
  store_.run(nullptr, nullptr);
}

// A lease outside of a program, at the host if there is room, else where the tensor may be.
Lease Engine::host_lease(SegmentId segment, Access access) {
  const Position::Waiting waiting(*position_, Position::Waits::kForLease);
  if (layout_.table.segment(segment).lowest == Tier::kDevice)
    return store_.acquire(segment, Tier::kDevice, access);
  try {
    return store_.acquire(segment, Tier::kHost, access);
  } catch (const Error& e) {
    if (e.code() != Errc::kMemory || !device_.is_host()) throw;
    return store_.acquire(segment, Tier::kDevice, access);
  }
}

void Engine::initialize(const ParamSource& source) {
  leave_program();
  // The plan makes the same accesses in the same order (Load in plan.cpp).
  const DType state = layout_.model->accumulator_dtype();
  std::vector<float> values;
  for (std::size_t u = 0; u < layout_.units.size(); ++u) {
    const auto& tensors = layout_.units[u];
    const Unit& unit = layout_.model->units()[u];
    Lease weight = host_lease(layout_.whole(tensors.weight), Access::kOverwrite);
    const Tensor& master = layout_.table.tensor(tensors.master);
    for (std::int32_t i = 0; i < master.segments; ++i) {
      const Segment& segment = layout_.table.segment(master.first_segment + i);
      values.assign(static_cast<std::size_t>(segment.elements), 0.0f);
      for (const Param& p : unit.params) {
        const std::int64_t begin = std::max(p.offset, segment.first_element);
        const std::int64_t end = std::min(p.offset + p.count(), segment.first_element + segment.elements);
        if (begin < end)
          source(p, begin - p.offset, end - p.offset, values.data() + (begin - segment.first_element));
      }
      View in(values.data(), DType::kF32, 1, segment.elements);
      Lease lease = host_lease(master.first_segment + i, Access::kOverwrite);
      const View out(lease.data(), state, 1, segment.elements);
      HostStream now("initialize", HostStream::Mode::kInline);
      if (state == DType::kF32) {
        std::memcpy(lease.data(), values.data(), values.size() * sizeof(float));
      } else {
        for (std::int64_t k = 0; k < segment.elements; ++k)
          out.as<double>()[k] = values[static_cast<std::size_t>(k)];
      }
      const View w = whole_view(weight, tensors.weight).col_range(segment.first_element, segment.elements);
      host_ops().cast(now, out, w);
      lease.release();  // the plan has room for one segment beside the weight
      for (const TensorId moment : {tensors.m, tensors.v}) {
        Lease zero = host_lease(layout_.table.tensor(moment).first_segment + i, Access::kOverwrite);
        std::memset(zero.data(), 0, static_cast<std::size_t>(zero.bytes()));
      }
    }
  }
  // From here on what moves is the programs' doing alone, and can be foretold.
  store_.sink();
  {
    const Position::Waiting waiting(*position_, Position::Waits::kForMoves);
    store_.drain();
  }
  initial_ = store_.traffic();
}

Traffic Engine::settled_traffic() {
  leave_program();
  const Position::Waiting waiting(*position_, Position::Waits::kForMoves);
  store_.drain();
  return store_.traffic() - initial_;
}

View Engine::whole_view(const Lease& lease, TensorId tensor) const {
  const TensorSpec& spec = layout_.table.tensor(tensor).spec;
  return {lease.data(), spec.dtype, 1, spec.count};
}

// The previous step's work is done when this is called: its tokens may be overwritten.
void Engine::load_tokens(std::size_t m, const MicroBatch& batch) {
  const Workspace w(layout_, workspace_memory_);
  const auto rows = static_cast<std::size_t>(layout_.options.micro_batch.rows());
  std::int32_t* staging = token_staging_.data() + 2 * m * rows;
  std::memcpy(staging, batch.ids, rows * sizeof(std::int32_t));
  std::memcpy(staging + rows, batch.targets, rows * sizeof(std::int32_t));
  const auto i = static_cast<std::int64_t>(m);
  device_.copy_to_device(*compute_, w.ids(i).data, staging, w.token_bytes());
  device_.copy_to_device(*compute_, w.targets(i).data, staging + rows, w.token_bytes());
  own_.host_to_device += 2 * w.token_bytes();
}

void Engine::zero_scalars() {
  const Workspace w(layout_, workspace_memory_);
  device_.ops().zero(*compute_, w.scalars());
}

std::vector<double> Engine::read_scalars() {
  const Workspace w(layout_, workspace_memory_);
  const auto bytes = static_cast<std::int64_t>(scalar_staging_.size() * sizeof(double));
  device_.copy_to_host(*compute_, scalar_staging_.data(), w.scalars().data, bytes);
  own_.device_to_host += bytes;
  const Position::Waiting waiting(*position_, Position::Waits::kForStream);
  compute_->synchronize();
  return scalar_staging_;
}

Traffic Engine::own_traffic_per_step() const {
  Traffic t;
  t.host_to_device = 2 * 4 * layout_.options.micro_batch.rows() * layout_.options.micro_batches;
  t.device_to_host = static_cast<std::int64_t>(scalar_staging_.size() * sizeof(double));
  return t;
}

Traffic Engine::traffic() const {
  Traffic t = store_.traffic();
  return t += own_;
}

std::string Engine::state() const {
  return position_->text();
}
std::uint64_t Engine::progress() const {
  return position_->progress();
}
bool Engine::waiting() const {
  return position_->waiting();
}

void Engine::run_program(const StepProgram& program, const StepProgram* next) {
  store_.run(&program.program, next != nullptr ? &next->program : nullptr);
  if (history_.empty() || history_.back().program != &program || history_.back().next != next) {
    history_.push_back({&program, next, 0});
  }
  ++history_.back().times;
  position_->begin_program(program);
  for (std::int32_t i = 0; i < program.program.op_count(); ++i) {
    const StepOp& op = program.ops[static_cast<std::size_t>(i)];
    Stream& stream = op.kind == OpKind::kUpdate ? *optimizer_ : *compute_;
    position_->next_op(i);
    {
      const Position::Waiting waiting(*position_, Position::Waits::kForLease);
      store_.acquire_op(&stream, leases_);
    }
    timer_->begin(stream, op);
    issue(op, leases_);
    timer_->end(stream, op);
    const Event event = stream.record();
    for (Lease& lease : leases_) lease.release_after(stream, event);
    position_->issued();
  }
}

StepResult Engine::train_step(std::int64_t step, const std::vector<MicroBatch>& micro_batches,
                              const UpdateRule& rule, Then then) {
  ZG_ASSERT_EQ(static_cast<std::int64_t>(micro_batches.size()), layout_.options.micro_batches);
  const auto begin = Clock::now();
  const double busy = compute_->busy_seconds();
  const Traffic before = traffic();
  timer_->reset();
  position_->begin_step(step);
  StepResult result;
  for (const MicroBatch& b : micro_batches) {
    result.tokens += std::count_if(b.targets, b.targets + layout_.options.micro_batch.rows(),
                                   [](auto t) { return t >= 0; });
  }
  const double per_token = 1.0 / static_cast<double>(std::max<std::int64_t>(1, result.tokens));
  const bool early = programs_.timing == UpdateTiming::kEarly;
  ZG_ASSERT(!(early && rule.clip > 0), "clipping needs all gradients before the first update");
  if (early) {
    rule_ = rule;
    update_ = rule.adam;
    update_.step = step + 1;
    update_.grad_scale = per_token;
  }
  for (std::size_t m = 0; m < micro_batches.size(); ++m) load_tokens(m, micro_batches[m]);
  zero_scalars();
  const StepProgram& program = early || pending_ ? programs_.step : programs_.first;
  const StepProgram* next = then == Then::kTrain ? &programs_.step : early ? nullptr : &programs_.flush;
  run_program(program, next);
  const std::vector<double> scalars = read_scalars();

  result.loss = scalars[0] * per_token;
  double norm_sq = 0;
  for (std::size_t u = 1; u < scalars.size(); ++u) norm_sq += scalars[u];
  result.grad_norm = std::sqrt(norm_sq) * per_token;
  if (!std::isfinite(result.loss) || !std::isfinite(result.grad_norm)) {
    throw Error(
        Errc::kNumeric, fmt::format("step {}", step),
        fmt::format("the training diverged: loss {}, gradient norm {}", result.loss, result.grad_norm),
        "lower the learning rate, warm up longer, or clip gradients (gradient_clipping)");
  }
  if (!early) {
    pending_ = true;
    rule_ = rule;
    update_ = rule.adam;
    update_.step = step + 1;
    const double clip = rule.clip > 0 ? std::min(1.0, rule.clip / (result.grad_norm + 1e-6)) : 1.0;
    update_.grad_scale = per_token * clip;
  }
  result.seconds = seconds_between(begin, Clock::now());
  result.stall = std::max(0.0, result.seconds - (compute_->busy_seconds() - busy));
  result.phases = timer_->phases();
  result.traffic = traffic() - before;
  return result;
}

void Engine::flush() {
  if (!pending_) return;
  run_program(programs_.flush, nullptr);
  const Position::Waiting waiting(*position_, Position::Waits::kForStream);
  optimizer_->synchronize();
  pending_ = false;
}

double Engine::evaluate(std::int64_t micro_batches, const std::function<MicroBatch(std::int64_t)>& batch) {
  flush();
  const auto group = static_cast<std::size_t>(layout_.live_micro_batches());
  const auto rows = static_cast<std::size_t>(layout_.options.micro_batch.rows());
  const std::vector<std::int32_t> nothing(rows, 0), ignored(rows, -1);
  double loss = 0;
  std::int64_t tokens = 0;
  for (std::int64_t first = 0; first < micro_batches; first += static_cast<std::int64_t>(group)) {
    for (std::size_t m = 0; m < group; ++m) {
      const std::int64_t i = first + static_cast<std::int64_t>(m);
      const MicroBatch b = i < micro_batches ? batch(i) : MicroBatch{nothing.data(), ignored.data()};
      tokens += std::count_if(b.targets, b.targets + rows, [](auto t) { return t >= 0; });
      load_tokens(m, b);
    }
    zero_scalars();
    const bool more = first + static_cast<std::int64_t>(group) < micro_batches;
    run_program(programs_.evaluate, more ? &programs_.evaluate : nullptr);
    loss += read_scalars()[0];
  }
  return loss / static_cast<double>(std::max<std::int64_t>(1, tokens));
}

void Engine::read_state(TensorId tensor, const Param& param, std::int64_t begin, std::int64_t end,
                        float* out) {
  flush();
  leave_program();
  const Tensor& t = layout_.table.tensor(tensor);
  std::int64_t at = param.offset + begin;
  const std::int64_t stop = param.offset + end;
  while (at < stop) {
    const auto i = static_cast<std::int32_t>(at / layout_.table.segment(t.first_segment).elements);
    const Segment& segment = layout_.table.segment(t.first_segment + i);
    const std::int64_t until = std::min(stop, segment.first_element + segment.elements);
    const Lease lease = host_lease(t.first_segment + i, Access::kRead);
    const std::int64_t inside = at - segment.first_element;
    for (std::int64_t k = 0; k < until - at; ++k) {
      out[k] = t.spec.dtype == DType::kF64
                   ? static_cast<float>(static_cast<const double*>(lease.data())[inside + k])
                   : static_cast<const float*>(lease.data())[inside + k];
    }
    out += until - at;
    at = until;
  }
}

void Engine::read_master(std::int32_t unit, const Param& param, std::int64_t begin, std::int64_t end,
                         float* out) {
  read_state(layout_.units[static_cast<std::size_t>(unit)].master, param, begin, end, out);
}

void Engine::read_moment(int which, std::int32_t unit, const Param& param, std::int64_t begin,
                         std::int64_t end, float* out) {
  const auto& u = layout_.units[static_cast<std::size_t>(unit)];
  read_state(which == 0 ? u.m : u.v, param, begin, end, out);
}

}  // namespace zg
