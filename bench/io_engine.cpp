// What the engine itself costs for a request, from submit to complete, where the drive costs nothing: a drive
// of memory that moves no bytes, at several depths and block sizes, and writes to /dev/null.
//
//   bench_io_engine [--benchmark_filter=REGEX] [--benchmark_repetitions=N]
//
// Ours:   the engine over each back end; requests follow one another by completion ("completion"), or another
//         thread waits for the oldest ticket and submits the next ("wait").
// Peers:  what DeepSpeed's async_io does (io_submit for each request, or for a whole queue of them, then
//         io_getevents for all that is pending), and pwrite on 4 threads behind one mutex.
// Roof:   a loop around liburing with a registered file and buffer, nothing else ("uring_loop").
// An iteration is a request; "CPU" is the processor time of all threads, user and system. What this kernel
// does not have is named and left out.
#include <fcntl.h>
#include <libaio.h>
#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/micro.hpp"
#include "io/core.hpp"
#include "ziggurat/base/buffer.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::bench {
namespace {

constexpr int kPoolThreads = 4;
[[noreturn]] void fail(const char* what, int error) {
  throw Error(Errc::kIo, what, errno_text(error));
}

// Everything writes the same bytes to the same place: nobody keeps them.
struct Target {
  Target(int queue_depth, std::int64_t block_size)
      : block(block_size), depth(queue_depth), buffer(block_size) {
    fd = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (fd < 0) fail("/dev/null", errno);
  }
  ~Target() { close(fd); }
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;
  std::int64_t block;
  int depth;
  Buffer buffer;
  int fd = -1;
};

// Makes `count` requests, `depth` of them at a time; returns when all are done.
class Contestant {
 public:
  virtual ~Contestant() = default;
  virtual void run(std::int64_t count) = 0;
};

class UringLoop final : public Contestant {
 public:
  explicit UringLoop(const Target& t) : target_(t) {
    io_uring_params params{};
    params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    int result = io_uring_queue_init_params(static_cast<unsigned>(t.depth), &ring_, &params);
    if (result == -EINVAL) result = io_uring_queue_init(static_cast<unsigned>(t.depth), &ring_, 0);
    if (result < 0) fail("io_uring", -result);
    const iovec memory{.iov_base = t.buffer.data(), .iov_len = static_cast<std::size_t>(t.block)};
    result = io_uring_register_files(&ring_, &t.fd, 1);
    if (result == 0) result = io_uring_register_buffers(&ring_, &memory, 1);
    if (result == 0) return;
    io_uring_queue_exit(&ring_);
    fail("io_uring_register", -result);
  }
  ~UringLoop() override { io_uring_queue_exit(&ring_); }

  void run(std::int64_t count) override {
    std::int64_t begun = 0, done = 0;
    while (done < count) {
      for (; begun < count && begun - done < target_.depth; ++begun) {
        io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
        ZG_ASSERT(sqe != nullptr);
        io_uring_prep_write_fixed(sqe, 0, target_.buffer.data(), static_cast<unsigned>(target_.block), 0, 0);
        sqe->flags |= IOSQE_FIXED_FILE;
      }
      if (const int result = io_uring_submit_and_wait(&ring_, 1); result < 0) fail("io_uring_enter", -result);
      unsigned head = 0, seen = 0;
      io_uring_cqe* cqe = nullptr;
      io_uring_for_each_cqe(&ring_, head, cqe) {
        ++seen;
        if (cqe->res != target_.block) fail("io_uring", -cqe->res);
      }
      io_uring_cq_advance(&ring_, seen);
      done += seen;
    }
  }

 private:
  const Target& target_;
  io_uring ring_{};
};

// As DeepSpeed's csrc/aio works: a queue of requests is submitted, then all of it is waited for.
class AioLoop final : public Contestant {
 public:
  AioLoop(const Target& t, bool one_by_one)
      : target_(t),
        one_by_one_(one_by_one),
        blocks_(static_cast<std::size_t>(t.depth)),
        events_(static_cast<std::size_t>(t.depth)) {
    if (const int result = io_setup(t.depth, &context_); result < 0) fail("io_setup", -result);
    for (iocb& block : blocks_) {
      io_prep_pwrite(&block, t.fd, t.buffer.data(), static_cast<std::size_t>(t.block), 0);
      pointers_.push_back(&block);
    }
  }
  ~AioLoop() override { io_destroy(context_); }

