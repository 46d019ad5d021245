// A store behind ziggurat.h, for its tests.
#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "store/c_api.hpp"

namespace zg::test {

inline constexpr std::int64_t kPage = 4096;

inline std::string last_error() {
  return zg_last_error();
}
inline bool said(const std::string& part) {
  return last_error().find(part) != std::string::npos;
}

#define EXPECT_OK(call) EXPECT_EQ(call, ZG_OK) << last_error()
#define ASSERT_OK(call) ASSERT_EQ(call, ZG_OK) << last_error()
#define EXPECT_REFUSED(call, part)           \
  do {                                       \
    EXPECT_EQ(call, ZG_USAGE);               \
    EXPECT_TRUE(said(part)) << last_error(); \
  } while (false)

// A store over drives of the ram back end, closed at the end of the test.
class CApi : public ::testing::Test {
 protected:
  void open(std::int64_t device, std::int64_t host, std::uint32_t flags = 0, std::int64_t drive = 1 << 22) {
    const char* path = nullptr;
    zg_store_config config = {};
    config.size = sizeof config;
    config.device_bytes = device;
    config.host_bytes = host;
    config.drive_paths = &path;
    config.drive_bytes = &drive;
    config.drive_count = 1;
    config.backend = ZG_BACKEND_RAM;
    config.warn_after_seconds = 30;
    config.flags = flags;
    ASSERT_OK(zg_store_open(&config, &store_));
  }
  void TearDown() override { EXPECT_OK(zg_store_close(store_)); }

  static zg_tensor_spec spec(const char* name, std::int64_t segments, std::int64_t segment_bytes = kPage) {
    zg_tensor_spec s = {};
    s.size = sizeof s;
    s.name = name;
    s.dtype = ZG_U8;
    s.count = segments * segment_bytes;
    s.segment_bytes = segment_bytes;
    return s;
  }
  std::int32_t add(const char* name, std::int64_t segments) {
    const zg_tensor_spec s = spec(name, segments);
    std::int32_t tensor = -1;
    EXPECT_OK(zg_tensor_add(store_, &s, &tensor));
    return tensor;
  }
  zg_lease acquire(std::int32_t tensor, std::int32_t segment, int mode, int tier = ZG_HOST) {
    zg_lease lease;
    EXPECT_OK(zg_acquire(store_, {tensor, segment, tier, mode}, &lease));
    return lease;
  }
  void write(std::int32_t tensor, std::int32_t segment) {
    zg_lease lease = acquire(tensor, segment, ZG_OVERWRITE);
    std::memset(lease.data, segment, static_cast<std::size_t>(lease.bytes));
    EXPECT_OK(zg_release(store_, &lease));
  }

  zg_store* store_ = nullptr;
};

}  // namespace zg::test
