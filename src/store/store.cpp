#include "ziggurat/store/store.hpp"

#include <algorithm>
#include <utility>

#include "store/node.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    release();
    node_ = std::exchange(other.node_, nullptr);
    store_ = std::exchange(other.store_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void Lease::release() {
  if (store_ == nullptr) return;
  std::exchange(store_, nullptr)->end_use(*node_);
  data_ = nullptr;
}

void Lease::release_after(Stream& stream, const Event& event) {
  if (store_ == nullptr) return;
  TensorStore* store = std::exchange(store_, nullptr);
  data_ = nullptr;
  Node* node = node_;
  store->pass(*node, stream);
  event.on_done([store, node] { store->end_use(*node); });
}

TensorStore::TensorStore(const Options& options)
    : table_(*options.table),
      options_(options),
      residency_(*options.table, options.budgets),
      segments_(static_cast<std::size_t>(options.table->segment_count())),
      completions_("zg-completions", HostStream::Mode::kThread) {
  copy_stream_[kToDevice] = options_.device->make_stream("host->device");
  copy_stream_[kToHost] = options_.device->make_stream("device->host");
  ZG_ASSERT_LE(options_.budgets.device, options_.device->arena().budget());
  ZG_ASSERT_LE(options_.budgets.host, options_.host->budget());
  if (options_.io != nullptr) {
    ZG_ASSERT_EQ(options_.io->drive_count(), table_.drives());
    io::Engine* io = options_.io;
    // Segments are whole pages, so a page is the grain: nothing is lost to rounding.
    volume_ = io::make_volume(
        *io, {.shares = options_.drive_shares, .grain = io::Engine::alignment(), .verify = options_.verify});
    for (SegmentId id = 0; id < table_.segment_count(); ++id) {
      if (table_.segment(id).lowest != Tier::kNvme) continue;
      at(id).extent = volume_->create({.name = table_.segment_name(id), .bytes = table_.segment(id).charge});
    }
    // Last: where something throws before, nobody takes them off the arena, which may outlive the engine.
    options_.host->set_hooks({[io](void* data, std::int64_t bytes) { io->register_memory(data, bytes); },
                              [io](void* data, std::int64_t) { io->unregister_memory(data); }});
  }
}

TensorStore::~TensorStore() {
  Lock lock(mutex_);
  closing_ = true;
  changed_.wait(lock, [&] {
    return passed_ == 0 && std::all_of(std::begin(moving_), std::end(moving_), [](int n) { return n == 0; });
  });
  for (SegmentState& s : segments_) {
    for (const Node& node : s.queue) {
      ZG_ASSERT(!node.leased, "{} is still leased when its store ends", describe(node));
    }
  }
  for (std::int32_t id = 0; id < table_.segment_count(); ++id) {
    for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
      void*& memory = at(id).memory[static_cast<std::size_t>(tier)];
      if (memory != nullptr) arena(tier).release(std::exchange(memory, nullptr), table_.segment(id).charge);
    }
  }
  lock.unlock();
  copy_stream_[0].reset();
  copy_stream_[1].reset();
  volume_.reset();  // its last completion has returned from completions_ then
  if (options_.io != nullptr) options_.host->set_hooks({});
}

TensorStore::SegmentState& TensorStore::at(SegmentId id) {
  return segments_[static_cast<std::size_t>(id)];
}

Arena& TensorStore::arena(Tier tier) {
  return tier == Tier::kDevice ? options_.device->arena() : *options_.host;
}

void TensorStore::run(const Program* program, const Program* next) {
  Lock lock(mutex_);
  throw_failure();
  const bool announced = program_ != nullptr && next_ != nullptr;
  if (program_ != nullptr) {
    ZG_ASSERT_EQ(access_, program_->access_count());
    if (announced) ZG_ASSERT(next_ == program, "another program was announced");
  }
  decided_ = announced ? decided_ - program_->op_count() : 0;
  if (decided_ < 0) decided_ = 0;
  program_ = program;
  next_ = next;
  op_ = 0;
  access_ = 0;
  residency_.set_future(program, next);
  if (program_ != nullptr) decide_ahead(lock);
}

