// The attention of a block over a context group: each rank with its part of the sequences, together the
// attention of whole sequences; and what is exchanged in the backward is the adjoint of what is exchanged
// before.
#include <gtest/gtest.h>

#include <mutex>
#include <random>
#include <thread>

#include "model/block_attention.hpp"
#include "support/model_runner.hpp"
#include "support/seed.hpp"
#include "ziggurat/comm/comm.hpp"

namespace zg::test {
namespace {

// Over a communicator, on the caller's stream.
class OverCommunicator final : public ContextExchange {
 public:
  explicit OverCommunicator(Communicator& group) : group_(group) {}
  void begin_pass(Stream& s, const View& mine, const View& from_before) override {
    const int rank = group_.rank(), size = group_.size();
    const auto send = [&] { group_.send(s, mine.data, mine.count(), mine.dtype, (rank + 1) % size); };
    if (rank % 2 == 0) send();
    group_.receive(s, from_before.data, from_before.count(), from_before.dtype, (rank + size - 1) % size);
    if (rank % 2 == 1) send();
    calls.push_back({ContextCall::Kind::kPass, mine.count(), mine.dtype});
  }
  void end_pass(Stream&) override {}
  void all_to_all(Stream& s, const View& in, const View& out) override {
    const std::int64_t count = in.count() / group_.size();
    group_.all_to_all(s, in.data, out.data, count, in.dtype);
    calls.push_back({ContextCall::Kind::kAllToAll, count, in.dtype});
  }
  std::vector<ContextCall> calls;

