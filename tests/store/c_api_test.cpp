// ziggurat.h: versions, errors, and what it refuses. That a compiler of C takes it is shown by c_program.c,
// and that Python does by c_api_ctypes.py.
#include <cstddef>
#include <new>
#include <system_error>
#include <thread>

#include "store/c_api_rig.hpp"

extern "C" int zg_test_c_program(void);

namespace zg::test {
namespace {

TEST_F(CApi, AProgramInCRuns) {
  EXPECT_EQ(zg_test_c_program(), 0) << "the line of c_program.c";
}

TEST_F(CApi, VersionsAgree) {
  EXPECT_STREQ(zg_version_text(), ZG_PROJECT_VERSION);
  EXPECT_EQ(zg_version(), ZG_VERSION);
}

TEST_F(CApi, EveryExceptionBecomesACodeWithText) {
  const auto status = [](auto thrown) { return c_api::guarded([&] { throw thrown; }); };
  const std::pair<Errc, int> codes[] = {{Errc::kUsage, ZG_USAGE},     {Errc::kIo, ZG_IO},
                                        {Errc::kMemory, ZG_MEMORY},   {Errc::kDevice, ZG_DEVICE},
                                        {Errc::kNumeric, ZG_NUMERIC}, {Errc::kInterrupted, ZG_INTERRUPTED}};
  for (const auto& [code, expected] : codes) {
    EXPECT_EQ(status(Error(code, "place", "what", "hint")), expected);
    EXPECT_TRUE(said("place: what") && said("hint")) << last_error();
    EXPECT_STRNE(zg_status_text(expected), "unknown");
  }
  EXPECT_EQ(status(std::bad_alloc()), ZG_MEMORY);
  EXPECT_TRUE(said("memory"));
  EXPECT_EQ(status(std::system_error(EAGAIN, std::generic_category(), "thread")), ZG_MEMORY);
  EXPECT_EQ(status(std::runtime_error("odd")), ZG_BUG);
  EXPECT_EQ(last_error(), "odd");
  EXPECT_EQ(status(42), ZG_BUG);
  EXPECT_FALSE(last_error().empty());
  EXPECT_STREQ(zg_status_text(ZG_OK), "ok");
  EXPECT_STREQ(zg_status_text(99), "unknown");
  EXPECT_STREQ(zg_status_text(-1), "unknown");
}

TEST_F(CApi, TheLastErrorIsEachThreadsOwnAndStaysAfterASuccess) {
  EXPECT_EQ(zg_set_log_level(17), ZG_USAGE);
  const std::string mine = last_error();
  std::string before, after;
  std::thread([&] {
    before = last_error();
    (void)zg_drain(nullptr);
    after = last_error();
  }).join();
  EXPECT_EQ(before, "");
  EXPECT_NE(after, "");
  EXPECT_OK(zg_store_close(nullptr));
  EXPECT_EQ(last_error(), mine);
}

TEST_F(CApi, NullIsRefusedEverywhere) {
  open(0, 4 * kPage);
  const std::int32_t t = add("t", 2);
  const zg_tensor_spec s = spec("s", 1);
  const zg_access access = {t, 0, ZG_HOST, ZG_OVERWRITE};
  std::int32_t number = 0;
  std::int64_t bytes = 0;
  zg_lease lease = {};
  zg_pin pin = {};
  zg_statistics statistics = {};
  zg_tensor_statistics of = {};
  char text[8];
  // Without a store.
  EXPECT_REFUSED(zg_tensor_add(nullptr, &s, &number), "store");
  EXPECT_REFUSED(zg_tensor_remove(nullptr, t), "store");
  EXPECT_REFUSED(zg_tensor_find(nullptr, "t", &number), "store");
  EXPECT_REFUSED(zg_segment_count(nullptr, t, &number), "store");
  EXPECT_REFUSED(zg_segment_bytes(nullptr, t, 0, &bytes), "store");
  EXPECT_REFUSED(zg_has_content(nullptr, t, 0, &number), "store");
  EXPECT_REFUSED(zg_discard(nullptr, t, 0), "store");
  EXPECT_REFUSED(zg_acquire(nullptr, access, &lease), "store");
  EXPECT_REFUSED(zg_acquire_all(nullptr, &access, 1, &lease), "store");
  EXPECT_REFUSED(zg_release(nullptr, &lease), "store");
  EXPECT_REFUSED(zg_prefetch(nullptr, t, 0, ZG_HOST), "store");
  EXPECT_REFUSED(zg_pin_segment(nullptr, t, 0, ZG_HOST, &pin), "store");
  EXPECT_REFUSED(zg_unpin(nullptr, &pin), "store");
  EXPECT_REFUSED(zg_step_begin(nullptr, "s"), "store");
  EXPECT_REFUSED(zg_step_end(nullptr), "store");
  EXPECT_REFUSED(zg_sink(nullptr), "store");
  EXPECT_REFUSED(zg_drain(nullptr), "store");
  EXPECT_REFUSED(zg_get_statistics(nullptr, &statistics), "store");
  EXPECT_REFUSED(zg_get_tensor_statistics(nullptr, t, &of), "store");
  EXPECT_REFUSED(zg_explain(nullptr, t, text, sizeof text, nullptr), "store");
  EXPECT_REFUSED(zg_state(nullptr, text, sizeof text, nullptr), "store");
  // Without what the call needs.
  zg_store* none = store_;
  EXPECT_REFUSED(zg_store_open(nullptr, &none), "config");
  EXPECT_EQ(none, nullptr);
  EXPECT_REFUSED(zg_store_open(nullptr, nullptr), "store");
  EXPECT_REFUSED(zg_tensor_add(store_, nullptr, &number), "spec");
  EXPECT_REFUSED(zg_tensor_add(store_, &s, nullptr), "tensor");
  EXPECT_REFUSED(zg_tensor_find(store_, nullptr, &number), "name");
  EXPECT_REFUSED(zg_tensor_find(store_, "t", nullptr), "tensor");
  EXPECT_REFUSED(zg_segment_count(store_, t, nullptr), "count");
  EXPECT_REFUSED(zg_segment_bytes(store_, t, 0, nullptr), "bytes");
  EXPECT_REFUSED(zg_has_content(store_, t, 0, nullptr), "yes");
  EXPECT_REFUSED(zg_acquire(store_, access, nullptr), "lease");
  EXPECT_REFUSED(zg_acquire_all(store_, nullptr, 1, &lease), "accesses");
  EXPECT_REFUSED(zg_acquire_all(store_, &access, 1, nullptr), "leases");
  EXPECT_OK(zg_acquire_all(store_, nullptr, 0, nullptr));
  EXPECT_REFUSED(zg_release(store_, nullptr), "lease");
  EXPECT_REFUSED(zg_pin_segment(store_, t, 0, ZG_HOST, nullptr), "pin");
  EXPECT_REFUSED(zg_unpin(store_, nullptr), "pin");
  EXPECT_REFUSED(zg_get_statistics(store_, nullptr), "statistics");
  EXPECT_REFUSED(zg_get_tensor_statistics(store_, t, nullptr), "statistics");
  EXPECT_REFUSED(zg_state(store_, nullptr, 8, nullptr), "buffer");
}

TEST_F(CApi, ConfigsThatMakeNoSenseAreRefusedByField) {
  const char* path = "/nowhere/at/all";
  const std::int64_t bytes = kPage;
  const auto refused = [&](const char* field, auto spoil) {
    zg_store_config config = {};
    config.size = sizeof config;
    config.host_bytes = 4 * kPage;
    config.drive_paths = &path;
    config.drive_bytes = &bytes;
    config.drive_count = 1;
    spoil(config);
    zg_store* store = nullptr;
    EXPECT_REFUSED(zg_store_open(&config, &store), field);
    EXPECT_EQ(store, nullptr);
  };
  refused("/nowhere/at/all", [](auto&) {});
  refused("host_bytes", [](auto& c) { c.host_bytes = 0; });
  refused("device_bytes", [](auto& c) { c.device_bytes = -1; });
  refused("drive_count", [](auto& c) { c.drive_count = -1; });
  refused("drive_paths", [](auto& c) { c.drive_paths = nullptr; });
  refused("drive_bytes", [](auto& c) { c.drive_bytes = nullptr; });
  refused("backend", [](auto& c) { c.backend = 9; });
  refused("flags", [](auto& c) { c.flags = 1u << 31; });
  refused("aio.queue_depth", [](auto& c) { c.queue_depth = -1; });
  refused("aio.block_size", [](auto& c) { c.block_size = 77; });
  refused("next-use, lru", [](auto& c) { c.policy = "newest"; });
  refused("warn_after_seconds", [](auto& c) { c.warn_after_seconds = -1; });
  const char* no_path = nullptr;
  refused("drive_paths[0]", [&](auto& c) { c.drive_paths = &no_path; });
}

TEST_F(CApi, StructsCarryTheirSize) {
  // A program of today with a library of yesterday, or the other way round.
  struct Larger {
    zg_store_config config = {};
    std::int64_t later = 0;
  } larger;
  larger.config.host_bytes = kPage;
  const auto* config = &larger.config;
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{8}, sizeof(zg_store_config) - 1, ~std::size_t{0}}) {
    larger.config.size = size;
    EXPECT_REFUSED(zg_store_open(config, &store_), "config.size");
  }
  larger.config.size = sizeof larger;
  larger.later = 1;
  EXPECT_REFUSED(zg_store_open(config, &store_), "does not know");
  larger.later = 0;
  ASSERT_OK(zg_store_open(config, &store_));

