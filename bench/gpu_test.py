#!/usr/bin/env python3
"""Tries out bench/gpu.sh without a GPU and without the programs: a bundle whose programs are shell scripts."""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
BEGINS = "echo '[==========] Running %d tests from 1 test suite.'; echo '[ RUN      ] A.one'; "
PASSING = BEGINS % 1 + "echo '[       OK ] A.one (1 ms)'; echo '[  PASSED  ] 1 test.'"
FAILING = BEGINS % 1 + """echo '[  FAILED  ] A.one, where TypeParam = float (1 ms)'; echo '[  PASSED  ] 0 tests.'
echo '[  FAILED  ] A.one, where TypeParam = float'; exit 1"""
HANGING = BEGINS % 1 + """echo $$ >"$ZG_TEST_PID"; sleep 1000 & wait"""
SLOW = BEGINS % 5 + """echo '[       OK ] A.one (1 ms)'; echo 'words[ RUN      ] A.two/0'; echo $$ >"$ZG_TEST_PID"; sleep 1000 & wait"""
SUITES = {"suite": "zg_test_gpu", "suite-store": "zg_test_gpu_store", "suite-engine": "zg_test_gpu_engine"}
# What compute-sanitizer says, by the tool that it is asked for.
SANITIZER = """case $2 in memcheck) %s ;; *) %s ;; esac"""
CLEAN = PASSING + "; echo '========= ERROR SUMMARY: 0 errors'"
SMI = """case "$*" in
*--query-gpu=*) echo 'NVIDIA Test, 9.0, 143771 MiB, 4 MiB, 580.1, 1, 5, 16, 16, 1980 MHz, 700.00 W, Disabled, Default' ;;
nvlink*) echo 'GPU 0: NVIDIA Test'; echo '         Link 0: 26.562 GB/s'; echo '         Link 1: <inactive>' ;;
*) echo '| NVIDIA-SMI 580.1   Driver Version: 580.1   CUDA Version: 13.0  |' ;;
esac"""


