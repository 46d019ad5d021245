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

HERE = pathlib.Path(__file__).resolve().parent
PASSING = """echo '[ RUN      ] A.one'; echo '[       OK ] A.one (1 ms)'; echo '[  PASSED  ] 1 test.'"""
FAILING = """echo '[ RUN      ] A.one'; echo '[  FAILED  ] A.one (1 ms)'; echo '[  PASSED  ] 0 tests.'; exit 1"""
HANGING = """echo $$ >"$ZG_TEST_PID"; echo '[ RUN      ] A.one'; sleep 1000 & wait"""


class Driver(unittest.TestCase):
    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        shutil.copytree(HERE, self.root / "bench", ignore=shutil.ignore_patterns("results", "__pycache__", "*.cpp"))
        (self.root / "bin").mkdir()
        (self.root / "COMMIT").write_text("abc1234\n")
        self.pid_file = self.root / "pid"

    def program(self, body, name="zg_test_gpu"):
        """One of the suites; the others pass."""
        for suite in ("zg_test_gpu", "zg_test_gpu_store", "zg_test_gpu_engine"):
            file = self.root / "bin" / suite
            file.write_text(f"#!/bin/sh\n{body if suite == name else PASSING}\n")
            file.chmod(0o755)

    def command(self, *flags):
        return [str(self.root / "bench" / "gpu.sh"), str(self.root / "out"), *flags]

    def run_driver(self, *flags):
        environment = dict(os.environ, PYTHON=sys.executable, ZG_TEST_PID=str(self.pid_file))
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
        for name in ("zg_test_gpu_store", "zg_test_gpu_engine"):
            self.program(FAILING, name)
            suite = self.run_driver("--stages", "suite")["suite"]
            self.assertEqual(suite["status"], "failed")
            self.assertEqual(suite["data"]["tests"], {"run": 3, "skipped": 0, "passed": 2, "failed": ["A.one"]})
            self.assertFalse(suite["aims"][0]["met"])
            self.assertIn(f"{name} ended with 1", "\n".join(suite["notes"]))

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
        self.assertEqual([s["status"] for s in stages.values()], ["timed out", "failed", "timed out"])
        self.assertIn("this stage never ends", "\n".join(stages["hang"]["notes"]))
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
