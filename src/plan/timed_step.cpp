#include "ziggurat/plan/timed_step.hpp"

#include <algorithm>
#include <map>
#include <tuple>

#include "ziggurat/base/error.hpp"
#include "ziggurat/store/dry_run.hpp"

namespace zg {
namespace {

enum Stream : int { kCompute, kOptimizer, kComm, kSendStream, kReceiveStream, kStreams };
// Two lines bound what drives read and write at once; nvme_seconds() has the same limits.
enum Resource : int { kDriveReads, kDriveWrites, kLinkIn, kLinkOut, kMemory, kPeers, kCores, kResources };

bool is_pass(OpKind kind) {
  switch (kind) {
    case OpKind::kForward:
    case OpKind::kBackward:
    case OpKind::kBackwardInput:
    case OpKind::kBackwardWeight:
    case OpKind::kHead:
    case OpKind::kHeadLoss:
      return true;
    default:
      return false;
  }
}

// How often an operation multiplies by the matrices of its unit.
double passes_of(const Layout& layout, const StepOp& op) {
  const double again = layout.options.recompute ? 1 : 0;
  const double weights = layout.is_frozen(op.unit) ? 0 : 1;
  switch (op.kind) {
    case OpKind::kForward:
    case OpKind::kHeadLoss:
    case OpKind::kBackwardWeight:
      return op.kind == OpKind::kBackwardWeight ? weights : 1;
    case OpKind::kBackward:
      return again + 1 + weights;
    case OpKind::kBackwardInput:
      return again + 1;
    case OpKind::kHead:
      return 2 + weights;
    default:
      return 0;
  }
}

double bytes_sent(const RankPlace& place, const CommCall& call) {
  const auto bytes = static_cast<double>(call.count) * static_cast<double>(size_of(call.dtype));
  if (call.passes || call.to >= 0 || call.from >= 0) return bytes;
  const auto members = static_cast<double>(members_of(place, call.axis).size());
  if (members < 2) return 0;
  return call.everywhere ? 2 * (members - 1) / members * bytes : (members - 1) * bytes;
}

}  // namespace

const char* name_of(TimedPart part) {
  static constexpr const char* kNames[] = {"compute",     "nvme",  "host->device", "device->host",
                                           "host memory", "ranks", "host updates"};
  return kNames[static_cast<std::size_t>(part)];
}

RankRates rates_of(const MachineFile& machine, int ranks, int drives, Outlook outlook) {
  RankRates r;
  r.host_memory = machine.host.memory_rate.at(outlook) / ranks;
  if (machine.gpus) {
    r.products = machine.gpus->products.at(outlook);
    r.device_memory = machine.gpus->memory_rate.at(outlook);
    r.to_device = machine.gpus->to_device.at(outlook);
    r.to_host = machine.gpus->to_host.at(outlook);
    if (machine.gpus->peers) r.peers = machine.gpus->peers->at(outlook);
  } else {
    r.on_host = true;
    r.products = machine.host.products->at(outlook) / ranks;
    r.device_memory = r.host_memory;
    r.to_device = r.to_host = r.host_memory / 2;  // a copy reads and writes
  }
  if (!machine.drives || drives == 0) return r;
  const double part = static_cast<double>(drives) / ranks;
  r.drive_read = machine.drives->read.at(outlook) * part;
  r.drive_write = machine.drives->write.at(outlook) * part;
  if (machine.drives->mixed) r.drive_mixed = machine.drives->mixed->at(outlook) * part;
  return r;
}

std::vector<double> op_flops(const Layout& layout, const StepProgram& program) {
  const LayoutOptions& o = layout.options;
  const Model& model = *layout.model;
  const ModelConfig& config = model.config();
  const double rows = static_cast<double>(o.micro_batch.rows());
  const auto sequence = static_cast<std::int64_t>(o.micro_batch.time) * o.parts.context;
  const double table = static_cast<double>(config.width) * static_cast<double>(config.vocab_size);
  // The operations of a call on a unit in tiles share its products evenly.
  std::map<std::tuple<OpKind, std::int32_t, std::int32_t>, int> operations;
  for (const StepOp& op : program.ops) {
    if (is_pass(op.kind)) ++operations[{op.kind, op.unit, op.micro_batch}];
  }
  std::vector<double> flops;
  for (const StepOp& op : program.ops) {
    if (!is_pass(op.kind)) {
      flops.push_back(0);
      continue;
    }
    const bool head = op.kind == OpKind::kHead || op.kind == OpKind::kHeadLoss;
    const double products =
        head ? table : model.block_of(static_cast<std::size_t>(op.unit)).forward_products(sequence);
    flops.push_back(2 * rows * products * passes_of(layout, op) / o.parts.tensor /
                    operations.at({op.kind, op.unit, op.micro_batch}));
  }
  return flops;
}

StepTimer::StepTimer(const Layout& layout, const StepPrograms& programs, const Options& options)
    : layout_(layout), options_(options) {
  Residency residency(layout.table, options.resident);
  ProgramSequence sequence(programs);
  std::vector<Action> ignored;
  std::map<const StepProgram*, std::size_t> known;
  constexpr int kWarmUp = 2, kTimed = 2;
  for (int i = -1; i < kWarmUp + kTimed; ++i) {
    sequence.begin(i < 0 ? Activity::kInitialize : Activity::kStep);
    while (const auto start = sequence.next()) {
      const Program& program = start->program->program;
      if (i < kWarmUp) {
        const auto failure = dry_run(residency, program);
        ZG_ASSERT(!failure, "the plan of this run said that it fits");
        continue;
      }
      decided_.emplace_back(residency, program);
      const auto [found, is_new] = known.emplace(start->program, costs_.size());
      if (is_new) costs_.push_back(costs_of(*start->program));
      cost_of_.push_back(found->second);
    }
    if (i < 0) residency.demote_all(ignored);
    if (i == kWarmUp) first_step_ = decided_.size();
  }
}

std::vector<StepTimer::Cost> StepTimer::costs_of(const StepProgram& program) const {
  const std::vector<double> flops = op_flops(layout_, program);
  const RankPlace place = layout_.options.place();
  std::vector<Cost> costs;
  for (std::int32_t i = 0; i < program.program.op_count(); ++i) {
    const StepOp& op = program.ops[static_cast<std::size_t>(i)];
    Cost c;
    c.flops = flops[static_cast<std::size_t>(i)] * options_.flops_factor;
    for (const AccessStep& a : program.program.op(i)) {
      // An update works on one segment of state, and on as many elements of gradient and weight.
      const std::int64_t bytes = layout_.table.segment(a.segment).bytes;
      const std::int64_t parts =
          op.kind == OpKind::kUpdate && !(a.tier == Tier::kNvme) &&
                  layout_.table.tensor(layout_.table.segment(a.segment).tensor).spec.role !=
                      Role::kOptimizerState
              ? std::max<std::int64_t>(1, layout_.state_segments(op.tile))
              : 1;
      const double moved =
          static_cast<double>(bytes) / static_cast<double>(parts) * (a.access == Access::kWrite ? 2 : 1);
      (a.tier == Tier::kDevice ? c.device_bytes : c.host_bytes) += moved;
    }
    for (const CommCall& call : calls_of(layout_, op)) {
      c.sent_bytes += bytes_sent(place, call);
      if (members_of(place, call.axis).size() > 1) ++c.calls;
    }
    c.apart = joins_ranks(op.kind) || joins_stages(op.kind);
    c.stream = op.kind == OpKind::kUpdate                  ? kOptimizer
               : op.kind == OpKind::kSend                  ? kSendStream
               : op.kind == OpKind::kReceive               ? kReceiveStream
               : joins_ranks(op.kind) && place.ranks() > 1 ? kComm
                                                           : kCompute;
    costs.push_back(c);
  }
  return costs;
}

Flow StepTimer::flow_of(const Cost& c, const RankRates& r) const {
  Flow flow;
  const double own = std::max(c.flops / r.products, c.device_bytes / r.device_memory);
  flow.own_seconds =
      (c.apart && c.sent_bytes > 0 ? c.device_bytes / r.device_memory : own) + c.calls * r.call_seconds;
  double memory = c.host_bytes + (r.on_host ? c.device_bytes : 0);
  if (c.sent_bytes > 0 && !c.apart) {
    // What layers exchange with other ranks is a part of the operation.
    flow.own_seconds += c.sent_bytes / (r.peers > 0 ? r.peers : std::min(r.to_device, r.to_host));
  } else if (c.sent_bytes > 0 && r.peers > 0) {
    flow.demands.push_back({kPeers, c.sent_bytes});
  } else if (c.sent_bytes > 0) {
    memory += 2 * c.sent_bytes;
    flow.demands.insert(flow.demands.end(), {{kLinkOut, c.sent_bytes}, {kLinkIn, c.sent_bytes}});
  }
  if (memory > 0) flow.demands.push_back({kMemory, memory});
  if (r.on_host && flow.own_seconds > 0) flow.demands.push_back({kCores, flow.own_seconds});
  return flow;
}

StepTime StepTimer::time(const RankRates& r) const {
  TimedMachine m;
  m.capacities.assign(kResources, 1);
  m.capacities[kLinkIn] = r.to_device, m.capacities[kLinkOut] = r.to_host;
  m.capacities[kMemory] = r.host_memory, m.capacities[kPeers] = r.peers > 0 ? r.peers : 1;
  // A second of drives as two lines: through (reads alone, the mixture) and (the mixture, writes alone).
  const double read = r.drive_read > 0 ? 1 / r.drive_read : 0,
               write = r.drive_write > 0 ? 1 / r.drive_write : 0;
  const double half = r.drive_mixed / 2;
  const double more_write = half > 0 ? std::max(0.0, (1 - half * read) / half) : write;
  const double more_read = half > 0 ? std::max(0.0, (1 - half * write) / half) : read;
  for (const Link link : {kNvmeRead, kDirectRead})
    m.links[link].per_byte = {{kDriveReads, read}, {kDriveWrites, more_read}};
  for (const Link link : {kNvmeWrite, kDirectWrite})
    m.links[link].per_byte = {{kDriveReads, more_write}, {kDriveWrites, write}};
  const double copy = r.on_host ? 2 : 1;
  m.links[kNvmeRead].per_byte.push_back({kMemory, 1});
  m.links[kNvmeWrite].per_byte.push_back({kMemory, 1});
  m.links[kToDevice].per_byte = {{kLinkIn, 1}, {kMemory, copy}};
  m.links[kToHost].per_byte = {{kLinkOut, 1}, {kMemory, copy}};
  m.links[kDirectRead].per_byte.push_back({kLinkIn, 1});
  m.links[kDirectWrite].per_byte.push_back({kLinkOut, 1});
  m.memory = options_.memory;
  m.prefetch_depth = options_.prefetch_depth;
  m.drives_take_turns = half == 0;
  m.drive_window = options_.drive_window;
  m.streams = kStreams;
  m.goes_on.assign(kStreams, false);
  m.goes_on[kOptimizer] = true;
  std::vector<std::vector<TimedOp>> ops;
  for (const std::vector<Cost>& costs : costs_) {
    ops.emplace_back();
    for (const Cost& c : costs) {
      const bool device_update = c.stream == kOptimizer && c.host_bytes == 0 && !r.on_host;
      ops.back().push_back({device_update ? kCompute : c.stream, flow_of(c, r)});
    }
  }
  std::vector<TimedProgram> timed;
  for (std::size_t i = 0; i < decided_.size(); ++i) timed.push_back({&decided_[i], ops[cost_of_[i]]});
  const TimedResult run = timed_run(layout_.table, m, timed);
  StepTime t;
  t.between_ends = run.ends.back() - run.ends[first_step_ - 1];
  // The work of the second step.
  std::array<double, kResources> used{};
  std::array<double, kStreams> streams{};
  LinkBytes traffic;
  for (std::size_t i = first_step_; i < timed.size(); ++i) {
    traffic += decided_[i].traffic();
    for (const TimedOp& op : timed[i].ops) {
      streams[static_cast<std::size_t>(op.stream)] += seconds_alone(op.flow, m.capacities);
      for (const FlowDemand& d : op.flow.demands) used[static_cast<std::size_t>(d.resource)] += d.amount;
    }
  }
  for (const double seconds : streams) t.sum += seconds;
  for (int l = 0; l < kLinks; ++l) {
    const auto bytes = static_cast<double>(traffic[static_cast<Link>(l)]);
    if (bytes == 0) continue;
    const std::vector<FlowDemand>& per_byte = m.links[static_cast<std::size_t>(l)].per_byte;
    for (const FlowDemand& d : per_byte) used[static_cast<std::size_t>(d.resource)] += bytes * d.amount;
    t.sum += bytes * seconds_alone({0, per_byte}, m.capacities);
  }
  const auto at = [&](TimedPart part) -> double& { return t.parts[static_cast<std::size_t>(part)]; };
  at(TimedPart::kCompute) = std::max(streams[kCompute], used[kCores]);
  at(TimedPart::kDrives) = std::max(used[kDriveReads], used[kDriveWrites]);
  at(TimedPart::kToDevice) = used[kLinkIn] / r.to_device;
  at(TimedPart::kToHost) = used[kLinkOut] / r.to_host;
  at(TimedPart::kHostMemory) = used[kMemory] / r.host_memory;
  at(TimedPart::kRanks) = std::max({streams[kComm], streams[kSendStream], streams[kReceiveStream]});
  at(TimedPart::kUpdates) = streams[kOptimizer];
  const auto most = std::max_element(t.parts.begin(), t.parts.end());
  t.bound = *most, t.bound_by = static_cast<TimedPart>(most - t.parts.begin());
  // Moves of a step may lie in the time of the step before it, and those of the next one in its own.
  t.seconds = std::clamp(t.between_ends, t.bound, t.sum);
  return t;
}

}  // namespace zg