// Decides the operations up to prefetch_depth ahead of the current one. Those of the next program are only
// reached when this one is decided to its end.
void TensorStore::decide_ahead(Lock& lock) {
  const std::int64_t total = std::int64_t{program_->op_count()} + (next_ != nullptr ? next_->op_count() : 0);
  const std::int64_t target = std::min(total, std::int64_t{op_} + 1 + options_.prefetch_depth);
  while (decided_ < target) {
    const bool in_next = decided_ >= program_->op_count();
    const std::int32_t op = in_next ? decided_ - program_->op_count() : decided_;
    if (const auto failure = residency_.decide(in_next ? 1 : 0, op, actions_)) {
      actions_.clear();  // the decisions cannot be gone on with
      fail(lock, Errc::kMemory, name_of(failure->tier) + std::string(" tier"),
           fmt::format("operation {} of program {} finds no room for {} ({})", op,
                       (in_next ? next_ : program_)->name(), table_.segment_name(failure->segment),
                       format_bytes(failure->needed)),
           "raise this tier's budget");
      throw_failure();
    }
    ++decided_;
    add_actions(lock);
  }
}

// Appends the decided moves to their segments' queues and starts what can start.
void TensorStore::add_actions(Lock& lock) {
  for (const Action& action : actions_) {
    SegmentState& s = at(action.segment);
    Node& node = s.queue.emplace_back();
    node.action = action;
    node.sequence = sequence_++;
    if (action.kind == Action::Kind::kAlloc)
      memory_queue_[static_cast<std::size_t>(action.tier)].push_back(&node);
  }
  for (const Action& action : actions_) advance(lock, action.segment);
  actions_.clear();
}

// The first use of the segment that nobody has taken yet.
Node& TensorStore::next_use_node(SegmentId segment, Tier tier, Access access) {
  for (Node& node : at(segment).queue) {
    if (node.action.kind != Action::Kind::kUse || node.taken) continue;
    ZG_ASSERT(node.action.tier == tier && node.action.access == access, "{}", describe(node));
    node.taken = true;
    return node;
  }
  ZG_ASSERT(false, "{} was not decided", table_.segment_name(segment));
  __builtin_unreachable();
}

Lease TensorStore::acquire(SegmentId segment, Tier tier, Access access, Stream* consumer) {
  Lock lock(mutex_);
  throw_failure();
  if (program_ != nullptr) {
    ZG_ASSERT_LT(access_, program_->access_count());
    const AccessStep& expected = program_->access(access_);
    ZG_ASSERT(expected.segment == segment && expected.tier == tier && expected.access == access,
              "program {} expects {} next, not {}", program_->name(), table_.segment_name(expected.segment),
              table_.segment_name(segment));
    while (op_ + 1 < program_->op_count() && program_->first_access(op_ + 1) <= access_) ++op_;
    decide_ahead(lock);
    ++access_;
  } else {
    const AccessStep step{segment, tier, access, false};
    const auto held = [&](SegmentId id, Tier held_at) {
      const auto& queue = at(id).queue;
      return std::any_of(queue.begin(), queue.end(), [&](const Node& node) {
        return node.action.kind == Action::Kind::kUse && node.action.tier == held_at &&
               node.state != Node::State::kDone;
      });
    };
    if (const auto failure = residency_.decide_free(step, held, actions_)) {
      // What was decided before the failure stands; only this use does not happen.
      add_actions(lock);
      throw Error(Errc::kMemory, name_of(failure->tier) + std::string(" tier"),
                  fmt::format("no room for {} ({}): the leases that are held fill the budget",
                              table_.segment_name(failure->segment), format_bytes(failure->needed)),
                  "release leases, or raise this tier's budget");
    }
    add_actions(lock);
  }
  return wait_for(lock, next_use_node(segment, tier, access), consumer);
}

void TensorStore::acquire_op(Stream* consumer, std::vector<Lease>& out) {
  out.clear();
  std::int32_t op = 0;
  {
    Lock lock(mutex_);
    ZG_ASSERT(program_ != nullptr);
    op = op_;
    while (op < program_->op_count() && program_->first_access(op) < access_) ++op;
    ZG_ASSERT(op < program_->op_count(), "program {} is at its end", program_->name());
  }
  for (const AccessStep& a : program_->op(op)) out.push_back(acquire(a.segment, a.tier, a.access, consumer));
}

