// The op set in the plainest fp64 loops, written from the formulae alone: what the real ops, and models
// over them, are compared with. Runs at once; the stream is only a place in the signature.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "tests/support/naive_router_ops.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/device/ops.hpp"

namespace zg::test {

class NaiveOps : public NaiveRouterOps {
 public:
  std::int64_t row_groups() const override { return 1; }
  std::int64_t logits_bytes() const override { return std::int64_t{1} << 20; }
  std::int64_t attention_scratch_bytes(DType, const AttentionShape&) const override { return 0; }

  void gemm(Stream&, View a, View b, View c, const GemmOptions& o) override {
    const bool ta = o.a == Trans::kYes, tb = o.b == Trans::kYes;
    const std::int64_t k = ta ? a.rows : a.cols;
    ZG_ASSERT_EQ(ta ? a.cols : a.rows, c.rows);
    ZG_ASSERT_EQ(tb ? b.rows : b.cols, c.cols);
    ZG_ASSERT_EQ(tb ? b.cols : b.rows, k);
    ZG_ASSERT(!(o.accumulate && o.bias));
    for (std::int64_t i = 0; i < c.rows; ++i) {
      for (std::int64_t j = 0; j < c.cols; ++j) {
        double sum = 0;
        for (std::int64_t l = 0; l < k; ++l)
          sum += (ta ? at(a, l, i) : at(a, i, l)) * (tb ? at(b, j, l) : at(b, l, j));
        if (o.bias) sum += at(o.bias, 0, j);
        if (o.addend) sum += at(o.addend, i, j);
        if (o.gelu_input) sum = gelu_of(at(o.gelu_input, i, j) = sum);
        if (o.gelu_backward) sum *= gelu_slope(at(o.gelu_backward, i, j));
        at(c, i, j) = o.accumulate ? at(c, i, j) + sum : sum;
      }
      if (!o.bias_gradient) continue;
      ZG_ASSERT(ta);
      double& sum = at(o.bias_gradient, 0, i);
      if (!o.accumulate) sum = 0;
      for (std::int64_t l = 0; l < k; ++l) sum += at(a, l, i);
    }
  }