  struct LargerStatistics {
    zg_statistics statistics = {};
    std::int64_t later = -1, beyond = -1;
  } out;
  out.statistics.size = sizeof(zg_statistics) + 8;
  ASSERT_OK(zg_get_statistics(store_, &out.statistics));
  EXPECT_EQ(out.statistics.host.budget, kPage);
  EXPECT_EQ(out.statistics.size, sizeof(zg_statistics) + 8);
  EXPECT_EQ(out.later, 0);    // unknown to us
  EXPECT_EQ(out.beyond, -1);  // not the caller's struct
  // A caller that was compiled before waits were told apart.
  out.statistics.size = offsetof(zg_statistics, waited_for_reads);
  out.statistics.waited_for_reads = -1;
  ASSERT_OK(zg_get_statistics(store_, &out.statistics));
  EXPECT_EQ(out.statistics.host.budget, kPage);
  EXPECT_EQ(out.statistics.waited_for_reads, -1);
  out.statistics.size = 8;
  EXPECT_REFUSED(zg_get_statistics(store_, &out.statistics), "statistics.size");
  zg_tensor_spec s = spec("s", 1);
  s.size = 0;
  std::int32_t tensor = 0;
  EXPECT_REFUSED(zg_tensor_add(store_, &s, &tensor), "spec.size");
}