  void run(std::int64_t count) override {
    while (count > 0) {
      const long n = std::min<std::int64_t>(count, target_.depth);
      const long step = one_by_one_ ? 1 : n;
      for (long at = 0; at < n;) {
        const int result = io_submit(context_, std::min(step, n - at), pointers_.data() + at);
        if (result <= 0) fail("io_submit", -result);
        at += result;
      }
      const int got = io_getevents(context_, n, n, events_.data(), nullptr);
      if (got != n) fail("io_getevents", -got);
      for (long i = 0; i < n; ++i) {
        const auto result = static_cast<std::int64_t>(events_[static_cast<std::size_t>(i)].res);
        if (result != target_.block) fail("libaio", static_cast<int>(-result));
      }
      count -= n;
    }
  }

 private:
  const Target& target_;
  const bool one_by_one_;
  io_context_t context_ = nullptr;
  std::vector<iocb> blocks_;
  std::vector<iocb*> pointers_;
  std::vector<io_event> events_;
};

// pwrite on a few threads that take from one queue behind one mutex.
class PoolLoop final : public Contestant {
 public:
  explicit PoolLoop(const Target& t) : target_(t) {
    for (int i = 0; i < kPoolThreads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~PoolLoop() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void run(std::int64_t count) override {
    std::unique_lock lock(mutex_);
    done_ = 0;
    for (std::int64_t begun = 0; begun < count; ++begun) {
      finished_.wait(lock, [&] { return begun - done_ < target_.depth; });
      queue_.push_back(0);
      work_.notify_one();
    }
    finished_.wait(lock, [&] { return done_ == count; });
    if (error_ != 0) fail("pwrite", error_);
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (stop_) return;
      const off_t offset = queue_.front();
      queue_.pop_front();
      lock.unlock();
      const ssize_t n =
          pwrite(target_.fd, target_.buffer.data(), static_cast<std::size_t>(target_.block), offset);
      const int error = n == target_.block ? 0 : n < 0 ? errno : EIO;
      lock.lock();
      ++done_;
      if (error != 0) error_ = error;
      finished_.notify_one();
    }
  }

  const Target& target_;
  std::mutex mutex_;
  std::condition_variable work_, finished_;
  std::deque<off_t> queue_;
  std::int64_t done_ = 0;
  int error_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

std::unique_ptr<io::EngineCore> make_engine(io::Backend backend, const Target& t) {
  io::EngineOptions options{.backend = backend, .block_size = t.block, .queue_depth = t.depth};
  io::DriveSpec drive;
  drive.name = "null";
  drive.bytes = std::int64_t{1} << 30;
  const int fd = t.fd;
  drive.make_queue = [backend, fd](int, int depth) -> std::unique_ptr<io::Queue> {
    switch (backend) {
      case io::Backend::kUring:
        return io::make_uring_queue(fd, depth, {});
      case io::Backend::kLibaio:
        return io::make_aio_queue(fd, depth);
      case io::Backend::kThreads:
        return io::make_thread_queue(fd, depth, kPoolThreads, "zg-io0");
      default:
        return io::make_ram_queue(std::int64_t{1} << 30, depth, {.moves_bytes = false});
    }
  };
  std::vector<io::DriveSpec> drives;
  drives.push_back(std::move(drive));
  auto engine = std::make_unique<io::EngineCore>(backend, options, std::move(drives));
  engine->register_memory(t.buffer.data(), t.buffer.size());
  return engine;
}

class EngineByCompletion final : public Contestant, private io::Completion {
 public:
  EngineByCompletion(io::Backend backend, const Target& t) : target_(t), engine_(make_engine(backend, t)) {}

  void run(std::int64_t count) override {
    done_ = 0;
    count_ = count;
    const std::int64_t first = std::min<std::int64_t>(count, target_.depth);
    left_ = count - first;
    for (std::int64_t i = 0; i < first; ++i) submit();
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [&] { return done_ == count_; });
    if (error_ != 0) fail("engine", error_);
  }

 private:
  void submit() {
    engine_->submit(
        {.op = io::Op::kWrite, .data = target_.buffer.data(), .bytes = target_.block, .completion = this});
  }
  void on_complete(io::Ticket, std::uint64_t, io::Result result) override {
    if (!result.ok()) error_ = result.error;
    if (left_.fetch_sub(1, std::memory_order_relaxed) > 0) submit();
    if (done_.fetch_add(1) + 1 < count_) return;
    std::lock_guard lock(mutex_);
    finished_.notify_one();
  }

  const Target& target_;
  std::atomic<std::int64_t> left_{0}, done_{0}, count_{0};
  std::atomic<int> error_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
  std::unique_ptr<io::EngineCore> engine_;
};

class EngineByWait final : public Contestant {
 public:
  EngineByWait(io::Backend backend, const Target& t)
      : target_(t), engine_(make_engine(backend, t)), tickets_(static_cast<std::size_t>(t.depth)) {}

