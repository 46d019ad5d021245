/* ziggurat for C: a tiered tensor store. Named tensors, cut into segments, over device memory, host memory
 * and NVMe, within budgets that are never exceeded. Plain C11, and usable from Python by ctypes
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
 * Errors: every function returns a zg_status, except those that return texts and versions. Any status but
 * ZG_OK means that the call did nothing, and that its out parameters are 0 or NULL; zg_last_error() then has
 * the text: where, what, and how to mend it. Arguments that make no sense give ZG_USAGE; but a store that was
 * closed, or a pointer to something else, is not recognised. After a transfer has failed the store is failed
 * for good: every call that needs its content returns ZG_IO, and all that remains is to release leases and to
 * close the store.
 *
 * Threads: any thread may call any function at any time, and a lease may be released by another thread than
 * the one that acquired it. But zg_tensor_add(), zg_tensor_remove(), zg_sink() and zg_store_close() need the
 * store alone: they return ZG_USAGE while another thread is inside a call with it. A thread must not be
 * cancelled (pthread_cancel) inside a call.
 *
 * Waits: zg_acquire() waits for moves of the segment, for leases of other threads, and for room. A wait that
 * would never end gives ZG_USAGE (the leases that it needs are held by threads that wait, too) or ZG_MEMORY
 * (there is no room while these leases are held). A thread that needs several segments at once takes them by
 * zg_acquire_all(), which holds no lease while it waits for leases or room.
 *
 * Ownership: the bytes belong to the store, and may only be accessed through a lease, until it is released.
 * Strings and arrays that are passed in are copied. Strings that are returned are constants, or are copied
 * into the caller's buffer.
 *
 * ABI: structs that may grow have their size as first field. Set it to sizeof the struct, and all fields that
 * you do not need to 0, which is the default of every field. So programs run with later versions of the
 * library without being compiled again. The other structs never change.
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

/* The version of this header; zg_version() returns that of the library. */
#define ZG_VERSION_MAJOR 0
#define ZG_VERSION_MINOR 1
#define ZG_VERSION_PATCH 0
#define ZG_VERSION (ZG_VERSION_MAJOR * 10000 + ZG_VERSION_MINOR * 100 + ZG_VERSION_PATCH)

ZG_API int zg_version(void);              /* to compare with ZG_VERSION */
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
  ZG_BACKEND_RAM = 4 /* memory instead of drives, for tests; paths are ignored */
};

enum zg_store_flags {
  ZG_REQUIRE_BACKEND = 1, /* fail where the backend does not work, instead of using another one */
  ZG_NO_VERIFY = 2,       /* no checksums of NVMe copies */
  ZG_NO_WRITE_AHEAD = 4,  /* copies are written back when they are evicted, never ahead of time */
  ZG_RECORD = 8           /* steps are kept for traces, which takes memory */
};

typedef struct zg_store_config {
  size_t size;          /* sizeof(zg_store_config) */
  int64_t device_bytes; /* budget of device memory; 0: none, tensors are acquired at the host alone */
  int64_t host_bytes;   /* budget of host memory; needed */
  /* A directory on each drive, and the size of the file that is made there. Writes are spread over several
   * drives by bandwidth, so give each more than its equal share. None: no NVMe tier. */
  const char* const* drive_paths;
  const int64_t* drive_bytes;
  int32_t drive_count;
  int32_t backend;           /* zg_backend */
  int32_t queue_depth;       /* blocks in flight on a drive; 0: 32 to 64 MiB of them, by host_bytes */
  uint32_t flags;            /* zg_store_flags */
  int64_t block_size;        /* bytes of one request to the kernel, a multiple of 4096; 0: 1 MiB */
  const char* policy;        /* of eviction: "next-use" (NULL), "lru", "clock" */
  int64_t read_ahead;        /* bytes prefetched for a step, per tier; 0: half of its budget */
  double warn_after_seconds; /* a longer wait is logged, with what waits for what; 0: 5 */
} zg_store_config;