TEST_F(CApi, TensorsThatMakeNoSenseAreRefused) {
  open(0, 4 * kPage, 0, 16 * kPage);
  EXPECT_EQ(add("t", 3), 0);
  const auto refused = [&](const char* part, auto spoil) {
    zg_tensor_spec s = spec("new", 2);
    spoil(s);
    std::int32_t tensor = 0;
    EXPECT_REFUSED(zg_tensor_add(store_, &s, &tensor), part);
  };
  refused("exists", [](auto& s) { s.name = "t"; });
  refused("no name", [](auto& s) { s.name = ""; });
  refused("name", [](auto& s) { s.name = nullptr; });
  refused("dtype", [](auto& s) { s.dtype = 0; });
  refused("dtype", [](auto& s) { s.dtype = 9; });
  refused("role", [](auto& s) { s.role = 5; });
  refused("tier", [](auto& s) { s.lowest = 4; });
  refused("elements", [](auto& s) { s.count = 0; });
  refused("priority", [](auto& s) { s.priority = 101; });
  refused("segment_bytes", [](auto& s) { s.segment_bytes = -1; });
  refused("segment_bytes", [](auto& s) { s.segment_bytes = 1001, s.dtype = ZG_F32; });
  const zg_tensor_spec large = spec("large", 20);
  std::int32_t tensor = 0;
  EXPECT_EQ(zg_tensor_add(store_, &large, &tensor), ZG_IO) << "the drive has no room";
  for (const std::int32_t no : {-1, 1, 77}) EXPECT_REFUSED(zg_segment_count(store_, no, &tensor), "tensor");
  std::int64_t bytes = 0;
  for (const std::int32_t no : {-1, 3}) EXPECT_REFUSED(zg_segment_bytes(store_, 0, no, &bytes), "no segment");
  EXPECT_OK(zg_segment_bytes(store_, 0, 2, &bytes));
  EXPECT_EQ(bytes, kPage);
  EXPECT_OK(zg_tensor_find(store_, "t", &tensor));
  EXPECT_EQ(tensor, 0);
  EXPECT_OK(zg_tensor_find(store_, "u", &tensor));
  EXPECT_EQ(tensor, -1);
  EXPECT_OK(zg_tensor_remove(store_, 0));
  EXPECT_REFUSED(zg_tensor_remove(store_, 0), "was removed");
  EXPECT_REFUSED(zg_segment_count(store_, 0, &tensor), "was removed");
  EXPECT_GT(add("t", 3), 0);
}

}  // namespace
}  // namespace zg::test
