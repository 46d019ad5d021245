#include "ziggurat/store/store.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "store/node.hpp"
#include "store/predictor.hpp"
#include "store/recorder.hpp"
#include "ziggurat/base/buffer.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {

namespace {

// Tells the stores of a process apart, for what threads remember of the last one that they used.
std::uint64_t next_identity() {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

}  // namespace

TensorStore::TensorStore(const Options& options)
    : table_(options.table != nullptr ? *options.table
                                      : TensorTable(options.io != nullptr ? options.io->drive_count() : 0,
                                                    options.device->arena().granule())),
      options_(options),
      identity_(next_identity()),
      residency_(table_, options.budgets, options.policy),
      completions_("zg-completions", HostStream::Mode::kThread) {
  copy_stream_[kToDevice] = options_.device->make_stream("host->device");
  copy_stream_[kToHost] = options_.device->make_stream("device->host");
  ZG_ASSERT_LE(options_.budgets.device, options_.device->arena().budget());
  ZG_ASSERT_LE(options_.budgets.host, options_.host->budget());
  ZG_ASSERT(!options_.budgets.direct || options_.device->is_host() ||
                (options_.io != nullptr && options_.io->direct() != nullptr),
            "the drives do not reach the device");
  // Where an arena charges more than is counted here, it refuses what was promised, and that is waited for
  // for ever.
  ZG_ASSERT_EQ(table_.device_granule() % options_.device->arena().granule(), 0);
  ZG_ASSERT_EQ(io::Engine::alignment() % options_.host->granule(), 0);
  if (options_.io != nullptr) {
    ZG_ASSERT_EQ(options_.io->drive_count(), table_.drives());
    // Segments are whole pages, so a page is the grain: nothing is lost to rounding.
    volume_ = io::make_volume(
        *options_.io,
        {.shares = options_.drive_shares, .grain = io::Engine::alignment(), .verify = options_.verify});
  }
  predictor_ = std::make_unique<Predictor>();
  recorder_ = std::make_unique<Recorder>();
  make_segments();
  set_looks();
  residency_.set_gate(this);
  // Last: where something throws before, nobody takes them off the arena, which may outlive the engine.
  const Arena::Hooks pin = options_.device->host_hooks();
  io::Engine* const io = options_.io;
  if (io == nullptr && !pin.mapped) return;
  options_.host->set_hooks({[io, pin](void* data, std::int64_t bytes) {
                              if (pin.mapped) pin.mapped(data, bytes);
                              if (io != nullptr) io->register_memory(data, bytes);
                            },
                            [io, pin](void* data, std::int64_t bytes) {
                              if (io != nullptr) io->unregister_memory(data);
                              if (pin.unmapped) pin.unmapped(data, bytes);
                            }});
  hooked_ = true;
}

// For those that the table has and we do not. Where the drives have no room for one it has no extent, and the
// rest have none either.
void TensorStore::make_segments() {
  std::optional<Error> failure;
  for (; segment_count_ < table_.segment_count(); ++segment_count_) {
    const SegmentId id = segment_count_;
    if (static_cast<std::size_t>(id) % kBlock == 0) {
      hot_.push_back(std::make_unique<Hot[]>(kBlock));
      segments_.push_back(std::make_unique<SegmentState[]>(kBlock));
    }
    hot(id).bytes = table_.segment(id).bytes;
    if (failure || volume_ == nullptr || table_.segment(id).lowest != Tier::kNvme) continue;
    try {
      at(id).extent = volume_->create(
          {.name = table_.segment_name(id), .bytes = table_.segment(id).charge, .slots = versions_of(id)});
    } catch (const Error& e) {
      failure = e;
    }
  }
  touched_.reserve(static_cast<std::size_t>(segment_count_));
  residency_.grow();
  if (failure) throw Error(*failure);
}

int TensorStore::versions_of(SegmentId segment) const {
  return table_.tensor(table_.segment(segment).tensor).spec.versions;
}

TensorId TensorStore::add(const TensorSpec& spec) {
  Lock lock(mutex_);
  throw_failure();
  ZG_ASSERT(program_ == nullptr, "tensors are added between programs");
  const TensorId id = table_.add(spec);
  try {
    make_segments();
  } catch (const Error&) {
    free_extents(table_.tensor(id));
    table_.remove(id);
    throw;
  }
  return id;
}

void TensorStore::free_extents(const Tensor& tensor) {
  for (SegmentId id = tensor.first_segment; id < tensor.first_segment + tensor.segments; ++id) {
    if (at(id).extent) volume_->destroy(std::exchange(at(id).extent, io::ExtentId{}));
  }
}

void TensorStore::remove(TensorId tensor) {
  const Tensor& t = table_.tensor(tensor);
  for (SegmentId id = t.first_segment; id < t.first_segment + t.segments; ++id) discard(id);
  drain();
  Lock lock(mutex_);
  free_extents(t);
  table_.remove(tensor);
}

TensorStore::~TensorStore() {
  Lock lock(mutex_);
  closing_ = true;
  keep(nullptr);
  changed_.wait(lock, [&] {
    return passed_ == 0 &&
           std::all_of(links_.begin(), links_.end(), [](const auto& l) { return l.moving == 0; });
  });
  for (std::int32_t id = 0; id < table_.segment_count(); ++id) {
    for (const Node* n = at(id).first; n != nullptr; n = n->next) {
      ZG_ASSERT(!n->leased, "{} is still leased when its store ends", describe(*n));
    }
    for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
      const auto t = static_cast<std::size_t>(tier);
      ZG_ASSERT((hot(id).word[t].load() & Hot::kLeases) == 0, "{} is still leased when its store ends",
                table_.segment_name(id));
      ZG_ASSERT(!residency_.is_pinned(id, tier), "{} is still pinned when its store ends",
                table_.segment_name(id));
      void*& memory = hot(id).memory[t];
      if (memory != nullptr)
        arena(tier).release(std::exchange(memory, nullptr), table_.segment(id).charge_at(tier));
    }
  }
  lock.unlock();
  copy_stream_[0].reset();
  copy_stream_[1].reset();
  volume_.reset();  // its last completion has returned from completions_ then
  if (hooked_) options_.host->set_hooks({});
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
  if (program_ == nullptr && program != nullptr) enter_program(lock);
  decided_ = announced ? decided_ - program_->op_count() : 0;
  if (decided_ < 0) decided_ = 0;
  const bool leaves = program_ != nullptr && program == nullptr;
  program_ = program;
  next_ = next;
  op_ = 0;
  access_ = 0;
  residency_.set_future(program, next);
  if (program_ != nullptr) {
    if (options_.record) recorder_->ran(*program_);
    decide_ahead(lock);
  } else {
    residency_.set_gate(this);
    if (leaves) {
      residency_.guess(predictor_->program(), -1);
      for (SegmentId id = 0; id < table_.segment_count(); ++id) refresh(id);
      expect_again();
      fetch_ahead(lock);
    }
  }
}