  void run(std::int64_t count) override {
    for (std::int64_t i = 0; i < count + target_.depth; ++i) {
      io::Ticket& ticket = tickets_[static_cast<std::size_t>(i % target_.depth)];
      if (ticket) {
        const io::Result result = engine_->wait(std::exchange(ticket, {}));
        if (!result.ok()) fail("engine", result.error);
      }
      if (i < count)
        ticket =
            engine_->submit({.op = io::Op::kWrite, .data = target_.buffer.data(), .bytes = target_.block});
    }
  }

 private:
  const Target& target_;
  std::unique_ptr<io::EngineCore> engine_;
  std::vector<io::Ticket> tickets_;
};

using Make = std::function<std::unique_ptr<Contestant>(const Target&)>;

void add(const std::string& name, const Make& make, const std::vector<std::int64_t>& depths,
         const std::vector<std::int64_t>& blocks) {
  const auto body = [make](benchmark::State& state) {
    try {
      const Target target(static_cast<int>(state.range(0)), state.range(1));
      const std::unique_ptr<Contestant> contestant = make(target);
      while (state.KeepRunningBatch(state.max_iterations)) contestant->run(state.max_iterations);
    } catch (const Error& e) {
      state.SkipWithError(e.what());
    }
    state.counters["per_cpu_second"] = {1, benchmark::Counter::kIsIterationInvariantRate};
  };
  benchmark::RegisterBenchmark(name.c_str(), body)
      ->ArgNames({"depth", "block"})
      ->ArgsProduct({depths, blocks})
      ->MeasureProcessCPUTime();
}

void run() {
  const std::vector<std::int64_t> depth = {32}, block = {128 << 10};
  const auto peer = [&](const std::string& name, const Make& make) { add(name, make, depth, block); };
  peer("uring_loop", [](const Target& t) { return std::make_unique<UringLoop>(t); });
  peer("libaio_one_by_one", [](const Target& t) { return std::make_unique<AioLoop>(t, true); });
  peer("libaio_in_batches", [](const Target& t) { return std::make_unique<AioLoop>(t, false); });
  peer("pwrite_on_4_threads", [](const Target& t) { return std::make_unique<PoolLoop>(t); });
  for (const io::Backend b :
       {io::Backend::kRam, io::Backend::kUring, io::Backend::kLibaio, io::Backend::kThreads}) {
    const bool ram = b == io::Backend::kRam;
    const auto depths = ram ? std::vector<std::int64_t>{1, 8, 32, 128} : depth;
    const auto blocks = ram ? std::vector<std::int64_t>{4 << 10, 128 << 10, 1 << 20} : block;
    const std::string name = fmt::format("engine/{}/", io::name_of(b));
    add(
        name + "completion", [b](const Target& t) { return std::make_unique<EngineByCompletion>(b, t); },
        depths, blocks);
    add(
        name + "wait", [b](const Target& t) { return std::make_unique<EngineByWait>(b, t); }, depths, blocks);
  }
  run_registered();
}

}  // namespace
}  // namespace zg::bench

int main(int argc, char** argv) {
  CLI::App app("What the engine itself costs");
  return zg::bench::micro_main(argc, argv, app, zg::bench::run);
}
