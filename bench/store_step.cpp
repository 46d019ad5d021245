// Does the I/O of a training step hide behind its compute, as far as the store has a say in it? The step of a
// GPT-2 with 12 layers and a tied embedding: its operations in the engine's order, on a compute stream and an
// optimizer stream, where compute is a sleep of the time that the products take, and updates take none.
// Optimizer state is on a drive of memory, half duplex, whose bandwidth is set so that all of it, read and
// written once, takes --io-share of the step's compute.
//
//   bench_store_step [--rounds 3] [--steps 3] [--step-seconds 1.2] [--segment 1MiB] [--io-share 0.9]
//                    [--host 0.4,0.6,0.8,0.9] [--read-ahead 0.25] [--policy next-use,least]
//
// early: a layer is updated when its gradient is there, the embedding at the end. deferred: before the next
// forward needs its weight. Updates hide in backward or in forward alone, and at most the host's memory can
// be read before that part and written behind it; so 2 x (state - host memory) must cross the link in it.
// "least" is what that leaves possible, of compute. --host: host memory for state, of all state; --read-ahead
// of it is what the store is not told of, for what is on its way. Policies: next-use is the store's own;
// least moves the least bytes, without a look at when.
#include <CLI/CLI.hpp>

#include <thread>

#include "bench/store_support.hpp"

namespace zg::bench {
namespace {

struct Options {
  int rounds = 3, steps = 3;
  double step_seconds = 1.2, io_share = 0.9, read_ahead = 0.25;
  std::int64_t segment = kMiB;
  std::vector<double> host = {0.4, 0.6, 0.8, 0.9};
  std::vector<std::string> policies = {"next-use", "least"};
};

// GPT-2 124M: parameters in millions, and segments of their state, of which the embedding has 39.4 / 7.1 as
// many as a layer.
constexpr int kLayers = 12, kEmbedding = kLayers;  // units: the layers, then the embedding
constexpr std::int64_t kLayerTime = 71, kHeadTime = 3 * 386;
constexpr int kLayerSegments = 7, kEmbeddingSegments = 39;
constexpr int kStateSegments = kLayers * kLayerSegments + kEmbeddingSegments;
constexpr std::int64_t kStepTime = 3 * kLayers * kLayerTime + kHeadTime;

struct Op {
  double seconds = 0;  // of compute; 0: an update
};

class Step {
 public:
  Step(const Options& o, bool early, double host_share, const std::string& policy)
      : o_(o), early_(early), table_(1) {
    for (int u = 0; u <= kEmbedding; ++u) {
      const auto add = [&](const char* what, std::int64_t bytes, int segments, Tier lowest) {
        const TensorId id = table_.add({.name = fmt::format("{}.{}", what, u),
                                        .dtype = DType::kU8,
                                        .count = bytes * segments,
                                        .lowest = lowest,
                                        .segment_elements = bytes});
        return table_.tensor(id).first_segment;
      };
      weight_[u] = add("weight", 4096, 1, Tier::kHost);
      gradient_[u] = add("gradient", 4096, 1, Tier::kHost);
      state_[u] = add("state", o.segment, segments_of(u), Tier::kNvme);
    }
    emit();
    const std::int64_t for_state = static_cast<std::int64_t>(host_share * kStateSegments) * o.segment;
    const std::int64_t rest = 2 * (kLayers + 1) * std::int64_t{4096};
    state_bytes_ = kStateSegments * o.segment;
    bandwidth_ = 2 * static_cast<double>(state_bytes_) / (o.io_share * o.step_seconds);
    const double window = static_cast<double>(kLayers * kLayerTime * (early ? 2 : 1)) / kStepTime;
    const double must = 2 * static_cast<double>(state_bytes_ - for_state) / bandwidth_ / o.step_seconds;
    least_ = 1 - window + std::max(window, must);
    io::EngineOptions engine;
    engine.backend = io::Backend::kRam;
    engine.require = true;
    engine.ram.bytes_per_second = bandwidth_;
    io_ = io::make_engine(engine, {{.bytes = table_.drive_bytes()}});
    device_ = make_host_device(4096, nullptr);
    host_ = make_host_arena("host memory", for_state + rest);
    TensorStore::Options options;
    options.table = &table_;
    options.device = device_.get();
    options.host = host_.get();
    options.io = io_.get();
    options.budgets = {
        .device = 4096,
        .host = rest + for_state - static_cast<std::int64_t>(o.read_ahead * static_cast<double>(for_state))};
    if (policy == "least") options.policy = next_use_policy();
    store_ = std::make_unique<TensorStore>(options);
    for (SegmentId id = 0; id < table_.segment_count(); ++id) {
      const Lease lease = store_->acquire(id, Tier::kHost, Access::kOverwrite);
      std::memset(lease.data(), 0, static_cast<std::size_t>(lease.bytes()));
    }
    store_->drain();
  }
  ~Step() {
    if (started_) run(nullptr);
    store_->run(nullptr, nullptr);
  }

