"""The stages of bench/gpu.sh that train models beyond the GPU's memory.

The least time of a step (P parameters, T tokens; the usual bound of engines that move state between tiers):

    T_compute   FLOPs of the step / F. F: the fastest square product in bf16; and, as a second figure, what the same blocks
                reach on this GPU with everything in its memory
    T_h2d       bytes to the device / the link's measured rate;  T_d2h likewise. With nothing kept on the device these are
                4 P and 2 P + A bytes (weights twice, gradients once, A of the blocks' inputs), A = 2 T h L; what the run
                moves is less by what stays there, and that is what counts here
    T_adam      parameters updated on the host x the measured time of one: bound by the host's memory
    T_clip      with clipping no update may begin before the last gradient is there: backward + max(forward, T_adam), where
                forward is a quarter of T_compute (three quarters are backward, which runs the blocks' forward again)

    T_bound = max of these,  eta = T_bound / T_measured
"""
import json
import pathlib
import shutil
import subprocess
import time

from gpu_support import GIB, Failed, mem_available, ours

TINY_LLAMA = ["model.num_hidden_layers=4", "model.hidden_size=64", "model.intermediate_size=176", "model.num_attention_heads=2",
              "model.num_key_value_heads=2", "model.max_position_embeddings=64", "model.vocab_size=320", "data.seq_len=64",
              "train_batch_size=8", "train_micro_batch_size_per_gpu=2", "tiers.host=64MiB"]


def host_budget(share=0.92):
    """What host memory gives a run: some must stay for the process, its tokens and the drivers' own."""
    available = mem_available()
    return max(64 << 20, int(min(share * available, available - 6 * GIB) if available > 20 * GIB else 0.25 * available))


def adam_ns(stage):
    """Nanoseconds per parameter of the host's AdamW with fp32 state, all threads."""
    params = 2_000_000 if stage.tiny else 200_000_000
    lines = []
    code = stage.run_lines([stage.program("bench_optimizer"), "--benchmark_filter=adamw_fp32", "--params", str(params), "--repeats", "5",
                            "--benchmark_format=json"], lines.append)
    if code != 0:
        raise Failed(f"bench_optimizer ended with {code}, and told no time of adamw_fp32")
    records = json.loads("\n".join(lines))["benchmarks"]
    stage.data("optimizer", records)
    return records[0]["ns_per_param"]


def bound(ready, step, flops_per_s, ns):
    compute = step["flops"] / flops_per_s
    adam = ready["updated_on_host"] * ns * 1e-9
    parts = {"compute": compute, "host -> device": step["h2d"] / ready["roof_h2d"], "device -> host": step["d2h"] / ready["roof_d2h"],
             "host's AdamW": adam, "backward, then the update": 0.75 * compute + max(0.25 * compute, adam)}
    by = max(parts, key=parts.get)
    return {"seconds": parts[by], "by": by, "parts": parts}


def take_steps(stage, program, warm, count):
    for i in range(warm + count):
        record = program.step(i >= warm)
        stage.say(f"{program.name}: step {i + 1}, {record['step_s']:.2f} s, loss {record['loss']:.3f}, {record['tokens_per_s']:.0f} tokens/s")
    program.close()


def rate_in_memory(stage, tiny):
    """FLOP/s of the same blocks, a few of them, with everything on the device."""
    layers = "2" if stage.tiny else "4"
    program = ours(stage, "bench-llama-7b-gpu.json", "4 blocks on the device", *tiny, f"model.num_hidden_layers={layers}",
                   "tiers.host=" + ("64MiB" if stage.tiny else "8GiB"))
    take_steps(stage, program, 1, 2)
    return program.summary()["flops_per_s"]


