// Exchanges of the parts of a model go on beside products that do not need them: in which order both are
// enqueued, and that nothing touches what is under way.
#include <gtest/gtest.h>

#include <mutex>

#include "support/local_parts.hpp"
#include "support/naive_ops.hpp"
#include "support/reference.hpp"

namespace zg::test {
namespace {

// What a part enqueues, in order: "gather" and "sum" begin, "end" ends the oldest of them, "dw" is a product
// for the gradient of weights, "dx" for that of an input, "y" one of a forward; neighbouring products of one
// kind are one.
using Order = std::vector<std::string>;

class RecordingOps final : public NaiveOps {
 public:
  explicit RecordingOps(Order& order) : order_(order) {}
  void gemm(Stream& s, View a, View b, View c, const GemmOptions& o) override {
    const char* const kind = o.a == Trans::kYes ? "dw" : o.b == Trans::kYes ? "y" : "dx";
    if (order_.empty() || order_.back() != kind) order_.emplace_back(kind);
    NaiveOps::gemm(s, a, b, c, o);
  }

 private:
  Order& order_;
};

class RecordingExchange final : public TensorParallelGroup {
 public:
  RecordingExchange(TensorParallelGroup& exchange, Order& order) : exchange_(exchange), order_(order) {}
  void all_reduce(Stream& s, const View& data) override {
    order_.emplace_back("sum");
    exchange_.all_reduce(s, data);
  }
  void reduce_scatter(Stream& s, const View& in, const View& out) override {
    order_.emplace_back("sum");
    exchange_.reduce_scatter(s, in, out);
  }
  void all_gather(Stream& s, const View& in, const View& out) override {
    order_.emplace_back("gather");
    exchange_.all_gather(s, in, out);
  }
  void end(Stream& s) override {
    order_.emplace_back("end");
    exchange_.end(s);
  }