/* Opens a store without tensors; *store must be closed. On failure it is NULL, and nothing is left on the
 * drives. */
ZG_API int zg_store_open(const zg_store_config* config, zg_store** store);
/* Closes the store: its tensors' content is lost, and its files are removed. Waits for moves under way.
 * ZG_USAGE, and the store stays open, while there are leases or pins. NULL: does nothing. */
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
  const char* name;      /* unique in the store */
  int32_t dtype;         /* zg_dtype; needed */
  int32_t role;          /* zg_role */
  int64_t count;         /* elements; 1 or more */
  int32_t lowest;        /* zg_tier that it may be demoted to; 0: NVMe. Without drives NVMe means the host */
  int32_t priority;      /* -100 to 100: tensors of a lower priority are evicted first */
  int64_t segment_bytes; /* a multiple of the element's size; the last segment may be smaller. 0: one segment.
                            A segment is contiguous and moves as a whole; some MiB are a good size */
} zg_tensor_spec;

/* Declares a tensor, which has no content until it is written, and reserves its space on the drives. *tensor:
 * its number, from 0, which is never used again. Between steps only. ZG_IO: the drives have no room. */
ZG_API int zg_tensor_add(zg_store* store, const zg_tensor_spec* spec, int32_t* tensor);
/* Drops the tensor's content and space. ZG_USAGE while there are leases or pins of it. */
ZG_API int zg_tensor_remove(zg_store* store, int32_t tensor);
/* *tensor: -1 if no tensor has this name (which is no error). */
ZG_API int zg_tensor_find(zg_store* store, const char* name, int32_t* tensor);
ZG_API int zg_segment_count(zg_store* store, int32_t tensor, int32_t* count);
ZG_API int zg_segment_bytes(zg_store* store, int32_t tensor, int32_t segment, int64_t* bytes);
/* *yes: 1 if the segment has been written and not discarded, else 0. */
ZG_API int zg_has_content(zg_store* store, int32_t tensor, int32_t segment, int32_t* yes);
/* Drops the content, which is not written to the drives any more. Waits for leases of the segment. */
ZG_API int zg_discard(zg_store* store, int32_t tensor, int32_t segment);

/* ---- access ---- */

enum zg_mode {
  ZG_READ = 1,
  ZG_WRITE = 2,    /* read and modify */
  ZG_OVERWRITE = 3 /* every byte is written before it is read, so nothing is fetched */
};

/* The access that a lease is asked for. */
typedef struct zg_access {
  int32_t tensor, segment; /* numbers of both, from 0 */
  int32_t tier;            /* ZG_HOST or ZG_DEVICE_MEMORY */
  int32_t mode;            /* zg_mode */
} zg_access;

/* A lease. A copy of the struct is the same lease. */
typedef struct zg_lease {
  uint64_t id; /* 0: no lease */
  void* data;  /* aligned to 4096; ordinary memory at both tiers, since the device is the host */
  int64_t bytes;
} zg_lease;

/* A segment has any number of leases that read it at once, or one that writes it. ZG_USAGE for reading
 * (ZG_READ, ZG_WRITE) a segment without content. */
ZG_API int zg_acquire(zg_store* store, zg_access access, zg_lease* lease);
/* Acquires all leases or none. Each segment is named once. leases: room for `count` of them. */
ZG_API int zg_acquire_all(zg_store* store, const zg_access* accesses, size_t count, zg_lease* leases);
/* Ends the lease and clears *lease: its bytes must not be accessed any more. Does nothing for a cleared one.
 * ZG_USAGE for a lease that was released already, through a copy of the struct. */
ZG_API int zg_release(zg_store* store, zg_lease* lease);

/* A hint: the segment is brought to the tier if it has content and there is room. Does not wait. */
ZG_API int zg_prefetch(zg_store* store, int32_t tensor, int32_t segment, int32_t tier);