// From now on leases are nodes: those of before must have ended.
void TensorStore::enter_program(Lock& lock) {
  ZG_ASSERT(!logging_, "a step is under way: end it before a program begins");
  keep(nullptr);  // a program decides itself what stays
  closed_for_program_ = true;
  for (SegmentId id = 0; id < table_.segment_count(); ++id) {
    refresh(id);
    demand(id);  // with a program all is equally urgent: what was decided before it must not come after it
  }
  double warn_at = options_.warn_after_seconds;
  const auto begin = Clock::now();
  for (SegmentId id = 0; id < table_.segment_count(); ++id) {
    while (held(id, Tier::kDevice) || held(id, Tier::kHost)) {
      ZG_ASSERT(!holds(holder(), hot(id)), "{} is leased by the thread that starts a program",
                table_.segment_name(id));
      for (auto& word : hot(id).word) word.fetch_or(Hot::kWaited);
      changed_.wait_for(lock, std::chrono::milliseconds(100));
      if (const double waited = seconds_between(begin, Clock::now()); waited > warn_at) {
        warn_at *= 2;
        log::warning("a program waits to start for {}: {} is still leased", format_seconds(waited),
                     table_.segment_name(id));
      }
    }
    for (auto& word : hot(id).word) word.fetch_and(~Hot::kWaited);
  }
  ZG_ASSERT(waiters_.empty(), "a thread waits for {}, which a program takes", describe(*waiters_.front()));
  closed_for_program_ = false;
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
    // For when there is no program any more.
    const std::uint64_t now = tick();
    for (const AccessStep& a : (in_next ? next_ : program_)->op(op)) hot(a.segment).last_use = now;
    add_actions(lock, Urgency::kDemand);
  }
}

