"""What the stages of bench/gpu.sh share: where programs are, what a stage tells, programs that take steps on request."""
import glob
import json
import os
import pathlib
import queue
import site
import statistics
import subprocess
import sys
import threading
import time

from serve import Served

ROOT = pathlib.Path(__file__).resolve().parent.parent
GIB = 1 << 30


class Skipped(Exception):
    pass


class Failed(Exception):
    pass


class Cut(Exception):
    """The time was up before all of a stage was done; what was done is well."""


def library_path():
    """Of our programs: what the bundle brings, then CUDA's own libraries, wherever this machine has them."""
    roots = set(site.getsitepackages() + [p for p in sys.path if p.endswith("site-packages")])
    wheels = sorted(d for r in roots for d in glob.glob(os.path.join(r, "nvidia", "*", "lib")))
    parts = [str(ROOT / "lib")] if (ROOT / "lib").is_dir() else []
    return ":".join(parts + ["/usr/local/cuda/lib64", "/usr/local/cuda/lib"] + wheels + [p for p in [os.environ.get("LD_LIBRARY_PATH")] if p])


class Stage:
    def __init__(self, args):
        self.name, self.device, self.tiny, self.disk = args.stage, args.device, args.tiny, args.disk
        self.file = pathlib.Path(args.json).resolve()
        self.work = self.file.parent / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        self.end = time.monotonic() + args.seconds
        self.told = {"tables": [], "aims": [], "notes": [], "data": {}}
        # The goldens of the engine's suite, in a bundle as in the sources.
        self.environment = dict(os.environ, LD_LIBRARY_PATH=library_path(), ZG_REFERENCE_DIR=str(ROOT / "tests" / "reference"))

    def left(self):
        return self.end - time.monotonic()

    def program(self, name):
        places = [ROOT / "bin"] + [ROOT / "build" / d for d in ("", "bench", "tests")]
        for place in places:
            if os.access(place / name, os.X_OK) and (place / name).is_file():
                return str(place / name)
        missing = f"{name} is neither in a bundle (bin/) nor in build/: nothing is built here"
        raise Skipped(missing) if self.tiny else Failed(missing)

    def config(self, name):
        return str(ROOT / "configs" / name)

    def save(self):
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self.told))
        os.replace(part, self.file)

    def say(self, text):
        """A line of progress."""
        print(text, flush=True)

    def note(self, text):
        self.told["notes"].append(text)
        self.say(text)
        self.save()

    def table(self, title, columns, rows):
        """Replaces the one of the same title."""
        self.told["tables"] = [t for t in self.told["tables"] if t["title"] != title] + [{"title": title, "columns": columns, "rows": rows}]
        self.save()

    def aim(self, what, value, asked, met):
        text = f"{value:.3g}" if isinstance(value, float) else str(value)
        # What a dry run measures is nothing to judge.
        self.told["aims"].append({"what": what, "value": text, "aim": asked, "met": None if self.tiny else bool(met)})
        self.say(f"{what}: {text} (asked: {asked})")
        self.save()

    def data(self, key, value):
        self.told["data"][key] = value
        self.save()

    def run_lines(self, command, each, **more):
        """Runs one of our programs; each(line) for what it prints. Returns the exit code, or None where `seconds` were
        over before it ended. Its stderr is this stage's."""
        return self.run_together([(command, more.pop("env", {}))], each, **more)[0]

    def run_together(self, programs, each, seconds=float("inf"), **more):
        """The same of several at once, each a command and what is added to its environment; returns all exit codes."""
        end, lines = time.monotonic() + seconds, queue.Queue()
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.environment | env, **more) for command, env in programs]

        def read(stream):
            for line in stream:
                lines.put(line.rstrip("\n"))
            lines.put(None)

        for process in running:
            threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
        open_ends = len(running)
        while open_ends > 0 and (left := end - time.monotonic()) > 0:
            try:
                line = lines.get(timeout=min(left, 3600))
            except queue.Empty:
                continue
            if line is None:
                open_ends -= 1
            else:
                each(line)
        if open_ends == 0:
            return [process.wait() for process in running]
        # What they have started themselves ends with this stage's process group.
        codes = [process.poll() for process in running]
        for process in running:
            process.kill()
        for process in running:
            process.wait()
        while not lines.empty():
            if (line := lines.get()) is not None:
                each(line)
        return codes

    def json_lines(self, command, each=None, check=True):
        records = []

        def read(line):
            if line.startswith("{"):
                records.append(json.loads(line))
                if each:
                    each(records[-1])

        code = self.run_lines(command, read)
        if check and code != 0:
            raise Failed(f"{pathlib.Path(command[0]).name} ended with {code}")
        return records


class Steps(Served):
    """A program that answers each "step", whose stderr is this stage's."""

    def __init__(self, stage, name, command, ours):
        self.name, self.command, self.steps, self.ready = name, command, [], None
        environment = stage.environment if ours else dict(os.environ)
        begin = time.monotonic()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.ready = self.answer("ready")
        self.start_seconds = time.monotonic() - begin
        stage.say(f"{name}: ready after {self.start_seconds:.1f} s")

    def answer(self, event):
        while True:
            line = self.process.stdout.readline()
            if not line:
                raise Failed(f"{self.name} ended with {self.process.wait()} (its words are in the log)")
            if line.startswith("{") and json.loads(line).get("event") == event:
                return json.loads(line)

    def step(self, counted):
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        event = self.answer("step")
        if counted:
            self.steps.append(event)
        return event

    def summary(self):
        step = self.median()
        return {"name": self.name, "step_s": step, "mad_s": self.mad(), "steps": len(self.steps), "start_s": self.start_seconds,
                "tokens_per_s": statistics.median(s["tokens_per_s"] for s in self.steps), "flops_per_s": self.median("flops") / step,
                "ready": self.ready, "times": [s["step_s"] for s in self.steps]}


# Dense products of bf16 per second, by the vendor's data sheets: what "model FLOP utilisation" usually means.
PEAKS = {"H100": 989.4e12, "H200": 989.4e12, "GH200": 989.4e12, "A100": 312e12, "B200": 2250e12, "B100": 1750e12}


def peak_of(device):
    """None for a GPU that is not in the list."""
    names = [name for name in PEAKS if name in device]
    return PEAKS[max(names, key=len)] if names else None


def ours(stage, config, name, *settings):
    """Our steps of a configuration."""
    command = [stage.program("bench_train_step"), stage.config(config), "--serve", "--work", str(stage.work), "--set", f"devices={stage.device}"]
    for setting in settings:
        command += ["--set", setting]
    return Steps(stage, name, command, ours=True)


def mem_available():
    line = next(l for l in open("/proc/meminfo") if l.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024