def llama_7b(stage):
    tiny = TINY_LLAMA if stage.tiny else []
    ns = adam_ns(stage)
    stage.note(f"AdamW on the host: {ns:.3f} ns per parameter")
    inside = rate_in_memory(stage, tiny)
    stage.note(f"the same blocks with everything on the device: {inside / 1e12:.1f} TFLOP/s, recomputation counted")
    host = min(host_budget(), 112 * GIB)
    runs = [("80 GB", f"tiers.device={64 << 20 if stage.tiny else 76 * GIB}"), ("16 GiB", f"tiers.device={(3 << 20) if stage.tiny else 16 * GIB}")]
    rows, seconds = [], {}
    for name, device in runs:
        if seconds and stage.left() < 1.2 * seconds["whole"]:
            stage.note(f"{name} of the GPU's memory: not run, {stage.left():.0f} s were left and the run before took {seconds['whole']:.0f} s")
            break
        begin = time.monotonic()
        settings = tiny + [device] + ([] if stage.tiny else [f"tiers.host={host}"])
        program = ours(stage, "bench-llama-7b-gpu.json", name, *settings)
        memory = next((l for l in program.ready["description"].splitlines() if l.startswith("memory")), "memory     not told")
        stage.note(f"{name}: ready after {program.start_seconds:.0f} s; {memory.split(maxsplit=1)[1]}")
        take_steps(stage, program, 1, 2)
        seconds[name], seconds["whole"] = program.median(), time.monotonic() - begin
        step = program.steps[-1]
        against = {"roof": bound(program.ready, step, program.ready["roof_flops"], ns), "blocks": bound(program.ready, step, inside, ns)}
        stage.data(f"run {name}", program.summary() | {"step": step, "bounds": against})
        for what, b in against.items():
            rows.append([name, program.median(), step["tokens_per_s"], step["stall_s"], step["h2d"] / 1e9, step["d2h"] / 1e9,
                         program.ready["updated_on_host"] / 1e9, "the fastest product" if what == "roof" else "the same blocks on the device",
                         b["seconds"], b["by"], b["seconds"] / program.median()])
        stage.table("Steps of 65,536 tokens", ["memory of the GPU", "s", "tokens/s", "stall s", "GB to the device", "GB to the host",
                                               "1e9 updated on the host", "compute as fast as", "least s", "by", "eta"], rows)
        eta = against["blocks"]["seconds"] / program.median()
        stage.note(f"{name}: parts of the least time, s: " + ", ".join(f"{k} {v:.2f}" for k, v in against["blocks"]["parts"].items()))
        stage.aim(f"7B with {name}: eta against the least time of a step", eta, "0.8 or more", eta >= 0.8)
        stage.aim(f"7B with {name}: eta with compute at the roof of products", against["roof"]["seconds"] / program.median(), "0.8 or more",
                  against["roof"]["seconds"] / program.median() >= 0.8)
    if len(seconds) == 3:
        cost = seconds["16 GiB"] / seconds["80 GB"]
        stage.aim("7B: step with 16 GiB over step with 80 GB", cost, "1.1 or less", cost <= 1.1)


class Search:
    """The most layers that a way of placing things has room for, by `ziggurat train --plan`."""

    def __init__(self, stage, settings):
        self.stage, self.settings = stage, settings
        self.tokens = stage.work / "tokens.bin"
        self.tokens.write_bytes(b"\1\0" * (1 << 17))

    def command(self, layers, placement):
        c = [self.stage.program("ziggurat"), "train", self.stage.config("bench-llama-7b-gpu.json"), "--plan"]
        for s in [f"devices={self.stage.device}", f"data.train={self.tokens}", f"output.dir={self.stage.work}/plan",
                  *self.settings, *placement, f"model.num_hidden_layers={layers}"]:
            c += ["--set", s]
        return c

    def fits(self, layers, placement):
        begin = time.monotonic()
        done = subprocess.run(self.command(layers, placement), capture_output=True, text=True, env=self.stage.environment)
        self.last = (done.stdout + done.stderr).strip().splitlines()
        if (seconds := time.monotonic() - begin) > 10:
            self.stage.say(f"{layers} layers {'fit' if done.returncode == 0 else 'do not fit'}, planned in {seconds:.0f} s")
        return done.returncode == 0

    def most(self, placement, start):
        low, high = 0, start
        while high < 65536 and self.fits(high, placement):
            low, high = high, 2 * high
        if low == 0:
            self.why = next((l for l in self.last if l.startswith("ziggurat:")), self.last[-1] if self.last else "no word")
        while high - low > 1 and self.stage.left() > 20:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle, placement) else (low, middle)
        return low


