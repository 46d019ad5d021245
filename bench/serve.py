"""Programs that take a training step for each line "step", run in turns so that all see the same machine.

Used by the drivers beside it. A turn is several steps of one program; the first of each turn is not counted: between
turns a program may have fetched ahead for free.
"""
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time


def mad(values):
    """The median absolute deviation."""
    middle = statistics.median(values)
    return statistics.median(abs(v - middle) for v in values)


class Served:
    """A child that answers each "step" with one JSON line {"event": "step", "step_s": ...}."""

    def __init__(self, name, command):
        self.name, self.command, self.steps, self.ready = name, command, [], None
        # A file, since nobody reads a pipe while the child works: a full one would stop it.
        self.words = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.words, text=True)
        while self.ready is None:
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit(f"{name} ended before it was ready:\n{self.last_words()}")
            event = json.loads(line)
            if event.get("event") == "ready":
                self.ready = event

    def step(self, counted):
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended:\n{self.last_words()}")
        event = json.loads(line)
        if counted:
            self.steps.append(event)

    def last_words(self):
        self.process.wait()
        self.words.seek(0)
        return self.words.read()

    def close(self):
        """Ends the child; a second call does nothing."""
        with contextlib.suppress(BrokenPipeError):  # it had ended by itself
            self.process.stdin.close()
        self.process.wait()

    def median(self, key="step_s"):
        return statistics.median(s[key] for s in self.steps)

    def mad(self, key="step_s"):
        return mad([s[key] for s in self.steps])


@contextlib.contextmanager
def drive_directories(base):
    """Gives a function that makes a new directory below `base` at each call, for the NVMe tier of one program: a run locks
    its drive's directory, so programs that live side by side need one each. Those and what they hold are removed at the end."""
    os.makedirs(base, exist_ok=True)
    made = []

    def new():
        made.append(tempfile.mkdtemp(prefix="drive-", dir=base))
        return made[-1]

    try:
        yield new
    finally:
        for directory in made:
            shutil.rmtree(directory, ignore_errors=True)


def take_turns(programs, rounds, per_turn, progress=print):
    """One uncounted turn each to warm up, then `rounds` turns each of `per_turn` counted steps and one that is not."""
    for program in programs:
        for _ in range(3):
            program.step(False)
    for r in range(rounds):
        for program in programs:
            program.step(False)
            for _ in range(per_turn):
                program.step(True)
        progress(f"round {r + 1}/{rounds}: " + ", ".join(f"{p.name} {p.median():.3f} s" for p in programs))


def provenance(root):
    def run(*command):
        return subprocess.run(command, capture_output=True, text=True, cwd=root).stdout.strip()

    cpu = next((l.split(":", 1)[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), platform.machine())
    cores = sum(1 for l in open("/proc/cpuinfo") if l.startswith("processor"))
    return {"commit": run("git", "rev-parse", "--short", "HEAD"), "date": time.strftime("%Y-%m-%d"), "cpu": cpu, "cores": cores}
