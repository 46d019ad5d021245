// open_store(): what it puts together, and what it refuses.
#include "ziggurat/store/open.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "store/rig.hpp"

namespace zg::test {
namespace {

constexpr std::int64_t kPage = 4096;

StoreConfig ram_config() {
  StoreConfig config{.device_bytes = 4 * kPage, .host_bytes = 4 * kPage, .drives = {{.bytes = 1 << 20}}};
  config.aio.backend = io::Backend::kRam;
  return config;
}

Error refusal(const StoreConfig& config) {
  return error_of([&] { return open_store(config); });
}

TEST(OpenStore, StreamsMoreThanMemoryHoldsAndLeavesNothingBehind) {
  const TempDir dir;
  for (const char* policy : {"next-use", "lru", "clock"}) {
    constexpr std::int32_t kSegments = 40;
    auto opened = open_store({.device_bytes = 2 * kPage,
                              .host_bytes = 6 * kPage,
                              .drives = {{.path = dir.path(), .bytes = kSegments * kPage}},
                              .policy = policy});
    opened->store().add(
        {.name = "w", .dtype = DType::kU8, .count = kSegments * kPage, .segment_elements = kPage});
    ASSERT_EQ(opened->segment_count("w"), kSegments);
    for (std::uint64_t round = 0; round < 3; ++round) {
      opened->store().step_begin();
      for (std::int32_t i = 0; i < kSegments; ++i) {
        const Tier tier = i % 3 == 0 ? Tier::kDevice : Tier::kHost;
        const Lease lease = opened->acquire("w", i, tier, round == 0 ? Access::kOverwrite : Access::kWrite);
        EXPECT_TRUE(round == 0 || holds(lease.data(), lease.bytes(), i, round - 1)) << i;
        fill(lease.data(), lease.bytes(), i, round);
      }
      opened->store().step_end();
    }
    opened->store().drain();
    EXPECT_LE(opened->host().peak(), 6 * kPage);
    EXPECT_LE(opened->device().arena().peak(), 2 * kPage);
    EXPECT_GT(opened->store().traffic().nvme_read(), 0);
    EXPECT_NE(opened->io(), nullptr);
    EXPECT_FALSE(std::filesystem::is_empty(dir.path()));
    opened.reset();
    EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
  }
}

TEST(OpenStore, WithoutDrivesNothingSinksBelowTheHost) {
  auto opened = open_store({.host_bytes = 2 * kPage});
  EXPECT_EQ(opened->io(), nullptr);
  opened->store().add({.name = "a", .count = 1});
  { opened->acquire("a", 0, Tier::kHost, Access::kOverwrite); }
  EXPECT_EQ(opened->store().table().tensor(0).spec.lowest, Tier::kHost);
  EXPECT_THROW((void)opened->acquire("a", 0, Tier::kDevice, Access::kRead), Error);
}

TEST(OpenStore, DrivesHaveInFlightWhatTheHostsMemoryAllows) {
  const auto depth_of = [](std::int64_t host_bytes, int drives,
                           const std::function<void(StoreConfig&)>& more) {
    StoreConfig config = ram_config();
    config.host_bytes = host_bytes;
    config.drives.resize(static_cast<std::size_t>(drives), config.drives.front());
    more(config);
    return open_store(config)->io()->report(0).depth;
  };
  constexpr std::int64_t kMiB = 1 << 20;
  const auto nothing = [](StoreConfig&) {};
  EXPECT_EQ(depth_of(96 * kMiB, 1, nothing), 32);
  EXPECT_EQ(depth_of(320 * kMiB, 1, nothing), 64);
  EXPECT_EQ(depth_of(320 * kMiB, 2, nothing), 40);
  EXPECT_EQ(depth_of(320 * kMiB, 1, [](StoreConfig& c) { c.aio.block_size = 2 << 20; }), 32);
  EXPECT_EQ(depth_of(320 * kMiB, 1, [](StoreConfig& c) { c.aio.queue_depth = 7; }), 7) << "it is stated";
}

TEST(OpenStore, NamesTheFieldThatMakesNoSense) {
  const TempDir dir;
  struct Case {
    const char* field;
    std::function<void(StoreConfig&)> spoil;
  };
  const Case cases[] = {
      {"device_bytes", [](auto& c) { c.device_bytes = -1; }},
      {"host_bytes", [](auto& c) { c.host_bytes = 0; }},
      {"host_bytes", [](auto& c) { c.host_bytes = std::int64_t{1} << 62; }},
      {"read_ahead", [](auto& c) { c.read_ahead = -1; }},
      {"warn_after_seconds", [](auto& c) { c.warn_after_seconds = 0; }},
      {"drives[0].bytes", [](auto& c) { c.drives[0].bytes = 0; }},
      {"drives[1].bytes", [](auto& c) { c.drives.push_back({.bytes = -5}); }},
      {"drives[0].path", [](auto& c) { c.aio.backend = io::Backend::kAuto; }},
      {"drives[1].path",
       [&](auto& c) {
         c.aio.backend = io::Backend::kAuto;
         c.drives = {{.path = dir.path(), .bytes = kPage}, {.path = dir.path() + "/.", .bytes = kPage}};
       }},
      {"drive_shares",
       [](auto& c) {
         c.drive_shares = {1, 2};
       }},
      {"policy", [](auto& c) { c.policy = "newest"; }},
      {"aio.block_size", [](auto& c) { c.aio.block_size = 1000; }},
      {"aio.queue_depth", [](auto& c) { c.aio.queue_depth = -1; }},
  };
  for (const Case& each : cases) {
    StoreConfig config = ram_config();
    each.spoil(config);
    const Error e = refusal(config);
    EXPECT_EQ(e.code(), Errc::kUsage) << e.what();
    EXPECT_EQ(e.where(), each.field) << e.what();
    EXPECT_FALSE(e.hint().empty()) << e.what();
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(OpenStore, WhatFailsLaterLeavesNothingOnTheDrives) {
  const TempDir dir;
  StoreConfig config{.host_bytes = kPage, .drives = {{.path = dir.path(), .bytes = kPage}}};
  config.drives.push_back({.path = dir.path() + "/missing", .bytes = kPage});
  EXPECT_EQ(refusal(config).code(), Errc::kUsage);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
  // The volume, which is made after the drives, refuses shares that are all zero.
  config.drives.pop_back();
  config.drive_shares = {-1};
  EXPECT_EQ(refusal(config).code(), Errc::kUsage);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(OpenStore, NamesThatAreNotThereAreRefusedWithTheNearest) {
  auto opened = open_store(ram_config());
  opened->store().add({.name = "block.0.weight", .count = 2048, .segment_elements = 1024});
  EXPECT_EQ(opened->segment("block.0.weight", 1), 1);
  for (const std::int32_t index : {-1, 2})
    EXPECT_THROW((void)opened->segment("block.0.weight", index), Error);
  const Error e = error_of([&] { (void)opened->acquire("block.0.wieght", 0, Tier::kHost, Access::kRead); });
  EXPECT_EQ(e.code(), Errc::kUsage);
  EXPECT_HAS(e.hint(), "block.0.weight");
  opened->store().remove(0);
  EXPECT_THROW((void)opened->segment("block.0.weight", 0), Error);
}

TEST(OpenStore, APolicyOfOnesOwnIsAsked) {
  int asked = 0;
  StoreConfig config = ram_config();
  config.own_policy = [&asked] {
    ++asked;
    return lru_policy()();
  };
  auto opened = open_store(config);
  opened->store().add({.name = "a", .count = 1});
  EXPECT_GT(asked, 0);
}

}  // namespace
}  // namespace zg::test
