// The parts of a model on threads of one process, which exchange through each other's memory: as plainly as
// possible, for streams that run their work at once.
#pragma once
#include <barrier>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "support/model_runner.hpp"

namespace zg::test {

class LocalParts {
 public:
  explicit LocalParts(int parts) : barrier_(parts), views_(static_cast<std::size_t>(parts)) {}

  class Part final : public PartExchange {
   public:
    Part(LocalParts& all, int part) : all_(all), part_(part) {}

    void all_reduce(Stream&, const View& data) override {
      meet(data, data, [&](std::int64_t i) { return sum(i); });
    }
    void reduce_scatter(Stream&, const View& in, const View& out) override {
      meet(in, out, [&](std::int64_t i) { return sum(part_ * out.count() + i); });
    }
    void all_gather(Stream&, const View& in, const View& out) override {
      meet(in, out, [&](std::int64_t i) {
        return element(all_.views_[static_cast<std::size_t>(i / in.count())], i % in.count());
      });
    }

   private:
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
  };

  // work(part, exchange) on a thread for each part.
  void run(const std::function<void(int, PartExchange&)>& work) {
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
  std::barrier<> barrier_;
  std::vector<View> views_;  // by part
};

}  // namespace zg::test
