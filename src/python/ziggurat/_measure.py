"""Measurements of drives, and what this machine has."""
import os
import tempfile

from . import _core
from ._errors import UsageError
from ._records import BenchResult, Probe, TuneResult
from ._store import bytes_of


def _paths(paths):
    return [os.fspath(paths)] if isinstance(paths, (str, os.PathLike)) else [os.fspath(p) for p in paths]


def probe(paths=(), measure_bytes=0):
    """What this machine has, and what the directories `paths` can do (measured with a file of measure_bytes)."""
    return Probe(_core.probe(_paths(paths), bytes_of(measure_bytes)))


def io_bench(paths, op="read", *, size="1GiB", pattern="sequential", block_size="1MiB", queue_depth=0, queues=1,
             backend="auto", seconds=None, ramp_seconds=0.5, verify=False, existing=False):  # fmt: skip
    """Measures throughput and latency of the drives under `paths`, as `ziggurat io-bench` does.

    paths     directories, on which temporary files of `size` are made; or existing files, with existing=True (op other
              than "read" replaces their contents)
    op        "read", "write", "mixed", or "copy": a file that is made in the first of one or two directories, or that is
              the first of `paths` with existing=True, is copied once to a new file in the last directory
    seconds   length of the measurement (5); 0: one pass over the files, as a copy always is
    Ctrl-C ends it. Raises UsageError and IoError.
    """
    if seconds is None:
        seconds = 0 if op == "copy" else 5
    paths = _paths(paths)
    if op == "copy" and len(paths) == 1:
        paths *= 2
    if existing:
        size = os.path.getsize(paths[0]) // 4096 * 4096 if op == "copy" and os.path.isfile(paths[0]) else 0
    return BenchResult(
        _core.io_bench(paths, existing, bytes_of(size), op, pattern, bytes_of(block_size),
                       queue_depth, queues, backend, seconds, ramp_seconds, verify)  # fmt: skip
    )


def io_tune(paths, seconds=120, purpose="both", *, size="1GiB", on_progress=None):
    """Searches for the back end, block size, depth and queues at which the drives are fastest.

    purpose      "both" (reads and writes, as training does), "read" or "write"
    on_progress  called before each measurement with the point's text; False ends the search
    Writes to temporary files of `size` under each path. The result's .aio can be put into a DeepSpeed file.
    """
    paths, size = _paths(paths), bytes_of(size) // 4096 * 4096
    files = []
    try:
        for path in paths:
            if not os.path.isdir(path):
                raise UsageError("is no directory", path, "name a directory on each drive")
            fd, name = tempfile.mkstemp(dir=path, prefix="ziggurat-tune-")
            files.append(name)
            with open(fd, "wb") as f:
                os.posix_fallocate(f.fileno(), 0, size)
        _core.io_bench(files, True, 0, "write", "sequential", 1 << 20, 0, 1, "auto", 0, 0, False)

        def side(point, op):
            r = _core.io_bench(files, True, 0, op, "sequential", point["block_size"], point["queue_depth"],
                               point["queues"], point["backend"], 0.35, 0.1, False)  # fmt: skip
            return [r["bytes_per_second"], r["cpu_seconds_per_gb"], r[op]["p50"], r[op]["p99"]]

        def measure(point, _round):
            if on_progress is not None and on_progress(point["text"]) is False:
                return None
            return side(point, "read") + side(point, "write")

        found = _core.io_tune(paths[0], len(paths), size, purpose, seconds, measure)
    finally:
        for name in files:
            os.unlink(name)
    best = found["candidates"][found["chosen"]] if found["found"] else None
    found["aio"] = None if best is None else {
        "block_size": best["block_size"], "queue_depth": best["queue_depth"],
        "thread_count": best["queues"], "single_submit": False, "overlap_events": True,
    }  # fmt: skip
    result = TuneResult(found)
    result.aio = found["aio"]  # a plain dictionary, for json.dump()
    return result
