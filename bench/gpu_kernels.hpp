// What the parts of bench_gpu_kernels share: operands in slabs of the device's memory, cases, and their
// timing.
//
// A case names its operands twice: once to learn how much of each slab it takes, once to get views. All cases
// of a group share the slabs, so that they can take turns; what a case writes lies where no other case reads.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "bench/measure.hpp"
#include "ziggurat/base/trace.hpp"
#include "ziggurat/device/device.hpp"
#include "ziggurat/device/ops.hpp"

namespace zg::bench {

struct Options {
  std::string device = "cuda:0", only, filter, attention = "auto";
  bool tiny = false, tf32 = false, deterministic = false;
  int rounds = 5;
  double seconds = 120;  // after which no round begins
  bool wants(const std::string& section) const {
    return only.empty() || ("," + only + ",").find("," + section + ",") != std::string::npos;
  }
};

// Shapes of a model's step: of one micro-batch.
struct Shapes {
  const char* name;
  bool llama;
  std::int64_t sequences, time, width, heads, head_size, inner, vocabulary;
  std::int64_t rows() const { return sequences * time; }
};
std::vector<Shapes> shapes(const Options& options);

// What an operand holds.
enum class Content {
  kNumbers,   // uniform in (-1, 1), read only
  kUpdated,   // the same, for what is read and written
  kIds,       // below a bound, read only
  kZero,      // for states that the work itself brings to life
  kAnything,  // only written, or scratch
};

class Slabs {
 public:
  struct Key {
    Content content = Content::kAnything;
    DType dtype = DType::kU8;
    std::int64_t bound = 0;
    auto operator<=>(const Key&) const = default;
  };
  explicit Slabs(Device& device) : device_(device) {}
  Slabs(const Slabs&) = delete;
  Slabs& operator=(const Slabs&) = delete;
  ~Slabs();
  void need(const Key& key, std::int64_t bytes);
  void allocate();  // once, after every need()
  char* base(const Key& key) const { return slabs_.at(key).data; }
  std::int64_t bytes() const;

 private:
  struct Slab {
    char* data = nullptr;
    std::int64_t bytes = 0;
  };
  void fill(const Key& key, const Slab& slab, Stream& stream);
  Device& device_;
  std::map<Key, Slab> slabs_;
};

// Hands out a case's operands and counts the bytes that it must move: each operand that is read once, each
// that is written once.
class Takes {
 public:
  explicit Takes(const Slabs* slabs) : slabs_(slabs) {}  // null: to learn the sizes
  View in(DType t, std::int64_t rows, std::int64_t cols) { return take(Content::kNumbers, t, rows, cols, 1); }
  View out(DType t, std::int64_t rows, std::int64_t cols) {
    return take(Content::kAnything, t, rows, cols, 1);
  }
  View inout(DType t, std::int64_t rows, std::int64_t cols) {
    return take(Content::kUpdated, t, rows, cols, 2);
  }
  View zeroed(DType t, std::int64_t rows, std::int64_t cols) {
    return take(Content::kZero, t, rows, cols, 2);
  }
  View scratch(DType t, std::int64_t rows, std::int64_t cols) {
    return take(Content::kAnything, t, rows, cols, 0);
  }
  View ids(std::int64_t n, std::int64_t bound) { return take(Content::kIds, DType::kI32, 1, n, 1, bound); }
  // An operand of which other bytes move than its size says.
  View uncounted(Content content, DType t, std::int64_t rows, std::int64_t cols) {
    return take(content, t, rows, cols, 0);
  }
  void count(double bytes) { bytes_ += bytes; }

  double bytes() const { return bytes_; }
  std::int64_t footprint() const;
  const std::map<Slabs::Key, std::int64_t>& used() const { return used_; }
  // The next operands lie behind these: another set of the same.
  void next_set() { bytes_ = 0; }

 private:
  View take(Content content, DType t, std::int64_t rows, std::int64_t cols, int passes,
            std::int64_t bound = 0);
  const Slabs* slabs_;
  std::map<Slabs::Key, std::int64_t> used_;
  double bytes_ = 0;
};

using Work = std::function<void(Stream&)>;

struct Case {
  std::string section, op, dtype, shape;
  double flops = 0;  // 0: its roof is memory, else the products' of `product`
  DType product = DType::kBF16;
  std::function<Work(Takes&)> make;
};

struct Measured {
  double seconds = 0, mad = 0, bytes = 0, flops = 0;
  double rate() const { return (flops > 0 ? flops : bytes) / seconds; }
};

// Measures all cases in turns, on operands of their own; in the order of `cases`.
std::vector<Measured> measure(Device& device, Stream& stream, const std::vector<Case>& cases,
                              const Options& options, Clock::time_point end);

// The parts.
std::vector<Case> roof_cases(Device& device, const Options& options);
std::vector<Case> op_cases(Device& device, const Options& options, DType dtype);
std::vector<Case> update_cases(Device& device, const Options& options);
std::vector<Case> product_cases(Device& device, const Options& options, DType dtype);
std::vector<Case> attention_cases(Device& device, const Options& options, DType dtype);

// Copies as the machine's own library does them, to compare with; null where there is none.
enum class Way { kToDevice, kToHost, kBoth };
class CopyPeer {
 public:
  virtual ~CopyPeer() = default;
  // Seconds that `count` copies of `bytes` each take (of each way, with kBoth), one behind the other.
  virtual double seconds(Way way, std::int64_t bytes, int count) = 0;
};
std::unique_ptr<CopyPeer> make_copy_peer(int device, std::int64_t largest);
void measure_copies(Device& device, const Options& options, int gpu, Clock::time_point end,
                    const std::function<void(const nlohmann::ordered_json&)>& print);

}  // namespace zg::bench