  struct Result {
    double seconds = 0;
    std::int64_t bytes = 0;
  };
  Result steps(int times) {
    const LinkBytes before = store_->traffic();
    const auto begin = Clock::now();
    for (int i = 0; i < times; ++i) run(&program_);
    compute_.synchronize();
    const LinkBytes moved = store_->traffic() - before;
    return {seconds_between(begin, Clock::now()) / times, (moved.nvme_read() + moved.nvme_write()) / times};
  }
  // Every update counts in each of its segments.
  void verify() {
    run(nullptr);
    compute_.synchronize(), optimizer_.synchronize();
    started_ = false;
    store_->run(nullptr, nullptr);
    for (int u = 0; u <= kEmbedding; ++u) {
      for (int i = 0; i < segments_of(u); ++i) {
        const Lease lease = store_->acquire(state_[u] + i, Tier::kHost, Access::kRead);
        ZG_ASSERT_EQ(*static_cast<const std::int64_t*>(lease.data()), runs_);
      }
    }
  }
  double least() const { return least_; }
  double bandwidth() const { return bandwidth_; }
  std::int64_t state_bytes() const { return state_bytes_; }

 private:
  static int segments_of(int unit) { return unit == kEmbedding ? kEmbeddingSegments : kLayerSegments; }

  void add(std::vector<AccessStep> accesses, std::int64_t time) {
    program_.add_op(accesses, time);
    ops_.push_back({o_.step_seconds * static_cast<double>(time) / kStepTime});
  }
  void update(int u) {
    for (int i = 0; i < segments_of(u); ++i) {
      add({{gradient_[u], Tier::kHost, Access::kRead, false},
           {weight_[u], Tier::kHost, Access::kWrite, false},
           {state_[u] + i, Tier::kHost, Access::kWrite, false}},
          0);
    }
  }
  void emit() {
    if (!early_) update(kEmbedding), update(0);
    for (int l = 0; l < kLayers; ++l) {
      if (!early_ && l + 1 < kLayers) update(l + 1);
      add({{weight_[l], Tier::kHost, Access::kRead, false}}, kLayerTime);
    }
    add({{weight_[kEmbedding], Tier::kHost, Access::kRead, false}}, kHeadTime);
    for (int l = kLayers - 1; l >= 0; --l) {
      std::vector<AccessStep> a{{weight_[l], Tier::kHost, Access::kRead, false},
                                {gradient_[l], Tier::kHost, Access::kWrite, false}};
      if (l == 0) a.push_back({gradient_[kEmbedding], Tier::kHost, Access::kWrite, false});
      add(a, 2 * kLayerTime);
      if (early_ && l + 1 < kLayers) update(l + 1);
    }
    if (early_) update(0), update(kEmbedding);
    program_.finish(table_.segment_count());
  }

  void run(const Program* next) {
    started_ = true;
    ++runs_;
    store_->run(&program_, next);
    for (const Op& op : ops_) {
      HostStream& stream = op.seconds > 0 ? compute_ : optimizer_;
      store_->acquire_op(&stream, leases_);
      if (op.seconds > 0) {
        stream.enqueue("compute", [seconds = op.seconds] {
          std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
        });
      } else {
        stream.enqueue("update", [state = leases_[2].data()] { ++*static_cast<std::int64_t*>(state); });
      }
      const Event done = stream.record();
      for (Lease& lease : leases_) lease.release_after(stream, done);
    }
  }

