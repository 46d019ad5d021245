/* ziggurat for C: a tiered tensor store. Named tensors, cut into segments, over device memory, host memory
 * and NVMe, within budgets that are never passed. Plain C11; from Python by ctypes
 * (tests/store/c_api_ctypes.py shows how).
 *
 *   zg_store_config config = {.size = sizeof config, .host_bytes = 256 << 20, ...};
 *   zg_store* store = NULL;
 *   if (zg_store_open(&config, &store) != ZG_OK) { fprintf(stderr, "%s\n", zg_last_error()); exit(1); }
 *
 *   int32_t w;
 *   zg_tensor_spec spec = {.size = sizeof spec, .name = "w", .dtype = ZG_F32, .count = 1 << 20};
 *   zg_tensor_add(store, &spec, &w);
 *   zg_lease lease;
 *   zg_acquire(store, (zg_access){w, 0, ZG_HOST, ZG_OVERWRITE}, &lease);    waits until the bytes are there
 *   memset(lease.data, 0, (size_t)lease.bytes);
 *   zg_release(store, &lease);                                              now they may move
 *   zg_store_close(store);
 *
 * tools/examples/store_c.c is a whole program.
 *
 * Errors: every function returns a zg_status, but for those that tell of errors and versions. Anything but
 * ZG_OK means that nothing was done, and that what was asked for by pointer is 0 or NULL; zg_last_error()
 * then has the text: where, what, how to mend it. Arguments that make no sense are ZG_USAGE; but a store that
 * was closed, or a pointer to something else, is not recognised. A transfer that fails makes the store fail
 * for good: all that needs its content says ZG_IO from then on, and what is left is to release and to close.
 *
 * Threads: any may call anything, at once, and a lease may be released by another thread than took it. But
 * zg_tensor_add(), zg_tensor_remove(), zg_sink() and zg_store_close() need the store alone: they say ZG_USAGE
 * when another thread is inside a call with it. A thread must not be cancelled (pthread_cancel) in a call.
 *
 * Waits: zg_acquire() waits for bytes that are on their way, for leases of others, and for room. A wait that
 * could never end is ZG_USAGE (the leases that it needs are held by threads that wait too) or ZG_MEMORY
 * (there is no room while they are held). Whoever needs several segments at once takes them by
 * zg_acquire_all(), which holds nothing while it waits for leases or room.
 *
 * Ownership: bytes belong to the store and are seen through a lease alone, until it is released. Strings and
 * arrays that are handed in are copied. Strings that come back are constants, or copied into the caller's
 * buffer.
 *
 * ABI: structs that may grow carry their size as the first field: set it to sizeof the struct, and what is
 * not needed to 0, which is the default of every field. So programs run with later libraries without being
 * compiled again. The others never change.
 *
 * Sizes are bytes, times seconds. Text is UTF-8.
 */
#ifndef ZIGGURAT_ZIGGURAT_H
#define ZIGGURAT_ZIGGURAT_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define ZG_API __attribute__((visibility("default")))
#else
#define ZG_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Of the header; zg_version() is that of the library. */
#define ZG_VERSION_MAJOR 0
#define ZG_VERSION_MINOR 1
#define ZG_VERSION_PATCH 0
#define ZG_VERSION (ZG_VERSION_MAJOR * 10000 + ZG_VERSION_MINOR * 100 + ZG_VERSION_PATCH)

ZG_API int zg_version(void);              /* compares to ZG_VERSION */
ZG_API const char* zg_version_text(void); /* "0.1.0" */

/* ---- errors ---- */

enum zg_status {
  ZG_OK = 0,
  ZG_USAGE = 1,       /* the caller's mistake */
  ZG_IO = 2,          /* the operating system, or a drive, refused or failed; or a checksum is wrong */
  ZG_MEMORY = 3,      /* a budget, or the machine's memory, does not suffice */
  ZG_DEVICE = 4,      /* a device failed */
  ZG_NUMERIC = 5,     /* a number that should be finite is not */
  ZG_INTERRUPTED = 6, /* the user asked to stop */
  ZG_BUG = 7          /* a mistake in ziggurat */
};

/* The text of this thread's last failure; "" before the first. Never NULL. Valid until this thread's next
 * failure; a success leaves it as it is. */
ZG_API const char* zg_last_error(void);
/* "ok", "usage", "io", ...; "unknown" for other numbers. Never NULL. */
ZG_API const char* zg_status_text(int status);

/* Which log lines of the whole process go to stderr. 0: all, 1: information, 2: warnings, 3: errors. */
ZG_API int zg_set_log_level(int level);

/* ---- the store ---- */

typedef struct zg_store zg_store;

enum zg_backend {
  ZG_BACKEND_AUTO = 0,
  ZG_BACKEND_URING = 1,
  ZG_BACKEND_LIBAIO = 2,
  ZG_BACKEND_THREADS = 3,
  ZG_BACKEND_RAM = 4 /* memory instead of drives, for tests: paths are not looked at */
};

