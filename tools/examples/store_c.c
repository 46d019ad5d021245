/* The tiered store from C: streams one tensor that is larger than host memory through it, and checks it.
 *
 *   store_c [--total MIB] [--host MIB] [--steps N] DIRECTORY
 *
 * Needs ziggurat.h and libziggurat_store.so alone: a compiler of C builds it (README.md).
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

#include <ziggurat/ziggurat.h>

/* Every call says how it ended; the text of what went wrong is the thread's own. */
static void must(int status) {
  if (status == ZG_OK) return;
  fprintf(stderr, "store_c: %s error: %s\n", zg_status_text(status), zg_last_error());
  exit(status == ZG_USAGE ? 2 : 1);
}

static void write_words(const zg_lease* lease, int64_t mark) {
  int64_t* words = lease->data;
  for (int64_t i = 0; i < lease->bytes / 8; ++i) words[i] = mark + i;
}

static int has_words(const zg_lease* lease, int64_t mark) {
  const int64_t* words = lease->data;
  for (int64_t i = 0; i < lease->bytes / 8; ++i) {
    if (words[i] != mark + i) return 0;
  }
  return 1;
}

/* What a segment holds after a step. */
static int64_t mark_of(int32_t segment, long step) {
  return ((int64_t)segment << 40) + ((int64_t)step << 32);
}

/* One step over all segments; 1 if one held other bytes than the step before had written. */
static int run_step(zg_store* store, int32_t tensor, int32_t segments, long step) {
  /* All steps of a name do the same, so the store fetches ahead from the second on; step 0 does something
   * else. */
  must(zg_step_begin(store, step == 0 ? "fill" : "step"));
  for (int32_t s = 0; s < segments; ++s) {
    zg_access access = {.tensor = tensor, .segment = s, .tier = ZG_HOST};
    access.mode = step == 0 ? ZG_OVERWRITE : ZG_WRITE; /* nothing to fetch, or read and modify */
    zg_lease lease;
    must(zg_acquire(store, access, &lease)); /* waits until the bytes are there */
    const int good = step == 0 || has_words(&lease, mark_of(s, step - 1));
    write_words(&lease, mark_of(s, step));
    must(zg_release(store, &lease)); /* from here on they may move */
    if (!good) return 1;
  }
  must(zg_step_end(store));
  return 0;
}

int main(int count, char** words) {
  long values[] = {1024, 128, 3}; /* total and host in MiB, steps */
  const struct option flags[] = {{"total", 1, NULL, 0},
                                 {"host", 1, NULL, 1},
                                 {"steps", 1, NULL, 2},
                                 {"help", 0, NULL, 'h'},
                                 {NULL, 0, NULL, 0}};
  for (int flag; (flag = getopt_long(count, words, "h", flags, NULL)) != -1;) {
    if (flag == 'h') {
      puts(
          "store_c [--total 1024] [--host 128] [--steps 3] DIRECTORY\n\nStreams a tensor of --total MiB "
          "through "
          "--host MiB of host memory, and checks it.");
      return 0;
    }
    if (flag == '?' || (values[flag] = strtol(optarg, NULL, 10)) < 1) {
      fputs("store_c: see --help\n", stderr);
      return 2;
    }
  }
  if (optind + 1 != count) {
    fputs("store_c: needs a directory on the drive\n", stderr);
    return 2;
  }
  const int64_t total = (int64_t)values[0] << 20, host = (int64_t)values[1] << 20;

  /* What is not named is 0: the default. The size lets later libraries know which fields this program has. */
  const char* path = words[optind];
  const zg_store_config config = {.size = sizeof config,
                                  .host_bytes = host,
                                  .drive_paths = &path,
                                  .drive_bytes = &total,
                                  .drive_count = 1};
  zg_store* store = NULL;
  must(zg_store_open(&config, &store));

  /* Segments move as a whole; several must fit into host memory at once. */
  const int64_t segment = host / 16 < 4 << 20 ? host / 16 : 4 << 20;
  const zg_tensor_spec spec = {
      .size = sizeof spec, .name = "data", .dtype = ZG_I64, .count = total / 8, .segment_bytes = segment};
  int32_t tensor, segments;
  must(zg_tensor_add(store, &spec, &tensor));
  must(zg_segment_count(store, tensor, &segments));

  int wrong = 0;
  for (long step = 0; step <= values[2] && !wrong; ++step) wrong = run_step(store, tensor, segments, step);

  zg_statistics s = {.size = sizeof s};
  must(zg_get_statistics(store, &s));
  printf(
      "%s: %d segments of %lld bytes; read %lld and wrote %lld bytes of NVMe, waited %.3f s, peak of host "
      "%lld\n",
      wrong ? "WRONG" : "all right", segments, (long long)segment, (long long)s.nvme_read.bytes,
      (long long)s.nvme_write.bytes, s.waited_seconds, (long long)s.host.peak);
  must(zg_store_close(store));
  return wrong;
}