  void layernorm(Stream&, const LayerNormArgs& args) override {
    const auto& [x, w, b, eps, y, stats] = args;
    const double n = static_cast<double>(x.cols);
    for (std::int64_t r = 0; r < x.rows; ++r) {
      double mean = 0, variance = 0;
      for (std::int64_t c = 0; c < x.cols; ++c) mean += at(x, r, c) / n;
      for (std::int64_t c = 0; c < x.cols; ++c) variance += square(at(x, r, c) - mean) / n;
      at(stats, r, 0) = mean;
      const double rstd = at(stats, r, 1) = 1 / std::sqrt(variance + eps);
      for (std::int64_t c = 0; c < x.cols; ++c)
        at(y, r, c) = (at(x, r, c) - mean) * rstd * at(w, 0, c) + at(b, 0, c);
    }
  }
  void layernorm_backward(Stream&, const LayerNormBackwardArgs& args) override {
    const auto& [dy, x, w, stats, dx, dw, db, scratch] = args;
    const double n = static_cast<double>(x.cols);
    for (std::int64_t r = 0; r < x.rows; ++r) {
      const double mean = at(stats, r, 0), rstd = at(stats, r, 1);
      double sum_g = 0, sum_gx = 0;  // g: the gradient of the normalised row
      for (std::int64_t c = 0; c < x.cols; ++c) {
        const double g = at(dy, r, c) * at(w, 0, c), hat = (at(x, r, c) - mean) * rstd;
        sum_g += g;
        sum_gx += g * hat;
        at(dw, 0, c) += at(dy, r, c) * hat;
        at(db, 0, c) += at(dy, r, c);
      }
      for (std::int64_t c = 0; c < x.cols; ++c) {
        const double g = at(dy, r, c) * at(w, 0, c), hat = (at(x, r, c) - mean) * rstd;
        at(dx, r, c) += rstd * (g - sum_g / n - hat * sum_gx / n);
      }
    }
  }
  void rmsnorm(Stream& s, const RmsNormArgs& args) override {
    head_rmsnorm(s, {.x = args.x,
                     .w = args.w,
                     .eps = args.eps,
                     .heads = 1,
                     .head_size = args.x.cols,
                     .y = args.y,
                     .stats = args.stats,
                     .weight = args.weight});
  }
  void rmsnorm_backward(Stream& s, const RmsNormBackwardArgs& args) override {
    const View& dx = args.dx;
    std::vector<double> before;
    for (std::int64_t i = 0; i < dx.count(); ++i) before.push_back(at(dx, i / dx.cols, i % dx.cols));
    head_rmsnorm_backward(s, {.dy = args.dy,
                              .x = args.x,
                              .w = args.w,
                              .stats = args.stats,
                              .heads = 1,
                              .head_size = args.x.cols,
                              .dx = dx,
                              .dw = args.dw,
                              .scratch = args.scratch,
                              .weight = args.weight});
    for (std::int64_t i = 0; i < dx.count(); ++i)
      at(dx, i / dx.cols, i % dx.cols) += before[static_cast<std::size_t>(i)];
  }
  void head_rmsnorm(Stream&, const HeadRmsNormArgs& args) override {
    const auto& [x, w, eps, heads, n, y, stats, weight] = args;
    for (std::int64_t r = 0; r < x.rows; ++r) {
      for (std::int64_t h = 0; h < heads; ++h) {
        double mean_square = 0;
        for (std::int64_t c = 0; c < n; ++c)
          mean_square += square(at(x, r, h * n + c)) / static_cast<double>(n);
        const double rstd = at(stats, r, h) = 1 / std::sqrt(mean_square + eps);
        for (std::int64_t c = 0; c < n; ++c)
          at(y, r, h * n + c) = at(x, r, h * n + c) * rstd * factor_of(w, c, weight);
      }
    }
  }
  void head_rmsnorm_backward(Stream&, const HeadRmsNormBackwardArgs& args) override {
    const auto& [dy, x, w, stats, heads, n, dx, dw, scratch, weight] = args;
    for (std::int64_t r = 0; r < x.rows; ++r) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const double rstd = at(stats, r, h);
        double sum_gx = 0;
        for (std::int64_t c = 0; c < n; ++c) {
          const double hat = at(x, r, h * n + c) * rstd, d = at(dy, r, h * n + c);
          sum_gx += d * factor_of(w, c, weight) * hat;
          at(dw, 0, c) += d * hat;
        }
        for (std::int64_t c = 0; c < n; ++c) {
          const double hat = at(x, r, h * n + c) * rstd, g = at(dy, r, h * n + c) * factor_of(w, c, weight);
          at(dx, r, h * n + c) = rstd * (g - hat * sum_gx / static_cast<double>(n));
        }
      }
    }
  }

  void gelu(Stream&, View x, View y) override {
    each(y, [&](std::int64_t r, std::int64_t c) { return gelu_of(at(x, r, c)); });
  }
  void gelu_backward(Stream&, View x, View dy, View dx) override {
    each(dx, [&](std::int64_t r, std::int64_t c) { return at(dy, r, c) * gelu_slope(at(x, r, c)); });
  }
  void swiglu(Stream&, View gate_up, View y, Gate activation) override {
    each(y, [&](std::int64_t r, std::int64_t c) {
      return activated(activation, at(gate_up, r, c)).value * at(gate_up, r, y.cols + c);
    });
  }
  void swiglu_backward(Stream&, View gate_up, View dy, View d, Gate activation) override {
    for (std::int64_t r = 0; r < dy.rows; ++r) {
      for (std::int64_t c = 0; c < dy.cols; ++c) {
        const Activated a = activated(activation, at(gate_up, r, c));
        const double up = at(gate_up, r, dy.cols + c), e = at(dy, r, c);
        at(d, r, c) = e * up * a.slope;
        at(d, r, dy.cols + c) = e * a.value;
      }
    }
  }

  void rope(Stream&, const RopeArgs& args) override {
    const auto& [x, positions, heads, head_size, table, inverse, first_keys] = args;
    const std::int64_t step = table.interleaved ? 2 : 1, distance = table.interleaved ? 1 : table.pairs;
    for (std::int64_t r = 0; r < x.rows; ++r) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const std::int64_t begin = h * head_size + table.first_column;
        for (std::int64_t i = 0; i < table.pairs; ++i) {
          const double frequency = table.frequency[static_cast<std::size_t>(i)];
          const double angle =
              static_cast<double>(place(positions, first_keys, r)) * frequency * (inverse ? -1 : 1);
          double& first = at(x, r, begin + i * step);
          double& second = at(x, r, begin + i * step + distance);
          const double a = first, b = second;
          first = table.amplitude * (a * std::cos(angle) - b * std::sin(angle));
          second = table.amplitude * (b * std::cos(angle) + a * std::sin(angle));
        }
      }
    }
  }

  void expand_kv(Stream&, const ExpandKvArgs& args) override {
    const auto& [n, joint, shared, kv] = args;
    for_latent_heads(n, kv.rows,
                     [&, &n = n, &joint = joint, &shared = shared, &kv = kv](
                         std::int64_t r, std::int64_t h, std::int64_t key, std::int64_t value) {
                       const std::int64_t own = h * (n.plain + n.value);
                       for (std::int64_t c = 0; c < n.plain; ++c) at(kv, r, key + c) = at(joint, r, own + c);
                       for (std::int64_t c = 0; c < n.shared; ++c)
                         at(kv, r, key + n.plain + c) = at(shared, r, c);
                       for (std::int64_t c = 0; c < n.value; ++c)
                         at(kv, r, value + c) = at(joint, r, own + n.plain + c);
                     });
  }
  void expand_kv_backward(Stream&, const ExpandKvBackwardArgs& args) override {
    const auto& [n, dkv, d_joint, d_shared] = args;
    each(d_shared, [](std::int64_t, std::int64_t) { return 0.0; });
    for_latent_heads(n, dkv.rows,
                     [&, &n = n, &dkv = dkv, &d_joint = d_joint, &d_shared = d_shared](
                         std::int64_t r, std::int64_t h, std::int64_t key, std::int64_t value) {
                       const std::int64_t own = h * (n.plain + n.value);
                       for (std::int64_t c = 0; c < n.plain; ++c)
                         at(d_joint, r, own + c) = at(dkv, r, key + c);
                       for (std::int64_t c = 0; c < n.shared; ++c)
                         at(d_shared, r, c) += at(dkv, r, key + n.plain + c);
                       for (std::int64_t c = 0; c < n.value; ++c)
                         at(d_joint, r, own + n.plain + c) = at(dkv, r, value + c);
                     });
  }

  void attention(Stream&, const AttentionArgs& args) override {
    const auto& [qkv, a, o, lse, scratch, first_keys, sinks] = args;
    for_heads(a, [&](std::int64_t b, std::int64_t h) {
      const Head v(qkv, a, b, h, first_keys);
      for (std::int64_t i = 0; i < a.time; ++i) {
        std::vector<double> p;
        for (std::int64_t j = 0; j <= i; ++j) p.push_back(v.sees(i, j) ? v.score(i, j) : -INFINITY);
        const double most = *std::max_element(p.begin(), p.end());
        double sum = 0;
        for (const double score : p) sum += std::exp(score - most);
        if (sinks) sum += std::exp(at(sinks, 0, h) - most);
        const double log_sum = at(lse, b * a.heads + h, i) = most + std::log(sum);
        for (double& score : p) score = std::exp(score - log_sum);
        for (std::int64_t d = 0; d < a.values(); ++d) {
          double mixed = 0;
          for (std::int64_t j = 0; j <= i; ++j) mixed += p[static_cast<std::size_t>(j)] * v.v(j, d);
          at(o, b * a.time + i, h * a.values() + d) = mixed;
        }
      }
    });
  }
  void attention_backward(Stream&, const AttentionBackwardArgs& args) override {
    const auto& [qkv, o, lse, d_o, a, dqkv, scratch, first_keys] = args;
    each(dqkv, [](std::int64_t, std::int64_t) { return 0.0; });
    for_heads(a, [&](std::int64_t b, std::int64_t h) {
      const Head v(qkv, a, b, h, first_keys), d(dqkv, a, b, h, first_keys);
      std::vector<double> p(static_cast<std::size_t>(a.time)), dp(p.size());
      for (std::int64_t i = 0; i < a.time; ++i) {
        double mean = 0;  // of dp, weighted by p
        for (std::int64_t j = 0; j <= i; ++j) {
          const auto n = static_cast<std::size_t>(j);
          p[n] = v.sees(i, j) ? std::exp(v.score(i, j) - at(lse, b * a.heads + h, i)) : 0;
          dp[n] = 0;
          for (std::int64_t k = 0; k < a.values(); ++k) {
            const double g = at(d_o, b * a.time + i, h * a.values() + k);
            dp[n] += g * v.v(j, k);
            d.v(j, k) += p[n] * g;
          }
          mean += p[n] * dp[n];
        }
        for (std::int64_t j = 0; j <= i; ++j) {
          const auto n = static_cast<std::size_t>(j);
          const double ds = p[n] * (dp[n] - mean) * slope_of(a.rule, a.head_size, v.score(i, j));
          for (std::int64_t k = 0; k < a.head_size; ++k) {
            d.q(i, k) += ds * v.k(j, k);
            d.k(j, k) += ds * v.q(i, k);
          }
        }
      }
    });
  }

  void attention_sinks_backward(Stream&, const AttentionSinksBackwardArgs& args) override {
    const auto& [o, lse, d_o, a, sinks, d_sinks] = args;
    for_heads(a, [&](std::int64_t b, std::int64_t h) {
      for (std::int64_t t = 0; t < a.time; ++t) {
        const double p = std::exp(at(sinks, 0, h) - at(lse, b * a.heads + h, t));
        for (std::int64_t c = h * a.values(); c < (h + 1) * a.values(); ++c)
          at(d_sinks, 0, h) -= p * at(o, b * a.time + t, c) * at(d_o, b * a.time + t, c);
      }
    });
  }

  void attention_block(Stream&, const AttentionBlockArgs& args) override {
    const auto& [q, kv, a, o, lse, first_keys, sinks] = args;
    for_queries(a, q, kv, first_keys, [&](const Query& x) {
      const double before = a.merge ? at(lse, x.lse_row, x.i)
                            : sinks ? at(sinks, 0, x.lse_row % a.heads)
                                    : -INFINITY;
      double most = before, sum = 0;
      for (std::int64_t j = 0; j < x.end; ++j) most = std::max(most, x.score(j));
      for (std::int64_t j = 0; j < x.end; ++j) sum += std::exp(x.score(j) - most);
      const double all = at(lse, x.lse_row, x.i) = most + std::log(std::exp(before - most) + sum);
      for (std::int64_t d = 0; d < a.values(); ++d) {
        double& out = at(o, x.row, x.o0 + d);
        out = a.merge ? out * std::exp(before - all) : 0;
        for (std::int64_t j = 0; j < x.end; ++j) out += std::exp(x.score(j) - all) * x.v(j, d);
      }
    });
  }
  void attention_block_backward(Stream&, const AttentionBlockBackwardArgs& args) override {
    const auto& [q, kv, o, lse, d_o, a, dq, dkv, scratch, first_keys] = args;
    for_queries(a, q, kv, first_keys, [&](const Query& x) {
      double delta = 0;
      for (std::int64_t d = 0; d < a.values(); ++d)
        delta += at(o, x.row, x.o0 + d) * at(d_o, x.row, x.o0 + d);
      for (std::int64_t j = 0; j < x.end; ++j) {
        const double p = std::exp(x.score(j) - at(lse, x.lse_row, x.i));
        if (p == 0) continue;  // it may be hidden
        double dp = 0;
        for (std::int64_t d = 0; d < a.values(); ++d) dp += at(d_o, x.row, x.o0 + d) * x.v(j, d);
        const double ds = p * (dp - delta) * slope_of(a.rule, a.head_size, x.score(j));
        for (std::int64_t d = 0; d < a.values(); ++d)
          at(dkv, x.key_row + j, x.v0 + d) += p * at(d_o, x.row, x.o0 + d);
        for (std::int64_t d = 0; d < a.head_size; ++d) {
          at(dkv, x.key_row + j, x.k0 + d) += ds * at(q, x.row, x.q0 + d);
          at(dq, x.row, x.q0 + d) += ds * at(kv, x.key_row + j, x.k0 + d);
        }
      }
    });
  }

  void add(Stream&, View a, View b, View out) override {
    each(out, [&](std::int64_t r, std::int64_t c) { return at(a, r, c) + at(b, r, c); });
  }
  void scale(Stream&, View x, double factor, View y) override {
    each(y, [&](std::int64_t r, std::int64_t c) { return factor * at(x, r, c); });
  }
  void dropout(Stream&, View x, const Dropout& d, View y) override {
    each(y, [&](std::int64_t r, std::int64_t c) {
      const std::int64_t row = d.slots == nullptr ? d.first_row + r : d.slots[r] / d.per_token;
      const std::int64_t column = d.first_column + c;
      const Philox4 words = philox4x32_10(
          {static_cast<std::uint32_t>(column / 4), static_cast<std::uint32_t>(d.positions.of(row)),
           static_cast<std::uint32_t>(d.first_sequence + row / d.positions.time),
           static_cast<std::uint32_t>(d.step)},
          {d.key.key[0], d.key.key[1]});
      return words[static_cast<std::size_t>(column % 4)] >= d.rate * 0x1p32 ? at(x, r, c) / (1 - d.rate)
                                                                            : 0.0;
    });
  }
  void bias_backward(Stream&, View dy, View db, View) override {
    for (std::int64_t r = 0; r < dy.rows; ++r) {
      for (std::int64_t c = 0; c < dy.cols; ++c) at(db, 0, c) += at(dy, r, c);
    }
  }

  void embedding(Stream&, const EmbeddingArgs& args) override {
    const auto& [ids, wte, wpe, positions, out, part, first_keys] = args;
    each(out, [&](std::int64_t r, std::int64_t c) {
      const std::int64_t row = id(ids, r) - part.first;
      const bool is_here = row >= 0 && row < wte.rows;
      if (part.only && !is_here) return at(out, r, c);
      return (is_here ? at(wte, row, c) : 0.0) + (wpe ? at(wpe, place(positions, first_keys, r), c) : 0.0);
    });
  }
  void embedding_backward(Stream&, const EmbeddingBackwardArgs& args) override {
    const auto& [ids, dout, positions, dwte, dwpe, part, first_keys] = args;
    for (std::int64_t r = 0; r < dout.rows; ++r) {
      const std::int64_t row = id(ids, r) - part.first;
      for (std::int64_t c = 0; c < dout.cols; ++c) {
        if (row >= 0 && row < dwte.rows) at(dwte, row, c) += at(dout, r, c);
        if (dwpe) at(dwpe, place(positions, first_keys, r), c) += at(dout, r, c);
      }
    }
  }

  void softmax_part(Stream&, const SoftmaxPartArgs& args) override {
    const auto& [logits, targets, first, numbers, softcap] = args;
    const auto logit = [&](std::int64_t r, std::int64_t c) { return capped(at(logits, r, c), softcap); };
    for (std::int64_t r = 0; r < logits.rows; ++r) {
      const std::int64_t target = id(targets, r) - first;
      double most = -std::numeric_limits<double>::infinity(), sum = 0;
      for (std::int64_t c = 0; c < logits.cols; ++c) most = std::max(most, logit(r, c));
      for (std::int64_t c = 0; c < logits.cols; ++c) sum += std::exp(logit(r, c) - most);
      at(numbers, 0, r) = most;
      at(numbers, 1, r) = sum;
      at(numbers, 2, r) = target >= 0 && target < logits.cols && id(targets, r) >= 0 ? logit(r, target) : 0;
    }
  }
  void cross_entropy_part(Stream&, const CrossEntropyPartArgs& args) override {
    const auto& [local, first, numbers] = args;
    const auto& [logits, targets, loss_sum, dlogits, scratch, scale, softcap] = local;
    for (std::int64_t r = 0; r < logits.rows; ++r) {
      const std::int64_t target = id(targets, r);
      double sum = 0, of_target = 0;
      for (std::int64_t p = 0; p < numbers.rows; p += 3) {
        sum += at(numbers, p + 1, r) * std::exp(at(numbers, p, r));
        of_target += at(numbers, p + 2, r);
      }
      if (target >= 0) at(loss_sum, 0, 0) += std::log(sum) - of_target;
      if (!dlogits) continue;
      for (std::int64_t c = 0; c < logits.cols; ++c) {
        const double l = at(logits, r, c);
        const double g = std::exp(capped(l, softcap)) / sum - (first + c == target ? 1 : 0);
        at(dlogits, r, c) = target >= 0 ? scale * g * cap_slope(l, softcap) : 0;
      }
    }
  }
  void cross_entropy(Stream&, const CrossEntropyArgs& args) override {
    const auto& [logits, targets, loss_sum, dlogits, scratch, scale, softcap] = args;
    const auto logit = [&](std::int64_t r, std::int64_t c) { return capped(at(logits, r, c), softcap); };
    for (std::int64_t r = 0; r < logits.rows; ++r) {
      const std::int64_t target = id(targets, r);
      double most = -std::numeric_limits<double>::infinity(), sum = 0;
      for (std::int64_t c = 0; c < logits.cols; ++c) most = std::max(most, logit(r, c));
      for (std::int64_t c = 0; c < logits.cols; ++c) sum += std::exp(logit(r, c) - most);
      const double log_sum = most + std::log(sum);
      if (target >= 0) at(loss_sum, 0, 0) += log_sum - logit(r, target);
      if (!dlogits) continue;
      for (std::int64_t c = 0; c < logits.cols; ++c) {
        const double g = std::exp(logit(r, c) - log_sum) - (c == target ? 1 : 0);
        at(dlogits, r, c) = target >= 0 ? scale * g * cap_slope(at(logits, r, c), softcap) : 0;
      }
    }
  }

  void zero(Stream&, View x) override {
    each(x, [](std::int64_t, std::int64_t) { return 0.0; });
  }
  void cast(Stream&, View in, View out) override {
    each(out, [&](std::int64_t r, std::int64_t c) { return at(in, r, c); });
  }
  // A code is a double here, behind the scale of its block.
  void quantize(Stream&, View values, int bits, View codes) override {
    auto* to = static_cast<double*>(codes.data);
    // Arithmetic is in fp32 but for f64, and a quotient half way between two codes rounds as it is stored.
    bool single = true;
    for (std::int64_t i = 0; i < values.cols; ++i)
      single = single && static_cast<double>(static_cast<float>(at(values, 0, i))) == at(values, 0, i);
    const auto quotient = [&](double x, double scale) {
      return single ? static_cast<double>(static_cast<float>(x) / static_cast<float>(scale)) : x / scale;
    };
    for (std::int64_t first = 0; first < values.cols; first += kQuantBlock) {
      const std::int64_t end = std::min(values.cols, first + kQuantBlock);
      double most = 0;
      for (std::int64_t i = first; i < end; ++i) most = std::max(most, std::abs(at(values, 0, i)));
      const double scale = static_cast<float>(most / kernels::largest_code(bits));
      *to++ = scale;
      for (std::int64_t i = first; i < end; ++i) *to++ = std::nearbyint(quotient(at(values, 0, i), scale));
    }
  }
  void dequantize(Stream&, View codes, int, bool add, View values) override {
    const auto* from = static_cast<const double*>(codes.data);
    for (std::int64_t i = 0; i < values.cols; ++i) {
      const double* const block = from + i / kQuantBlock * (1 + kQuantBlock);
      double& value = at(values, 0, i);
      value = (add ? value : 0) + block[0] * block[1 + i % kQuantBlock];
    }
  }
  // Its elements are no numbers in double: tests/suites/decode_test.cpp has their definition.
  void encode_fp8(Stream&, View, View, View) override {
    ZG_ASSERT(false, "codes have a definition of their own");
  }
  void decode(Stream&, const DecodeArgs&) override {
    ZG_ASSERT(false, "coded matrices have a definition of their own");
  }
  void finish_gradient(Stream&, View accumulator, View out, View norm_sq, View) override {
    double sum = 0;
    each(out, [&](std::int64_t r, std::int64_t c) {
      sum += square(at(accumulator, r, c));
      return at(accumulator, r, c);
    });
    at(norm_sq, 0, 0) += sum;
  }

  // Knows Adam alone.
  void update(Stream&, View grad, View weight, const OptimizerState& state, const StateFormat& format,
              const UpdateParams& p) override {
    ZG_ASSERT(format.kind == OptimizerKind::kAdam && !p.skip);
    const double t = static_cast<double>(p.step);
    const double correct1 = p.bias_correction ? 1 - std::pow(p.beta1, t) : 1;
    const double correct2 = p.bias_correction ? 1 - std::pow(p.beta2, t) : 1;
    each(weight, [&](std::int64_t r, std::int64_t c) {
      double& w = at(state.master, r, c);
      double &m = at(state.moment[0], r, c), &v = at(state.moment[1], r, c);
      const double g = at(grad, r, c) * p.grad_scale + (p.decoupled ? 0 : p.weight_decay * w);
      m = p.beta1 * m + (1 - p.beta1) * g;
      v = p.beta2 * v + (1 - p.beta2) * g * g;
      if (p.decoupled) w -= p.lr * p.weight_decay * w;
      w -= p.lr * (m / correct1) / (std::sqrt(v / correct2) + p.eps);
      return w;
    });
  }

 private:
  // A row's position in its sequence, or in its document.
  static std::int64_t place(const RowPositions& positions, const View& first_keys, std::int64_t row) {
    return positions.of(row) - (first_keys ? id(first_keys, row) : 0);
  }
  static double score_of(const AttentionRule& rule, std::int64_t head_size, double product) {
    const double s = product * (rule.scale == 0 ? 1 / std::sqrt(static_cast<double>(head_size)) : rule.scale);
    return rule.softcap == 0 ? s : rule.softcap * std::tanh(s / rule.softcap);
  }
  // The derivative of a score with respect to the product that it is made of.
  static double slope_of(const AttentionRule& rule, std::int64_t head_size, double score) {
    const double scale = rule.scale == 0 ? 1 / std::sqrt(static_cast<double>(head_size)) : rule.scale;
    return rule.softcap == 0 ? scale : scale * (1 - square(score / rule.softcap));
  }
  static double square(double x) { return x * x; }
  // What a norm multiplies column c by.
  static double factor_of(const View& w, std::int64_t c, NormWeight weight) {
    return at(w, 0, c) + (weight == NormWeight::kPlusOne ? 1 : 0);
  }
  static double capped(double logit, double softcap) {
    return softcap == 0 ? logit : softcap * std::tanh(logit / softcap);
  }
  static double cap_slope(double logit, double softcap) {
    return softcap == 0 ? 1 : 1 - square(std::tanh(logit / softcap));
  }
  // Sets x[r, c] = value(r, c) for all elements.
  template <class Value>
  static void each(const View& x, const Value& value) {
    for (std::int64_t r = 0; r < x.rows; ++r) {
      for (std::int64_t c = 0; c < x.cols; ++c) at(x, r, c) = value(r, c);
    }
  }
  template <class Body>
  static void for_heads(const AttentionShape& a, const Body& body) {
    for (std::int64_t b = 0; b < a.batch; ++b) {
      for (std::int64_t h = 0; h < a.heads; ++h) body(b, h);
    }
  }

  // Calls body(row, head, the first columns of its key and of its value in kv).
  template <class Body>
  static void for_latent_heads(const LatentHeads& n, std::int64_t rows, const Body& body) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t h = 0; h < n.heads; ++h)
        body(r, h, h * (n.plain + n.shared), n.heads * (n.plain + n.shared) + h * n.value);
    }
  }

  // A query of an AttentionBlock, of one head, and the keys [0, end), of which it attends to those that it
  // sees.
  struct Query {
    View q, kv;
    const AttentionBlock& block;
    std::int64_t first;  // position where the query's document begins
    std::int64_t i, row, key_row, lse_row, end, q0, k0, v0, o0, size;
    AttentionRule rule;
    double v(std::int64_t j, std::int64_t d) const { return at(kv, key_row + j, v0 + d); }
    double score(std::int64_t j) const {
      const std::int64_t position = block.key_positions.of(j), own = block.query_positions.of(i);
      if (rule.window > 0 && own - rule.window >= position) return -INFINITY;
      if (first > 0 && position < first) return -INFINITY;
      double sum = 0;
      for (std::int64_t d = 0; d < size; ++d) sum += at(q, row, q0 + d) * at(kv, key_row + j, k0 + d);
      return score_of(rule, size, sum);
    }
  };
  template <class Body>
  static void for_queries(const AttentionBlock& a, const View& q, const View& kv, const View& first_keys,
                          const Body& body) {
    for (std::int64_t b = 0; b < a.batch; ++b) {
      for (std::int64_t h = 0; h < a.heads; ++h) {
        const std::int64_t kv_head = h / (a.heads / a.kv_heads), k0 = kv_head * a.head_size,
                           v0 = a.kv_heads * a.head_size + kv_head * a.values();
        for (std::int64_t i = 0; i < a.queries; ++i) {
          const std::int64_t first = first_keys ? id(first_keys, b * a.query_step + i) : 0;
          body(Query{q, kv, a, first, i, b * a.query_step + i, b * a.key_step, b * a.heads + h,
                     a.causal ? i + 1 : a.keys, h * a.head_size, k0, v0, h * a.values(), a.head_size,
                     a.rule});
        }
      }
    }
  }

  // One query head of one sequence, with the key/value head that it reads.
  struct Head {
    Head(const View& x, const AttentionShape& a, std::int64_t batch, std::int64_t head, const View& first)
        : view(x), first_keys(first), row(batch * a.time), size(a.head_size), rule(a.rule) {
      q0 = head * size;
      const std::int64_t kv_head = head / (a.heads / a.kv_heads);
      k0 = (a.heads + kv_head) * size;
      v0 = (a.heads + a.kv_heads) * size + kv_head * a.values();
    }
    double& q(std::int64_t t, std::int64_t d) const { return at(view, row + t, q0 + d); }
    double& k(std::int64_t t, std::int64_t d) const { return at(view, row + t, k0 + d); }
    double& v(std::int64_t t, std::int64_t d) const { return at(view, row + t, v0 + d); }
    double score(std::int64_t i, std::int64_t j) const {
      double sum = 0;
      for (std::int64_t d = 0; d < size; ++d) sum += q(i, d) * k(j, d);
      return score_of(rule, size, sum);
    }
    bool sees(std::int64_t i, std::int64_t j) const {
      return (rule.window == 0 || i - rule.window < j) && (!first_keys || j >= id(first_keys, row + i));
    }
    View view, first_keys;
    std::int64_t row, size, q0 = 0, k0 = 0, v0 = 0;
    AttentionRule rule;
  };
};

}  // namespace zg::test
