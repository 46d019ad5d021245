"""The package in hard times: the GIL, views that die late, failing drives, signals, forks. Needs NumPy, not torch."""
import ctypes
import gc
import multiprocessing
import os
import pathlib
import subprocess
import sys
import threading
import time
import unittest

from support import InFolder, need

need("numpy")

import numpy as np  # noqa: E402

import ziggurat as zg  # noqa: E402
from ziggurat import _core  # noqa: E402

MIB = 1 << 20


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


class Gil(InFolder):
    """Every function that may wait lets other threads run: each is called here, or is said not to wait."""

    # Look at numbers that are there, or raise an error.
    NEVER_WAIT = {
        _core.Store: {"leases", "pins", "closed", "__init__", "__reduce__", "open"},
        _core.Optimizer: {"__init__", "bytes", "extent"},
        _core.Hash: {"__init__", "text"},
        _core.Rule: None,  # plain numbers
        _core.Lease: None,  # ends by a lock that is held for microseconds
        _core.Pin: None,
    }
    MODULE_NEVER_WAITS = {"set_log_level"}

    def setUp(self):
        super().setUp()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(60)  # who does not release the GIL keeps it
        self.addCleanup(sys.setswitchinterval, interval)
        self.ticks, self.stop = 0, False

        def tick():
            while not self.stop:
                self.ticks += 1
                time.sleep(0)

        thread = threading.Thread(target=tick)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(setattr, self, "stop", True)

    def releases(self, call):
        end = time.monotonic() + 10  # a call may be so short that others seldom get in
        while time.monotonic() < end:
            before = self.ticks
            call()
            if self.ticks != before:
                return True
        return False

    def methods(self, owner):
        return {n for n, v in vars(owner).items() if callable(v) or isinstance(v, (staticmethod, property))
                if not n.startswith("__") or n == "__init__"} - self.NEVER_WAIT[owner]  # fmt: skip

    def store_calls(self, store):
        t = store.add("t", "u8", 8 * MIB, segment_bytes=MIB)
        t.write(bytes(8 * MIB))
        c, n = store._core, t._number
        extra = iter(range(10**6))

        def acquire():
            c.acquire(n, next(extra) % 8, "read", "host").release()

        def acquire_all():
            for lease in c.acquire_all([(n, next(extra) % 8, "read", "host")]):
                lease.release()

        def step():
            c.step_begin("x")
            c.step_end()

        def add():
            return c.add(f"x{next(extra)}", "u8", 4096, "other", 4096, "host", 0)

        return {
            "acquire": acquire, "acquire_all": acquire_all, "pin": lambda: c.pin(n, 0, "host").release(),
            "prefetch": lambda: c.prefetch(n, next(extra) % 8, "host"), "step_begin": step, "step_end": step,
            "add": add, "remove": lambda: c.remove(add()), "statistics": c.statistics, "state": c.state,
            "explain": lambda: c.explain(n), "drain": c.drain, "demote": c.demote,
            "segments": lambda: c.segments(n), "has_content": lambda: c.has_content(n, 0), "discard": lambda: c.discard(n, 7),
            "close": lambda: zg.Store(host_bytes="1MiB").close(),
        }  # fmt: skip

    def test_of_stores(self):
        with zg.Store(host_bytes="4MiB", drives={self.folder: "64MiB"}) as store:
            calls = self.store_calls(store)
            self.assertEqual(self.methods(_core.Store), set(calls), "a method is neither tried here nor in NEVER_WAIT")
            for name, call in calls.items():
                self.assertTrue(self.releases(call), name)
            self.assertTrue(self.releases(lambda: zg.Store(host_bytes="1MiB")), "open")

    def test_of_optimizers(self):
        with zg.Store(host_bytes="4MiB", drives={self.folder: "64MiB"}) as store:
            o = _core.Optimizer(store._core, "adam", "int8", 2, MIB, 0)
            w, g, out = (np.zeros(4 * MIB, np.float32) for _ in range(3))
            at, extra = (lambda a: a.ctypes.data), iter(range(10**6))
            o.add("p", "p", w.size, "f32")
            rule = _core.Rule()
            rule.eps, rule.step, rule.grad_scale, rule.lr = 1e-8, 1, 1, 1e-3
            o.reset(0, at(w))

            def whole_step():
                o.begin_step()
                o.end_step()

            calls = {
                "add": lambda: o.add(f"x{next(extra)}", "x", 256, "f32"),
                "remove": lambda: o.remove(next(made)), "reset": lambda: o.reset(0, at(w)),
                "weights_changed": lambda: o.weights_changed(bf16, at(w)),
                "read": lambda: o.read(0, "0", at(w), at(out)), "write": lambda: o.write(0, "0", at(w), at(out)),
                "copy_blocks": lambda: o.copy_blocks(0, True, at(out)),
                "copy_codes": lambda: o.copy_codes(0, 0, True, at(out), at(g), 0),
                "update": lambda: o.update([(0, at(w), at(g), "f32", rule, -1)], True),
                "begin_step": whole_step, "end_step": whole_step,
                "gradient_square": lambda: _core.Optimizer.gradient_square(at(g), g.size, "f32"),
            }  # fmt: skip
            bf16 = o.add("h", "h", w.size, "bf16")
            o.reset(bf16, at(w))
            made = iter([o.add(f"y{i}", "y", 256, "f32") for i in range(5000)])
            self.assertEqual(self.methods(_core.Optimizer), set(calls), "a method is tried nowhere")
            for name, call in calls.items():
                self.assertTrue(self.releases(call), name)

    def test_of_hashes_and_that_no_class_is_left_out(self):
        values, hash = np.zeros(16 * MIB, np.uint8), _core.Hash()
        calls = {"update": lambda: hash.update(values.ctypes.data, values.nbytes)}
        self.assertEqual(self.methods(_core.Hash), set(calls))
        self.assertTrue(self.releases(calls["update"]))
        self.assertEqual({v for v in vars(_core).values() if isinstance(v, type)}, set(self.NEVER_WAIT))

    def test_of_training_runs(self):
        text = os.path.join(self.folder, "text.txt")
        with open(text, "w") as f:
            f.write("In the beginning God created the heaven and the earth. " * 200)
        config = {
            "model": {"arch": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 32},
            "data": {"train": text, "tokenizer": "bytes", "seq_len": 32}, "train_batch_size": 2, "steps": 2,
            "devices": "host", "tiers": {"device": "8MiB", "host": "8MiB"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "output": {"dir": os.path.join(self.folder, "run")},
        }  # fmt: skip
        try:
            from ziggurat import _train  # noqa: F401
        except ImportError:
            self.skipTest("this package was built without training runs")
        self.assertTrue(self.releases(lambda: zg.train(config)))

    def test_of_measurements(self):
        calls = {
            "probe": lambda: zg.probe([self.folder]),
            "io_bench": lambda: zg.io_bench(self.folder, size="1MiB", seconds=0, op="write"),
            "io_tune": lambda: zg.io_tune(self.folder, seconds=0.5, size="16MiB"),
        }
        functions = {n for n, v in vars(_core).items() if callable(v) and not isinstance(v, type) and n[0] != "_"}
        self.assertEqual(functions - self.MODULE_NEVER_WAITS, set(calls))
        for name, call in calls.items():
            self.assertTrue(self.releases(call), name)


class Threads(InFolder):
    """Programs of their own, with a deadline: what they show is a process that hangs, or is ended by a signal."""

    def run_program(self, code, seconds=120):
        code = "import sys, threading, time, ziggurat as zg\nMIB = 1 << 20\n" + code
        try:
            return subprocess.run([sys.executable, "-c", code, self.folder], capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired as e:
            self.fail(f"hangs: {e.stdout!r} {e.stderr!r}")

    def test_who_looks_a_tensor_up_does_not_keep_the_gil_from_who_has_the_store_alone(self):
        """demote() asks for the GIL while it waits for moves, and holds the store's lock meanwhile."""
        done = self.run_program(
            "store = zg.Store(host_bytes='32MiB', drives={sys.argv[1]: '256MiB'})\n"
            "tensors = [store.add(f't{i}', 'u8', 8 * MIB, segment_bytes=MIB // 4) for i in range(8)]\n"
            "def demote():\n"
            "    try: store.demote(); store.demote()\n"
            "    except zg.UsageError: pass\n"
            "sys.setswitchinterval(1e-5)\n"
            "end = time.monotonic() + 10\n"
            "for turn in range(40):\n"
            "    for t in tensors: t.write(bytes(8 * MIB))\n"
            "    thread = threading.Thread(target=demote)\n"
            "    thread.start()\n"
            "    while thread.is_alive(): assert store._core.segments(tensors[0]._number) == 32\n"
            "    if time.monotonic() > end: break\n"
            "print('done', turn)\n"
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("done", done.stdout)

    def test_an_exit_with_a_thread_in_acquire(self):
        """The wait ends with an error, the process with its own code, and nothing is left on the drive."""
        done = self.run_program(
            "def wait():\n"
            "    try: tensor.acquire(0)\n"
            "    except zg.Interrupted as e: sys.stdout.write(f'woken: {e}'); sys.stdout.flush()\n"
            "store = zg.Store(host_bytes='1MiB', drives={sys.argv[1]: '16MiB'})\n"
            "tensor = store.add('t', 'u8', MIB // 2)\n"
            "tensor.write(bytes(MIB // 2))\n"
            "lease = tensor.acquire(0, 'write')\n"
            "threading.Thread(target=wait, daemon=True).start()\n"
            "while 'waits' not in tensor.explain() and not store.statistics().waits: time.sleep(0.01)\n"
            "time.sleep(0.3)\n"
            "sys.exit(3)\n"
        )
        self.assertEqual((done.returncode, done.stderr), (3, ""))
        self.assertIn("woken: ", done.stdout)
        self.assertEqual([p.name for p in pathlib.Path(self.folder).glob("*.tier")], [])

    def test_an_exit_with_a_thread_that_never_stops(self):
        """It is refused again and again while the interpreter ends, and nothing aborts."""
        for call in ("tensor.read()", "store.statistics()", "tensor.acquire(0).release()", "store.demote()"):
            done = self.run_program(
                "def work():\n"
                "    while True:\n"
                f"        try: {call}\n"
                "        except zg.Error: pass\n"
                "store = zg.Store(host_bytes='1MiB', drives={sys.argv[1]: '16MiB'})\n"
                "tensor = store.add('t', 'u8', 4 * MIB, segment_bytes=MIB // 4)\n"
                "tensor.write(bytes(4 * MIB))\n"
                "for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
                "time.sleep(0.5)\n"
            )
            self.assertEqual((done.returncode, done.stderr), (0, ""), call)
            self.assertEqual(list(pathlib.Path(self.folder).glob("*.tier")), [], call)

    def test_an_exit_during_a_measurement(self):
        done = self.run_program(
            "call = lambda: zg.io_bench(sys.argv[1], size='16MiB', seconds=600)\n"
            "threading.excepthook = lambda args: print(args.exc_type.__name__, flush=True)\n"
            "threading.Thread(target=call, daemon=True).start()\n"
            "time.sleep(2)\n"
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(os.listdir(self.folder), [])

    def test_an_open_store_is_closed_at_exit_however_it_is_held(self):
        done = self.run_program(
            "store = zg.Store(host_bytes='1MiB', drives={sys.argv[1]: '16MiB'})\n"
            "tensor = store.add('t', 'u8', 4 * MIB, segment_bytes=MIB // 4)\n"
            "tensor.write(bytes(4 * MIB))\n"
            "store.itself = store  # only the collector of cycles would free it\n"
            "sys.kept = store, tensor.acquire(0)\n"
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(list(pathlib.Path(self.folder).glob("*.tier")), [])


class LateViews(InFolder):
    def test_a_deleter_on_a_thread_that_python_does_not_know(self):
        """A consumer of DLPack calls the deleter from wherever it drops its last view."""
        store = zg.Store(host_bytes="4MiB")
        lease = store.add("t", "u8", 4096).acquire(mode="overwrite")
        api = ctypes.pythonapi
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
        capsule = lease.__dlpack__()
        managed = api.PyCapsule_GetPointer(capsule, b"dltensor")
        used = ctypes.c_char_p(b"used_dltensor")
        api.PyCapsule_SetName(capsule, used)
        del capsule
        self.assertEqual(lease.views, 1)
        deleter = ctypes.c_void_p.from_address(managed + 48 + 8).value  # behind the DLTensor and the context
        # As a start routine of the C library's own thread: no Python on that thread, and no GIL.
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        routine, argument = ctypes.c_void_p(deleter), ctypes.c_void_p(managed)
        self.assertEqual(libc.pthread_create(ctypes.byref(thread), None, routine, argument), 0)
        self.assertEqual(libc.pthread_join(thread, None), 0)
        self.assertEqual(lease.views, 0)
        lease.release()
        store.close()

    def test_views_that_outlive_the_interpreter(self):
        """Nothing crashes when the process ends with everything alive, and nothing is left on the drive."""
        code = (
            "import sys, numpy as np, ziggurat as zg, atexit\n"
            "store = zg.Store(host_bytes='4MiB', drives={sys.argv[1]: '16MiB'})\n"
            "t = store.add('t', 'u8', 8 << 20, segment_bytes=1 << 20); t.write(bytes(8 << 20))\n"
            "lease = t.acquire(0); pin = t.pin(1)\n"
            "sys.view = np.from_dlpack(lease); sys.other = memoryview(lease); sys.capsule = lease.__dlpack__()\n"
            "step = store.step(); step.__enter__()\n"
        )
        done = subprocess.run([sys.executable, "-c", code, self.folder], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_nothing_leaks(self):
        """nanobind tells at the end which of its objects are left."""
        code = (
            "import sys, numpy as np, ziggurat as zg\n"
            "def work():\n"
            "    with zg.Store(host_bytes='4MiB', drives={sys.argv[1]: '16MiB'}) as store:\n"
            "        t = store.add('t', 'u8', 1 << 20); t.write(bytes(1 << 20))\n"
            "        with t.acquire(0, 'write') as lease, t.pin(0): lease.numpy()[:] = 1\n"
            "        try: t.acquire(9)\n"
            "        except zg.UsageError: pass\n"
            "        zg.io_bench(sys.argv[1], size='1MiB', seconds=0, op='write')\n"
            "work()\n"
        )
        done = subprocess.run([sys.executable, "-c", code, self.folder], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_memory_stays_over_ten_thousand_leases(self):
        with zg.Store(host_bytes="4MiB") as store:
            t = store.add("t", "u8", 4096)
            t.write(bytes(4096))

            def many():
                for _ in range(10_000):
                    with t.acquire() as lease:
                        lease.numpy()
                        np.from_dlpack(lease)
                gc.collect()
                return resident()

            many()
            before = many()
            self.assertLess(many() - before, MIB)


class Drives(InFolder):
    def broken(self):
        """A store whose drive has lost what was written to it."""
        store = zg.Store(host_bytes="4MiB", drives={self.folder: "64MiB"})
        t = store.add("t", "u8", 32 * MIB, segment_bytes=MIB)
        t.write(np.full(32 * MIB, 7, np.uint8))
        store.demote()
        store.drain()
        (file,) = pathlib.Path(self.folder).glob("*.tier")
        with open(file, "r+b") as f:
            for at in range(0, os.path.getsize(file), MIB):
                f.seek(at)
                f.write(bytes(4096))
        return store, t

    def test_what_a_drive_has_lost_is_an_error_and_not_a_value(self):
        store, t = self.broken()
        with self.assertRaises(zg.IoError) as caught:
            t.read()
        e = caught.exception
        self.assertTrue(e.place and e.message, repr(e))
        with self.assertRaises(zg.Error):  # it has failed for good
            t.acquire(0)

    def test_a_full_disk(self):
        """More than the file system has, and a quota of it by the limit of a process."""
        code = (
            "import resource, sys, ziggurat as zg\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))\n"
            "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "try:\n"
            "    with zg.Store(host_bytes='1MiB', drives={sys.argv[1]: '64MiB'}) as s:\n"
            "        s.add('t', 'u8', 32 << 20, segment_bytes=1 << 20).write(bytes(32 << 20))\n"
            "    print('no error')\n"
            "except zg.IoError as e: print(e.code, e.errno, sys.argv[1] in str(e))\n"
        )
        done = subprocess.run([sys.executable, "-c", code, self.folder], capture_output=True, text=True)
        self.assertEqual(done.stdout, "io 27 True\n", done.stderr)  # EFBIG
        with self.assertRaises(zg.Error) as caught:
            zg.Store(host_bytes="1MiB", drives={self.folder: 1 << 50}).add("t", "u8", MIB).write(bytes(MIB))
        self.assertIn(self.folder, str(caught.exception))


class Signals(InFolder):
    def test_the_program_keeps_its_handlers(self):
        """No handler is set and no signal ignored by the import of the package, a store or an error."""
        code = (
            "def masks():  # of signals below 32: the others are the C library's own, for its threads\n"
            "    lines = [l.split() for l in open('/proc/self/status') if l[:6] in ('SigIgn', 'SigCgt')]\n"
            "    return [(name, int(mask, 16) & 0x7fffffff) for name, mask in lines]\n"
            "before = masks()\n"
            "import sys, ziggurat as zg\n"
            "with zg.Store(host_bytes='1MiB', drives={sys.argv[1]: '4MiB'}) as s:\n"
            "    s.add('t', 'u8', 4096).write(bytes(4096))\n"
            "    try: s.add('t', 'u8', 4096)\n"
            "    except zg.Error: pass\n"
            "    print(len(before), masks() == before)\n"
        )
        done = subprocess.run([sys.executable, "-c", code, self.folder], capture_output=True, text=True)
        self.assertEqual(done.stdout, "2 True\n", done.stderr)


def _work_of_child(drive, queue):
    with zg.Store(host_bytes="1MiB", drives={drive: "4MiB"}) as store:
        t = store.add("t", "u8", 4096)
        t.write(bytes([3]) * 4096)
        queue.put(int(t.read().sum()))


class Children(InFolder):
    def test_processes_of_every_start_method_beside_a_live_store(self):
        with zg.Store(host_bytes="1MiB", drives={self.folder: "8MiB"}) as store:
            t = store.add("t", "u8", 4 * MIB, segment_bytes=MIB // 4)
            t.write(bytes([1]) * (4 * MIB))
            for method in ("fork", "spawn", "forkserver"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                drive = os.path.join(self.folder, method)  # a directory serves one process
                os.mkdir(drive)
                child = context.Process(target=_work_of_child, args=(drive, queue))
                child.start()
                self.assertEqual(queue.get(timeout=60), 3 * 4096, method)
                child.join(60)
                self.assertEqual(child.exitcode, 0, method)
            self.assertEqual(int(t.read().sum()), 4 * MIB)


if __name__ == "__main__":
    unittest.main()