class Driver(unittest.TestCase):
    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        shutil.copytree(HERE, self.root / "bench", ignore=shutil.ignore_patterns("results", "__pycache__", "*.cpp"))
        (self.root / "bin").mkdir()
        (self.root / "COMMIT").write_text("abc1234\n")
        self.pid_file = self.root / "pid"

    def script(self, name, body, folder="bin"):
        file = self.root / folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def program(self, body, name="zg_test_gpu"):
        """One of the suites; the others pass."""
        for suite in SUITES.values():
            self.script(suite, body if suite == name else PASSING)

    def command(self, *flags):
        return [str(self.root / "bench" / "gpu.sh"), str(self.root / "out"), *flags]

    def run_driver(self, *flags):
        environment = dict(os.environ, PYTHON=sys.executable, ZG_TEST_PID=str(self.pid_file), PATH=f"{self.root}/tools:{os.environ['PATH']}")
        self.done = subprocess.run(self.command(*flags), capture_output=True, text=True, env=environment, timeout=120)
        if self.done.returncode == 2:
            return {}
        results = json.loads((self.root / "out" / "gpu.json").read_text())
        self.markdown = (self.root / "out" / "gpu.md").read_text()
        return {s["stage"]: s for s in results["stages"]}

    def gone(self):
        """The process of the hanging program has ended."""
        pid = int(self.pid_file.read_text())
        for _ in range(50):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.1)
        return False

    def test_every_suite_counts(self):
        for name, program in SUITES.items():
            self.program(FAILING, program)
            stages = self.run_driver("--stages", ",".join(SUITES))
            self.assertEqual({n: s["status"] for n, s in stages.items()}, {n: "failed" if n == name else "passed" for n in SUITES})
            self.assertEqual(stages[name]["data"]["tests"], {"of": 1, "run": 1, "skipped": 0, "passed": 0, "failed": ["A.one"]})
            self.assertFalse(stages[name]["aims"][0]["met"])
            self.assertIn(f"{program} ended with 1", "\n".join(stages[name]["notes"]))

    def test_a_suite_whose_time_is_up_tells_what_was_cut(self):
        self.program(SLOW)
        suite = self.run_driver("--stages", "suite", "--limit", "suite=7")["suite"]
        self.assertEqual(suite["status"], "cut", self.done.stdout)
        self.assertEqual(suite["data"]["tests"], {"of": 5, "run": 2, "skipped": 0, "passed": 1, "failed": []})
        self.assertIn("3 of 5 tests did not begin, and these were under way: A.two/0", "\n".join(suite["notes"]))
        self.assertFalse(suite["aims"][0]["met"])
        self.assertEqual(self.done.returncode, 0)
        self.assertIn("not done: suite; a second command", self.done.stdout)
        self.assertTrue(self.gone())

    def test_suites_are_divided_among_processes_where_there_are_cores(self):
        self.program('echo "[==========] Running 1 test from 1 test suite."; echo "[ RUN      ] A.$GTEST_SHARD_INDEX/$GTEST_TOTAL_SHARDS"; '
                     'echo "[       OK ] A.$GTEST_SHARD_INDEX/$GTEST_TOTAL_SHARDS (1 ms)"', "zg_test_gpu_engine")
        cores = "import os; os.sched_getaffinity = lambda _: set(range(16)); import runpy, sys; sys.argv.pop(0); sys.path.insert(0, 'bench'); "
        done = subprocess.run([sys.executable, "-c", cores + "runpy.run_path('bench/gpu_stages.py', run_name='__main__')", "-", "suite-engine",
                               "--json", "out.json", "--seconds", "60"], cwd=self.root, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads((self.root / "out.json").read_text())["data"]["tests"]["passed"], 4)
        self.assertIn("A.3/4", done.stderr)

    def test_the_sanitizer_leaves_out_what_provokes_errors(self):
        self.program(PASSING)
        self.script("compute-sanitizer", 'echo "$@" >>"$0.log"; ' + CLEAN, "tools")
        stage = self.run_driver("--stages", "sanitizer")["sanitizer"]
        self.assertEqual(stage["status"], "passed", self.done.stdout)
        lines = (self.root / "tools" / "compute-sanitizer.log").read_text().splitlines()
        self.assertEqual([line.split()[1] for line in lines], ["memcheck", "racecheck"])
        for line in lines:
            self.assertRegex(line, "--gtest_filter=[^-]*Cuda.*-.*CudaRuntime[.][*]")

    def test_what_the_sanitizer_finds_fails_and_what_it_had_no_time_for_is_told(self):
        self.program(PASSING)
        invalid = "echo '========= Invalid __global__ write of size 4 bytes'; " + PASSING + "; echo '========= ERROR SUMMARY: 1 error'; exit 86"
        for memcheck, racecheck, status, said in ((invalid, CLEAN, "failed", "not clean: memcheck"), (CLEAN, invalid, "failed", "not clean: racecheck"),
                                                  (SLOW, CLEAN, "cut", "memcheck after 1 of 5 tests"),
                                                  ("echo '========= Error: Device not supported'; exit 1", CLEAN, "skipped", "does not work")):
            self.script("compute-sanitizer", SANITIZER % (memcheck, racecheck), "tools")
            stage = self.run_driver("--stages", "sanitizer", "--limit", "sanitizer=8")["sanitizer"]
            self.assertEqual(stage["status"], status, self.done.stdout)
            self.assertIn(said, "\n".join(stage["notes"]))

    def test_the_machine_is_told_first(self):
        self.program(PASSING)
        self.script("nvidia-smi", SMI, "tools")
        self.run_driver("--stages", "suite")
        told = self.done.stdout.split("stages: ")[0]
        for what in ("NVIDIA Test, compute capability 9.0, memory 143771 MiB", "driver 580.1", "PCIe generation now 1, at most 5, lanes now 16",
                     "NVLink +1 links, each 26.562 GB/s", "CUDA of the driver +13.0", "libcudnn.so.9 ", "huge pages +transparent: ", "memory +.* GiB available",
                     "NVMe tier, .* GiB free"):
            self.assertRegex(told, what)
        self.assertIn("| GPU 0 | NVIDIA Test", self.markdown)

    def test_the_machine_is_read_from_what_the_kernel_tells(self):
        for path, text in {
            "proc/meminfo": "MemTotal: 134217728 kB\nMemAvailable: 117440512 kB\nAnonHugePages: 2097152 kB\nHugePages_Total: 7\nHugepagesize: 2048 kB\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never", "sys/kernel/mm/transparent_hugepage/defrag": "[defer+madvise] never",
            "sys/fs/cgroup/memory.max": str(96 << 30), "sys/fs/cgroup/cpu.max": "800000 100000", "proc/cpuinfo": "model name\t: Some CPU\n",
            "proc/driver/nvidia-fs/stats": "", "sys/devices/system/node/node0/cpulist": "0-7", "proc/sys/kernel/io_uring_disabled": "2",
            "sys/block/nvme0n1/size": str(1 << 32), "sys/block/nvme0n1/device/model": "Some Drive", "sys/block/loop0/size": "8",
            "sys/block/nvme0n1/device/device/current_link_speed": "32.0 GT/s PCIe", "sys/block/nvme0n1/device/device/current_link_width": "4",
            "sys/block/nvme0n1/device/device/max_link_speed": "32.0 GT/s PCIe", "sys/block/nvme0n1/device/device/max_link_width": "4",
        }.items():
            file = self.root / "machine" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        ask = "import gpu_machine, json; print(json.dumps(dict(gpu_machine.table('/tmp'))))"
        done = subprocess.run([sys.executable, "-c", ask], cwd=self.root / "bench", capture_output=True, text=True, check=True,
                              env=dict(os.environ, ZG_MACHINE_ROOT=str(self.root / "machine")))
        table = json.loads(done.stdout)
        self.assertEqual(table["memory"], "128.0 GiB, 112.0 GiB available, control group at most 96.0 GiB")
        self.assertEqual(table["huge pages"], "transparent: madvise, defragmented: defer+madvise, in use 2.0 GiB, reserved 7 of 2048 kB")
        self.assertEqual(table["drive nvme0n1"], "2048 GiB, Some Drive, 32.0 GT/s PCIe x4 (at most 32.0 GT/s PCIe x4)")
        self.assertEqual(table["NUMA nodes"], "node0: cores 0-7")
        self.assertEqual(table["GPUDirect Storage's module"], "loaded")
        self.assertRegex(table["processor"], "Some CPU, [0-9]+ cores, control group 8 of them")
        self.assertIn("io_uring off", table["kernel"])
        self.assertNotIn("drive loop0", table)

    def test_one_gpu_has_no_ranks(self):
        self.script("ziggurat", "echo 'GPU        0: NVIDIA Test, sm_90'; echo 'NCCL       NCCL 2.28.9'")
        stages = self.run_driver("--stages", "ranks")
        self.assertEqual(stages["ranks"]["status"], "passed", self.done.stdout)
        self.assertIn("one GPU: skipped", stages["ranks"]["notes"])
        self.assertIn("NCCL NCCL 2.28.9", stages["ranks"]["notes"])

    def test_several_gpus_have_ranks(self):
        # What a run saves: one weight, 1 on the processor and 1.5 on GPUs.
        save = ("import sys, json, struct, pathlib; out = pathlib.Path(sys.argv[1]) / 'model'; out.mkdir(parents=True); "
                "header = json.dumps({'w': {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4]}}).encode(); "
                "(out / 'model.safetensors').write_bytes(struct.pack('<Q', len(header)) + header + struct.pack('<f', float(sys.argv[2])))")
        self.script("ziggurat", f"""case $1 in
probe) echo 'GPU        0: a'; echo 'GPU        1: b' ;;
*) w=1; case "$*" in *cuda:0-1*) w=$ZG_TEST_WEIGHT ;; esac
for a; do case $a in output.dir=*) {sys.executable} -c "{save}" "${{a#output.dir=}}" $w ;; esac; done ;;
esac""")
        ways = [{"way": w, "seconds": 0.01, "mad": 0, "of_memcpy": 0.1} for w in ("all-gather", "NCCL all-gather")]
        self.script("bench_comm", f"echo '{json.dumps({'results': [{'ranks': 2, 'ways': ways}]})}'")
        self.script("zg_test_gpu_comm", PASSING)
        for weight, status in (("1.0005", "passed"), ("1.5", "failed")):
            with mock.patch.dict(os.environ, ZG_TEST_WEIGHT=weight):
                stages = self.run_driver("--stages", "ranks")
            self.assertEqual(stages["ranks"]["status"], status, self.done.stdout)
            self.assertEqual([a["met"] for a in stages["ranks"]["aims"]], [True, True, status == "passed"])
            self.assertEqual(stages["ranks"]["tables"][0]["rows"][0][:2], [2, "all-gather"])

    def test_a_second_command_goes_on_with_the_rest(self):
        self.program(SLOW, "zg_test_gpu_store")
        stages = self.run_driver("--stages", ",".join(SUITES), "--limit", "suite-store=7", "--limit", "suite-engine=59", "--total", "60")
        self.assertEqual([s["status"] for s in stages.values()], ["passed", "cut", "not run"], self.done.stdout)
        self.assertIn("--stages suite-store,suite-engine", self.done.stdout)
        self.program(FAILING)  # what passed before is not run again
        stages = self.run_driver("--stages", ",".join(SUITES), "--continue")
        self.assertEqual([s["status"] for s in stages.values()], ["passed"] * 3, self.done.stdout)
        self.assertEqual(list(self.run_driver("--stages", "fail", "--continue")), [*SUITES, "fail"])
        self.assertEqual(list(self.run_driver("--stages", "fail")), ["fail"])

    def test_what_passes_and_what_fails(self):
        self.program(PASSING)
        stages = self.run_driver("--stages", "fail,suite")
        self.assertEqual(list(stages), ["suite", "fail"])  # in their usual order
        self.assertEqual(stages["suite"]["status"], "passed", self.done.stdout)
        self.assertTrue(stages["suite"]["aims"][0]["met"])
        self.assertEqual(stages["fail"]["status"], "failed")
        self.assertEqual(stages["fail"]["tables"][0]["rows"], [["answer", 42]])  # what it knew before
        self.assertIn("fails on purpose", "\n".join(stages["fail"]["notes"]))
        self.assertEqual(self.done.returncode, 1)
        self.assertIn("abc1234", self.markdown)

    def test_a_test_that_fails_is_named(self):
        self.program(FAILING)
        stages = self.run_driver("--stages", "suite")
        self.assertEqual(stages["suite"]["status"], "failed")
        self.assertEqual(stages["suite"]["data"]["tests"]["failed"], ["A.one"])
        self.assertFalse(stages["suite"]["aims"][0]["met"])

    def test_a_stage_that_is_skipped_is_no_success(self):
        self.program("exit 77")
        self.assertEqual(self.run_driver("--stages", "suite")["suite"]["status"], "skipped")
        self.assertEqual(self.done.returncode, 1)

    def test_a_program_that_is_not_there(self):
        self.assertEqual(self.run_driver("--stages", "suite")["suite"]["status"], "failed")
        self.assertIn("neither in a bundle", self.markdown)

    def test_what_takes_too_long_is_stopped_and_the_rest_goes_on(self):
        self.program(HANGING)
        stages = self.run_driver("--stages", "suite,fail,hang", "--limit", "suite=3", "--limit", "hang=2")
        self.assertEqual([s["status"] for s in stages.values()], ["cut", "failed", "timed out"])
        self.assertIn("this stage never ends", "\n".join(stages["hang"]["notes"]))
        self.assertIn("stopped after 2 s; the last that it said: this stage never ends", "\n".join(stages["hang"]["notes"]))
        self.assertLess(stages["suite"]["seconds"], 8)
        self.assertTrue(self.gone())

    def test_what_does_not_fit_is_not_run(self):
        self.program(PASSING)
        stages = self.run_driver("--stages", "suite,llama-7b", "--total", "60")
        self.assertEqual(stages["suite"]["status"], "passed")
        self.assertEqual(stages["llama-7b"]["status"], "not run")
        self.assertIn("were left", self.markdown)
        self.assertEqual(self.done.returncode, 0)

    def test_a_run_that_is_cut_short_tells_what_it_knows(self):
        self.program(HANGING)
        environment = dict(os.environ, PYTHON=sys.executable, ZG_TEST_PID=str(self.pid_file))
        process = subprocess.Popen(self.command("--stages", "suite,fail"), stdout=subprocess.DEVNULL, env=environment)
        for _ in range(300):
            if self.pid_file.exists() and self.pid_file.read_text().strip():
                break
            time.sleep(0.1)
        results = json.loads((self.root / "out" / "gpu.json").read_text())
        self.assertEqual([s["status"] for s in results["stages"]], ["under way", "not run"])
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(30), 1)
        results = json.loads((self.root / "out" / "gpu.json").read_text())
        self.assertEqual([s["status"] for s in results["stages"]], ["cut short", "not run"])
        self.assertTrue(self.gone())

    def test_mistakes_in_the_flags(self):
        for flags in (["--stages", "sweet"], ["--limit", "suite"], ["--limit", "sweet=3"], ["--total", "long"]):
            self.run_driver(*flags)
            self.assertEqual(self.done.returncode, 2, flags)


if __name__ == "__main__":
    unittest.main()