def largest(stage):
    """One step of the largest model, and how much of the machine's memory it is."""
    disk = pathlib.Path(stage.disk) / "zg-largest"
    disk.mkdir(parents=True, exist_ok=True)
    free = subprocess.run(["df", "--output=avail", "-B1", str(disk)], capture_output=True, text=True).stdout.split()
    disk_bytes = min(int(0.9 * int(free[-1])), 1 << 40)
    host = host_budget()
    settings = ["train_batch_size=2", "train_micro_batch_size_per_gpu=2"]
    if stage.tiny:
        host, disk_bytes = 96 << 20, 192 << 20
        settings = TINY_LLAMA + ["model.hidden_size=128", "train_batch_size=2", "tiers.device=64MiB"]
    # A layer fits in each of these budgets; that a model which does not fit whole is tried in tiles would take time.
    settings += [f"tiers.host={host}", "tiers.tiles=off"]
    nvme = "tiers.nvme=" + json.dumps([{"path": str(disk), "bytes": disk_bytes}])
    ways = {"no drive": [], "anything may go to the drive": [nvme],
            "optimizer state may go to the drive": [nvme, "zero_optimization.stage=3", "zero_optimization.offload_param.device=cpu",
                                                    "zero_optimization.offload_optimizer.device=nvme"]}
    search = Search(stage, settings)
    found = {}
    for way, placement in ways.items():
        found[way] = search.most(placement, 8)
        stage.say(f"{way}: {found[way]} layers" + (f" ({search.why})" if found[way] == 0 else ""))
        stage.data("layers", found)
    way = max(found, key=found.get)
    if found[way] == 0:
        raise Failed(f"no model fits: {search.why}")
    try:
        take_largest(stage, settings + ways[way], way, found[way], host, disk_bytes)
    finally:
        shutil.rmtree(disk, ignore_errors=True)


def take_largest(stage, settings, way, layers, host, disk_bytes):
    command = [stage.program("bench_train_step"), stage.config("bench-llama-7b-gpu.json"), "--steps", "1", "--work", str(stage.work)]
    for s in [f"devices={stage.device}", *settings, f"model.num_hidden_layers={layers}"]:
        command += ["--set", s]
    stage.say(f"{layers} layers: loading")
    records = stage.json_lines(command, lambda r: stage.say(f"{r['event']}: {r.get('parameters') or r.get('step_s')}"))
    ready, step = records[0], records[-1]
    if step["event"] != "step":
        raise Failed("no step was told")
    # At rest a parameter is a weight in bf16 and 12 bytes of state.
    most = (ready["device_budget"] + host + disk_bytes) / 14
    ratio = ready["parameters"] / most
    stage.table("The largest model", ["placement", "layers", "1e9 parameters", "GPU GiB", "host GiB", "disk GiB", "step s", "least bytes allow 1e9", "ratio"],
                [[way, layers, ready["parameters"] / 1e9, ready["device_budget"] / GIB, host / GIB, disk_bytes / GIB, step["step_s"], most / 1e9, ratio]])
    stage.data("largest", {"ready": ready, "step": step, "theoretical_maximum": most, "ratio": ratio, "placement": way})
    stage.aim("largest model takes a step", f"{ready['parameters'] / 1e9:.3g}e9 parameters, {ratio:.2f} of {most / 1e9:.3g}e9", "a step", True)
