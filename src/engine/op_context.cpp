#include "engine/op_context.hpp"

#include <string>

#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

std::unique_ptr<Stream> stream_if(bool wanted, Device& device, const char* name) {
  return wanted ? device.make_stream(name) : nullptr;
}

}  // namespace

OpContext::OpContext(const StepExecutor::Options& o)
    : layout(*o.layout),
      device(*o.device),
      store(*o.store),
      compute(device.make_stream("compute")),
      optimizer(device.is_host()
                    ? device.make_stream("optimizer")
                    : std::make_unique<HostStream>("optimizer", HostStream::Mode::kThread, o.trace)),
      comm(stream_if(o.comm != nullptr, device, "comm")),
      send(stream_if(place().parts.stages > 1, device, "send")),
      receive(stream_if(place().parts.stages > 1, device, "receive")),
      timer(o.trace, position, place(), *compute),
      stall(*compute, *optimizer, [this] { return timer.waited_seconds(); }) {
  const std::int64_t bytes = layout.workspace_bytes();
  memory_ = {device.arena().allocate(bytes),
             [this, bytes](void* memory) { device.arena().release(memory, bytes); }};
  if (memory_ == nullptr) {
    throw Error(Errc::kMemory, "device tier", "no room for the workspace of " + format_bytes(bytes),
                "raise tiers.device");
  }
  if (send != nullptr) stall.set_stages(*send, *receive);
  if (o.comm == nullptr) {
    ZG_ASSERT_EQ(place().ranks(), 1);
    return;
  }
  ZG_ASSERT_EQ(o.comm->size(), place().ranks());
  ZG_ASSERT_EQ(o.comm->rank(), place().rank());
  const auto group = [&](CommAxis axis) { return make_group(o.comm, axis); };
  // Made first, since all ranks have this group however they shard. So agree() can detect ranks that shard
  // differently.
  numbers = group(CommAxis::kScalars);
  const auto make_sharding = [&](ShardingGroups& groups, SharedWeights weights) {
    groups.shards = make_group(o.comm, CommAxis::kShards, weights);
    groups.replicas = make_group(o.comm, CommAxis::kReplicas, weights);
    groups.pieces = make_group(o.comm, CommAxis::kDataParallel, weights);
  };
  make_sharding(of_all, SharedWeights::kAll);
  if (place().parts.experts > 1) make_sharding(of_experts, SharedWeights::kExperts);
  copies = group(CommAxis::kReplicated);
  stages = group(CommAxis::kStages);
}

std::unique_ptr<Communicator> OpContext::make_group(CommRank* of, CommAxis axis,
                                                    SharedWeights weights) const {
  const std::vector<int> members = members_of(place(), axis, weights);
  const std::string name = weights == SharedWeights::kExperts ? "experts' " : "";
  return members.size() > 1 ? of->group(members, name + name_of(axis)) : nullptr;
}

// Updates on the host run on a stream of their own. Updates on a GPU run on the compute stream: they are
// limited by memory bandwidth, which compute also uses, so nothing is gained by running both at once; and on
// one stream, no thread has to wait between an update and the forward that reads its result.
Stream& OpContext::stream_of(const StepOp& op) const {
  if (op.kind == OpKind::kUpdate)
    return !device.is_host() && layout.update_at(op.unit) == Tier::kDevice ? *compute : *optimizer;
  if (joins_stages(op.kind)) return op.kind == OpKind::kSend ? *send : *receive;
  return comm != nullptr && joins_ranks(op.kind) ? *comm : *compute;
}

}  // namespace zg
