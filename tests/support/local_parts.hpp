// The parts of a model on threads of one process, which exchange through each other's memory: as plainly as
// possible, for streams that run their work at once. An exchange is made when it begins, or when it ends: as
// early and as late as a stream of its own may make it.
#pragma once
#include <barrier>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "support/model_runner.hpp"

namespace zg::test {

enum class Exchanges { kWhenBegun, kWhenEnded };

class LocalParts {
 public:
  explicit LocalParts(int parts, Exchanges when = Exchanges::kWhenBegun)
      : when_(when), barrier_(parts), views_(static_cast<std::size_t>(parts)) {}

  class Part final : public TensorParallelGroup {
   public:
    Part(LocalParts& all, int part) : all_(all), part_(part) {}

    ~Part() override { EXPECT_TRUE(begun_.empty()) << "an exchange is not ended"; }

    void all_reduce(Stream&, const View& data) override {
      begin([this, data] { meet(data, data, [&](std::int64_t i) { return sum(i); }); });
    }
    void reduce_scatter(Stream&, const View& in, const View& out) override {
      begin([this, in, out] { meet(in, out, [&](std::int64_t i) { return sum(part_ * out.count() + i); }); });
    }
    void all_gather(Stream&, const View& in, const View& out) override {
      begin([this, in, out] {
        meet(in, out, [&](std::int64_t i) {
          return element(all_.views_[static_cast<std::size_t>(i / in.count())], i % in.count());
        });
      });
    }
    void end(Stream&) override {
      ASSERT_FALSE(begun_.empty()) << "an exchange is ended that has not begun";
      if (all_.when_ == Exchanges::kWhenEnded) begun_.front()();
      begun_.pop_front();
    }

   private:
    void begin(std::function<void()> exchange) {
      if (all_.when_ == Exchanges::kWhenBegun) exchange();
      begun_.push_back(std::move(exchange));
    }
    static double element(const View& v, std::int64_t i) { return load(v, i / v.cols, i % v.cols); }
    double sum(std::int64_t i) const {
      double sum = 0;
      for (const View& v : all_.views_) sum += element(v, i);
      return sum;
    }
    // Writes value(i) to each element of `out` when all have shown `in`, and all have read.
    template <class Value>
    void meet(const View& in, const View& out, const Value& value) {
      all_.views_[static_cast<std::size_t>(part_)] = in;
      all_.barrier_.arrive_and_wait();
      std::vector<double> values;
      for (std::int64_t i = 0; i < out.count(); ++i) values.push_back(value(i));
      all_.barrier_.arrive_and_wait();
      for (std::int64_t i = 0; i < out.count(); ++i)
        store(out, i / out.cols, i % out.cols, values[static_cast<std::size_t>(i)]);
    }

    LocalParts& all_;
    const int part_;
    std::deque<std::function<void()>> begun_;  // and not ended
  };

  // work(part, exchange) on a thread for each part.
  void run(const std::function<void(int, TensorParallelGroup&)>& work) {
    std::vector<std::thread> threads;
    for (int p = 0; p < static_cast<int>(views_.size()); ++p) {
      threads.emplace_back([&, p] {
        Part part(*this, p);
        work(p, part);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  const Exchanges when_;
  std::barrier<> barrier_;
  std::vector<View> views_;  // by part
};

}  // namespace zg::test
