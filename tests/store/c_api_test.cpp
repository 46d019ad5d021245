// ziggurat.h: what it refuses, who owns what, and several threads at once. That a compiler of C takes it is
// shown by c_program.c, and that Python does by c_api_ctypes.py.
#include <gtest/gtest.h>

#include <new>
#include <random>
#include <system_error>
#include <thread>

#include "store/c_api.hpp"
#include "store/rig.hpp"
#include "support/seed.hpp"

extern "C" int zg_test_c_program(void);

namespace zg::test {
namespace {

constexpr std::int64_t kPage = 4096;

std::string last_error() {
  return zg_last_error();
}
bool said(const std::string& part) {
  return last_error().find(part) != std::string::npos;
}

#define EXPECT_OK(call) EXPECT_EQ(call, ZG_OK) << last_error()
#define ASSERT_OK(call) ASSERT_EQ(call, ZG_OK) << last_error()
#define EXPECT_REFUSED(call, part)           \
  do {                                       \
    EXPECT_EQ(call, ZG_USAGE);               \
    EXPECT_TRUE(said(part)) << last_error(); \
  } while (false)

// A store over pretended drives, closed at the end.
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

TEST_F(CApi, ALeaseEndsOnceAndFailedCallsGiveNone) {
  open(0, 2 * kPage);
  const std::int32_t t = add("t", 4);
  zg_lease lease = {77, &lease, 77};
  EXPECT_REFUSED(zg_acquire(store_, {t, 0, ZG_HOST, ZG_READ}, &lease), "has no content");
  EXPECT_EQ(lease.id, 0u);
  EXPECT_EQ(lease.data, nullptr);
  EXPECT_REFUSED(zg_acquire(store_, {t, 0, ZG_NVME, ZG_OVERWRITE}, &lease), "NVMe");
  EXPECT_REFUSED(zg_acquire(store_, {t, 0, 0, ZG_OVERWRITE}, &lease), "tier");
  EXPECT_REFUSED(zg_acquire(store_, {t, 0, ZG_HOST, 0}, &lease), "mode");
  EXPECT_REFUSED(zg_acquire(store_, {t, 4, ZG_HOST, ZG_OVERWRITE}, &lease), "no segment");
  EXPECT_EQ(zg_acquire(store_, {t, 0, ZG_DEVICE_MEMORY, ZG_OVERWRITE}, &lease), ZG_MEMORY)
      << "there is no device";

  lease = acquire(t, 0, ZG_OVERWRITE);
  EXPECT_EQ(lease.bytes, kPage);
  zg_lease copy = lease;
  EXPECT_OK(zg_release(store_, &lease));
  EXPECT_EQ(lease.data, nullptr);
  EXPECT_OK(zg_release(store_, &lease));  // cleared
  EXPECT_REFUSED(zg_release(store_, &copy), "none of this store's");
  zg_lease next = acquire(t, 1, ZG_OVERWRITE);  // may have the place of the one before
  EXPECT_NE(next.id, copy.id);
  EXPECT_REFUSED(zg_release(store_, &copy), "none of this store's");
  std::thread([&] { EXPECT_OK(zg_release(store_, &next)); }).join();

  // This thread holds all: a wait would never end.
  zg_lease a = acquire(t, 0, ZG_OVERWRITE), b = acquire(t, 1, ZG_OVERWRITE), c = {};
  EXPECT_EQ(zg_acquire(store_, {t, 2, ZG_HOST, ZG_OVERWRITE}, &c), ZG_MEMORY);
  EXPECT_EQ(zg_acquire(store_, {t, 0, ZG_HOST, ZG_READ}, &c), ZG_USAGE);
  EXPECT_OK(zg_release(store_, &a));
  EXPECT_OK(zg_release(store_, &b));
}

TEST_F(CApi, SeveralAtOnceAreAllOrNone) {
  open(0, 3 * kPage);
  const std::int32_t t = add("t", 4);
  for (std::int32_t i = 0; i < 4; ++i) write(t, i);
  const zg_access three[] = {
      {t, 0, ZG_HOST, ZG_READ}, {t, 1, ZG_HOST, ZG_WRITE}, {t, 3, ZG_HOST, ZG_OVERWRITE}};
  zg_lease leases[3];
  ASSERT_OK(zg_acquire_all(store_, three, 3, leases));
  EXPECT_EQ(static_cast<char*>(leases[0].data)[7], 0);
  EXPECT_EQ(static_cast<char*>(leases[1].data)[7], 1);
  for (zg_lease& l : leases) EXPECT_OK(zg_release(store_, &l));
  const zg_access twice[] = {{t, 0, ZG_HOST, ZG_READ}, {t, 1, ZG_HOST, ZG_READ}, {t, 0, ZG_HOST, ZG_READ}};
  EXPECT_REFUSED(zg_acquire_all(store_, twice, 3, leases), "t[0] is named twice");
  const zg_access four[] = {three[0], three[1], three[2], {t, 2, ZG_HOST, ZG_READ}};
  zg_lease more[4] = {{5, nullptr, 5}, {5, nullptr, 5}, {5, nullptr, 5}, {5, nullptr, 5}};
  EXPECT_EQ(zg_acquire_all(store_, four, 4, more), ZG_MEMORY);
  for (const zg_lease& l : more) EXPECT_EQ(l.id, 0u);
}

TEST_F(CApi, AStoreWithLeasesOrPinsStaysOpen) {
  open(0, 4 * kPage);
  const std::int32_t t = add("t", 2), u = add("u", 1);
  zg_lease lease = acquire(t, 0, ZG_OVERWRITE);
  EXPECT_REFUSED(zg_store_close(store_), "1 lease and 0 pins");
  EXPECT_REFUSED(zg_sink(store_), "1 lease");
  EXPECT_REFUSED(zg_tensor_remove(store_, t), "t[0] is leased");
  EXPECT_OK(zg_tensor_remove(store_, u));
  std::memset(lease.data, 1, kPage);  // the store is still there
  EXPECT_OK(zg_release(store_, &lease));
  zg_pin pin = {}, copy = {};
  EXPECT_OK(zg_pin_segment(store_, t, 0, ZG_HOST, &pin));
  copy = pin;
  EXPECT_REFUSED(zg_store_close(store_), "0 leases and 1 pin");
  EXPECT_REFUSED(zg_tensor_remove(store_, t), "t[0] is pinned");
  EXPECT_OK(zg_unpin(store_, &pin));
  EXPECT_OK(zg_unpin(store_, &pin));
  EXPECT_REFUSED(zg_unpin(store_, &copy), "none of this store's");
  std::vector<zg_pin> many(200);
  for (zg_pin& p : many) ASSERT_OK(zg_pin_segment(store_, t, 0, ZG_HOST, &p));
  EXPECT_REFUSED(zg_pin_segment(store_, t, 0, ZG_HOST, &pin), "200 pins");
  for (zg_pin& p : many) EXPECT_OK(zg_unpin(store_, &p));
  EXPECT_REFUSED(zg_pin_segment(store_, t, 0, ZG_NVME, &pin), "NVMe");
}

TEST_F(CApi, APinnedSegmentStaysAndADiscardedOneIsGone) {
  open(0, 4 * kPage);
  const std::int32_t t = add("t", 12);
  write(t, 0);
  zg_pin pin;
  ASSERT_OK(zg_pin_segment(store_, t, 0, ZG_HOST, &pin));
  for (std::int32_t i = 1; i < 12; ++i) write(t, i);
  zg_tensor_statistics before = {}, after = {};
  before.size = after.size = sizeof before;
  EXPECT_OK(zg_drain(store_));
  EXPECT_OK(zg_get_tensor_statistics(store_, t, &before));
  zg_lease lease = acquire(t, 0, ZG_READ);
  EXPECT_OK(zg_release(store_, &lease));
  EXPECT_OK(zg_get_tensor_statistics(store_, t, &after));
  EXPECT_EQ(after.nvme_read_bytes, before.nvme_read_bytes);
  EXPECT_EQ(after.hits, before.hits + 1);
  EXPECT_GT(after.nvme_write_bytes, 0);
  EXPECT_OK(zg_unpin(store_, &pin));

  std::int32_t yes = -1;
  EXPECT_OK(zg_has_content(store_, t, 5, &yes));
  EXPECT_EQ(yes, 1);
  EXPECT_OK(zg_discard(store_, t, 5));
  EXPECT_OK(zg_has_content(store_, t, 5, &yes));
  EXPECT_EQ(yes, 0);
  EXPECT_OK(zg_prefetch(store_, t, 5, ZG_HOST));  // a hint: there is nothing to bring
  EXPECT_OK(zg_prefetch(store_, t, 1, ZG_HOST));
  EXPECT_OK(zg_sink(store_));
  EXPECT_OK(zg_drain(store_));
  zg_statistics all = {};
  all.size = sizeof all;
  EXPECT_OK(zg_get_statistics(store_, &all));
  EXPECT_EQ(all.host.segments, 0);
  EXPECT_EQ(all.nvme.segments, 11);
}

TEST_F(CApi, StepsComeOneAfterTheOther) {
  open(0, 4 * kPage);
  const std::int32_t t = add("t", 12);
  EXPECT_REFUSED(zg_step_end(store_), "no step has begun");
  for (int round = 0; round < 3; ++round) {
    ASSERT_OK(zg_step_begin(store_, "train"));
    for (std::int32_t i = 0; i < 12; ++i) write(t, i);
    ASSERT_OK(zg_step_end(store_));
  }
  EXPECT_OK(zg_step_begin(store_, nullptr));
  EXPECT_REFUSED(zg_step_begin(store_, nullptr), "has not ended");
  const zg_tensor_spec s = spec("s", 1);
  std::int32_t tensor = 0;
  EXPECT_OK(zg_tensor_add(store_, &s, &tensor));
  write(tensor, 0);
  EXPECT_OK(zg_step_end(store_));
}

TEST_F(CApi, TextsAreCutAsBySnprintf) {
  open(0, 4 * kPage);
  const std::int32_t t = add("a tensor", 2);
  std::size_t length = 0;
  ASSERT_OK(zg_explain(store_, t, nullptr, 0, &length));
  std::string whole(length + 1, '#');
  ASSERT_OK(zg_explain(store_, t, whole.data(), whole.size(), nullptr));
  EXPECT_EQ(whole[length], '\0');
  whole.pop_back();
  EXPECT_EQ(std::strlen(whole.c_str()), length);
  EXPECT_NE(whole.find("a tensor[1]"), std::string::npos);
  char part[8] = "#######";
  std::size_t again = 0;
  ASSERT_OK(zg_explain(store_, t, part, 5, &again));
  EXPECT_EQ(again, length);
  EXPECT_EQ(std::string(part), whole.substr(0, 4));
  EXPECT_EQ(part[5], '#');
  ASSERT_OK(zg_state(store_, part, 1, &again));
  EXPECT_EQ(part[0], '\0');
  EXPECT_GT(again, 10u);
}

TEST_F(CApi, AFailedTransferIsToldFromThenOnAndTheStoreStillCloses) {
  StoreConfig config{.host_bytes = 2 * kPage, .drives = {{.bytes = 1 << 20}}};
  config.aio.backend = io::Backend::kRam;
  config.aio.faults.fail_after = 2;
  auto made = std::make_unique<zg_store>();
  made->opened = open_store(config);
  store_ = made.release();
  const std::int32_t t = add("t", 8);
  zg_lease kept = acquire(t, 0, ZG_OVERWRITE), lease = {};
  int status = ZG_OK;
  for (std::int32_t i = 1; status == ZG_OK; i = i % 7 + 1) {
    status = zg_acquire(store_, {t, i, ZG_HOST, ZG_OVERWRITE}, &lease);
    EXPECT_EQ(lease.id != 0, status == ZG_OK);
    EXPECT_OK(zg_release(store_, &lease));
  }
  EXPECT_EQ(status, ZG_IO);
  EXPECT_TRUE(said("nvme0")) << last_error();
  EXPECT_EQ(zg_acquire(store_, {t, 0, ZG_HOST, ZG_READ}, &lease), ZG_IO);
  EXPECT_EQ(zg_step_begin(store_, nullptr), ZG_IO);
  EXPECT_EQ(zg_drain(store_), ZG_IO);
  std::size_t length = 0;
  EXPECT_OK(zg_state(store_, nullptr, 0, &length));
  EXPECT_OK(zg_release(store_, &kept));
}

// What needs the store alone says so, instead of waiting for somebody who waits for this very thread.
TEST_F(CApi, WhatNeedsTheStoreAloneDoesNotWaitForOthers) {
  open(0, 4 * kPage);
  const Watchdog watchdog(60, [&] { return store_->opened->store().state(); });
  const std::int32_t t = add("t", 1);
  zg_lease mine = acquire(t, 0, ZG_OVERWRITE);
  std::thread other([&] {
    zg_lease lease = acquire(t, 0, ZG_WRITE);
    EXPECT_OK(zg_release(store_, &lease));
  });
  while (store_->opened->store().waiting() == 0) std::this_thread::yield();
  const zg_tensor_spec s = spec("s", 1);
  std::int32_t tensor = 0;
  EXPECT_REFUSED(zg_tensor_add(store_, &s, &tensor), "another thread");
  EXPECT_REFUSED(zg_tensor_remove(store_, t), "another thread");
  EXPECT_REFUSED(zg_sink(store_), "another thread");
  EXPECT_REFUSED(zg_store_close(store_), "another thread");
  EXPECT_OK(zg_release(store_, &mine));
  other.join();
  EXPECT_OK(zg_tensor_add(store_, &s, &tensor));
}

// Threads with a tensor each, in the room of a few segments, and all other calls in between.
TEST_F(CApi, ATraceIsSavedAndExpected) {
  const std::string path = ::testing::TempDir() + "c_api.trace.json";
  const auto step = [&](std::int32_t t) {
    EXPECT_OK(zg_step_begin(store_, nullptr));
    for (std::int32_t i = 0; i < 6; ++i) {
      zg_lease lease = acquire(t, i, ZG_READ);
      EXPECT_OK(zg_release(store_, &lease));
    }
    EXPECT_OK(zg_step_end(store_));
  };
  zg_statistics statistics = {};
  statistics.size = sizeof statistics;
  open(0, 4 * kPage, ZG_RECORD);
  EXPECT_EQ(zg_trace_save(store_, path.c_str()), ZG_USAGE);
  EXPECT_TRUE(said("nothing was recorded")) << last_error();
  std::int32_t t = add("t", 6);
  for (std::int32_t i = 0; i < 6; ++i) write(t, i);
  step(t);
  EXPECT_OK(zg_trace_save(store_, path.c_str()));
  EXPECT_OK(zg_store_close(store_));
  open(0, 4 * kPage);
  EXPECT_EQ(zg_trace_expect(store_, path.c_str()), ZG_USAGE);
  EXPECT_TRUE(said("has 1 tensors, the store has 0")) << last_error();
  t = add("t", 6);
  EXPECT_OK(zg_trace_expect(store_, path.c_str()));
  for (std::int32_t i = 0; i < 6; ++i) write(t, i);
  EXPECT_OK(zg_drain(store_));
  step(t);  // the first here, and foreseen
  EXPECT_OK(zg_get_statistics(store_, &statistics));
  EXPECT_GT(statistics.prefetches, 0);
  EXPECT_EQ(statistics.left_record, 0);
  std::remove(path.c_str());
}

TEST_F(CApi, ManyThreadsAtOnce) {
  constexpr int kThreads = 6, kRounds = 400;
  constexpr std::int32_t kSegments = 5;
  open(6 * kPage, 14 * kPage);
  const Watchdog watchdog(100, [&] { return store_->opened->store().state(); });
  std::int32_t tensors[kThreads];
  for (int i = 0; i < kThreads; ++i) tensors[i] = add(fmt::format("t{}", i).c_str(), kSegments);
  const std::uint64_t seed = test_seed(20);
  SCOPED_TRACE(fmt::format("ZG_TEST_SEED={}", seed));
  std::atomic<int> wrong{0};
  const auto work = [&](int number) {
    std::mt19937_64 random(seed + static_cast<std::uint64_t>(number));
    const std::int32_t t = tensors[number];
    std::uint64_t versions[kSegments] = {};
    for (std::int32_t i = 0; i < kSegments; ++i) {
      zg_lease lease = acquire(t, i, ZG_OVERWRITE);
      fill(lease.data, lease.bytes, i, 0);
      EXPECT_OK(zg_release(store_, &lease));
    }
    for (std::uint64_t round = 1; round <= kRounds && !testing::Test::HasFailure(); ++round) {
      const auto a = static_cast<std::int32_t>(random() % kSegments);
      const auto b = static_cast<std::int32_t>(
          (a + 1 + static_cast<std::int32_t>(random() % (kSegments - 1))) % kSegments);
      const int tier = random() % 2 == 0 ? ZG_HOST : ZG_DEVICE_MEMORY;
      const zg_access both[] = {{t, a, tier, ZG_WRITE}, {t, b, ZG_HOST, ZG_READ}};
      zg_lease leases[2];
      EXPECT_OK(zg_acquire_all(store_, both, 2, leases));
      if (!holds(leases[0].data, leases[0].bytes, a, versions[a])) ++wrong;
      if (!holds(leases[1].data, leases[1].bytes, b, versions[b])) ++wrong;
      fill(leases[0].data, leases[0].bytes, a, round);
      versions[a] = round;
      for (zg_lease& l : leases) EXPECT_OK(zg_release(store_, &l));
      switch (random() % 6) {
        case 5:
          EXPECT_OK(zg_prefetch(store_, t, b, tier));
          break;
        case 0: {
          zg_statistics statistics = {};
          statistics.size = sizeof statistics;
          EXPECT_OK(zg_get_statistics(store_, &statistics));
          break;
        }
        case 1: {
          char text[256];
          EXPECT_OK(zg_explain(store_, tensors[random() % kThreads], text, sizeof text, nullptr));
          break;
        }
        case 2: {
          zg_lease lease;
          EXPECT_EQ(zg_acquire(store_, {t, kSegments, ZG_HOST, ZG_READ}, &lease), ZG_USAGE);
          EXPECT_TRUE(said(fmt::format("\"t{}\"", number))) << last_error();  // not another thread's
          break;
        }
        default:
          break;
      }
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(store_->leases.size(), 0u);
}

TEST_F(CApi, AHandleNamesOneValueAlone) {
  c_api::HandleTable<std::unique_ptr<int>> table;
  std::vector<std::uint64_t> ids;
  for (int i = 0; i < 100; ++i) ids.push_back(table.put(std::make_unique<int>(i)));
  EXPECT_EQ(table.size(), 100u);
  for (const std::uint64_t id : ids) EXPECT_NE(id, 0u);
  for (int i = 0; i < 100; ++i) {
    auto value = table.take(ids[static_cast<std::size_t>(i)]);
    ASSERT_TRUE(value.has_value());
    EXPECT_EQ(**value, i);
    EXPECT_FALSE(table.take(ids[static_cast<std::size_t>(i)]).has_value());
    (void)table.put(std::make_unique<int>(-1));  // in the same place
    EXPECT_FALSE(table.take(ids[static_cast<std::size_t>(i)]).has_value());
  }
  for (const std::uint64_t id : {std::uint64_t{0}, ~std::uint64_t{0}, std::uint64_t{1} << 32 | 0xfffffff0u})
    EXPECT_FALSE(table.take(id).has_value());
  EXPECT_EQ(table.size(), 100u);
}

}  // namespace
}  // namespace zg::test
