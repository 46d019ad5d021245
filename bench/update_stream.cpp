// Streams an optimizer's state through small host memory: updates of all parameters, one after the other,
// with the state on a drive and weights and gradients in the device tier. In turns with it the same update
// with all state in memory, and what io-bench reaches on the same drive, reading and writing half each.
//
//   bench_update_stream --path DIR [--parameters 300000000] [--host 1GiB] [--read-ahead 0.25] [--rounds 3]
//                       [--updates 2] [--io-seconds 2] [--block-size 1MiB] [--queue-depth 32]
//                       [--checksums on|off]
//
// Adam, fp32 master and moments, bf16 gradients and weights: 12 bytes of state a parameter. A turn is one
// update that is not counted and --updates that are. Its time is compared with the longer of the bytes that
// it moved over the mixed bandwidth of its round and the update in memory of its round. --read-ahead of the
// host memory is for what is on its way; in the rest state stays from update to update. At the end the state
// and the weights of both are compared, bit for bit. A file for the state and one of at most 4 GiB for
// io-bench lie in DIR meanwhile, and are removed at the end.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <bit>
#include <filesystem>

#include "bench/store_support.hpp"
#include "ziggurat/device/ops.hpp"
#include "ziggurat/io/bench.hpp"
#include "ziggurat/optim/state.hpp"