// The first use of the segment that nobody has taken yet.
Node& TensorStore::next_use_node(SegmentId segment, Tier tier, Access access) {
  for (Node* n = at(segment).first; n != nullptr; n = n->next) {
    if (n->action.kind != Action::Kind::kUse || n->taken) continue;
    ZG_ASSERT(n->action.tier == tier && n->action.access == access, "{}", describe(*n));
    n->taken = true;
    return *n;
  }
  ZG_ASSERT(false, "{} was not decided", table_.segment_name(segment));
  __builtin_unreachable();
}

Lease TensorStore::acquire_in_program(Lock& lock, SegmentId segment, Tier tier, Access access,
                                      Stream* consumer) {
  throw_failure();
  ZG_ASSERT_LT(access_, program_->access_count());
  const AccessStep& expected = program_->access(access_);
  ZG_ASSERT(expected.segment == segment && expected.tier == tier && expected.access == access,
            "program {} expects {} next, not {}", program_->name(), table_.segment_name(expected.segment),
            table_.segment_name(segment));
  while (op_ + 1 < program_->op_count() && program_->first_access(op_ + 1) <= access_) ++op_;
  decide_ahead(lock);
  ++access_;
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
  const SegmentId id = node.action.segment;
  SegmentState& s = at(id);
  node.consumer = consumer;
  touch(id);
  settle(lock);
  if (node.state == Node::State::kPending) {
    ++s.counts.misses;
    ++tiers_[static_cast<std::size_t>(node.action.tier)].misses;
    demand(id);
    waiting_.fetch_add(1);
    const auto begin = begin_wait(node);
    double warn_at = options_.warn_after_seconds;
    while (node.state == Node::State::kPending && !failed_) {
      changed_.wait_for(lock, std::chrono::milliseconds(500));
      look_at_wait();
      const double waited = seconds_between(begin, Clock::now());
      if (waited > warn_at && node.state == Node::State::kPending && !failed_) {
        warn_at *= 2;
        const std::string what = describe(node);
        lock.unlock();
        log::warning("waiting for {} for {}\n{}", what, format_seconds(waited), state());
        lock.lock();
      }
    }
    waiting_.fetch_sub(1);
    end_wait();
    const double seconds = seconds_between(begin, awaiting_.since);
    ++waits_;
    ++s.counts.waits;
    s.counts.waited_seconds += seconds;
  } else {
    hot(id).hits[static_cast<std::size_t>(node.action.tier)].fetch_add(1, std::memory_order_relaxed);
  }
  throw_failure();
  node.leased = true;
  Lease lease;
  lease.node_ = &node;
  lease.store_ = this;
  lease.data_ = hot(id).memory[static_cast<std::size_t>(node.action.tier)];
  lease.bytes_ = hot(id).bytes;
  return lease;
}

void TensorStore::pass(Node& node, Stream& stream) {
  Lock lock(mutex_);
  node.passed_to = &stream;
  ++passed_;
  touch(node.action.segment);
  settle(lock);  // a use on the same stream may have waited for just this
}

void TensorStore::end_use(Node& node) {
  Lock lock(mutex_);
  node.leased = false;
  if (node.passed_to != nullptr) --passed_;
  finish(lock, node);
}

void TensorStore::discard(SegmentId segment) {
  Lock lock(mutex_);
  ZG_ASSERT(program_ == nullptr, "a program says itself what is dead");
  check_access(segment, Tier::kHost);
  Waiter waiter(*this, {segment, Tier::kHost, Access::kOverwrite, false}, nullptr);
  while (true) {
    throw_failure();
    if (at(segment).first != nullptr) {
      waiter.obstacle = Obstacle::kMoving;
      waiter.moving = segment;
      demand(segment);
    } else if (in_the_way(waiter) || !close_for_write(segment)) {
      waiter.obstacle = Obstacle::kLeases;
    } else {
      break;
    }
    waiter.seen = changes_;
    wait(lock, waiter);
  }
  residency_.discard(segment, actions_);
  add_actions(lock, Urgency::kDemand);
}

