// What every back end of communication must do. The same program runs under an MPI launcher, where each
// process has some of the ranks.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "comm/worlds.hpp"
#include "support/seed.hpp"

namespace zg::test {
namespace {

const std::int64_t kCounts[] = {0, 1, 3, 257, large_count()};

// Element i of what a rank brings: of magnitudes so different that the order of a sum shows in its bits.
template <class T>
T value(int rank, std::int64_t i) {
  const std::uint64_t h = (static_cast<std::uint64_t>(rank) * 1000003 + static_cast<std::uint64_t>(i) + 7) *
                          0x9E3779B97F4A7C15ull;
  const double mantissa = static_cast<double>(h >> 40) / (1 << 24) + 0.5;
  const double sign = (h & 1) != 0 ? -1 : 1;
  const double v = sign * std::ldexp(mantissa, static_cast<int>(h >> 8 & 15) - 8);
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(v);
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(h >> 16);
  } else {
    return T(static_cast<float>(v));
  }
}

template <class T>
std::vector<T> values(int rank, std::int64_t first, std::int64_t count) {
  std::vector<T> out;
  for (std::int64_t i = 0; i < count; ++i) out.push_back(value<T>(rank, first + i));
  return out;
}

template <class T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The reduction in ascending order of the ranks, rounded once.
template <class T>
T reduced(std::vector<int> members, std::int64_t i, Reduction reduction) {
  std::sort(members.begin(), members.end());
  Sum<T> sum = static_cast<Sum<T>>(value<T>(members[0], i));
  for (std::size_t m = 1; m < members.size(); ++m) {
    const auto x = static_cast<Sum<T>>(value<T>(members[m], i));
    sum = reduction == Reduction::kSum ? sum + x : std::max(sum, x);
  }
  return T(sum);
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// Groups of a world of n ranks, each also in another order.
std::vector<std::vector<int>> groups_of(int n) {
  std::vector<std::vector<int>> groups(1);
  for (int r = 0; r < n; ++r) groups[0].push_back(r);
  if (n > 1) groups.push_back({n - 1, 0});
  if (n > 2) {
    groups.push_back({});
    for (int r = n - 1; r >= 1; --r) groups.back().push_back(r);
    groups.push_back({1});
  }
  return groups;
}

bool is_in(const std::vector<int>& group, int rank) {
  return std::find(group.begin(), group.end(), rank) != group.end();
}

class Conformance : public testing::TestWithParam<int> {
 protected:
  // body(communicator, members, stream, place) on every member of every group.
  template <class Body>
  void in_groups(const Body& body) {
    in_world(GetParam(), [&](CommRank& rank, const Place& place) {
      const auto stream = place.stream("comm");
      for (const auto& members : groups_of(rank.size())) {
        if (!is_in(members, rank.rank())) continue;
        const auto comm = rank.group(members, "test");
        ASSERT_EQ(comm->size(), static_cast<int>(members.size()));
        ASSERT_EQ(members[static_cast<std::size_t>(comm->rank())], rank.rank());
        body(*comm, members, *stream, place);
        stream->synchronize();
      }
    });
  }

  template <class T>
  void all_gather() {
    in_groups([](Communicator& comm, const std::vector<int>& members, Stream& stream, const Place& place) {
      const int me = members[static_cast<std::size_t>(comm.rank())];
      for (const std::int64_t n : kCounts) {
        Operand<T> in(place, values<T>(me, 0, n)), out(place, n * comm.size());
        std::vector<T> expected;
        for (const int m : members) {
          const auto theirs = values<T>(m, 0, n);
          expected.insert(expected.end(), theirs.begin(), theirs.end());
        }
        comm.all_gather(stream, in.data(), out.data(), n, dtype_of<T>);
        stream.synchronize();
        EXPECT_TRUE(same(out.read(), expected)) << n;
        std::vector<T> mine(expected.size());
        std::copy_n(expected.begin() + comm.rank() * n, n, mine.begin() + comm.rank() * n);
        Operand<T> both(place, mine);
        comm.all_gather(stream, both.data() + comm.rank() * n, both.data(), n, dtype_of<T>);
        stream.synchronize();
        EXPECT_TRUE(same(both.read(), expected)) << n << " in place";
      }
    });
  }

  template <class T>
  void reduce(Reduction reduction) {
    in_groups([&](Communicator& comm, const std::vector<int>& members, Stream& stream, const Place& place) {
      const int me = members[static_cast<std::size_t>(comm.rank())];
      for (const std::int64_t n : kCounts) {
        const std::int64_t all = n * comm.size();
        Operand<T> in(place, values<T>(me, 0, all)), out(place, n);
        std::vector<T> expected;
        for (std::int64_t i = 0; i < all; ++i) expected.push_back(reduced<T>(members, i, reduction));
        const auto row = expected.begin() + comm.rank() * n;
        comm.reduce_scatter(stream, in.data(), out.data(), n, dtype_of<T>, reduction);
        stream.synchronize();
        EXPECT_TRUE(same(out.read(), std::vector<T>(row, row + n))) << n;
        EXPECT_TRUE(same(in.read(), values<T>(me, 0, all))) << "the operand is left alone";
        // Counts that do not divide by the members, too.
        for (const std::int64_t more : {std::int64_t{0}, std::min<std::int64_t>(all, 1)}) {
          Operand<T> data(place, values<T>(me, 0, all - more));
          comm.all_reduce(stream, data.data(), all - more, dtype_of<T>, reduction);
          stream.synchronize();
          EXPECT_TRUE(same(data.read(), std::vector<T>(expected.begin(), expected.end() - more))) << n;
        }
        comm.reduce_scatter(stream, in.data(), in.data() + comm.rank() * n, n, dtype_of<T>, reduction);
        stream.synchronize();
        const auto reduced_row = in.read().begin() + comm.rank() * n;
        EXPECT_TRUE(same(std::vector<T>(reduced_row, reduced_row + n), std::vector<T>(row, row + n)))
            << n << " in place";
      }
    });
  }
};

TEST_P(Conformance, GathersEveryType) {
  all_gather<double>();
  all_gather<float>();
  all_gather<bf16>();
  all_gather<std::uint8_t>();
}

TEST_P(Conformance, SumsInTheOrderOfTheRanks) {
  reduce<double>(Reduction::kSum);
  reduce<float>(Reduction::kSum);
  reduce<fp16>(Reduction::kSum);
  reduce<bf16>(Reduction::kSum);
}

TEST_P(Conformance, TakesMaxima) {
  reduce<double>(Reduction::kMax);
  reduce<float>(Reduction::kMax);
  reduce<bf16>(Reduction::kMax);
}

TEST_P(Conformance, AMaximumWithNanIsNan) {
  in_groups([](Communicator& comm, const std::vector<int>&, Stream& stream, const Place& place) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (int whose = 0; whose < comm.size(); ++whose) {
      Operand<float> data(place, {comm.rank() == whose ? nan : 1.0f, static_cast<float>(comm.rank())});
      comm.all_reduce(stream, data.data(), 2, DType::kF32, Reduction::kMax);
      stream.synchronize();
      EXPECT_TRUE(std::isnan(data.read()[0]));
      EXPECT_EQ(data.read()[1], static_cast<float>(comm.size() - 1));
    }
  });
}

TEST_P(Conformance, BroadcastsFromEveryMember) {
  in_groups([](Communicator& comm, const std::vector<int>& members, Stream& stream, const Place& place) {
    for (const std::int64_t n : kCounts) {
      for (int root = 0; root < comm.size(); ++root) {
        const int source = members[static_cast<std::size_t>(root)];
        Operand<float> data(place, n);
        if (comm.rank() == root) data.write(values<float>(source, 0, n));
        comm.broadcast(stream, data.data(), n, DType::kF32, root);
        stream.synchronize();
        EXPECT_TRUE(same(data.read(), values<float>(source, 0, n))) << n << " from " << root;
      }
    }
  });
}

TEST_P(Conformance, ExchangesAllWithAll) {
  in_groups([](Communicator& comm, const std::vector<int>& members, Stream& stream, const Place& place) {
    const int me = members[static_cast<std::size_t>(comm.rank())];
    for (const std::int64_t n : kCounts) {
      Operand<bf16> in(place, values<bf16>(me, 0, n * comm.size())), out(place, n * comm.size());
      std::vector<bf16> expected;
      for (const int m : members) {
        const auto part = values<bf16>(m, comm.rank() * n, n);
        expected.insert(expected.end(), part.begin(), part.end());
      }
      comm.all_to_all(stream, in.data(), out.data(), n, DType::kBF16);
      stream.synchronize();
      EXPECT_TRUE(same(out.read(), expected)) << n;
    }
  });
}

// Each member sends round the ring while it receives, on two streams; several messages, in order.
TEST_P(Conformance, SendsAndReceivesMatchInOrder) {
  in_groups([](Communicator& comm, const std::vector<int>& members, Stream& stream, const Place& place) {
    if (comm.size() == 1) return;
    const auto sends = place.stream("sends");
    const int next = (comm.rank() + 1) % comm.size(), before = (comm.rank() + comm.size() - 1) % comm.size();
    const int me = members[static_cast<std::size_t>(comm.rank())],
              theirs = members[static_cast<std::size_t>(before)];
    std::vector<std::unique_ptr<Operand<float>>> out, in;
    for (const std::int64_t n : kCounts) {
      out.push_back(std::make_unique<Operand<float>>(place, values<float>(me, n, n)));
      in.push_back(std::make_unique<Operand<float>>(place, n));
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
      comm.send(*sends, out[i]->data(), kCounts[i], DType::kF32, next);
      comm.receive(stream, in[i]->data(), kCounts[i], DType::kF32, before);
    }
    sends->synchronize();
    stream.synchronize();
    for (std::size_t i = 0; i < in.size(); ++i)
      EXPECT_TRUE(same(in[i]->read(), values<float>(theirs, kCounts[i], kCounts[i])));
  });
}

// <A x, y> = <x, A' y> over all members, of each call that a backward turns round: what is gathered is summed
// by pieces, a sum that all go on with is the sum of their gradients, what is broadcast is summed, what is
// exchanged is exchanged back, and what is passed round a ring goes round the other way.
TEST_P(Conformance, BackwardsAreTheAdjoints) {
  in_groups([](Communicator& comm, const std::vector<int>& members, Stream& stream, const Place& place) {
    constexpr std::int64_t kN = 257;
    const int d = comm.size(), me = members[static_cast<std::size_t>(comm.rank())];
    const auto back = place.stream("back");
    // Of this member, from numbers that no other vector has.
    const auto vector = [&](int which, std::int64_t n) { return values<double>(me, which * 10 * kN * d, n); };
    const auto expect_adjoint = [&](const char* what, const std::vector<double>& x, Operand<double>& ax,
                                    const std::vector<double>& y, Operand<double>& aty) {
      stream.synchronize(), back->synchronize();
      const auto dot = [](const std::vector<double>& a, const std::vector<double>& b, bool magnitudes) {
        double sum = 0;
        for (std::size_t i = 0; i < a.size(); ++i) sum += magnitudes ? std::abs(a[i] * b[i]) : a[i] * b[i];
        return sum;
      };
      Operand<double> sums(place, {dot(ax.read(), y, false), dot(x, aty.read(), false),
                                   dot(ax.read(), y, true) + dot(x, aty.read(), true)});
      comm.all_reduce(stream, sums.data(), 3, DType::kF64, Reduction::kSum);
      stream.synchronize();
      const std::vector<double> all = sums.read();
      EXPECT_NEAR(all[0], all[1], 1e-13 * all[2]) << what << " of " << d;
      EXPECT_GT(all[2], 0) << what;
    };
    const std::vector<double> x = vector(0, kN), y = vector(1, kN * d), z = vector(2, kN),
                              w = vector(3, kN * d);
    {
      Operand<double> in(place, x), ax(place, kN * d), out(place, y), aty(place, kN);
      comm.all_gather(stream, in.data(), ax.data(), kN, DType::kF64);
      comm.reduce_scatter(stream, out.data(), aty.data(), kN, DType::kF64, Reduction::kSum);
      expect_adjoint("all-gather", x, ax, y, aty);
    }
    {
      Operand<double> ax(place, x), aty(place, z);
      comm.all_reduce(stream, ax.data(), kN, DType::kF64, Reduction::kSum);
      comm.all_reduce(stream, aty.data(), kN, DType::kF64, Reduction::kSum);
      expect_adjoint("all-reduce", x, ax, z, aty);
    }
    {
      Operand<double> in(place, y), ax(place, kN * d), out(place, w), aty(place, kN * d);
      comm.all_to_all(stream, in.data(), ax.data(), kN, DType::kF64);
      comm.all_to_all(stream, out.data(), aty.data(), kN, DType::kF64);
      expect_adjoint("all-to-all", y, ax, w, aty);
    }
    for (int root = 0; root < d; ++root) {
      // The root alone has an x, and a gradient.
      const std::vector<double> mine = comm.rank() == root ? x : std::vector<double>(kN);
      Operand<double> ax(place, mine), sum(place, z);
      comm.broadcast(stream, ax.data(), kN, DType::kF64, root);
      comm.all_reduce(stream, sum.data(), kN, DType::kF64, Reduction::kSum);
      expect_adjoint("broadcast", mine, ax, z, sum);
    }
    if (d == 1) return;
    const int next = (comm.rank() + 1) % d, before = (comm.rank() + d - 1) % d;
    Operand<double> in(place, x), ax(place, kN), out(place, z), aty(place, kN);
    comm.send(*back, in.data(), kN, DType::kF64, next);
    comm.receive(stream, ax.data(), kN, DType::kF64, before);
    stream.synchronize(), back->synchronize();
    comm.send(*back, out.data(), kN, DType::kF64, before);
    comm.receive(stream, aty.data(), kN, DType::kF64, next);
    expect_adjoint("ring", x, ax, z, aty);
  });
}

// The second call finds the operands as the first has left them, on every rank.
TEST_P(Conformance, CallsOfAStreamFollowEachOther) {
  in_groups([](Communicator& comm, const std::vector<int>&, Stream& stream, const Place& place) {
    Operand<double> data(place, std::vector<double>(1000, 1));
    double factor = 1;
    for (int i = 0; i < 15; ++i) {  // 8^15 is exact
      comm.all_reduce(stream, data.data(), 1000, DType::kF64, Reduction::kSum);
      factor *= comm.size();
      if (i % 5 == 0) comm.barrier(stream);
    }
    stream.synchronize();
    EXPECT_EQ(data.read(), std::vector<double>(1000, factor));
  });
}

// Calls in random order over groups that overlap, while ranks are held up: what a rank has afterwards is a
// function of the calls alone.
TEST_P(Conformance, RandomCallsOverManyGroupsGiveTheSameBits) {
  const std::uint64_t seed = test_seed(4711);
  SCOPED_TRACE(seed);
  constexpr std::int64_t kSize = 600;
  in_world(GetParam(), [&](CommRank& rank, const Place& place) {
    const auto groups = groups_of(rank.size());
    const int n = rank.size();
    // All ranks' contents, which every rank follows.
    std::vector<std::vector<float>> expected;
    for (int r = 0; r < n; ++r) expected.push_back(values<float>(r, 0, kSize));
    Operand<float> mine(place, expected[static_cast<std::size_t>(rank.rank())]), scratch(place, kSize);
    const auto stream_owner = place.stream("comm");
    Stream& stream = *stream_owner;
    std::vector<std::unique_ptr<Communicator>> comms;
    for (const auto& g : groups) comms.push_back(is_in(g, rank.rank()) ? rank.group(g, "random") : nullptr);
    std::mt19937_64 random(seed), delay(seed + static_cast<std::uint64_t>(rank.rank()));
    for (int round = 0; round < 200; ++round) {
      const std::size_t g = random() % groups.size(), what = random() % 3;
      const auto& members = groups[g];
      const auto d = static_cast<std::int64_t>(members.size());
      const std::int64_t count = static_cast<std::int64_t>(random() % 600) / d;
      const auto root = static_cast<int>(random() % members.size());
      const auto theirs = [&](int m) -> std::vector<float>& {
        return expected[static_cast<std::size_t>(members[static_cast<std::size_t>(m)])];
      };
      // The expected contents.
      std::vector<float> result(kSize);
      for (std::int64_t i = 0; i < count * (what == 2 ? d : 1); ++i) {
        const auto at = static_cast<std::size_t>(i);
        if (what == 0) {
          std::vector<int> ascending = members;
          std::sort(ascending.begin(), ascending.end());
          result[at] = expected[static_cast<std::size_t>(ascending[0])][at];
          for (std::size_t m = 1; m < ascending.size(); ++m)
            result[at] += expected[static_cast<std::size_t>(ascending[m])][at];
          result[at] *= 0.5f;
        } else if (what == 1) {
          result[at] = theirs(root)[at];
        } else {
          result[at] = theirs(static_cast<int>(i / count))[static_cast<std::size_t>(i % count)];
        }
      }
      for (int m = 0; m < d; ++m) std::copy_n(result.begin(), count * (what == 2 ? d : 1), theirs(m).begin());
      if (comms[g] == nullptr) continue;
      if (delay() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(delay() % 2000));
      if (what == 0) {
        comms[g]->all_reduce(stream, mine.data(), count, DType::kF32, Reduction::kSum);
        mine.change(stream, [count](std::vector<float>& values) {
          for (std::int64_t i = 0; i < count; ++i) values[static_cast<std::size_t>(i)] *= 0.5f;
        });
      } else if (what == 1) {
        comms[g]->broadcast(stream, mine.data(), count, DType::kF32, root);
      } else {
        scratch.change(stream, [&mine](std::vector<float>& values) { values = mine.read(); });
        comms[g]->all_gather(stream, scratch.data(), mine.data(), count, DType::kF32);
      }
    }
    stream.synchronize();
    EXPECT_TRUE(same(mine.read(), expected[static_cast<std::size_t>(rank.rank())]));
  });
}

// What a back end counts is what the dry one counts, and the closed form.
TEST_P(Conformance, BytesAreTheClosedForm) {
  in_groups([](Communicator& comm, const std::vector<int>&, Stream& stream, const Place& place) {
    const auto d = static_cast<std::int64_t>(comm.size());
    const auto dry_rank = make_dry_rank(comm.rank(), comm.size());
    std::vector<int> all(static_cast<std::size_t>(d));
    std::iota(all.begin(), all.end(), 0);
    const auto dry = dry_rank->group(all, "dry");
    Operand<float> a(place, 60 * d), b(place, 60 * d);
    std::vector<CommTraffic> seen[2];
    int which = 0;
    for (Communicator* c : {&comm, dry.get()}) {
      CommTraffic before = c->traffic();
      const auto note = [&] {
        const CommTraffic now = c->traffic();
        seen[which].push_back(
            {now.sent - before.sent, now.received - before.received, now.calls - before.calls});
        before = now;
      };
      c->all_gather(stream, a.data(), b.data(), 60, DType::kF32), note();
      c->reduce_scatter(stream, b.data(), a.data(), 60, DType::kF32, Reduction::kSum), note();
      c->all_reduce(stream, b.data(), 60 * d, DType::kF32, Reduction::kSum), note();
      c->all_reduce(stream, b.data(), 60 * d - 1, DType::kF32, Reduction::kSum), note();
      c->broadcast(stream, b.data(), 7, DType::kBF16, 0), note();
      c->all_to_all(stream, a.data(), b.data(), 60, DType::kF32), note();
      c->barrier(stream), note();
      stream.synchronize();
      ++which;
    }
    EXPECT_EQ(seen[0], seen[1]);
    const std::int64_t bytes = 240 * d * (d - 1) / d;
    EXPECT_EQ(seen[0][0], (CommTraffic{bytes, bytes, 1}));
    EXPECT_EQ(seen[0][1], (CommTraffic{bytes, bytes, 1}));
    EXPECT_EQ(seen[0][2], (CommTraffic{2 * bytes, 2 * bytes, 1}));
    EXPECT_EQ(seen[0][4], comm.rank() == 0 ? (CommTraffic{14 * (d - 1), 0, 1}) : (CommTraffic{0, 14, 1}));
    EXPECT_EQ(seen[0][6], (CommTraffic{0, 0, 1}));
  });
}

// Under a launcher the world has one size, whatever the parameter says.
INSTANTIATE_TEST_SUITE_P(Worlds, Conformance,
                         testing::ValuesIn(is_under_mpi() ? std::vector<int>{0} : world_sizes()),
                         [](const auto& p) { return "ranks_" + std::to_string(p.param); });

}  // namespace
}  // namespace zg::test
