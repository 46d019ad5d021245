// The files of tests/reference, and how far from them a training run may be.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/places.hpp"
#include "support/reference.hpp"
#include "ziggurat/model/hf.hpp"

namespace zg::test {

// Deviations are proportional to the epsilon of the type. What PyTorch itself deviates in fp32 from fp64 (the
// table in tests/reference/README.md) is the yardstick, ten times that the bound for fp32, and for fp64 the
// same times the ratio of the epsilons, 2^-29.
struct Tolerance {
  double logits = 2.3e-6;               // absolute
  double loss = 2e-8;                   // relative, first step
  double gradient_element = 1.6e-6;     // of the tensor's largest
  double gradient_norm = 2.2e-7;        // relative
  double gradient_sum = 4e-6;           // of the norm
  double losses = 1.8e-6;               // relative, ten steps
  double norms = 8e-6;                  // relative, ten steps
  double final_element = 6.3e-5;        // absolute
  double final_sum = 6e-6;              // of the norm
  double final_sum_with_keys = 2.4e-4;  // the same where the keys' bias is part
};

inline Tolerance tolerance_of(DType t) {
  const double scale = 10 * (t == DType::kF64 ? 0x1p-29 : 1.0);
  Tolerance a;
  for (double* x : {&a.logits, &a.loss, &a.gradient_element, &a.gradient_norm, &a.gradient_sum, &a.losses,
                    &a.norms, &a.final_element, &a.final_sum, &a.final_sum_with_keys}) {
    *x *= scale;
  }
  return a;
}

// What PyTorch's own sums of squares may have rounded in the stored norms: some eps of fp64.
inline constexpr double kStoredSum = 16 * 0x1p-53;

// Where the stored outputs lie: ZG_REFERENCE_DIR, for programs that run where their sources are not.
inline std::string reference_directory() {
  const char* const elsewhere = std::getenv("ZG_REFERENCE_DIR");
  return elsewhere != nullptr ? std::string(elsewhere) + "/" : test::in_source("tests/reference/");
}

class GoldenFile {
 public:
  explicit GoldenFile(Arch arch)
      : file_(reference_directory() + (arch == Arch::kGpt2 ? "gpt2" : "llama") + "_tiny.safetensors") {}

  const SafeTensors::Entry* find(const std::string& name) const { return file_.find(name); }
  void read(const SafeTensors::Entry& entry, void* out) const { file_.read(entry, 0, entry.bytes, out); }
  std::vector<double> doubles(const std::string& name) const {
    const SafeTensors::Entry* e = file_.find(name);
    if (e == nullptr || e->dtype != "F64") throw std::runtime_error("no F64 tensor " + name);
    std::vector<double> values(static_cast<std::size_t>(e->count()));
    file_.read(*e, 0, e->bytes, values.data());
    return values;
  }
  Digest stored(const std::string& name) const {
    const std::vector<double> values = doubles(name);
    return stored_digest(values.data(), static_cast<std::int64_t>(values.size()));
  }
  // The parameter after the ten steps of AdamW.
  void expect_final(const Param& p, const View& weight, const Tolerance& tolerance) const {
    SCOPED_TRACE(p.name);
    // The keys' bias has no influence on the loss: its gradient is rounding noise, which Adam magnifies.
    const bool has_keys = p.name.ends_with("attn.c_attn.bias");
    const auto is_key = [&](std::size_t i) { return has_keys && i >= 172 && i < 344; };
    const double sum = has_keys ? tolerance.final_sum_with_keys : tolerance.final_sum;
    const Digest expected = stored("final." + p.name), actual = digest(p, weight, 1);
    EXPECT_NEAR(actual.norm, expected.norm, sum * expected.norm);
    EXPECT_NEAR(actual.sum, expected.sum, sum * expected.norm);
    for (int j = 0; j < 3; ++j) EXPECT_NEAR(actual.signs[j], expected.signs[j], sum * expected.norm) << j;
    const std::size_t stride = std::max<std::size_t>(1, static_cast<std::size_t>(p.count()) / 64);
    ASSERT_EQ(actual.samples.size(), expected.samples.size());
    for (std::size_t i = 0; i < actual.samples.size(); ++i) {
      if (is_key(i * stride)) continue;
      EXPECT_NEAR(actual.samples[i], expected.samples[i], tolerance.final_element) << i;
    }
  }

 private:
  SafeTensors file_;
};

}  // namespace zg::test
