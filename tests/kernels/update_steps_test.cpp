// Many steps: split masters against whole ones, fp32 against fp64, narrow moments against whole ones, and the
// optimizers themselves against torch.
#include <fstream>
#include <map>
#include <sstream>

#include "support/places.hpp"
#include "tests/kernels/update_support.hpp"

namespace zg::test {
namespace {

// Masters whose low half is exactly a half, above even and odd high halves, with both signs; the largest, the
// smallest; what is not finite.
std::vector<float> hard_masters() {
  std::vector<float> values;
  for (const std::uint32_t bits :
       {0x3f808000u, 0x3f818000u, 0x3f807fffu, 0x3f808001u, 0x3f80ffffu, 0x3f800000u, 0x00008000u,
        0x00018000u, 0x00007fffu, 0x00000001u, 0x7f7f8000u, 0x7f7effffu, 0x7f7f7fffu, 0x7f7fffffu,
        0x7f800000u, 0x00000000u}) {
    values.push_back(std::bit_cast<float>(bits));
    values.push_back(std::bit_cast<float>(bits | 0x80000000u));
  }
  values.push_back(std::numeric_limits<float>::quiet_NaN());
  return values;
}

std::uint32_t master_bits(const State& s, std::size_t i) {
  const float x = s.master<float>(i);
  return std::bit_cast<std::uint32_t>(x);
}

TEST(UpdateSteps, SplitMastersAreWholeOnesBitForBit) {
  constexpr std::size_t kCount = 1000;
  for (Case c : optimizers()) {
    for (const MomentFormat moments : {MomentFormat::kFull, MomentFormat::kBf16, MomentFormat::kInt8}) {
      if (c.format.moment_count == 0 && moments != MomentFormat::kFull) continue;
      c.format.moments = moments, c.grad = c.weight = DType::kBF16;
      Case split_case = c;
      split_case.format.master = MasterFormat::kSplit;
      SCOPED_TRACE(describe(c));
      State whole(c, kCount), split(split_case, kCount);
      whole.fill(1, c.params), split.fill(1, c.params);
      const std::vector<float> hard = hard_masters();
      for (std::size_t i = 0; i < hard.size(); ++i) {
        for (const std::size_t at : {i, 500 + i}) {
          whole.set_master(at, hard[i]), split.set_master(at, hard[i]);
          if (at == i) whole.set_grad(at, 0), split.set_grad(at, 0);
        }
      }
      UpdateParams p = c.params;
      auto random = generator(2);
      std::normal_distribution<double> normal;
      for (p.step = 1; p.step <= 300; ++p.step) {
        // Nothing moves at first, so that the ties are read and written as they are.
        p.lr = p.step <= 2 ? 0 : c.params.lr;
        whole.update(p), split.update(p);
        for (std::size_t i = 0; i < kCount; ++i) {
          ASSERT_EQ(master_bits(whole, i), master_bits(split, i)) << "step " << p.step << ", element " << i;
          ASSERT_EQ(whole.weight_bits(i), split.weight_bits(i)) << "step " << p.step << ", element " << i;
          const double g = normal(random);
          whole.set_grad(i, g), split.set_grad(i, g);
        }
      }
    }
  }
}

// Adam in fp32 against fp64 over 10,000 steps. With u = 2^-24 and gradients between G / 2 and G:
//
//   m      beta1 m has two roundings (the constant's and its own), rest1 g four (scale, its constant,
//   rest1's,
//          its own), the sum one: (2 beta1 + 4 (1 - beta1) + 1) u G < 4 u G a step, of which 1 - beta1^t over
//          1 - beta1 steps are left: 40 u G c1, with c1 = 1 - beta1^t.
//   v      is a sum of positive terms. beta2 v has two roundings, (rest2 g) g seven, the sum one; so its
//          relative error grows by 3 u a step and is forgotten at the rate of 1 - beta2: (3 / (1 - beta2) +
//          7) u
//   step   sqrt(v / c2) >= G / 2 and |m| <= G c1, so |step| <= 2 lr, with a relative error of half that of v
//          and 8 u of roundings, and 40 u G c1 / c1 / (G / 2) = 80 u from m:
//          lr u (2 (1.5 / (1 - beta2) + 3.5 + 8) + 80)
//   master three roundings (decay's, its product's, the difference's): 3 u |master|
//
// which may add up over the steps; decay only lessens what is there.
TEST(UpdateSteps, TenThousandStepsOfAdamNearDouble) {
  constexpr std::size_t kCount = 64;
  constexpr int kSteps = 10000;
  for (const MasterFormat master : {MasterFormat::kFull, MasterFormat::kSplit}) {
    for (const double beta2 : {0.95, 0.999}) {
      Case c = optimizers()[0];
      c.format.master = master, c.grad = c.weight = DType::kBF16;
      c.params.lr = 1e-3, c.params.beta2 = beta2;
      State s(c, kCount);
      auto random = generator(3);
      std::normal_distribution<double> normal;
      std::uniform_real_distribution<double> size(0.5, 1);
      std::vector<double> w(kCount), m(kCount), v(kCount), largest(kCount);
      for (std::size_t i = 0; i < kCount; ++i) {
        s.set_master(i, static_cast<float>(normal(random)));
        w[i] = s.master<double>(i);
      }
      UpdateParams p = c.params;
      for (p.step = 1; p.step <= kSteps; ++p.step) {
        const double t = static_cast<double>(p.step);
        const double c1 = 1 - std::pow(p.beta1, t), c2 = 1 - std::pow(p.beta2, t);
        for (std::size_t i = 0; i < kCount; ++i) {
          // Signs that lean to one side, so that masters move.
          s.set_grad(i, size(random) * (random() % 4 == 0 ? -1 : 1));
          const double g = s.grad<double>(i) * p.grad_scale;
          m[i] = p.beta1 * m[i] + (1 - p.beta1) * g;
          v[i] = p.beta2 * v[i] + (1 - p.beta2) * g * g;
          w[i] = (1 - p.lr * p.weight_decay) * w[i] - p.lr * (m[i] / c1) / (std::sqrt(v[i] / c2) + p.eps);
          largest[i] = std::max(largest[i], std::abs(w[i]));
        }
        s.update(p);
      }
      const double u = 0x1p-24;
      for (std::size_t i = 0; i < kCount; ++i) {
        const double step = p.lr * u * (2 * (1.5 / (1 - beta2) + 3.5 + 8) + 80);
        ASSERT_NEAR(s.master<double>(i), w[i], kSteps * (step + 3 * u * largest[i])) << "beta2 " << beta2;
        ASSERT_NEAR(s.moment<double>(0, i), m[i], 40 * u * p.grad_scale);
        ASSERT_NEAR(s.moment<double>(1, i), v[i], (3 / (1 - beta2) + 7) * u * v[i]);
      }
    }
  }
}

// A noisy quadratic bowl, each element with a curvature and a noise of its own, over three decades within
// each block, down a learning rate that falls to a tenth. Returns the mean of the loss over the last steps,
// each element's relative to its noise, so that all count alike.
double final_loss(MomentFormat moments, OptimizerKind kind, std::uint32_t key) {
  constexpr std::size_t kCount = 2048;
  constexpr std::int64_t kSteps = 3000;
  Case c = optimizers()[kind == OptimizerKind::kAdam ? 0 : 5];
  c.format.moments = moments;
  c.params = {
      .lr = 0, .beta2 = kind == OptimizerKind::kAdam ? 0.999 : 0.99, .weight_decay = 0, .random = {{key, 1}}};
  State s(c, kCount);
  auto random = generator(key);
  std::normal_distribution<float> normal;
  std::vector<double> scale(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    scale[i] = std::pow(10.0, -3.0 * static_cast<double>(i * 37 % 256) / 256);
    s.set_master(i, normal(random));
  }
  const double lr = kind == OptimizerKind::kAdam ? 1e-2 : 1e-3;
  double loss = 0;
  for (c.params.step = 1; c.params.step <= kSteps; ++c.params.step) {
    c.params.lr = lr * (1 - 0.9 * static_cast<double>(c.params.step) / kSteps);
    for (std::size_t i = 0; i < kCount; ++i) {
      const double w = s.master<double>(i);
      if (c.params.step > kSteps - 500) loss += w * w / (500.0 * kCount);
      s.set_grad(i, scale[i] * (w + static_cast<double>(normal(random))));
    }
    s.update(c.params);
  }
  return loss;
}

// Where noise and pull balance, the loss is proportional to the size of the steps, and what rounding adds to
// them is this. 8 bits: v wanders by 0.25 of itself (update_int8_test.cpp), which makes the mean of
// 1 / sqrt(v) larger by 3/8 0.25^2 = 2.4%; m is off by up to a step of the code, at most 1/8 and uniform at
// worst, which adds 1/8^2 / 4 = 0.4% to the square of each step, and as much again for the steps of small m.
// bf16: a sixteenth of these or less. To the noise of the measurement: the same differences of random numbers
// enter both runs, the losses of 2048 elements over some twenty spans of memory differ by less than 1%.
TEST(UpdateSteps, NarrowMomentsTrainAsWellAsWholeOnes) {
  for (const OptimizerKind kind : {OptimizerKind::kAdam, OptimizerKind::kLion}) {
    const double whole = final_loss(MomentFormat::kFull, kind, 1);
    const double bf16_loss = final_loss(MomentFormat::kBf16, kind, 1),
                 int8_loss = final_loss(MomentFormat::kInt8, kind, 1);
    EXPECT_LT(whole, 0.05);  // from 1
    EXPECT_NEAR(bf16_loss / whole, 1, 0.015) << whole;
    EXPECT_NEAR(int8_loss / whole, 1, 0.045) << whole;
  }
}

std::map<std::string, std::vector<double>> torch_values() {
  std::map<std::string, std::vector<double>> values;
  std::ifstream in(test::in_source("tests/reference/optimizers.txt"));
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string name, word;
    words >> name;
    while (words >> word) values[name].push_back(std::strtod(word.c_str(), nullptr));
  }
  return values;
}

// tests/reference/make_optimizers.py. In fp64 a dozen steps of a few roundings each differ by far less than
// 1e-13; in fp32 by at most 12 steps of ten roundings of numbers below two.
TEST(UpdateSteps, TorchsNumbers) {
  struct Variant {
    const char* name;
    OptimizerKind kind;
    int moments;
    UpdateParams params;
  };
  const UpdateParams adam{.lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1};
  UpdateParams coupled = adam, lion = adam, momentum = adam, dampening, nesterov;
  coupled.decoupled = false, lion.beta2 = 0.99, momentum.momentum = 0.9;
  dampening = momentum, nesterov = momentum;
  dampening.dampening = 0.3, nesterov.nesterov = true;
  const Variant variants[] = {{"adamw", OptimizerKind::kAdam, 2, adam},
                              {"adam", OptimizerKind::kAdam, 2, coupled},
                              {"sgd", OptimizerKind::kSgd, 0, adam},
                              {"sgd_momentum", OptimizerKind::kSgd, 1, momentum},
                              {"sgd_dampening", OptimizerKind::kSgd, 1, dampening},
                              {"sgd_nesterov", OptimizerKind::kSgd, 1, nesterov},
                              {"lion", OptimizerKind::kLion, 1, lion}};
  const auto expected = torch_values();
  ASSERT_EQ(expected.size(), std::size(variants));
  for (const Variant& variant : variants) {
    for (const DType type : {DType::kF64, DType::kF32}) {
      SCOPED_TRACE(std::string(variant.name) + " in " + name_of(type));
      const Case c{variant.name,
                   {.kind = variant.kind, .moment_count = variant.moments, .full = type},
                   type,
                   type,
                   variant.params};
      const std::vector<double>& values = expected.at(variant.name);
      ASSERT_EQ(values.size(), 7u);
      State s(c, values.size());
      for (std::size_t i = 0; i < s.n(); ++i)
        s.set_master(i, (static_cast<double>((37 * i + 11) % 64) - 31) / 32);
      UpdateParams p = c.params;
      for (p.step = 1; p.step <= 12; ++p.step) {
        for (std::size_t i = 0; i < s.n(); ++i) {
          s.set_grad(i,
                     (static_cast<double>((29 * i + 101 * static_cast<std::size_t>(p.step)) % 97) - 48) / 64);
        }
        s.update(p);
      }
      for (std::size_t i = 0; i < s.n(); ++i) {
        EXPECT_NEAR(s.master<double>(i), values[i], type == DType::kF64 ? 1e-13 : 12 * 10 * 2 * 0x1p-24) << i;
      }
    }
  }
}

}  // namespace
}  // namespace zg::test