 private:
  TensorParallelGroup& exchange_;
  Order& order_;
};

ModelConfig config_of(bool llama) {
  ModelConfig c = llama ? reference_llama() : reference_gpt2();
  c.layers = 1;
  if (!llama) c.inner = 172;
  return c;
}

// The order of part 0 in the backward of a block, and in its second half.
struct Orders {
  Order backward, second_half;
};
Orders orders_of(bool llama, bool sequence) {
  Orders orders;
  LocalParts(2).run([&](int part, TensorParallelGroup& local) {
    Order order;
    RecordingOps ops(order);
    RecordingExchange exchange(local, order);
    HostStream s("test", HostStream::Mode::kInline);
    ModelRunner r(config_of(llama), DType::kF64, ops, s, 0, {2, part, sequence}, &exchange);
    const Model& model = r.model();
    const BatchShape shape{1, 4};
    for (const Backward how : {Backward::kWhole, Backward::kInHalves}) {
      const Bytes x(model.checkpoint_bytes(shape)), out(model.checkpoint_bytes(shape)),
          saved(model.saved_bytes(shape, how)), workspace(model.block_workspace_bytes(shape, how));
      const auto rows = [&](const Bytes& b) {
        return View(b.data(), DType::kF64, model.residual_rows(shape), model.config().width);
      };
      UnitCall call{.shape = shape,
                    .layer = 0,
                    .weights = r.weights(1),
                    .grads = r.grads(1),
                    .input = rows(x),
                    .output = rows(out),
                    .saved = saved.data(),
                    .workspace = workspace.data()};
      model.run(s, ModelCall::kBlock, call);
      order.clear();
      call.activation_gradient = rows(out);
      if (how == Backward::kWhole) {
        model.run(s, ModelCall::kBlockBackward, call);
        if (part == 0) orders.backward = order;
        continue;
      }
      model.run(s, ModelCall::kBlockBackwardInput, call);
      order.clear();
      model.run(s, ModelCall::kBlockBackwardWeight, call);
      if (part == 0) orders.second_half = order;
    }
  });
  return orders;
}

// The sum of an input's gradient is under way while the gradients of the weights are computed, and the input
// that these need is gathered beside the product before them.
TEST(PartsOverlap, ExchangesAreUnderWayBesideProducts) {
  for (const bool llama : {false, true}) {
    SCOPED_TRACE(llama ? "llama" : "gpt2");
    const Order branch{"dw", "dx", "sum", "dw", "end"};
    Order expected = branch;
    expected.insert(expected.end(), branch.begin(), branch.end());
    EXPECT_EQ(orders_of(llama, false).backward, expected);
    EXPECT_EQ(orders_of(llama, false).second_half, (Order{"dw"}));

    const Order split{"gather", "end", "dw", "dx", "gather", "dx", "sum", "end", "dw", "end"};
    expected = split;
    expected.insert(expected.end(), split.begin(), split.end());
    const Orders sequence = orders_of(llama, true);
    EXPECT_EQ(sequence.backward, expected);
    EXPECT_EQ(sequence.second_half, (Order{"gather", "gather", "end", "dw", "gather", "end", "dw", "gather",
                                           "end", "dw", "end", "dw"}));
  }
}

Batch some_batch(std::uint64_t number) {
  Batch b{{2, 10}, {}, {}};
  for (std::uint64_t i = 20 * number; i < 20 * number + 20; ++i) {
    b.ids.push_back(static_cast<std::int32_t>(reference_hash("tokens", i) % 257));
    b.targets.push_back(i % 9 == 7 ? -1 : static_cast<std::int32_t>(reference_hash("targets", i) % 257));
  }
  return b;
}

struct PartsRun {
  ModelConfig config;
  bool sequence = false;
  Backward how = Backward::kWhole;
  bool drops = false;
  DType dtype = DType::kF32;
  BlockTiling blocks = BlockTiling::kWhole;
};

// The losses and all gradients of each part, of two micro-batches: the first overwrites the gradients, the
// second adds to them.
std::vector<std::string> bits_of(const PartsRun& setup, Exchanges when) {
  constexpr int kParts = 2;
  ModelConfig config = setup.config;
  config.dropout = {.embedding = 0.1, .residual = 0.3};
  std::vector<std::string> bits(kParts);
  LocalParts(kParts, when).run([&](int part, TensorParallelGroup& exchange) {
    HostStream s("test", HostStream::Mode::kInline);
    ModelRunner r(config, setup.dtype, host_ops(), s, 0, {kParts, part, setup.sequence}, &exchange,
                  setup.blocks);
    r.fill(reference_weight);
    r.poison_grads();
    std::string& mine = bits[static_cast<std::size_t>(part)];
    for (const Gradients into : {Gradients::kOverwrite, Gradients::kAdd}) {
      const std::uint64_t number = into == Gradients::kAdd ? 1 : 0;
      if (setup.drops) r.drop_as(77, 3, 4 + 2 * static_cast<std::int64_t>(number));
      mine += std::to_string(r.forward_backward(some_batch(number), Recompute::kYes, 1, into, setup.how));
    }
    for (std::size_t u = 0; u < r.units().size(); ++u) {
      const View g = r.grads(u);
      mine.append(static_cast<const char*>(g.data), static_cast<std::size_t>(g.cols) * size_of(g.dtype));
    }
  });
  return bits;
}

// An exchange may be made at once, or only when it is ended: what lies between the two neither writes what it
// reads, nor reads what it writes, nor do the tiles of layers, and the sums of these in more bits.
TEST(PartsOverlap, NothingTouchesWhatIsUnderWay) {
  const ModelConfig llama = config_of(true);
  const std::pair<DType, BlockTiling> layers[] = {{DType::kF32, BlockTiling::kWhole},
                                                  {DType::kBF16, BlockTiling::kInTiles}};
  for (const ModelConfig& config :
       {config_of(false), llama, with_every_option(llama), with_adapters(config_of(false), 0.2),
        with_adapters(llama, 0.2), with_adapters(with_every_option(llama))}) {
    for (const bool sequence : {false, true}) {
      for (const Backward how : {Backward::kWhole, Backward::kInHalves}) {
        for (const bool drops : {false, true}) {
          for (const auto& [dtype, blocks] : layers) {
            if (config.lora.on() && blocks == BlockTiling::kInTiles) continue;
            const PartsRun setup{config, sequence, how, drops, dtype, blocks};
            EXPECT_TRUE(bits_of(setup, Exchanges::kWhenBegun) == bits_of(setup, Exchanges::kWhenEnded))
                << title_of(config.arch) << ", sequence " << sequence << ", in halves "
                << (how == Backward::kInHalves) << ", drops " << drops << ", " << name_of(dtype);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace zg::test
