#!/usr/bin/env python3
"""Uses the store from Python by ctypes, and looks at what its library lets others see.

    c_api_ctypes.py LIBRARY HEADER [NM]

Exit code 0: all as it should be.
"""
import ctypes as c
import re
import subprocess
import sys
import tempfile
import threading

OK, USAGE = 0, 1
F32, HOST, READ, OVERWRITE = 2, 2, 1, 3


class Config(c.Structure):
    _fields_ = [("size", c.c_size_t), ("device_bytes", c.c_int64), ("host_bytes", c.c_int64),
                ("drive_paths", c.POINTER(c.c_char_p)), ("drive_bytes", c.POINTER(c.c_int64)),
                ("drive_count", c.c_int32), ("backend", c.c_int32), ("queue_depth", c.c_int32),
                ("flags", c.c_uint32), ("block_size", c.c_int64), ("policy", c.c_char_p),
                ("read_ahead", c.c_int64), ("warn_after_seconds", c.c_double)]


class Spec(c.Structure):
    _fields_ = [("size", c.c_size_t), ("name", c.c_char_p), ("dtype", c.c_int32), ("role", c.c_int32),
                ("count", c.c_int64), ("lowest", c.c_int32), ("priority", c.c_int32), ("segment_bytes", c.c_int64)]


class Access(c.Structure):
    _fields_ = [("tensor", c.c_int32), ("segment", c.c_int32), ("tier", c.c_int32), ("mode", c.c_int32)]


class Lease(c.Structure):
    _fields_ = [("id", c.c_uint64), ("data", c.c_void_p), ("bytes", c.c_int64)]


def load(path):
    zg = c.CDLL(path)
    zg.zg_last_error.restype = c.c_char_p
    zg.zg_version_text.restype = c.c_char_p
    zg.zg_acquire.argtypes = [c.c_void_p, Access, c.POINTER(Lease)]
    zg.zg_release.argtypes = [c.c_void_p, c.POINTER(Lease)]
    return zg


def check(zg, status):
    assert status == OK, (status, zg.zg_last_error().decode())


def use(zg, folder):
    """Four threads, each with a tensor of its own, through host memory that holds a third of them."""
    segments, nbytes, tensors = 8, 65536, 4
    paths = (c.c_char_p * 1)(folder.encode())
    sizes = (c.c_int64 * 1)(2 * tensors * segments * nbytes)
    config = Config(size=c.sizeof(Config), host_bytes=tensors * segments * nbytes // 3, drive_paths=paths,
                    drive_bytes=sizes, drive_count=1)
    store = c.c_void_p()
    check(zg, zg.zg_store_open(c.byref(config), c.byref(store)))
    numbers = []
    for i in range(tensors):
        number = c.c_int32()
        spec = Spec(size=c.sizeof(Spec), name=b"t%d" % i, dtype=F32, count=segments * nbytes // 4, segment_bytes=nbytes)
        check(zg, zg.zg_tensor_add(store, c.byref(spec), c.byref(number)))
        numbers.append(number.value)
    mistakes = []

    def work(number):
        try:
            lease = Lease()
            for mode in (OVERWRITE, READ, READ):
                for s in range(segments):
                    check(zg, zg.zg_acquire(store, Access(number, s, HOST, mode), c.byref(lease)))
                    mark = bytes([number * segments + s + 1]) * lease.bytes
                    if mode == OVERWRITE:
                        c.memmove(lease.data, mark, lease.bytes)
                    else:
                        assert c.string_at(lease.data, lease.bytes) == mark, (number, s)
                    check(zg, zg.zg_release(store, c.byref(lease)))
        except BaseException as e:  # of a thread: told by the main one
            mistakes.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in numbers]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not mistakes, mistakes
    assert zg.zg_segment_count(store, 99, c.byref(c.c_int32())) == USAGE
    assert b"99" in zg.zg_last_error(), zg.zg_last_error()
    check(zg, zg.zg_store_close(store))


def exported(library, nm):
    out = subprocess.run([nm, "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in out.splitlines() if line.split()[-2] != "A"}


def main(arguments):
    library, header = arguments[:2]
    zg = load(library)
    print(zg.zg_version_text().decode())
    with tempfile.TemporaryDirectory() as folder:
        use(zg, folder)
    with open(header, encoding="utf-8") as f:
        declared = set(re.findall(r"^ZG_API .*?\b(zg_\w+)\(", f.read(), re.MULTILINE))
    assert len(declared) > 20
    if len(arguments) > 2:
        assert exported(library, arguments[2]) == declared, exported(library, arguments[2]) ^ declared
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
