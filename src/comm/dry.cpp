// Calls that move nothing, but count the bytes that they would move.
#include <algorithm>

#include "ziggurat/comm/comm.hpp"

namespace zg {
namespace {

class DryCommunicator final : public Communicator {
 public:
  DryCommunicator(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  CommTraffic traffic() const override { return traffic_; }

  void all_gather(Stream&, const void*, void*, std::int64_t count, DType dtype) override {
    each_other(count, dtype);
  }
  void reduce_scatter(Stream&, const void*, void*, std::int64_t count, DType dtype, Reduction) override {
    each_other(count, dtype);
  }
  void all_reduce(Stream&, void*, std::int64_t count, DType dtype, Reduction) override {
    const std::int64_t mine = (count / size_ + (rank_ < count % size_ ? 1 : 0)) * bytes(dtype);
    const std::int64_t both = count * bytes(dtype) - mine + (size_ - 1) * mine;
    traffic_ += {both, both, 1};
  }
  void broadcast(Stream&, void*, std::int64_t count, DType dtype, int root) override {
    const std::int64_t n = count * bytes(dtype);
    traffic_ += rank_ == root ? CommTraffic{(size_ - 1) * n, 0, 1} : CommTraffic{0, n, 1};
  }
  void all_to_all(Stream&, const void*, void*, std::int64_t count, DType dtype) override {
    each_other(count, dtype);
  }
  void send(Stream&, const void*, std::int64_t count, DType dtype, int) override {
    traffic_ += {count * bytes(dtype), 0, 1};
  }
  void receive(Stream&, void*, std::int64_t count, DType dtype, int) override {
    traffic_ += {0, count * bytes(dtype), 1};
  }
  void barrier(Stream&) override { traffic_ += {0, 0, 1}; }

 private:
  static std::int64_t bytes(DType dtype) { return static_cast<std::int64_t>(size_of(dtype)); }
  void each_other(std::int64_t count, DType dtype) {
    const std::int64_t n = (size_ - 1) * count * bytes(dtype);
    traffic_ += {n, n, 1};
  }
  const int rank_, size_;
  CommTraffic traffic_;
};

class DryRank final : public CommRank {
 public:
  DryRank(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string describe() const override { return fmt::format("rank {} of {}, dry", rank_, size_); }
  std::unique_ptr<Communicator> group(std::span<const int> members, const std::string& name) override {
    const auto it = std::find(members.begin(), members.end(), rank_);
    ZG_ASSERT(it != members.end(), "rank {} is no member of group {}", rank_, name);
    return std::make_unique<DryCommunicator>(static_cast<int>(it - members.begin()),
                                             static_cast<int>(members.size()));
  }
  void fail(const Error&) override {}

 private:
  const int rank_, size_;
};

}  // namespace

std::unique_ptr<CommRank> make_dry_rank(int rank, int size) {
  return std::make_unique<DryRank>(rank, size);
}

}  // namespace zg