typedef struct zg_pin {
  uint64_t id; /* 0: none */
} zg_pin;

/* Keeps the segment at the tier, once it is there, and begins to bring it there if it has content. All pins
 * together must leave room for what is acquired. At most 200 pins of one segment at one tier. */
ZG_API int zg_pin_segment(zg_store* store, int32_t tensor, int32_t segment, int32_t tier, zg_pin* pin);
/* As zg_release(). */
ZG_API int zg_unpin(zg_store* store, zg_pin* pin);

/* ---- future accesses ---- */

/* A step that repeats, more or less, begins or ends. The accesses of all threads in between are recorded, and
 * segments are prefetched for the next step of this name by this record. A step that deviates from the record
 * costs time, never correctness. name: NULL is "step". One step at a time. */
ZG_API int zg_step_begin(zg_store* store, const char* name);
ZG_API int zg_step_end(zg_store* store);
/* Writes what was recorded (ZG_RECORD) to a file, for `ziggurat trace`, which compares policies and budgets
 * without moving a byte, and for zg_trace_expect(). */
ZG_API int zg_trace_save(zg_store* store, const char* path);
/* Expects of steps what the steps of the same names in such a file do, before they were ever recorded here.
 * The store must have the same tensors, added in the same order; otherwise ZG_USAGE, and the text says what
 * differs. */
ZG_API int zg_trace_expect(zg_store* store, const char* path);
/* Begins to demote every segment as low as it may be demoted. ZG_USAGE while there are leases or pins. */
ZG_API int zg_sink(zg_store* store);
/* Waits until nothing moves. */
ZG_API int zg_drain(zg_store* store);

/* ---- statistics and reports ---- */

typedef struct zg_tier_statistics {
  int64_t budget, used, peak; /* bytes */
  int64_t segments, bytes;    /* with a copy at the tier */
  int64_t hits, misses;       /* acquires that found the segment at the tier, or not */
  int64_t evictions;          /* to make room */
} zg_tier_statistics;

typedef struct zg_link_statistics {
  int64_t bytes, transfers;
  double busy_seconds;     /* with at least one transfer under way */
  int64_t moving, waiting; /* transfers at this moment */
} zg_link_statistics;

typedef struct zg_statistics {
  size_t size; /* sizeof(zg_statistics), set by the caller */
  zg_tier_statistics device, host, nvme;
  zg_link_statistics to_device, to_host, nvme_read, nvme_write;
  int64_t waits;              /* acquires that waited */
  double waited_seconds;      /* summed over all threads */
  int64_t prefetches;         /* segments prefetched */
  int64_t prefetched_in_vain; /* of them, evicted without having been used */
  int64_t left_record;        /* acquires in a recorded step that deviated from the record */
  /* The causes of waited_seconds, which is their sum. */
  double waited_for_reads;       /* from the drives */
  double waited_for_write_backs; /* to the drives, which make room */
  double waited_for_memory;      /* that leases or moves other than writes to the drives still took */
  double waited_for_copies;      /* between host and device */
  double waited_for_leases;      /* of the same segment */
  double waited_for_other;       /* the wait was over, but the thread had not run yet */
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

/* Texts for people. As with snprintf(), at most `capacity` bytes of `buffer` are written, with the closing 0;
 * *length is the length of the whole text without it, so the text was cut off if *length >= capacity. buffer
 * may be NULL if capacity is 0; length may be NULL. */
/* For each segment of a tensor: where it is, its leases, its next use, what an acquire of it waits for. */
ZG_API int zg_explain(zg_store* store, int32_t tensor, char* buffer, size_t capacity, size_t* length);
/* What is queued, moving and leased in the store. */
ZG_API int zg_state(zg_store* store, char* buffer, size_t capacity, size_t* length);

#ifdef __cplusplus
}
#endif
#endif
