#include "ziggurat/store/timed_run.hpp"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <utility>

#include "store/drive_queue.hpp"
#include "store/move_graph.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/io/volume.hpp"
#include "ziggurat/store/store.hpp"

namespace zg {
namespace {

// MoveGraph only compares streams; nothing is ever enqueued on this one.
class VirtualStream final : public Stream {
 public:
  const std::string& name() const override { return name_; }
  Event record() override { return {}; }
  void wait(const Event&) override {}
  void callback(Task) override {}
  void synchronize() override {}
  double busy_seconds() const override { return 0; }

 private:
  std::string name_ = "virtual";
};

// The flows under way and the virtual time. Speeds are found anew whenever a flow begins or ends.
class FlowClock {
 public:
  explicit FlowClock(std::vector<double> capacities) : capacities_(std::move(capacities)) {
    used.resize(capacities_.size());
  }
  struct Running {
    const Flow* flow = nullptr;
    std::int32_t owner = 0;  // a link, or a stream behind the links
    double left = 1;         // share of the flow that is still to come
    double alone = 0;        // seconds
    double speed = 0;        // shares per second
  };
  // The flow must stay where it is until it ends.
  void begin(const Flow& flow, std::int32_t owner) {
    running_.push_back({&flow, owner, 1, seconds_alone(flow, capacities_), 0});
    settled_ = false;
    for (const FlowDemand& d : flow.demands) used[static_cast<std::size_t>(d.resource)] += d.amount;
  }
  bool empty() const { return running_.empty(); }
  // Seconds until the next flow ends.
  double next() {
    settle();
    double least = -1;
    for (const Running& r : running_) {
      const double seconds = r.alone == 0 ? 0 : r.left / r.speed;
      if (least < 0 || seconds < least) least = seconds;
    }
    return least;
  }
  // Lets this time pass, at most next(). Returns the owner of a flow that has ended; -1: none has.
  std::int32_t pass(double seconds) {
    settle();
    std::size_t first = running_.size();
    double soonest = 0;
    for (std::size_t i = 0; i < running_.size(); ++i) {
      Running& r = running_[i];
      const double rest = r.alone == 0 ? 0 : r.left / r.speed - seconds;
      r.left = std::max(0.0, r.left - seconds * r.speed);
      if (first == running_.size() || rest < soonest) first = i, soonest = rest;
    }
    if (first == running_.size() || soonest > 0) return -1;
    const std::int32_t owner = running_[first].owner;
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(first));
    settled_ = false;
    return owner;
  }
  std::vector<double> used;  // of each resource, by all flows that have begun

 private:
  void settle() {
    if (std::exchange(settled_, true)) return;
    flows_.clear();
    for (const Running& r : running_) flows_.push_back(r.flow);
    const std::vector<double> shares = fair_shares(flows_, capacities_);
    for (std::size_t i = 0; i < running_.size(); ++i)
      running_[i].speed = running_[i].alone == 0 ? 0 : shares[i] / running_[i].alone;
  }

  std::vector<double> capacities_;
  std::vector<Running> running_;
  std::vector<const Flow*> flows_;
  bool settled_ = true;
};

class TimedDriver final : public MoveDriver, public MoveEvents {
 public:
  TimedDriver(const TensorTable& table, const TimedMachine& machine)
      : table_(table),
        machine_(machine),
        graph_(table, {.piece_bytes = machine.piece_bytes, .copies_in_flight = machine.copies_in_flight},
               *this, *this),
        clock_(machine.capacities),
        links_(kLinks),
        streams_(static_cast<std::size_t>(machine.streams)) {
    graph_.grow(table.segment_count());
    for (StreamQueue& queue : streams_) queue.identity = std::make_unique<VirtualStream>();
    result_.busy.resize(streams_.size());
  }

