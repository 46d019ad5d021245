#include "ziggurat/base/buffer.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <new>
#include <string>
#include <utility>

#include "ziggurat/base/units.hpp"

namespace zg {
namespace {

std::uintptr_t address_of(const Buffer& buffer) {
  return reinterpret_cast<std::uintptr_t>(buffer.data());
}

// The kernel's flags of the mapping in which this address lies (proc(5), VmFlags); empty: there is none.
std::string flags_at(std::uintptr_t address) {
  std::ifstream maps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long first = 0, last = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &first, &last) == 2) here = first <= address && address < last;
    if (here && line.rfind("VmFlags:", 0) == 0) return line + " ";
  }
  return "";
}

TEST(BufferTest, LargeOnesBeginAtAHugePageAndAskForThem) {
  for (const std::int64_t bytes : {2 * kMiB, 8 * kMiB + 8192, 5 * kMiB + 1}) {
    const Buffer buffer(bytes);
    EXPECT_EQ(address_of(buffer) % (2 * kMiB), 0u);
    EXPECT_EQ(buffer.size(), round_up(bytes, 4096));
    std::memset(buffer.data(), 1, static_cast<std::size_t>(buffer.size()));
    const std::string flags = flags_at(address_of(buffer));
    ASSERT_NE(flags, "");
    if (std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled")) {
      EXPECT_NE(flags.find(" hg "), std::string::npos) << flags;
    }
  }
}

TEST(BufferTest, SmallOnesBeginAtAPage) {
  for (const std::int64_t bytes : {std::int64_t{1}, 2 * kMiB - 4096}) {
    const Buffer buffer(bytes);
    EXPECT_EQ(address_of(buffer) % 4096, 0u);
    EXPECT_EQ(buffer.size(), round_up(bytes, 4096));
    std::memset(buffer.data(), 1, static_cast<std::size_t>(buffer.size()));
  }
}

// Nothing of a large one stays mapped, neither its pages nor what alignment left over.
TEST(BufferTest, GivesEverythingBack) {
  const auto mapped = [] {
    std::ifstream file("/proc/self/statm");
    std::int64_t pages = 0;
    file >> pages;
    return pages;
  };
  { const Buffer warm(3 * kMiB); }
  const std::int64_t before = mapped();
  for (int i = 0; i < 100; ++i) {
    Buffer buffer(4096);
    buffer.reserve(3 * kMiB);
    buffer.reserve(2 * kMiB);
    EXPECT_EQ(buffer.size(), 3 * kMiB) << "it does not shrink";
    buffer.reserve(6 * kMiB);
    const Buffer moved = std::move(buffer);
  }
  EXPECT_LT(mapped() - before, 100 * 2 * kMiB / 4096 / 4);
}

TEST(BufferTest, WhatDoesNotFitIsRefused) {
  Buffer buffer(4096);
  EXPECT_THROW(buffer.reserve(std::int64_t{1} << 56), std::bad_alloc);
  EXPECT_EQ(buffer.size(), 0);
  buffer.reserve(4096);
  buffer.data()[4095] = 1;
}

}  // namespace
}  // namespace zg