Pin TensorStore::pin(SegmentId segment, Tier tier) {
  check_access(segment, tier);
  {
    Lock lock(mutex_);
    throw_failure();
    residency_.pin(segment, tier);
  }
  Pin pin;
  pin.store_ = this;
  pin.segment_ = segment;
  pin.tier_ = tier;
  prefetch(segment, tier);
  return pin;
}

void TensorStore::unpin(SegmentId segment, Tier tier) {
  Lock lock(mutex_);
  residency_.unpin(segment, tier);
  wake();
}

void TensorStore::sink() {
  Lock lock(mutex_);
  ZG_ASSERT(program_ == nullptr, "a program says itself what moves");
  // What is on its way first: it may be what sinks.
  changed_.wait(lock, [&] { return failed_ || idle(); });
  throw_failure();
  residency_.sink(actions_);
  add_actions(lock, Urgency::kWriteBack);
  expect_again();
  resting_ = true;
}

bool TensorStore::has_content(SegmentId segment) const {
  std::lock_guard lock(mutex_);
  return residency_.has_content(segment);
}

std::vector<std::int64_t> TensorStore::versions(SegmentId segment) const {
  check_access(segment, Tier::kHost);
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return still(); });
  std::vector<std::int64_t> found;
  if (!at(segment).extent) return found;
  for (int slot = 0; slot < versions_of(segment); ++slot) {
    if (const std::int64_t version = volume_->version(at(segment).extent, slot); version >= 0)
      found.push_back(version);
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

void TensorStore::read_version(SegmentId segment, std::int64_t version, void* data) const {
  check_access(segment, Tier::kHost);
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return still(); });
  const io::ExtentId extent = at(segment).extent;
  int slot = versions_of(segment) - 1;
  while (slot >= 0 && (!extent || volume_->version(extent, slot) != version)) --slot;
  if (slot < 0)
    throw Error(Errc::kUsage, table_.segment_name(segment), fmt::format("has no version {} on NVMe", version),
                "ask versions() for those that it has");
  const std::int64_t charge = table_.segment(segment).charge;
  const Buffer pages(charge);
  const io::ExtentResult result =
      volume_->read_and_wait({.extent = extent, .slot = slot, .data = pages.data()});
  if (!result.ok())
    throw Error(Errc::kIo, "nvme tier", volume_->explain(extent, io::Op::kRead, result),
                "another version may be whole");
  std::memcpy(data, pages.data(), static_cast<std::size_t>(table_.segment(segment).bytes));
}

// Nothing moves, and nothing begins to while the lock is held.
bool TensorStore::still() const {
  return failed_ ? std::all_of(links_.begin(), links_.end(), [](const auto& l) { return l.moving == 0; })
                 : idle();
}

void TensorStore::drain() {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return failed_ || idle(); });
  throw_failure();
}

bool TensorStore::idle() const {
  return std::all_of(links_.begin(), links_.end(), [](const auto& l) { return l.moving == 0; }) &&
         std::all_of(ready_.begin(), ready_.end(), [](const auto& r) { return r.first == nullptr; });
}

Traffic TensorStore::traffic() const {
  std::lock_guard lock(mutex_);
  const std::int64_t direct_read = links_[kDirectRead].bytes, direct_write = links_[kDirectWrite].bytes;
  return {links_[kNvmeRead].bytes + direct_read,
          links_[kNvmeWrite].bytes + direct_write,
          links_[kToDevice].bytes,
          links_[kToHost].bytes,
          direct_read,
          direct_write};
}

std::int64_t TensorStore::first_written_bytes() const {
  std::lock_guard lock(mutex_);
  return first_written_;
}

double TensorStore::waited_seconds() const {
  std::lock_guard lock(mutex_);
  return std::accumulate(waited_for_.begin(), waited_for_.end(), 0.0);
}

void TensorStore::observe_waits(WaitObserver* observer) {
  Lock lock(mutex_);
  ZG_ASSERT(program_ == nullptr || observer == nullptr, "{} runs", program_->name());
  observer_ = observer;
}

// The first failure is the one that is told.
void TensorStore::fail(Lock&, Errc code, const std::string& where, const std::string& what,
                       const std::string& hint) {
  if (failed_) return;
  failure_.emplace(code, where, what, hint);
  failed_ = true;
  wake();
}

void TensorStore::throw_failure() const {
  if (failed_) throw Error(*failure_);
}

}  // namespace zg