  TimedResult run(std::span<const TimedProgram> programs) {
    if (!programs.empty()) used_ = result_.peak = programs.front().decided->used_before();
    for (std::size_t p = 0; p < programs.size(); ++p) {
      run_program(programs[p], p + 1 < programs.size() ? &programs[p + 1] : nullptr);
      for (std::size_t s = 0; s < streams_.size(); ++s) {
        const bool goes_on = s < machine_.goes_on.size() && machine_.goes_on[s];
        while (!goes_on && !streams_[s].jobs.empty()) must_step("a stream");
      }
      result_.ends.push_back(now_);
    }
    while (step()) {
    }
    result_.drained = now_;
    result_.used = clock_.used;
    result_.traffic = graph_.bytes();
    ZG_ASSERT(graph_.idle() && !graph_.has_moves(), "moves are left at the end of a timed run");
    return std::move(result_);
  }

 private:
  struct LinkQueue {
    std::set<LinkJob> waiting;
    std::optional<LinkJob> now;
    Flow flow;
    double began = 0;
  };
  struct OpJob {
    const TimedOp* op = nullptr;
    std::vector<ActionNode*> uses;
  };
  struct StreamQueue {
    std::unique_ptr<Stream> identity;
    std::deque<OpJob> jobs;  // the first is under way
    double began = 0;
  };
  struct Fed {
    std::int64_t left = 0;  // bytes that have not been copied
    bool whole = false;
  };
  struct Later {
    double at = 0;
    std::uint64_t order = 0;
    LinkJob job;
    bool operator<(const Later& o) const { return at != o.at ? at > o.at : order > o.order; }
  };

  void run_program(const TimedProgram& timed, const TimedProgram* next) {
    const Program& p = timed.decided->program();
    const std::int64_t total =
        std::int64_t{p.op_count()} + (next != nullptr ? next->decided->program().op_count() : 0);
    for (std::int32_t op = 0; op < p.op_count(); ++op) {
      for (; decided_ < std::min(total, op + 1 + machine_.prefetch_depth); ++decided_) {
        const bool ahead = decided_ >= p.op_count();
        const auto actions =
            (ahead ? next : &timed)
                ->decided->actions(static_cast<std::int32_t>(ahead ? decided_ - p.op_count() : decided_));
        actions_.assign(actions.begin(), actions.end());
        graph_.decided(actions_, Urgency::kProgram);
      }
      const TimedOp& work = timed.ops[static_cast<std::size_t>(op)];
      StreamQueue& stream = streams_[static_cast<std::size_t>(work.stream)];
      OpJob job{&work, {}};
      for (const AccessStep& a : p.op(op)) job.uses.push_back(&graph_.claim_use(a, stream.identity.get()));
      graph_.settle();
      for (const ActionNode* use : job.uses) {
        if (use->state == ActionNode::State::kPending) graph_.hurry_reads(use->action.segment);
      }
      start_links();
      for (ActionNode* use : job.uses) {
        while (use->state == ActionNode::State::kPending) must_step("an operation");
        use->leased = true;
      }
      for (ActionNode* use : job.uses) graph_.pass_use(*use, *stream.identity, false);
      stream.jobs.push_back(std::move(job));
      if (stream.jobs.size() == 1) begin_op(work.stream);
      start_links();
    }
    decided_ -= p.op_count();
  }

  void must_step(const char* who) {
    const bool goes_on = step();
    ZG_ASSERT(goes_on, "{} waits for ever in a timed run", who);
  }

  void begin_op(int s) {
    StreamQueue& stream = streams_[static_cast<std::size_t>(s)];
    stream.began = now_;
    clock_.begin(stream.jobs.front().op->flow, kLinks + s);
  }

  // Lets the next thing happen; false: nothing will.
  bool step() {
    const double flows = clock_.empty() ? -1 : clock_.next();
    if (!later_.empty() && (flows < 0 || later_.top().at <= now_ + flows)) {
      const Later event = later_.top();
      later_.pop();
      if (!clock_.empty()) ended(clock_.pass(std::max(0.0, event.at - now_)), event.at);
      now_ = std::max(now_, event.at);
      arrived(event.job);
      start_links();
      return true;
    }
    if (flows < 0) return false;
    ended(clock_.pass(flows), now_ + flows);
    start_links();
    return true;
  }