 private:
  Communicator& group_;
};

struct Problem {
  ModelConfig config;
  BatchShape whole;
  std::int64_t q() const { return config.heads * config.head_size; }
  std::int64_t columns() const { return q() + 2 * config.kv_heads * config.head_size; }
};

// The result for all rows of whole sequences, in fp64.
struct Result {
  std::vector<double> att, d_qkv;
};

// qkv and d_att: [rows, columns] of whole sequences.
Result attend(const Problem& p, int parts, ContextMethod method, const std::vector<double>& qkv,
              const std::vector<double>& d_att) {
  Result result{std::vector<double>(d_att.size()), std::vector<double>(qkv.size())};
  auto ranks = make_local_ranks(parts, {.timeout_seconds = 60});
  std::vector<int> members;
  for (int i = 0; i < parts; ++i) members.push_back(i);
  std::vector<std::thread> threads;
  for (int part = 0; part < parts; ++part) {
    threads.emplace_back([&, part] {
      const BatchShape shape{p.whole.sequences, p.whole.time / parts, {parts, part, method}};
      const auto group = ranks[static_cast<std::size_t>(part)]->group(members, "context");
      OverCommunicator exchange(*group);
      HostStream stream("attention", HostStream::Mode::kThread);
      const Unit unit;
      const model::Call call{{.shape = shape, .context = &exchange},
                             ModelCall::kBlock,
                             host_ops(),
                             stream,
                             p.config,
                             DType::kF64,
                             unit};
      const auto take = [&](auto&& plan_of) {
        model::BufferPlan measure(nullptr);
        plan_of(measure);
        Bytes memory(std::max<std::int64_t>(measure.bytes(), 1));
        model::BufferPlan plan(memory.data());
        return std::pair(std::move(memory), plan_of(plan));
      };
      const auto saved = take(
          [&](model::BufferPlan& plan) { return model::SavedAttention(plan, p.config, DType::kF64, shape); });
      const auto w = take([&](model::BufferPlan& plan) {
        return model::AttentionWorkspace(plan, p.config, DType::kF64, shape, call.rule, host_ops());
      });
      const RowPositions rows = shape.sequence_shard.positions(shape.time);
      const auto whole_row = [&](std::int64_t r) { return r / shape.time * p.whole.time + rows.of(r); };
      const auto each = [&](const View& mine, const auto& f) {
        for (std::int64_t r = 0; r < mine.rows; ++r) {
          for (std::int64_t c = 0; c < mine.cols; ++c)
            f(mine.as<double>()[r * mine.ld + c], static_cast<std::size_t>(whole_row(r) * mine.cols + c));
        }
      };
      Bytes d_memory(shape.rows() * p.q() * 8), d_qkv_memory(shape.rows() * p.columns() * 8);
      const View d(d_memory.data(), DType::kF64, shape.rows(), p.q());
      const View d_qkv(d_qkv_memory.data(), DType::kF64, shape.rows(), p.columns());
      each(model::attention_input(call, saved.second, w.second),
           [&](double& x, std::size_t i) { x = qkv[i]; });
      each(d, [&](double& x, std::size_t i) { x = d_att[i]; });
      for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
        exchange.calls.clear();
        if (direction == Direction::kForward) {
          model::attention_forward(call, saved.second, w.second);
        } else {
          model::attention_backward(call, saved.second, w.second, d, d_qkv);
        }
        stream.synchronize();
        const std::vector<ContextCall> planned =
            model::context_calls(p.config, DType::kF64, shape, direction);
        EXPECT_EQ(exchange.calls.size(), planned.size());
        for (std::size_t i = 0; i < std::min(planned.size(), exchange.calls.size()); ++i) {
          EXPECT_EQ(exchange.calls[i].kind, planned[i].kind) << i;
          EXPECT_EQ(exchange.calls[i].count, planned[i].count) << i;
          EXPECT_EQ(exchange.calls[i].dtype, planned[i].dtype) << i;
        }
      }
      each(saved.second.att, [&](double& x, std::size_t i) { result.att[i] = x; });
      each(d_qkv, [&](double& x, std::size_t i) { result.d_qkv[i] = x; });
    });
  }
  for (std::thread& thread : threads) thread.join();
  return result;
}

std::vector<double> normal(std::int64_t count, std::mt19937_64& random) {
  std::normal_distribution<double> of;
  std::vector<double> all;
  for (std::int64_t i = 0; i < count; ++i) all.push_back(of(random));
  return all;
}

Problem problem_of(std::int64_t heads, std::int64_t kv_heads, std::int64_t head_size, std::int64_t time) {
  Problem p;
  p.config.heads = heads, p.config.kv_heads = kv_heads, p.config.head_size = head_size;
  p.whole = {3, time};
  return p;
}

// The parts and the ways in which they can be exchanged.
template <class F>
void for_ways(const Problem& p, const F& body) {
  for (const int parts : {2, 3, 4}) {
    for (const ContextMethod method : {ContextMethod::kRing, ContextMethod::kUlysses}) {
      const bool ring = method == ContextMethod::kRing;
      if (p.whole.time % (ring ? 2 * parts : parts) != 0) continue;
      if (!ring && (p.config.heads % parts != 0 || p.config.kv_heads % parts != 0)) continue;
      SCOPED_TRACE(testing::Message() << parts << " parts, " << (ring ? "ring" : "ulysses"));
      body(parts, method);
    }
  }
}

const Problem kProblems[] = {problem_of(6, 3, 22, 12), problem_of(4, 2, 5, 24), problem_of(8, 4, 3, 40),
                             problem_of(3, 3, 43, 12), problem_of(12, 12, 1, 24)};

// In fp64 sums of some dozens of terms of order 1 differ by their order alone.
TEST(ContextAttention, IsThatOfWholeSequences) {
  std::mt19937_64 random(test_seed(3));
  int ways = 0;
  for (const Problem& p : kProblems) {
    const auto qkv = normal(p.whole.rows() * p.columns(), random), d = normal(p.whole.rows() * p.q(), random);
    const Result one = attend(p, 1, ContextMethod::kRing, qkv, d);
    for_ways(p, [&](int parts, ContextMethod method) {
      const Result many = attend(p, parts, method, qkv, d);
      for (std::size_t i = 0; i < one.att.size(); ++i) ASSERT_NEAR(many.att[i], one.att[i], 1e-13) << i;
      for (std::size_t i = 0; i < one.d_qkv.size(); ++i) ASSERT_NEAR(many.d_qkv[i], one.d_qkv[i], 1e-12) << i;
      ++ways;
    });
  }
  EXPECT_GE(ways, 20);
}

// For fixed queries and keys attention is linear in the values: o = A v. The gradient of the values is A' d,
// of all ranks together, so <A v, d> = <v, A' d>.
TEST(ContextAttention, TheBackwardIsTheAdjoint) {
  std::mt19937_64 random(test_seed(4));
  for (const Problem& p : kProblems) {
    const auto qkv = normal(p.whole.rows() * p.columns(), random), d = normal(p.whole.rows() * p.q(), random);
    for_ways(p, [&](int parts, ContextMethod method) {
      const Result r = attend(p, parts, method, qkv, d);
      double before = 0, after = 0, size = 0;
      for (std::size_t i = 0; i < d.size(); ++i) before += r.att[i] * d[i];
      const auto columns = static_cast<std::size_t>(p.columns());
      const std::size_t first = columns - static_cast<std::size_t>(p.config.kv_heads * p.config.head_size);
      for (std::size_t i = 0; i < qkv.size(); ++i) {
        if (i % columns < first) continue;
        after += qkv[i] * r.d_qkv[i], size += std::abs(qkv[i] * r.d_qkv[i]);
      }
      EXPECT_NEAR(before, after, 1e-13 * size);
      EXPECT_GT(std::abs(before), 1e-6 * size);
    });
  }
}

TEST(SequenceParts, AreAllRowsOnce) {
  for (const ContextMethod method : {ContextMethod::kRing, ContextMethod::kUlysses}) {
    for (const int parts : {1, 2, 3, 4}) {
      const std::int64_t time = 6, all = time * parts;
      std::vector<std::int32_t> whole;
      for (std::int32_t i = 0; i < 2 * all; ++i) whole.push_back(i);
      std::vector<int> seen(whole.size());
      for (int part = 0; part < parts; ++part) {
        const SequenceShard p{parts, part, method};
        const std::vector<std::int32_t> mine = p.cut(whole, time);
        ASSERT_EQ(static_cast<std::int64_t>(mine.size()), 2 * time);
        for (std::int64_t r = 0; r < 2 * time; ++r) {
          const std::int32_t token = mine[static_cast<std::size_t>(r)];
          ++seen[static_cast<std::size_t>(token)];
          EXPECT_EQ(token, r / time * all + p.positions(time).of(r));
        }
      }
      EXPECT_EQ(seen, std::vector<int>(whole.size(), 1));
    }
  }
  // The first and the last chunk of eight.
  EXPECT_EQ((SequenceShard{4, 0, ContextMethod::kRing}.cut({0, 1, 2, 3, 4, 5, 6, 7}, 2)),
            (std::vector<std::int32_t>{0, 7}));
  EXPECT_EQ((SequenceShard{4, 1, ContextMethod::kRing}.cut({0, 1, 2, 3, 4, 5, 6, 7}, 2)),
            (std::vector<std::int32_t>{1, 6}));
}

}  // namespace
}  // namespace zg::test