  const Options& o_;
  bool early_, started_ = false;
  TensorTable table_;
  SegmentId weight_[kLayers + 1] = {}, gradient_[kLayers + 1] = {}, state_[kLayers + 1] = {};
  Program program_{"step"};
  std::vector<Op> ops_;
  std::int64_t state_bytes_ = 0, runs_ = 0;
  double bandwidth_ = 0, least_ = 0;
  std::unique_ptr<io::Engine> io_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Arena> host_;
  HostStream compute_{"compute", HostStream::Mode::kThread},
      optimizer_{"optimizer", HostStream::Mode::kThread};
  std::unique_ptr<TensorStore> store_;
  std::vector<Lease> leases_;
};

void run(const Options& o) {
  nlohmann::json json = {{"bench", "store_step"},      {"rounds", o.rounds},
                         {"steps", o.steps},           {"step_seconds", o.step_seconds},
                         {"segment_bytes", o.segment}, {"io_share", o.io_share},
                         {"read_ahead", o.read_ahead}};
  json.update(provenance());
  std::fprintf(stderr, "%-10s %-9s %6s %8s %8s %8s %8s\n", "updates", "policy", "host", "moved", "least",
               "step", "MAD");
  for (const bool early : {true, false}) {
    for (const double host : o.host) {
      for (const std::string& policy : o.policies) {
        Step step(o, early, host, policy);
        (void)step.steps(3);
        std::vector<double> seconds;
        std::int64_t bytes = 0;
        for (int r = 0; r < o.rounds; ++r) {
          const Step::Result result = step.steps(o.steps);
          seconds.push_back(result.seconds / o.step_seconds);
          bytes = result.bytes;
        }
        const double moved = static_cast<double>(bytes) / (2 * static_cast<double>(step.state_bytes()));
        std::fprintf(stderr, "%-10s %-9s %5.0f%% %7.0f%% %8.3f %8.3f %8.3f\n", early ? "early" : "deferred",
                     policy.c_str(), 100 * host, 100 * moved, step.least(), median(seconds), mad(seconds));
        json["results"].push_back({{"updates", early ? "early" : "deferred"},
                                   {"policy", policy},
                                   {"host_share", host},
                                   {"moved_share", moved},
                                   {"bytes_per_second", step.bandwidth()},
                                   {"least", step.least()},
                                   {"step", median(seconds)},
                                   {"mad", mad(seconds)}});
        step.verify();
      }
    }
  }
  json["load_at_end"] = first_line("/proc/loadavg", "");
  std::printf("%s\n", json.dump().c_str());
}

}  // namespace
}  // namespace zg::bench

int main(int argc, char** argv) {
  zg::bench::Options o;
  std::string segment = "1MiB";
  CLI::App app{"Does the I/O of a training step hide behind its compute?"};
  app.add_option("--rounds", o.rounds)->check(CLI::Range(1, 1000));
  app.add_option("--steps", o.steps, "of a round, which counts as one time")->check(CLI::Range(1, 1000));
  app.add_option("--step-seconds", o.step_seconds, "compute of a step")->check(CLI::PositiveNumber);
  app.add_option("--segment", segment, "bytes of one of 123 of the state");
  app.add_option("--io-share", o.io_share, "of compute")->check(CLI::PositiveNumber);
  app.add_option("--host", o.host, "of all state")->delimiter(',')->check(CLI::Range(0.05, 1.0));
  app.add_option("--read-ahead", o.read_ahead)->check(CLI::Range(0.0, 0.9));
  app.add_option("--policy", o.policies)->delimiter(',')->check(CLI::IsMember({"next-use", "least"}));
  CLI11_PARSE(app, argc, argv);
  try {
    o.segment = zg::bench::bytes_of("--segment", segment);
    zg::bench::run(o);
  } catch (const zg::Error& e) {
    std::fprintf(stderr, "bench_store_step: %s\n", e.what());
    return e.exit_code();
  }
}