enum zg_store_flags {
  ZG_REQUIRE_BACKEND = 1, /* fail where the backend does not work, instead of taking the next best */
  ZG_NO_VERIFY = 2,       /* no checksums of what is on the drives */
  ZG_NO_WRITE_AHEAD = 4,  /* copies are written back when they leave memory, never ahead of it */
  ZG_RECORD = 8           /* steps are kept for traces, which takes memory */
};

typedef struct zg_store_config {
  size_t size;          /* sizeof(zg_store_config) */
  int64_t device_bytes; /* budget of device memory; 0: none, tensors are acquired at the host alone */
  int64_t host_bytes;   /* budget of host memory; needed */
  /* A directory on each drive, and the size of the file that is made there. Several drives share what is
   * written by their bandwidth, so give each more than its equal part. None: no NVMe tier. */
  const char* const* drive_paths;
  const int64_t* drive_bytes;
  int32_t drive_count;
  int32_t backend;           /* zg_backend */
  int32_t queue_depth;       /* blocks in flight on a drive; 0: 32 MiB of them */
  uint32_t flags;            /* zg_store_flags */
  int64_t block_size;        /* of one request to the kernel, a multiple of 4096; 0: 1 MiB */
  const char* policy;        /* what leaves memory first: "next-use" (NULL), "lru", "clock" */
  int64_t read_ahead;        /* bytes fetched ahead of a step; 0: half of each budget */
  double warn_after_seconds; /* a longer wait is logged with what waits for what; 0: 5 */
} zg_store_config;

/* Opens a store without tensors; *store must be closed. On failure it is NULL, and nothing is left on the
 * drives. */
ZG_API int zg_store_open(const zg_store_config* config, zg_store** store);
/* Ends the store and what its tensors hold, and removes its files; waits for what is moving. ZG_USAGE, and
 * the store stays open, while there are leases or pins. NULL: does nothing. */
ZG_API int zg_store_close(zg_store* store);

/* ---- tensors ---- */

enum zg_dtype {
  ZG_F64 = 1,
  ZG_F32 = 2,
  ZG_F16 = 3,
  ZG_BF16 = 4,
  ZG_I64 = 5,
  ZG_I32 = 6,
  ZG_U16 = 7,
  ZG_U8 = 8
};
enum zg_role { ZG_OTHER = 0, ZG_WEIGHT = 1, ZG_GRADIENT = 2, ZG_OPTIMIZER_STATE = 3, ZG_ACTIVATION = 4 };
enum zg_tier { ZG_DEVICE_MEMORY = 1, ZG_HOST = 2, ZG_NVME = 3 };

typedef struct zg_tensor_spec {
  size_t size;           /* sizeof(zg_tensor_spec) */
  const char* name;      /* one of its own */
  int32_t dtype;         /* zg_dtype; needed */
  int32_t role;          /* zg_role */
  int64_t count;         /* elements; 1 or more */
  int32_t lowest;        /* zg_tier: how far it may sink; 0: NVMe. Without drives NVMe means the host */
  int32_t priority;      /* -100 to 100: tensors of a lower one leave memory first */
  int64_t segment_bytes; /* a multiple of the element's size; the last segment may be smaller. 0: one segment.
                            A segment is contiguous, and what moves as a whole: MiB are a good size */
} zg_tensor_spec;

/* Declares a tensor, which has no content until it is written, and reserves its room on the drives. *tensor:
 * its number from 0, which is never used again. Between steps only. ZG_IO: the drives have no room. */
ZG_API int zg_tensor_add(zg_store* store, const zg_tensor_spec* spec, int32_t* tensor);
/* Drops content and room. ZG_USAGE while there are leases or pins of it. */
ZG_API int zg_tensor_remove(zg_store* store, int32_t tensor);
/* *tensor: -1 where there is none of that name (which is no error). */
ZG_API int zg_tensor_find(zg_store* store, const char* name, int32_t* tensor);
ZG_API int zg_segment_count(zg_store* store, int32_t tensor, int32_t* count);
ZG_API int zg_segment_bytes(zg_store* store, int32_t tensor, int32_t segment, int64_t* bytes);
/* *yes: 1 if the segment has been written and not discarded, else 0. */
ZG_API int zg_has_content(zg_store* store, int32_t tensor, int32_t segment, int32_t* yes);
/* The content is no longer needed: it is not written to the drives any more. Waits for leases of the segment.
 */
ZG_API int zg_discard(zg_store* store, int32_t tensor, int32_t segment);

/* ---- access ---- */

enum zg_mode {
  ZG_READ = 1,
  ZG_WRITE = 2,    /* read and modify */
  ZG_OVERWRITE = 3 /* every byte that matters is written before it is read: nothing is fetched */
};

/* What is asked for. */
typedef struct zg_access {
  int32_t tensor, segment; /* numbers of both, from 0 */
  int32_t tier;            /* where the bytes are to be: ZG_HOST or ZG_DEVICE_MEMORY */
  int32_t mode;            /* zg_mode */
} zg_access;

/* What was got. A copy of it is the same lease. */
typedef struct zg_lease {
  uint64_t id; /* 0: none */
  void* data;  /* aligned to 4096; on the host device ordinary memory at either tier */
  int64_t bytes;
} zg_lease;