namespace zg::bench {
namespace {

struct Options {
  std::string path, checksums = "on";
  std::int64_t parameters = 300'000'000, host = kGiB, block_size = kMiB;
  int rounds = 3, updates = 2, queue_depth = 32;
  double read_ahead = 0.25, io_seconds = 2;
};

constexpr std::int64_t kSegmentBytes = 12 << 20;  // as the trainer cuts it

// A file of io-bench's own, gone with its scope.
class Scratch {
 public:
  Scratch(const Options& o, std::int64_t bytes)
      : path_((std::filesystem::path(o.path) / fmt::format("update_stream-{}.io-bench", getpid())).string()) {
    std::ofstream(path_).close();
    std::error_code error;
    std::filesystem::resize_file(path_, static_cast<std::uintmax_t>(bytes), error);
    if (error) throw Error(Errc::kIo, path_, error.message(), "name a directory with room");
  }
  ~Scratch() { unlink(path_.c_str()); }
  Scratch(const Scratch&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// The parameters, in segments of equally many.
struct Shape {
  StateLayout layout{StateFormat{}};
  std::int64_t each = 0, segments = 0;

  explicit Shape(std::int64_t parameters) {
    each = layout.elements_within(kSegmentBytes);
    segments = (parameters + each - 1) / each;
  }
  std::int64_t parameters() const { return each * segments; }
  std::int64_t state_bytes() const { return layout.bytes(each); }
  OptimizerState state(void* data) const { return layout.part(data, each, 0, each); }

  void fill_gradient(void* data, std::int64_t segment) const {
    auto* words = static_cast<std::uint16_t*>(data);
    for (std::int64_t i = 0; i < each; ++i) words[i] = bits(segment * each + i, 0x3a00);  // about 5e-4
  }
  void fill_state(void* data, std::int64_t segment) const {
    std::memset(data, 0, static_cast<std::size_t>(state_bytes()));
    auto* master = static_cast<float*>(state(data).master.data);
    for (std::int64_t i = 0; i < each; ++i)
      master[i] = std::bit_cast<float>(std::uint32_t{bits(segment * each + i, 0x3c00)} << 16);
  }
  UpdateParams params(std::int64_t step) const {
    return {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1, .step = step};
  }

 private:
  // A bf16 number of either sign and varying size, from `base` on.
  static std::uint16_t bits(std::int64_t i, std::uint16_t base) {
    const std::uint64_t h = (static_cast<std::uint64_t>(i) + 1) * 0x9E3779B97F4A7C15ull;
    return static_cast<std::uint16_t>(((h >> 63) << 15) | (base + ((h >> 40) & 0xff)));
  }
};

// All in memory.
class InMemory {
 public:
  explicit InMemory(const Shape& shape)
      : shape_(shape),
        arena_(make_host_arena("in memory",
                               shape.segments * (charge(shape.state_bytes()) + 2 * charge(2 * shape.each)))),
        stream_("update in memory", HostStream::Mode::kThread) {
    for (std::int64_t s = 0; s < shape_.segments; ++s) {
      segments_.push_back({take(shape_.state_bytes()), take(2 * shape_.each), take(2 * shape_.each)});
      shape_.fill_state(segments_.back().state, s);
      shape_.fill_gradient(segments_.back().gradient, s);
      std::memset(segments_.back().weight, 0, static_cast<std::size_t>(2 * shape_.each));
    }
  }
  ~InMemory() {
    stream_.synchronize();
    for (const Part& p : segments_) {
      arena_->release(p.state, charge(shape_.state_bytes()));
      arena_->release(p.gradient, charge(2 * shape_.each));
      arena_->release(p.weight, charge(2 * shape_.each));
    }
  }
  double update() {
    const auto begin = Clock::now();
    ++step_;
    for (const Part& p : segments_) {
      host_ops().update(stream_, View(p.gradient, DType::kBF16, 1, shape_.each),
                        View(p.weight, DType::kBF16, 1, shape_.each), shape_.state(p.state),
                        shape_.layout.format(), shape_.params(step_));
    }
    stream_.synchronize();
    return seconds_between(begin, Clock::now());
  }
  const void* state(std::int64_t s) const { return segments_[static_cast<std::size_t>(s)].state; }
  const void* weight(std::int64_t s) const { return segments_[static_cast<std::size_t>(s)].weight; }

 private:
  struct Part {
    void *state, *gradient, *weight;
  };
  static std::int64_t charge(std::int64_t bytes) { return arena_charge(bytes); }
  void* take(std::int64_t bytes) {
    void* const memory = arena_->allocate(charge(bytes));
    ZG_ASSERT(memory != nullptr);
    return memory;
  }

  const Shape& shape_;
  std::unique_ptr<Arena> arena_;
  HostStream stream_;
  std::vector<Part> segments_;
  std::int64_t step_ = 0;
};

// The state in a store with a drive.
class Streamed {
 public:
  Streamed(const Options& o, const Shape& shape) : shape_(shape), table_(1) {
    const auto add = [&](const char* name, DType dtype, Tier lowest, std::int64_t each) {
      const TensorId id = table_.add({.name = name,
                                      .dtype = dtype,
                                      .count = each * shape_.segments,
                                      .lowest = lowest,
                                      .segment_elements = each});
      return table_.tensor(id).first_segment;
    };
    state_ = add("state", DType::kU8, Tier::kNvme, shape_.state_bytes());
    gradient_ = add("gradient", DType::kBF16, Tier::kDevice, shape_.each);
    weight_ = add("weight", DType::kBF16, Tier::kDevice, shape_.each);
    io::EngineOptions engine;
    engine.block_size = o.block_size;
    engine.queue_depth = o.queue_depth;
    io_ = io::make_engine(engine, {{.path = o.path, .bytes = table_.drive_bytes()}});
    const std::int64_t in_device = shape_.segments * 2 * arena_charge(2 * shape_.each);
    device_ = make_host_device(in_device, nullptr);
    host_ = make_host_arena("host memory", o.host);
    optimizer_ = device_->make_stream("optimizer");
    TensorStore::Options options;
    options.table = &table_;
    options.device = device_.get();
    options.host = host_.get();
    options.io = io_.get();
    options.budgets = {
        .device = in_device,
        .host = o.host - static_cast<std::int64_t>(o.read_ahead * static_cast<double>(o.host))};
    options.verify = o.checksums == "on";
    store_ = std::make_unique<TensorStore>(options);
    for (std::int32_t s = 0; s < shape_.segments; ++s) {
      shape_.fill_gradient(store_->acquire(gradient_ + s, Tier::kDevice, Access::kOverwrite).data(), s);
      shape_.fill_state(store_->acquire(state_ + s, Tier::kHost, Access::kOverwrite).data(), s);
      program_.add_op(std::vector<AccessStep>{{gradient_ + s, Tier::kDevice, Access::kRead, false},
                                              {weight_ + s, Tier::kDevice, Access::kOverwrite, false},
                                              {state_ + s, Tier::kHost, Access::kWrite, false}});
    }
    program_.finish(table_.segment_count());
    store_->demote_all();
    store_->drain();
  }

  struct Update {
    double seconds = 0, waited = 0, bytes = 0;
  };
  // So many updates, the last of a turn or not.
  Update update(int times, bool last) {
    const LinkBytes before = store_->traffic();
    const double waited = store_->waited_seconds();
    const auto begin = Clock::now();
    for (int n = 1; n <= times; ++n) {
      ++step_;
      store_->run(&program_, last && n == times ? nullptr : &program_);
      for (std::int32_t s = 0; s < shape_.segments; ++s) {
        store_->acquire_op(optimizer_.get(), leases_);
        device_->ops().update(*optimizer_, View(leases_[0].data(), DType::kBF16, 1, shape_.each),
                              View(leases_[1].data(), DType::kBF16, 1, shape_.each),
                              shape_.state(leases_[2].data()), shape_.layout.format(), shape_.params(step_));
        const Event done = optimizer_->record();
        for (Lease& lease : leases_) lease.release_after(*optimizer_, done);
      }
    }
    optimizer_->synchronize();
    const LinkBytes moved = store_->traffic() - before;
    return {seconds_between(begin, Clock::now()) / times, (store_->waited_seconds() - waited) / times,
            static_cast<double>(moved.nvme_read() + moved.nvme_write()) / times};
  }
  void settle() { store_->drain(); }

  void expect_same(const InMemory& other) {
    store_->run(nullptr, nullptr);
    for (std::int32_t s = 0; s < shape_.segments; ++s) {
      const Lease state = store_->acquire(state_ + s, Tier::kHost, Access::kRead);
      const Lease weight = store_->acquire(weight_ + s, Tier::kDevice, Access::kRead);
      const bool same =
          std::memcmp(state.data(), other.state(s), static_cast<std::size_t>(state.bytes())) == 0 &&
          std::memcmp(weight.data(), other.weight(s), static_cast<std::size_t>(weight.bytes())) == 0;
      ZG_ASSERT(same, "after {} updates segment {} differs from the one in memory", step_, s);
    }
  }
  std::string drive() const { return io_->describe(); }

 private:
  const Shape& shape_;
  TensorTable table_;
  std::unique_ptr<io::Engine> io_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Arena> host_;
  std::unique_ptr<Stream> optimizer_;
  std::unique_ptr<TensorStore> store_;
  SegmentId state_ = 0, gradient_ = 0, weight_ = 0;
  Program program_{"update"};
  std::vector<Lease> leases_;
  std::int64_t step_ = 0;
};

void run(const Options& o) {
  const Shape shape(o.parameters);
  nlohmann::json json = {{"bench", "update_stream"},
                         {"parameters", shape.parameters()},
                         {"state_bytes", shape.segments * shape.state_bytes()},
                         {"host", o.host},
                         {"read_ahead", o.read_ahead},
                         {"rounds", o.rounds},
                         {"updates", o.updates},
                         {"checksums", o.checksums},
                         {"block_size", o.block_size},
                         {"queue_depth", o.queue_depth}};
  json.update(provenance());
  const Scratch scratch(
      o, std::min(shape.segments * shape.state_bytes(), 4 * kGiB) / o.block_size * o.block_size);
  io::BenchOptions mixed;
  mixed.drives = {{.path = scratch.path(), .kind = io::FileKind::kExisting}};
  mixed.engine.block_size = o.block_size;
  mixed.engine.queue_depth = o.queue_depth;
  mixed.op = io::BenchOp::kWrite;
  (void)io::run_bench(mixed);  // what was never written is not read from the drive
  mixed.op = io::BenchOp::kMixed;
  mixed.seconds = o.io_seconds;
  mixed.ramp_seconds = 0.2;

  InMemory in_memory(shape);
  Streamed streamed(o, shape);
  std::vector<double> seconds, memory, drive, bytes, waited, ratio;
  for (int r = 0; r < o.rounds; ++r) {
    drive.push_back(io::run_bench(mixed).bytes_per_second());
    (void)in_memory.update();
    std::vector<double> turn;
    for (int n = 0; n < o.updates; ++n) turn.push_back(in_memory.update());
    memory.push_back(median(turn));
    (void)streamed.update(1, false);  // what was fetched in the turns of others is used up
    const Streamed::Update u = streamed.update(o.updates, true);
    streamed.settle();
    seconds.push_back(u.seconds), bytes.push_back(u.bytes), waited.push_back(u.waited);
    ratio.push_back(u.seconds / std::max(u.bytes / drive.back(), memory.back()));
    std::fprintf(
        stderr,
        "round %d: io-bench, mixed, %s: %.3f s for %s; in memory %.3f s; streamed %.3f s, of the longer "
        "%.3f\n",
        r + 1, format_rate(drive.back()).c_str(), u.bytes / drive.back(),
        format_bytes(static_cast<std::int64_t>(u.bytes)).c_str(), memory.back(), u.seconds, ratio.back());
  }
  streamed.expect_same(in_memory);
  json["engine"] = streamed.drive();
  json["mixed_bytes_per_second"] = drive;
  json["bytes_per_update"] = bytes;
  json["in_memory_seconds"] = memory;
  json["streamed_seconds"] = seconds;
  json["waited_seconds"] = waited;
  json["ratio"] = median(ratio);
  json["ratio_mad"] = mad(ratio);
  json["verified"] = true;
  json["load_at_end"] = first_line("/proc/loadavg", "");
  std::printf("%s\n", json.dump().c_str());
}

}  // namespace
}  // namespace zg::bench

int main(int argc, char** argv) {
  using namespace zg;
  bench::Options o;
  std::string host = "1GiB", block = "1MiB";
  CLI::App app{"Updates of all parameters with the optimizer's state on a drive"};
  app.add_option("--path", o.path, "a directory on the drive")->required();
  app.add_option("--parameters", o.parameters, "rounded up to whole segments")
      ->check(CLI::Range(1 << 20, 2000000000));
  app.add_option("--host", host, "host memory for state");
  app.add_option("--read-ahead", o.read_ahead, "share of it for what is on its way")
      ->check(CLI::Range(0.0, 0.95));
  app.add_option("--rounds", o.rounds)->check(CLI::Range(1, 1000));
  app.add_option("--updates", o.updates, "counted ones of a turn")->check(CLI::Range(1, 1000));
  app.add_option("--io-seconds", o.io_seconds, "of io-bench in each round")->check(CLI::PositiveNumber);
  app.add_option("--block-size", block);
  app.add_option("--queue-depth", o.queue_depth)->check(CLI::Range(1, 4096));
  app.add_option("--checksums", o.checksums)->check(CLI::IsMember({"on", "off"}));
  CLI11_PARSE(app, argc, argv);
  try {
    o.host = bench::bytes_of("--host", host);
    o.block_size = bench::bytes_of("--block-size", block);
    bench::run(o);
  } catch (const Error& e) {
    std::fprintf(stderr, "bench_update_stream: %s\n", e.what());
    return e.exit_code();
  }
}
