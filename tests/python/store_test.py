"""The store from Python: leases and their views, waits, errors, forks. Needs NumPy, not torch."""
import gc
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from support import need

need("numpy")

import numpy as np  # noqa: E402

import ziggurat as zg  # noqa: E402

MIB = 1 << 20


class OnDrive(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def store(self, host="4MiB", drive="32MiB"):
        self.drive = tempfile.mkdtemp(dir=self.folder)
        store = zg.Store(host_bytes=host, drives={self.drive: drive})
        self.addCleanup(store.close)
        return store


class Contents(OnDrive):
    def test_a_tensor_larger_than_memory_comes_back_whole(self):
        store = self.store()
        t = store.add("w", np.float32, (16, MIB // 4), segment_bytes="1MiB")
        self.assertEqual((t.segments, t.nbytes, t.shape), (16, 16 * MIB, (16, MIB // 4)))
        values = np.arange(4 * MIB, dtype=np.float32).reshape(t.shape)
        t.write(values)
        np.testing.assert_array_equal(t.read(), values)
        with store.step():
            for i in range(t.segments):
                with t.acquire(i, mode="write") as lease:
                    lease.numpy()[:] += 1
        np.testing.assert_array_equal(t.read(), values + 1)
        s = store.statistics()
        self.assertGreaterEqual(s.links.nvme_write.bytes, 12 * MIB)
        self.assertEqual(s.tiers.host.budget, 4 * MIB)
        self.assertLessEqual(s.tiers.host.peak, 4 * MIB)
        self.assertIn("nvme_write", s._repr_html_())
        self.assertEqual(s.as_dict()["tiers"]["host"]["budget"], 4 * MIB)

    def test_every_dtype_has_its_numpy_view(self):
        store = self.store()
        for name in ("float64", "float32", "float16", "int64", "int32", "uint16", "uint8"):
            t = store.add(name, name, 8)
            with t.acquire(mode="overwrite") as lease:
                a = lease.numpy((2, 4))
                self.assertEqual((a.dtype.name, a.shape, a.flags.writeable), (name, (2, 4), True))
                a[:] = 3
                del a
            self.assertEqual(t.read().tolist(), [3] * 8)
        with store.add("b", "bfloat16", 8).acquire(mode="overwrite") as lease:
            self.assertEqual(lease.numpy().itemsize, 2)

    def test_arrays_of_other_types_are_not_taken_for_its_own(self):
        store = self.store()
        t = store.add("t", "float32", 8)
        for values in (np.arange(8, dtype=np.int32), np.arange(4.0)):  # of as many bytes
            with self.assertRaises(zg.UsageError) as caught:
                t.write(values)
            self.assertIn(str(values.dtype), caught.exception.message)
        t.write(np.arange(8, dtype=np.float32).reshape(2, 4).T)  # not contiguous
        self.assertEqual(t.read().tolist(), [0, 4, 1, 5, 2, 6, 3, 7])
        t.write(t.read().tobytes())
        self.assertEqual(t.read().tolist(), [0, 4, 1, 5, 2, 6, 3, 7])
        b = store.add("b", "bfloat16", 4)
        b.write(np.array([0x3F80, 0, 0x4000, 0xBF80], dtype=np.uint16))
        with b.acquire() as lease:
            self.assertEqual(bytes(memoryview(lease)), bytes.fromhex("803f 0000 0040 80bf"))
        with self.assertRaisesRegex(KeyError, "no tensor .c."):
            store["c"]

    def test_leases_of_several_segments_at_once(self):
        store = self.store()
        t = store.add("t", "u8", 2 * MIB, segment_bytes=MIB)
        leases = store.acquire_all([(t, 0, "overwrite"), (t, 1, "overwrite")])
        for n, lease in enumerate(leases):
            lease.numpy()[:] = n + 1
            lease.release()
        self.assertEqual(set(t.read().tolist()), {1, 2})

    def test_pins_hold_and_end(self):
        store = self.store()
        t = store.add("t", "u8", MIB)
        t.write(bytes(MIB))
        with t.pin() as pin:
            self.assertFalse(pin.released)
            with self.assertRaises(zg.UsageError):
                t.remove()
            with self.assertRaises(zg.UsageError):
                store.demote()
        self.assertTrue(pin.released)
        pin.release()
        store.demote()
        store.drain()
        self.assertEqual(store.statistics().tiers.host.used, 0)
        t.remove()
        self.assertNotIn("t", store)


class Checkpoints(OnDrive):
    def filled(self):
        store = self.store()
        wanted = {}
        for n, name in enumerate(("float64", "float32", "float16", "int64", "int32", "uint16", "uint8")):
            wanted[name] = np.random.default_rng(n).integers(0, 200, (300, 700)).astype(name)
            store.add(name, name, wanted[name].shape, segment_bytes="64KiB", priority=n).write(wanted[name])
        store.add("one", "f32", ()).write(np.full(1, 3, np.float32))
        store.add("empty", "bf16", 77, lowest="host")
        return store, wanted

    def test_a_store_comes_back(self):
        store, wanted = self.filled()
        saved = os.path.join(self.folder, "saved")
        store.checkpoint(saved)
        store["uint8"].write(wanted["uint8"] + 1)
        manifest = store.checkpoint(saved, step=7)
        self.assertEqual(os.path.basename(os.path.dirname(manifest)), "0002-step-7")
        drive = tempfile.mkdtemp(dir=self.folder)
        with zg.Store.open(saved, host_bytes="1MiB", drives={drive: "32MiB"}) as other:
            self.assertEqual(list(other), list(store))
            for name, values in wanted.items():
                np.testing.assert_array_equal(other[name].read(), values + (name == "uint8"))
                self.assertEqual(other[name].declared, store[name].declared)
            self.assertEqual(other["one"].read().tolist(), 3)
            self.assertFalse(other["empty"].has_content())
            self.assertGreater(other.statistics().links.nvme_write.bytes, 0)
        program = os.environ.get("ZG_PROGRAM")
        for command in (["list", saved], ["show", saved, "--tensors"], ["verify", saved]) if program else ():
            done = subprocess.run([program, "checkpoint", *command], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_what_cannot_be_opened(self):
        store, _ = self.filled()
        manifest = store.checkpoint(os.path.join(self.folder, "saved"))
        data = os.path.join(os.path.dirname(manifest), "rank-00000.safetensors")
        with open(data, "r+b") as f:
            f.seek(-3, os.SEEK_END)
            f.write(b"xyz")
        with self.assertRaises(zg.UsageError):
            zg.Store.open(manifest, host_bytes="4MiB")
        half = store.add("half", "u8", 8192, segment_bytes=4096)
        half.acquire(1, "overwrite").release()
        with self.assertRaisesRegex(zg.UsageError, "half"):
            store.checkpoint(os.path.join(self.folder, "other"))


class Views(OnDrive):
    def lease(self, mode="overwrite"):
        store = self.store()
        t = store.add("t", "float32", 1024)
        t.write(np.zeros(1024, np.float32))
        return store, t, t.acquire(mode=mode)

    def test_a_view_keeps_its_lease(self):
        store, t, lease = self.lease()
        array = lease.numpy()
        with self.assertRaises(BufferError) as caught:
            lease.release()
        self.assertIn("1 view", str(caught.exception))
        with self.assertRaises(zg.UsageError):
            store.close()
        array[:] = 7
        del array
        lease.release()
        lease.release()
        self.assertTrue(lease.released)
        with self.assertRaises(zg.UsageError):
            lease.numpy() if lease.nbytes else None

    def test_a_block_that_ends_before_its_views_hands_the_lease_over(self):
        store, t, lease = self.lease()
        with lease:
            array = lease.numpy()
        self.assertTrue(lease.released)
        self.assertEqual(store._core.leases, 1)
        array[:] = 5  # still ours
        del array
        self.assertEqual(store._core.leases, 0)
        self.assertEqual(t.read()[0], 5)

    def test_a_view_outlives_the_store_object(self):
        store = zg.Store(host_bytes="4MiB")
        with store.add("t", "u8", 4096).acquire(mode="overwrite") as lease:
            array = lease.numpy()
        del store, lease
        gc.collect()
        array[:] = 9
        self.assertEqual(array.sum(), 9 * 4096)

    def test_what_is_read_cannot_be_written(self):
        _, _, lease = self.lease("read")
        with lease:
            array = lease.numpy()
            self.assertFalse(array.flags.writeable)
            with self.assertRaises(ValueError):
                array[0] = 1
            self.assertTrue(memoryview(lease).readonly)
            del array

    def test_who_writes_to_what_is_read_ends_with_protect_reads(self):
        code = (
            "import sys, ctypes, ziggurat as zg\n"
            "with zg.Store(host_bytes='4MiB', drives={sys.argv[1]: '16MiB'}, protect_reads=True) as store:\n"
            "    t = store.add('t', 'u8', 2 << 20, segment_bytes=5000)\n"
            "    t.write(bytes([7]) * (2 << 20))\n"
            "    a, b, c = t.acquire(3), t.acquire(3), t.acquire(4)\n"
            "    assert bytes(memoryview(b)) == bytes([7]) * 5000\n"
            "    write = lambda lease: ctypes.memset(lease.address, 1, 1)\n"
            "    if sys.argv[2] == 'reader': b.release(); write(a)\n"
            "    a.release(); b.release()\n"
            "    with t.acquire(3, 'write') as w: write(w); print('written', flush=True)\n"
            "    if sys.argv[2] == 'neighbour': write(c)\n"
            "    c.release(); t.read(); print('read')\n"
        )
        for who, status, said in (("nobody", 0, "written\nread\n"), ("reader", -signal.SIGSEGV, ""),
                                  ("neighbour", -signal.SIGSEGV, "written\n")):  # fmt: skip
            done = subprocess.run([sys.executable, "-c", code, self.folder, who], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stdout), (status, said), done.stderr)
            for name in os.listdir(self.folder):  # of a process that had no time to remove it
                os.unlink(os.path.join(self.folder, name))

    def test_dlpack(self):
        store, _, lease = self.lease()
        self.assertEqual(lease.__dlpack_device__(), (1, 0))
        array = np.from_dlpack(lease)
        self.assertEqual((array.shape, array.dtype), ((1024,), np.float32))
        with self.assertRaises(BufferError):
            lease.release()
        del array
        unused = [lease.__dlpack__(), lease.__dlpack__(stream=None, max_version=(1, 0))]
        self.assertEqual(lease.views, 2)
        with self.assertRaises(BufferError):
            lease.__dlpack__(copy=True)
        del unused
        lease.release()
        self.assertEqual(store._core.leases, 0)

    def test_ten_thousand_views_leave_nothing(self):
        store, _, lease = self.lease()
        for kind in (np.from_dlpack, lambda x: x.numpy()):
            kind(lease)
            before = sys.getrefcount(lease)
            for _ in range(10_000):
                kind(lease)
            self.assertEqual((sys.getrefcount(lease), lease.views), (before, 0))
        lease.release()


class Errors(OnDrive):
    def test_classes_place_and_hint(self):
        store = self.store()
        t = store.add("t", "u8", 4096)
        for call, kind, place in (
            (lambda: t.acquire(), zg.UsageError, "t"),  # never written
            (lambda: t.acquire(1), zg.UsageError, 'tensor "t"'),
            (lambda: t.acquire(mode="wirte"), zg.UsageError, "mode"),
            (lambda: store.add("t", "u8", 1), zg.UsageError, "t"),
            (lambda: store.add("u", "complex64", 1), zg.UsageError, "dtype"),
            (lambda: store.add("big", "u8", 1 << 30), zg.IoError, ""),
            (lambda: zg.Store(host_bytes=0), zg.UsageError, "host_bytes"),
            (lambda: zg.Store(host_bytes="12 parsec"), zg.UsageError, "host_bytes"),
            (lambda: zg.Store(host_bytes=None), zg.UsageError, "host_bytes"),
            (lambda: zg.Store(host_bytes=MIB, drives=self.folder), zg.UsageError, "drives"),
            (lambda: zg.Store(host_bytes=MIB, drives=[self.folder]), zg.UsageError, "drives"),
            (lambda: zg.Store(host_bytes=MIB, drives={"/nowhere": MIB}), zg.UsageError, "/nowhere"),
            (lambda: zg.Store(host_bytes=1 << 55), zg.MemoryLimitError, ""),
            (lambda: zg.io_bench(self.folder, op="erase"), zg.UsageError, "op"),
            (lambda: zg.io_bench([], op="copy"), zg.UsageError, "benchmark"),
            (lambda: zg.io_bench(self.folder, op="copy", seconds=1), zg.UsageError, "benchmark"),
            (lambda: zg.io_bench("/nowhere", op="copy", existing=True), zg.UsageError, "/nowhere"),
        ):
            with self.assertRaises(kind) as caught:
                call()
            e = caught.exception
            self.assertIn(place, e.place)
            self.assertIn(e.message, str(e))
            self.assertEqual(e.code, kind.code)
        self.assertTrue(issubclass(zg.UsageError, ValueError) and issubclass(zg.IoError, OSError))
        self.assertTrue(issubclass(zg.MemoryLimitError, MemoryError))

    def test_errno_of_a_failure(self):
        from ziggurat import _errors

        for code, kind, also in (
            ("usage", zg.UsageError, ValueError), ("io", zg.IoError, OSError),
            ("memory", zg.MemoryLimitError, MemoryError),
            ("device", zg.DeviceError, RuntimeError), ("comm", zg.DeviceError, RuntimeError),
            ("numeric", zg.NumericError, ArithmeticError), ("interrupted", zg.Interrupted, RuntimeError),
            ("fork", zg.ForkError, RuntimeError), ("bug", zg.Error, RuntimeError),
        ):  # fmt: skip
            e = _errors.make(code, "there", "is wrong", "mend it")
            self.assertIs(type(e), kind)
            self.assertIsInstance(e, also)
            self.assertEqual((e.code, e.place, e.message, e.hint), (code, "there", "is wrong", "mend it"))
            self.assertEqual(str(e), "there: is wrong\n  hint: mend it")
        e = _errors.make("io", "/mnt/a", "cannot be written: No space left on device (errno 28)", "free some")
        self.assertEqual((e.errno, e.path, e.hint), (28, "/mnt/a", "free some"))
        self.assertIsInstance(e, OSError)

    def test_an_error_in_a_block_with_leases_is_the_one_that_comes_out(self):
        with self.assertRaises(KeyError):
            with zg.Store(host_bytes="1MiB") as store:
                lease = store.add("t", "u8", 4096).acquire(mode="overwrite")
                raise KeyError("mine")
        lease.release()
        store.close()

    def test_no_room_beside_leases(self):
        store = self.store()
        t = store.add("t", "u8", 8 * MIB, segment_bytes=2 * MIB)
        held = [t.acquire(i, "overwrite") for i in range(2)]
        with self.assertRaises(zg.MemoryLimitError):
            t.acquire(2, "overwrite")
        del held
        t.acquire(2, "overwrite").release()

    def test_a_wait_that_would_never_end(self):
        store = self.store()
        t = store.add("t", "u8", 4096)
        with t.acquire(mode="overwrite"):
            with self.assertRaises(zg.UsageError):
                t.acquire()

    def test_nothing_can_be_pickled(self):
        import copy
        import pickle

        store = self.store()
        t = store.add("t", "u8", 4096)
        with t.acquire(mode="overwrite") as lease:
            for thing in (store, t, lease):
                for how in (pickle.dumps, copy.deepcopy):
                    with self.assertRaises(TypeError):
                        how(thing)

    def test_a_closed_store(self):
        store = self.store()
        t = store.add("t", "u8", 4096)
        store.close()
        store.close()
        for call in (t.acquire, t.explain, store.statistics, store.drain, lambda: store.add("u", "u8", 1)):
            with self.assertRaises(zg.UsageError):
                call()


class Threads(OnDrive):
    def wait_for_lease(self):
        """A tensor, and the lease of another thread that is in the way until `go_on` is set."""
        store = self.store()
        t = store.add("t", "u8", 4096)
        t.write(bytes(4096))
        go_on, held = threading.Event(), threading.Event()

        def hold():
            with t.acquire(mode="write"):
                held.set()
                go_on.wait(10)

        thread = threading.Thread(target=hold)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(go_on.set)
        held.wait()
        return store, t, go_on

    def test_others_run_while_a_call_waits(self):
        interval = sys.getswitchinterval()
        sys.setswitchinterval(60)  # a call that keeps the GIL would keep it for good
        self.addCleanup(sys.setswitchinterval, interval)
        for call in ("acquire", "acquire_all", "discard"):
            store, t, go_on = self.wait_for_lease()
            calls = {"acquire": t.acquire, "discard": t.discard,
                     "acquire_all": lambda: store.acquire_all([(t, 0, "read")])}  # fmt: skip
            threading.Timer(0.2, go_on.set).start()
            begin = time.monotonic()
            calls[call]()
            self.assertLess(time.monotonic() - begin, 5, call)

    def test_ctrl_c_ends_a_wait_and_leaves_the_store_usable(self):
        store, t, go_on = self.wait_for_lease()
        taken = []
        for _ in range(3):  # the best of three: the machine may be busy
            raised = []

            def interrupt():
                raised.append(time.monotonic())
                signal.raise_signal(signal.SIGINT)

            threading.Timer(0.3, interrupt).start()
            with self.assertRaises(KeyboardInterrupt):
                t.acquire()
            taken.append(time.monotonic() - raised[0])
        self.assertLess(min(taken), 0.5)
        go_on.set()
        with t.acquire() as lease:
            self.assertEqual(lease.nbytes, 4096)
        t.write(bytes([1]) * 4096)
        self.assertEqual(t.read().sum(), 4096)


class Forks(OnDrive):
    def child(self, work):
        """The exit code of a forked child that does `work`; 99 where it does not end in time."""
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(work())
            except BaseException as e:  # noqa: BLE001
                print(repr(e), file=sys.stderr)
                os._exit(98)
        for _ in range(500):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return 99

    def test_a_forked_child_is_refused_at_once_and_harms_nothing(self):
        store = self.store()
        t = store.add("t", "float32", 1024, segment_bytes=1024)
        t.write(np.ones(1024, np.float32))
        lease, pin = t.acquire(), t.pin(1)
        view = memoryview(lease)

        def work():
            for call in (t.acquire, t.discard, store.statistics, store.close, lease.release, lease.numpy, pin.release):
                try:
                    call()
                    return 1
                except (zg.ForkError, BufferError):
                    pass
            nonlocal view
            view = None
            return 0

        self.assertEqual(self.child(work), 0)

        def drop_all():  # what the interpreter does when the child ends
            nonlocal store, t, lease, pin, view
            view = lease = pin = t = store = None
            self._cleanups.clear()
            gc.collect()
            with zg.Store(host_bytes="4MiB") as own:  # a child may have a store of its own
                own.add("x", "u8", 4096).write(bytes(4096))
            return 0

        self.assertEqual(self.child(drop_all), 0)
        self.assertEqual([n.rpartition(".")[2] for n in os.listdir(self.drive) if n.endswith(".tier")], ["tier"])
        view.release()
        lease.release()
        pin.release()
        self.assertEqual(t.read().sum(), 1024)


class Measures(OnDrive):
    def test_io_bench_and_probe(self):
        r = zg.io_bench(self.folder, size="8MiB", block_size="256KiB", seconds=0, verify=True, op="write")
        self.assertEqual(r.write.bytes, 8 * MIB)
        self.assertGreater(r.bytes_per_second, 0)
        self.assertIn("GB/s", repr(r))
        r = zg.io_bench(self.folder, "copy", size="8MiB", block_size="256KiB", verify=True)
        self.assertEqual((r.read.bytes, r.write.bytes), (8 * MIB, 8 * MIB))
        p = zg.probe([self.folder])
        self.assertGreater(p.memory, 0)
        self.assertTrue(any(b.works for b in p.backends))
        self.assertEqual(p.paths[0].path, self.folder)

    def test_io_tune(self):
        seen = []

        def progress(text):
            seen.append(text)
            return len(seen) < 5

        r = zg.io_tune(self.folder, seconds=4, size="16MiB", on_progress=progress)
        self.assertTrue(r.found)
        self.assertEqual(set(r.aio) >= {"block_size", "queue_depth", "thread_count"}, True)
        self.assertIsInstance(r.aio, dict)
        self.assertEqual(os.listdir(self.folder), [])
        self.assertIn("<table>", r._repr_html_())

    def test_log(self):
        path = os.path.join(self.folder, "log.jsonl")
        with open(path, "w") as f:
            f.write('{"step":1,"loss":2.5,"bytes":{"nvme_read":10}}\n')
            f.write('{"step":2,"loss":2.0,"val_loss":3,"bytes":{"nvme_read":20}}\n{"st')
        log = zg.read_log(self.folder)
        self.assertEqual((len(log), log["loss"], log["val_loss"]), (2, [2.5, 2.0], [None, 3]))
        self.assertEqual(log.links(), {"nvme_read": 15})
        self.assertTrue(np.isnan(log.array("val_loss")[0]))
        with self.assertRaises(zg.UsageError):
            log["lss"]
        with self.assertRaisesRegex(zg.UsageError, "has not ended a step"):
            zg.Log([])["loss"]
        path = log.to_tensorboard()
        self.assertEqual(os.path.dirname(path), self.folder)
        with open(path, "rb") as f:
            data = f.read()
        self.assertEqual(data[:8], (24).to_bytes(8, "little"))
        self.assertIn(b"bytes/nvme_read\x15" + np.float32(20).tobytes(), data)
        try:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        except ImportError:
            pass  # the bytes above are what it reads
        else:
            events = EventAccumulator(path).Reload()
            self.assertEqual([(e.step, e.value) for e in events.Scalars("loss")], [(1, 2.5), (2, 2.0)])
        follow = zg.read_log(self.folder, follow=True)
        self.assertEqual([next(follow)["step"], next(follow)["step"]], [1, 2])


class Runs(OnDrive):
    def config(self):
        with open(os.path.join(self.folder, "text.txt"), "w") as f:
            f.write("In the beginning God created the heaven and the earth. " * 200)
        return {
            "model": {"arch": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 32},
            "data": {"train": os.path.join(self.folder, "text.txt"), "tokenizer": "bytes", "seq_len": 32},
            "train_batch_size": 2, "steps": 4, "devices": "host", "tiers": {"device": "8MiB", "host": "8MiB"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "output": {"dir": os.path.join(self.folder, "run")},
        }  # fmt: skip

    def test_a_run_calls_back_and_leaves_its_log(self):
        seen = []
        result = zg.train(self.config(), on_step=seen.append)
        self.assertEqual([s["step"] for s in seen], [1, 2, 3, 4])
        self.assertEqual(result.steps, 4)
        self.assertEqual(result.log.steps, seen)
        self.assertEqual(result.last_loss, seen[-1]["loss"])
        self.assertTrue(os.path.isdir(os.path.join(result.output_dir, "model")))
        again = zg.train(self.config(), steps=2)
        self.assertEqual(again.log["loss"], result.log["loss"][:2])

    def test_a_callback_can_end_it(self):
        result = zg.train(self.config(), on_step=lambda s: s["step"] < 2)
        self.assertEqual((result.stopped, len(result.log)), (True, 3))

        def fail(step):
            raise KeyError("mine")

        with self.assertRaises(KeyError):
            zg.train(self.config(), on_step=fail)
        with self.assertRaises(zg.UsageError):
            zg.train(dict(self.config(), lr=1))

    def test_ctrl_c_ends_it(self):
        def interrupt(step):
            if step["step"] == 2:
                os.kill(os.getpid(), signal.SIGINT)

        with self.assertRaises(KeyboardInterrupt):
            zg.train(self.config(), steps=10**6, on_step=interrupt)
        self.assertLess(len(zg.read_log(os.path.join(self.folder, "run"))), 10**5)


class Examples(OnDrive):
    def test_store_stream(self):
        example = pathlib.Path(__file__).resolve().parents[2] / "tools" / "examples" / "store_stream.py"
        command = [sys.executable, example, "--total", "32MiB", "--host", "16MiB", "--steps", "3", self.folder]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        self.assertIn("every value is 3", done.stdout)


class Docs(unittest.TestCase):
    def test_everything_public_is_documented(self):
        for name in zg.__all__:
            thing = getattr(zg, name)
            if callable(thing):
                self.assertTrue(thing.__doc__ and len(thing.__doc__) > 20, name)
            if isinstance(thing, type):
                for member, value in vars(thing).items():
                    if callable(value) and not member.startswith("_") and member not in ("items",):
                        self.assertTrue(value.__doc__, f"{name}.{member}")

    def test_neither_torch_is_needed(self):
        self.assertNotIn("torch", sys.modules)


if __name__ == "__main__":
    unittest.main()
