#!/usr/bin/env python3
"""Streams a tensor through host memory that holds a part of it, in steps that repeat, and says what moved and how long
the program waited.

    python store_stream.py [--total 1GiB] [--host 128MiB] [--steps 4] DIRECTORY
"""
import argparse
import time

import ziggurat as zg


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="on a drive")
    parser.add_argument("--total", default="1GiB", help="size of the tensor (default: %(default)s)")
    parser.add_argument("--host", default="128MiB", help="host memory for it (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="times that it is streamed (default: %(default)s)")
    a = parser.parse_args()
    count = zg.bytes_of(a.total) // 4
    with zg.Store(host_bytes=a.host, drives={a.directory: zg.bytes_of(a.total) * 5 // 4}) as store:
        t = store.add("values", "float32", count)
        for i in range(t.segments):
            with t.acquire(i, "overwrite") as lease:
                lease.numpy()[:] = 0
        before = store.statistics()
        for step in range(1, a.steps + 1):
            begin = time.perf_counter()
            with store.step():  # from the second on, what comes next is on its way
                for i in range(t.segments):
                    with t.acquire(i, "write") as lease:
                        lease.numpy()[:] += 1
            now = store.statistics()
            read = now.links.nvme_read.bytes - before.links.nvme_read.bytes
            print(f"step {step}: {time.perf_counter() - begin:.2f} s, {read / 2**20:.0f} MiB read, "
                  f"waited {now.waited_seconds - before.waited_seconds:.2f} s")  # fmt: skip
            before = now
        with t.acquire(t.segments - 1) as lease:
            print(f"every value is {lease.numpy()[-1]:.0f}, as it should be")


if __name__ == "__main__":
    main()
