// The bookkeeping of the host arena, against an array of pages.
#include "device/extents.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "support/seed.hpp"

namespace zg::test {
namespace {

using Kind = Extents::Kind;
using Range = Extents::Range;

constexpr std::int64_t kBase = 1000;

class Model {
 public:
  explicit Model(std::int64_t pages) : kinds_(static_cast<std::size_t>(pages), Kind::kEmpty) {}

  Kind& at(std::int64_t page) { return kinds_[static_cast<std::size_t>(page - kBase)]; }
  void set(Range r, Kind kind) {
    for (std::int64_t p = r.begin; p < r.end(); ++p) at(p) = kind;
  }
  bool free(Range r) {
    for (std::int64_t p = r.begin; p < r.end(); ++p) {
      if (at(p) == Kind::kUsed || at(p) == Kind::kLeft) return false;
    }
    return true;
  }
  std::int64_t count(Range r, Kind kind) {
    std::int64_t n = 0;
    for (std::int64_t p = r.begin; p < r.end(); ++p) n += at(p) == kind ? 1 : 0;
    return n;
  }
  std::vector<Range> runs(Kind kind) {
    std::vector<Range> all;
    for (std::int64_t p = kBase; p < end(); ++p) {
      if (at(p) != kind) continue;
      if (all.empty() || all.back().end() != p) all.push_back({p, 0});
      ++all.back().bytes;
    }
    return all;
  }
  std::int64_t end() const { return kBase + static_cast<std::int64_t>(kinds_.size()); }

 private:
  std::vector<Kind> kinds_;
};

TEST(Extents, AgreeWithAnArrayOfPages) {
  const std::uint64_t seed = test_seed(5);
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 20; ++round) {
    constexpr std::int64_t kPages = 200;
    const auto any = [&](std::int64_t n) {
      return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
    };
    Extents extents;
    extents.add_region({kBase, 120});
    extents.add_region({kBase + 120, 80});  // adjacent: the free addresses of both join
    Model model(kPages);
    std::vector<Range> buffers;
    const auto checked_window = [&](std::int64_t bytes) {
      const auto window = extents.window(bytes, {kBase, kPages});
      std::int64_t least = bytes + 1;
      for (std::int64_t p = kBase; p + bytes <= model.end(); ++p) {
        if (model.free({p, bytes})) least = std::min(least, model.count({p, bytes}, Kind::kEmpty));
      }
      EXPECT_EQ(window.has_value(), least <= bytes);
      if (window) {
        EXPECT_EQ(window->missing, least);
        EXPECT_EQ(window->range.bytes, bytes);
        EXPECT_TRUE(model.free(window->range));
        EXPECT_EQ(model.count(window->range, Kind::kEmpty), least);
      }
      return window;
    };
    for (int i = 0; i < 400 && !HasFailure(); ++i) {
      const std::int64_t bytes = 1 + any(20);
      switch (any(4)) {
        case 0: {
          const auto begin = extents.take(bytes);
          std::int64_t smallest = 0;
          for (const Range& hole : model.runs(Kind::kHole)) {
            if (hole.bytes >= bytes && (smallest == 0 || hole.bytes < smallest)) smallest = hole.bytes;
          }
          ASSERT_EQ(begin.has_value(), smallest > 0);
          if (!begin) break;
          const auto holes = model.runs(Kind::kHole);
          EXPECT_TRUE(std::any_of(holes.begin(), holes.end(), [&](const Range& hole) {
            return hole.begin == *begin && hole.bytes == smallest;
          }));
          model.set({*begin, bytes}, Kind::kUsed);
          buffers.push_back({*begin, bytes});
          break;
        }
        case 1: {
          const auto window = checked_window(bytes);
          if (!window) break;
          extents.set(window->range, Kind::kUsed);
          model.set(window->range, Kind::kUsed);
          buffers.push_back(window->range);
          break;
        }
        case 2: {
          if (buffers.empty()) break;
          const auto it = buffers.begin() + any(static_cast<std::int64_t>(buffers.size()));
          extents.release(*it);
          model.set(*it, Kind::kHole);
          buffers.erase(it);
          break;
        }
        default: {
          const auto holes = extents.holes();
          if (holes.empty()) break;
          const Range hole = holes[static_cast<std::size_t>(any(static_cast<std::int64_t>(holes.size())))];
          const std::int64_t from = any(hole.bytes);
          const Range part{hole.begin + from, 1 + any(hole.bytes - from)};
          const Kind kind = any(10) == 0 ? Kind::kLeft : Kind::kEmpty;
          extents.set(part, kind);
          model.set(part, kind);
          break;
        }
      }
      std::vector<Range> holes = extents.holes();
      EXPECT_TRUE(
          std::is_sorted(holes.begin(), holes.end(), [](auto& a, auto& b) { return a.bytes > b.bytes; }));
      std::sort(holes.begin(), holes.end(), [](auto& a, auto& b) { return a.begin < b.begin; });
      const auto expected = model.runs(Kind::kHole);
      ASSERT_EQ(holes.size(), expected.size());
      for (std::size_t k = 0; k < holes.size(); ++k) {
        EXPECT_EQ(holes[k].begin, expected[k].begin);
        EXPECT_EQ(holes[k].bytes, expected[k].bytes);
      }
      const std::int64_t from = kBase + any(kPages - 1);
      const Range range{from, 1 + any(model.end() - from)};
      std::int64_t empty = 0;
      for (const Range& part : extents.empty_parts(range)) {
        EXPECT_EQ(model.count(part, Kind::kEmpty), part.bytes);
        empty += part.bytes;
      }
      EXPECT_EQ(empty, model.count(range, Kind::kEmpty));
      EXPECT_EQ(extents.backed(range), empty + model.count(range, Kind::kLeft) == 0);
      std::int64_t until = from;
      while (until < model.end() && model.at(until) == Kind::kEmpty) ++until;
      // Regions join where something has been set, not before.
      EXPECT_LE(extents.empty_bytes_at(from), until - from);
      EXPECT_EQ(extents.empty_bytes_at(from) > 0, until > from);
    }
  }
}

TEST(Extents, WindowsStayInTheirRegion) {
  Extents extents;
  extents.add_region({0, 10});
  extents.add_region({100, 20});
  EXPECT_FALSE(extents.window(11, {0, 10}).has_value());
  ASSERT_TRUE(extents.window(11, {100, 20}).has_value());
  EXPECT_EQ(extents.window(11, {100, 20})->range.begin, 100);
  EXPECT_FALSE(extents.take(1).has_value()) << "nothing has pages yet";
}

TEST(ExtentsDeathTest, WhatWasNotTakenCannotBeReleased) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Extents extents;
  extents.add_region({0, 10});
  extents.set({2, 4}, Kind::kUsed);
  EXPECT_DEATH(extents.release({2, 3}), "no buffer");
  EXPECT_DEATH(extents.release({3, 3}), "no buffer");
  extents.release({2, 4});
  EXPECT_DEATH(extents.release({2, 4}), "no buffer");
}

}  // namespace
}  // namespace zg::test
