/* ziggurat.h as a compiler of C11 sees it, with all warnings: a store used from its opening to its end.
 * Called by c_api_test.cpp. */
#include <stdio.h>
#include <string.h>

#include "ziggurat/ziggurat.h"
#include "ziggurat/ziggurat.h" /* twice does no harm */

enum { kSegments = 6, kBytes = 8192 };

#define CHECK(call)                                                                     \
  do {                                                                                  \
    const int status_ = (call);                                                         \
    if (status_ != ZG_OK) {                                                             \
      fprintf(stderr, "%s: %s: %s\n", #call, zg_status_text(status_), zg_last_error()); \
      return __LINE__;                                                                  \
    }                                                                                   \
  } while (0)

static int use(zg_store* store) {
  const zg_tensor_spec spec = {.size = sizeof spec,
                               .name = "w",
                               .dtype = ZG_BF16,
                               .role = ZG_WEIGHT,
                               .count = kSegments * kBytes / 2,
                               .segment_bytes = kBytes};
  int32_t w = -1, count = 0;
  CHECK(zg_tensor_add(store, &spec, &w));
  CHECK(zg_segment_count(store, w, &count));
  if (count != kSegments) return __LINE__;
  for (int round = 0; round < 3; ++round) {
    CHECK(zg_step_begin(store, NULL));
    for (int32_t i = 0; i < count; ++i) {
      zg_lease lease;
      const int32_t tier = i % 2 == 0 ? ZG_HOST : ZG_DEVICE_MEMORY;
      CHECK(zg_acquire(store, (zg_access){w, i, tier, round == 0 ? ZG_OVERWRITE : ZG_WRITE}, &lease));
      const unsigned char* at = lease.data;
      if (round > 0 && (at[0] != i + round || at[lease.bytes - 1] != i + round)) return __LINE__;
      memset(lease.data, i + round + 1, (size_t)lease.bytes);
      CHECK(zg_release(store, &lease));
      CHECK(zg_release(store, &lease)); /* cleared by the first */
    }
    CHECK(zg_step_end(store));
  }
  zg_statistics statistics = {.size = sizeof statistics};
  CHECK(zg_get_statistics(store, &statistics));
  /* They do not fit in host memory. */
  return statistics.nvme_read.bytes > 0 && statistics.to_device.bytes > 0 ? 0 : __LINE__;
}

/* 0, or the line that is not as it should be. */
int zg_test_c_program(void) {
  const char* path = "";
  const int64_t bytes = 1 << 20;
  const zg_store_config config = {.size = sizeof config,
                                  .device_bytes = 2 * kBytes,
                                  .host_bytes = 3 * kBytes,
                                  .drive_paths = &path,
                                  .drive_bytes = &bytes,
                                  .drive_count = 1,
                                  .backend = ZG_BACKEND_RAM,
                                  .block_size = 4096};
  zg_store* store = NULL;
  CHECK(zg_store_open(&config, &store));
  const int line = use(store);
  CHECK(zg_store_close(store));
  return line;
}