/* Any number may read a segment at once, or one write it. ZG_USAGE for reading (ZG_READ, ZG_WRITE) what has
 * no content. */
ZG_API int zg_acquire(zg_store* store, zg_access access, zg_lease* lease);
/* All or none; each segment named once. leases: room for `count`. */
ZG_API int zg_acquire_all(zg_store* store, const zg_access* accesses, size_t count, zg_lease* leases);
/* Ends the lease and clears *lease: its bytes may not be touched any more. A cleared one: does nothing.
 * ZG_USAGE for one that has been released by a copy. */
ZG_API int zg_release(zg_store* store, zg_lease* lease);

/* A hint: the segment is brought to the tier if it has content and there is room. Does not wait. */
ZG_API int zg_prefetch(zg_store* store, int32_t tensor, int32_t segment, int32_t tier);

typedef struct zg_pin {
  uint64_t id; /* 0: none */
} zg_pin;

/* Keeps the segment at the tier, once it is there, and begins to bring it if it has content. Pins must leave
 * room for what is acquired. At most 200 of one segment at a tier. */
ZG_API int zg_pin_segment(zg_store* store, int32_t tensor, int32_t segment, int32_t tier, zg_pin* pin);
/* As zg_release(). */
ZG_API int zg_unpin(zg_store* store, zg_pin* pin);

/* ---- what comes ---- */

/* A step that repeats, more or less, begins or ends. What all threads acquire in between is recorded; the
 * next step of this name is fetched ahead by it. Leaving the record costs time, never correctness. name: NULL
 * is "step". One step at a time. */
ZG_API int zg_step_begin(zg_store* store, const char* name);
ZG_API int zg_step_end(zg_store* store);
/* Writes what was recorded (ZG_RECORD) to a file, for `ziggurat trace`, which compares policies and budgets
 * without moving a byte, and for zg_trace_expect(). */
ZG_API int zg_trace_save(zg_store* store, const char* path);
/* Takes the steps of such a file for what steps of their names will do, before they were ever recorded. The
 * store must have the same tensors, added in the same order. ZG_USAGE says what differs. */
ZG_API int zg_trace_expect(zg_store* store, const char* path);
/* Begins to write everything back as low as it may sink. ZG_USAGE while there are leases or
 * pins. */
ZG_API int zg_sink(zg_store* store);
/* Waits until nothing moves. */
ZG_API int zg_drain(zg_store* store);

/* ---- what it tells ---- */

typedef struct zg_tier_statistics {
  int64_t budget, used, peak; /* bytes */
  int64_t segments, bytes;    /* that have a copy there */
  int64_t hits, misses;       /* acquires at this tier that found it there, or did not */
  int64_t evictions;          /* copies that left, discarded ones aside */
} zg_tier_statistics;

typedef struct zg_link_statistics {
  int64_t bytes, transfers;
  double busy_seconds;     /* with at least one transfer under way */
  int64_t moving, waiting; /* transfers now */
} zg_link_statistics;

typedef struct zg_statistics {
  size_t size; /* sizeof(zg_statistics), set by the caller */
  zg_tier_statistics device, host, nvme;
  zg_link_statistics to_device, to_host, nvme_read, nvme_write;
  int64_t waits;              /* acquires that waited */
  double waited_seconds;      /* of all threads: the stall */
  int64_t prefetches;         /* segments fetched ahead */
  int64_t prefetched_in_vain; /* of them, left again without having been used */
  int64_t left_record;        /* acquires within a known step that its record does not have there */
  /* Of waited_seconds, for what; together they are it. */
  double waited_for_reads;       /* from the drives */
  double waited_for_write_backs; /* to the drives, which must make room */
  double waited_for_memory;      /* that leases or other moves must give back, and no write to the drives */
  double waited_for_copies;      /* between host and device */
  double waited_for_leases;      /* of the same tensor */
  double waited_for_other;       /* all was there, and the thread had not run yet */
} zg_statistics;

typedef struct zg_tensor_statistics {
  size_t size;          /* sizeof(zg_tensor_statistics), set by the caller */
  int64_t hits, misses; /* acquires */
  int64_t waits;
  double waited_seconds;
  int64_t to_device_bytes, to_host_bytes, nvme_read_bytes, nvme_write_bytes;
  int64_t evictions, prefetches;
} zg_tensor_statistics;

ZG_API int zg_get_statistics(zg_store* store, zg_statistics* statistics);
ZG_API int zg_get_tensor_statistics(zg_store* store, int32_t tensor, zg_tensor_statistics* statistics);

/* Texts for people. As by snprintf(): at most `capacity` bytes of `buffer` are written, the closing 0
 * included; *length is that of the whole text without it, so that a text with *length >= capacity was cut
 * off. buffer may be NULL where capacity is 0, length may be NULL. */
/* Where each segment of a tensor is, who holds it, when it is needed next, what it waits for. */
ZG_API int zg_explain(zg_store* store, int32_t tensor, char* buffer, size_t capacity, size_t* length);
/* What is queued, moving and held in the store. */
ZG_API int zg_state(zg_store* store, char* buffer, size_t capacity, size_t* length);

#ifdef __cplusplus
}
#endif
#endif