Lease TensorStore::wait_for(Lock& lock, Node& node, Stream* consumer) {
  node.consumer = consumer;
  advance(lock, node.action.segment);
  if (node.state == Node::State::kPending) {
    demand(node);
    const auto begin = Clock::now();
    double warn_at = options_.warn_after_seconds;
    while (node.state == Node::State::kPending && !failed_) {
      changed_.wait_for(lock, std::chrono::milliseconds(500));
      const double waited = seconds_between(begin, Clock::now());
      if (waited > warn_at && node.state == Node::State::kPending && !failed_) {
        warn_at *= 2;
        const std::string what = describe(node);
        lock.unlock();
        log::warning("waiting for {} for {}\n{}", what, format_seconds(waited), state());
        lock.lock();
      }
    }
    waited_ += seconds_between(begin, Clock::now());
  }
  throw_failure();
  node.leased = true;
  Lease lease;
  lease.node_ = &node;
  lease.store_ = this;
  lease.data_ = at(node.action.segment).memory[static_cast<std::size_t>(node.action.tier)];
  lease.bytes_ = table_.segment(node.action.segment).bytes;
  return lease;
}

void TensorStore::pass(Node& node, Stream& stream) {
  Lock lock(mutex_);
  node.passed_to = &stream;
  ++passed_;
  advance(lock, node.action.segment);  // a use on the same stream may have waited for just this
}

void TensorStore::end_use(Node& node) {
  Lock lock(mutex_);
  node.leased = false;
  if (node.passed_to != nullptr) --passed_;
  finish(lock, node);
  if (closing_) changed_.notify_all();
}

void TensorStore::discard(SegmentId segment) {
  Lock lock(mutex_);
  ZG_ASSERT(program_ == nullptr, "a program says itself what is dead");
  residency_.discard(segment, actions_);
  add_actions(lock);
}

void TensorStore::sink() {
  Lock lock(mutex_);
  ZG_ASSERT(program_ == nullptr, "a program says itself what moves");
  residency_.sink(actions_);
  add_actions(lock);
}

bool TensorStore::has_content(SegmentId segment) const {
  std::lock_guard lock(mutex_);
  return residency_.has_content(segment);
}

void TensorStore::drain() {
  Lock lock(mutex_);
  changed_.wait(lock, [&] {
    if (failed_) return true;
    for (int i = 0; i < kLinks; ++i) {
      if (moving_[i] != 0 || !ready_[i].empty()) return false;
    }
    return true;
  });
  throw_failure();
}

Traffic TensorStore::traffic() const {
  std::lock_guard lock(mutex_);
  return traffic_;
}

double TensorStore::waited_seconds() const {
  std::lock_guard lock(mutex_);
  return waited_;
}

// The first failure is the one that is told.
void TensorStore::fail(Lock&, Errc code, const std::string& where, const std::string& what,
                       const std::string& hint) {
  if (failed_) return;
  failure_.emplace(code, where, what, hint);
  failed_ = true;
  changed_.notify_all();
}

void TensorStore::throw_failure() const {
  if (failed_) throw Error(*failure_);
}

std::string TensorStore::describe(const Node& node) const {
  static constexpr const char* kKinds[] = {"memory for", "move of", "release of", "use of"};
  static constexpr const char* kStates[] = {"pending", "running", "done"};
  std::string text = fmt::format("{} {} at {} ({})", kKinds[static_cast<int>(node.action.kind)],
                                 table_.segment_name(node.action.segment), name_of(node.action.tier),
                                 kStates[static_cast<int>(node.state)]);
  if (node.action.kind == Action::Kind::kCopy) text += fmt::format(" from {}", name_of(node.action.from));
  return text;
}

std::string TensorStore::state() const {
  std::lock_guard lock(mutex_);
  static constexpr const char* kNames[kLinks] = {"host->device", "device->host", "nvme->host", "host->nvme"};
  std::string text = fmt::format(
      "  device {} of {}, host {} of {}; program {} operation {} of {}, decided {}",
      format_bytes(options_.device->arena().in_use()), format_bytes(options_.device->arena().budget()),
      format_bytes(options_.host->in_use()), format_bytes(options_.host->budget()),
      program_ ? program_->name() : "none", op_, program_ ? program_->op_count() : 0, decided_);
  for (int i = 0; i < kLinks; ++i) {
    text += fmt::format("\n  {}: {} moving, {} ready", kNames[i], moving_[i], ready_[i].size());
  }
  for (const auto& queue : memory_queue_) {
    if (!queue.empty()) text += fmt::format("\n  first to get memory: {}", describe(*queue.front()));
  }
  int shown = 0;
  for (const SegmentState& s : segments_) {
    for (const Node& node : s.queue) {
      if (node.state != Node::State::kRunning || shown++ >= 12) continue;
      text += fmt::format("\n  {}{}", describe(node), node.leased ? ", leased" : "");
    }
  }
  if (options_.io != nullptr) text += fmt::format("\n  {}", options_.io->state());
  return text;
}

}  // namespace zg