  void ended(std::int32_t owner, double at) {
    if (owner < 0) return;
    now_ = at;
    if (owner >= kLinks) return end_op(owner - kLinks);
    LinkQueue& link = links_[static_cast<std::size_t>(owner)];
    result_.links_busy[static_cast<std::size_t>(owner)] += now_ - link.began;
    const LinkJob job = *link.now;
    link.now.reset();
    if (in_turns(static_cast<Link>(owner))) {
      drives_busy_ = false;
      drives_.done(job);
    }
    const double latency = machine_.links[static_cast<std::size_t>(owner)].latency;
    if (latency == 0) return arrived(job);
    later_.push({now_ + latency, order_++, job});
  }

  void end_op(int s) {
    StreamQueue& stream = streams_[static_cast<std::size_t>(s)];
    result_.busy[static_cast<std::size_t>(s)] += now_ - stream.began;
    const OpJob job = std::move(stream.jobs.front());
    stream.jobs.pop_front();
    if (!stream.jobs.empty()) begin_op(s);
    for (ActionNode* use : job.uses) {
      use->leased = false;
      graph_.end(*use);
    }
  }

  // The bytes of a job are there.
  void arrived(const LinkJob& job) {
    ActionNode& copy = *job.copy;
    if (const auto found = fed_.find(&copy); found != fed_.end()) {
      Fed& fed = found->second;
      fed.left -= job.bytes;
      if (fed.left > 0 || !(fed.whole || writes_drives(link_of(copy.action)))) return;
      fed_.erase(found);
      return graph_.end(copy);
    }
    if (copy.in_pieces) {
      ActionNode* const fed = graph_.piece_arrived(copy, job.first, job.bytes);
      if (fed != nullptr) feed(*fed, job.first, job.bytes);
    }
    if (job.last) graph_.end(copy);
    // The pieces of a second hop may all have been copied when the first hop ends.
    for (ActionNode* const fed : std::exchange(whole_, {})) {
      const auto found = fed_.find(fed);
      if (found == fed_.end() || found->second.left > 0) continue;
      fed_.erase(found);
      graph_.end(*fed);
    }
  }

  void feed(ActionNode& copy, std::int64_t first, std::int64_t bytes) { push(copy, first, bytes, false); }
  void push(ActionNode& copy, std::int64_t first, std::int64_t bytes, bool last) {
    const Link link = link_of(copy.action);
    const LinkJob job{&copy, first, bytes, last, order_++};
    if (in_turns(link)) return drives_.push(job, graph_.drive_urgency(copy));
    links_[link].waiting.insert(job);
  }
  bool in_turns(Link link) const {
    return machine_.drives_take_turns && (reads_drives(link) || writes_drives(link));
  }

  // Each link that carries nothing takes the most urgent transfer.
  void start_links() {
    for (std::size_t l = 0; l < links_.size(); ++l) {
      LinkQueue& link = links_[l];
      if (link.now || link.waiting.empty()) continue;
      const LinkJob job = *link.waiting.begin();
      link.waiting.erase(link.waiting.begin());
      carry(l, job);
    }
    if (drives_busy_) return;
    if (const auto job = drives_.next(machine_.drive_window)) {
      drives_busy_ = true;
      carry(link_of(job->copy->action), *job);
    }
  }
  void carry(std::size_t l, const LinkJob& job) {
    LinkQueue& link = links_[l];
    link.now = job;
    link.began = now_;
    link.flow.demands = machine_.links[l].per_byte;
    for (FlowDemand& d : link.flow.demands) d.amount *= static_cast<double>(job.bytes);
    clock_.begin(link.flow, static_cast<std::int32_t>(l));
  }

  Memory take_memory(const ActionNode& node) override {
    const Tier tier = node.action.tier;
    const std::size_t t = index_of(tier);
    const std::int64_t bytes = table_.segment(node.action.segment).charge_at(tier);
    if (used_[t] + bytes > (tier == Tier::kDevice ? machine_.memory.device : machine_.memory.host))
      return Memory::kNoRoom;
    used_[t] += bytes;
    result_.peak[t] = std::max(result_.peak[t], used_[t]);
    return Memory::kGiven;
  }
  void free_memory(const ActionNode& node) override {
    used_[index_of(node.action.tier)] -= table_.segment(node.action.segment).charge_at(node.action.tier);
  }
  bool begin(ActionNode& copy, const ActionNode* fed_by) override {
    const Link link = link_of(copy.action);
    const Segment& segment = table_.segment(copy.action.segment);
    const bool drives = reads_drives(link) || writes_drives(link);
    const std::int64_t bytes = drives ? segment.charge : segment.bytes;
    if (fed_by != nullptr) {
      const bool from_drives = reads_drives(link_of(fed_by->action));
      fed_[&copy] = {from_drives ? segment.charge : segment.bytes, false};
      for (const auto& [first, piece] : graph_.queue(copy.action.segment).arrived) feed(copy, first, piece);
      return false;
    }
    const std::int64_t most = copy.in_pieces ? machine_.piece_bytes : bytes;
    for (std::int64_t first = 0; first < bytes; first += most) {
      const std::int64_t piece = std::min(most, bytes - first);
      push(copy, first, piece, first + piece == bytes);
    }
    return false;
  }
  bool fed_whole(ActionNode& copy) override {
    fed_.at(&copy).whole = true;
    whole_.push_back(&copy);
    return false;
  }
  void hurry(const ActionNode& copy) override { drives_.hurry(copy); }
  void evicting(const Action&) override {}
  void granted(const ActionNode&) override {}
  void changed(SegmentId) override {}

  const TensorTable& table_;
  const TimedMachine& machine_;
  MoveGraph graph_;
  FlowClock clock_;
  std::vector<LinkQueue> links_;  // by Link; a flow refers to its queue
  DriveQueue drives_;
  bool drives_busy_ = false;
  std::vector<StreamQueue> streams_;
  std::map<const ActionNode*, Fed> fed_;
  std::vector<ActionNode*> whole_;
  std::priority_queue<Later> later_;
  std::vector<Action> actions_;
  std::array<std::int64_t, 2> used_{};
  std::int64_t decided_ = 0;
  std::uint64_t order_ = 0;
  double now_ = 0;
  TimedResult result_;
};

}  // namespace

DecidedProgram::DecidedProgram(Residency& residency, const Program& program) : program_(&program) {
  used_ = {residency.copies().used(Tier::kDevice), residency.copies().used(Tier::kHost)};
  const LinkBytes before = residency.copies().traffic();
  residency.set_future(&program, nullptr);
  for (std::int32_t op = 0; op < program.op_count(); ++op) {
    first_.push_back(actions_.size());
    if (const auto no_room = residency.decide(0, op, actions_)) {
      throw Error(Errc::kMemory, name_of(no_room->tier) + std::string(" tier"),
                  fmt::format("operation {} of program {} finds no room for {}", op, program.name(),
                              format_bytes(no_room->needed)),
                  "raise this tier's budget");
    }
  }
  first_.push_back(actions_.size());
  traffic_ = residency.copies().traffic() - before;
}

std::span<const Action> DecidedProgram::actions(std::int32_t op) const {
  const std::size_t begin = first_[static_cast<std::size_t>(op)];
  return std::span(actions_).subspan(begin, first_[static_cast<std::size_t>(op) + 1] - begin);
}

TimedResult timed_run(const TensorTable& table, const TimedMachine& machine,
                      std::span<const TimedProgram> programs) {
  TimedMachine own = machine;
  if (own.piece_bytes == 0) own.piece_bytes = io::kMaxPieceBytes;
  if (own.copies_in_flight == 0) own.copies_in_flight = TensorStore::kCopiesInFlight;
  return TimedDriver(table, own).run(programs);
}

}  // namespace zg
