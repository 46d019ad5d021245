"""What bench/gpu.sh finds on a machine: driver, CUDA's libraries, memory, drives, and how fast their links are. It asks
the system and nvidia-smi alone, so that it takes a moment; what is not there is told as such."""
import glob
import importlib.metadata
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys

from gpu_support import library_path

GIB = 1 << 30
ROOT = pathlib.Path(os.environ.get("ZG_MACHINE_ROOT", "/"))  # of proc and sys, for the tests of this file
LIBRARIES = ("libcudart.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libcufile.so.0")
PACKAGES = ("torch", "triton", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
GPU_FIELDS = {
    "name": "name", "compute_cap": "compute capability", "memory.total": "memory", "memory.used": "in use", "driver_version": "driver",
    "pcie.link.gen.current": "PCIe generation now", "pcie.link.gen.max": "at most", "pcie.link.width.current": "lanes now",
    "pcie.link.width.max": "at most ", "clocks.max.sm": "clock at most", "power.limit": "power limit", "mig.mode.current": "MIG",
    "compute_mode": "compute mode",
}


def command_output(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return done.stdout.strip() if done.returncode == 0 else ""
    except (OSError, subprocess.SubprocessError):
        return ""


def text_of(path):
    """Of a file below proc or sys; empty where there is none."""
    try:
        return (ROOT / path).read_text(errors="replace").strip()
    except OSError:
        return ""


def field(path, key):
    found = re.search(rf"^{re.escape(key)}\s*:\s*(.*)$", text_of(path), re.MULTILINE)
    return found.group(1).strip() if found else ""


def gib(kib):
    return f"{int(kib.split()[0]) / (1 << 20):.1f} GiB" if kib else "unknown"


def link_of(folder):
    """A PCI device's link: "32.0 GT/s PCIe x16 (at most 32.0 GT/s PCIe x16)"."""
    now, most = ([text_of(f"{folder}/{which}_link_{what}") for what in ("speed", "width")] for which in ("current", "max"))
    return f"{now[0]} x{now[1]} (at most {most[0]} x{most[1]})" if all(now) else ""


def gpus():
    rows = []
    for line in command_output("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader").splitlines():
        values = [v.strip() for v in line.split(",")]
        rows.append((f"GPU {len(rows)}", ", ".join([values[0]] + [f"{name.strip()} {v}" for name, v in list(zip(GPU_FIELDS.values(), values))[1:]])))
    links = re.findall(r"Link \d+: (.*)", command_output("nvidia-smi", "nvlink", "--status"))
    on = [link for link in links if "inactive" not in link.lower()]
    cuda = re.search(r"CUDA Version: *([\d.]+)", command_output("nvidia-smi"))
    if not rows:  # an older driver may not know all of these fields
        rows = [("GPU", line) for line in command_output("nvidia-smi", "-L").splitlines()] or [("GPU", "none: nvidia-smi tells of none")]
    return rows + [
        ("NVLink", f"{len(on)} links, each {on[0]}" if on else "none that is active"),
        ("CUDA of the driver", cuda.group(1) if cuda else "unknown"),
    ]


def library(name):
    """Where the loader finds it, in the order of our programs' search; the file's own name has the version."""
    for folder in library_path().split(":"):
        if (file := pathlib.Path(folder) / name).exists():
            return str(file.resolve())
    found = re.search(rf"{re.escape(name)} .*=> (.*)", command_output("ldconfig", "-p") or command_output("/sbin/ldconfig", "-p"))
    return str(pathlib.Path(found.group(1)).resolve()) if found else "not found"


def cudnn_version(path):
    """Of the library itself: wheels do not tell it in the file's name. In a process of its own, which may crash."""
    ask = "import ctypes, sys; v = ctypes.CDLL(sys.argv[1]).cudnnGetVersion(); print(v // 10000, v // 100 % 100, v % 100, sep='.')"
    return command_output(sys.executable, "-c", ask, path)


def packages():
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            pass
    return ", ".join(found) or "neither PyTorch nor cuDNN"


def memory():
    huge, defragmented = (re.search(r"\[(.+)\]|$", text_of(f"sys/kernel/mm/transparent_hugepage/{what}")).group(1) or "unknown"
                          for what in ("enabled", "defrag"))
    limit = text_of("sys/fs/cgroup/memory.max")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    nodes = [f"{pathlib.Path(n).name}: cores {text_of(f'{n}/cpulist')}" for n in sorted(glob.glob(str(ROOT / "sys/devices/system/node/node[0-9]*")))]
    return [
        ("memory", f"{gib(field('proc/meminfo', 'MemTotal'))}, {gib(field('proc/meminfo', 'MemAvailable'))} available"
                   + (f", control group at most {int(limit) / GIB:.1f} GiB" if limit.isdigit() else "")),
        ("memory that may be locked", "all" if locked == resource.RLIM_INFINITY else f"{locked / GIB:.3g} GiB"),
        ("huge pages", f"transparent: {huge}, defragmented: {defragmented}, in use {gib(field('proc/meminfo', 'AnonHugePages'))}, reserved "
                       f"{field('proc/meminfo', 'HugePages_Total') or 0} of {field('proc/meminfo', 'Hugepagesize') or 'unknown size'}"),
        ("NUMA nodes", "; ".join(nodes) or "unknown"),
    ]


def drives(disk):
    rows = []
    for block in sorted((ROOT / "sys/block").glob("*")):
        sectors = text_of(f"sys/block/{block.name}/size")
        if re.match(r"loop|ram|zram|sr", block.name) or not sectors.isdigit() or sectors == "0":
            continue
        # NVMe: the block device's device is the controller, whose device is on the bus.
        words = [f"{int(sectors) * 512 / GIB:.0f} GiB", text_of(f"sys/block/{block.name}/device/model"),
                 link_of(f"sys/block/{block.name}/device/device"),
                 "rotational" if text_of(f"sys/block/{block.name}/queue/rotational") == "1" else ""]
        rows.append((f"drive {block.name}", ", ".join(w for w in words if w)))
    source = command_output("df", "--output=source,fstype", disk).splitlines()
    rows.append((f"NVMe tier, {disk}", f"{shutil.disk_usage(disk).free / GIB:.0f} GiB free on {' '.join(source[-1].split()) if source else 'unknown'}"))
    return rows


def compute_sanitizer():
    """Where it is, or None."""
    places = [shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer"]
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


def software():
    return [
        ("NVIDIA's kernel module", field("proc/driver/nvidia/version", "NVRM version") or "unknown"),
        ("GPUDirect Storage's module", "loaded" if (ROOT / "proc/driver/nvidia-fs").exists() else "none"),
        *[(name, library(name)) for name in LIBRARIES],
        ("cuDNN", cudnn_version(library("libcudnn.so.9")) or "unknown"),
        ("compute-sanitizer", compute_sanitizer() or "not found"),
        ("Python", f"{sys.version.split()[0]} ({sys.executable}); {packages()}"),
        ("kernel", f"{os.uname().release}, io_uring {'off' if text_of('proc/sys/kernel/io_uring_disabled') in ('1', '2') else 'not forbidden'}"),
    ]


def processor():
    quota = text_of("sys/fs/cgroup/cpu.max").split()
    return [("processor", f"{field('proc/cpuinfo', 'model name') or 'unknown'}, {len(os.sched_getaffinity(0))} cores"
             + (f", control group {int(quota[0]) / int(quota[1]):g} of them" if quota and quota[0].isdigit() else ""))]


def table(disk):
    """Rows of what and how, both text. A part that cannot be read is no reason to tell nothing of the rest."""
    rows = []
    for part in (gpus, software, processor, memory, lambda: drives(disk)):
        try:
            rows += part()
        except Exception as why:  # whatever a machine has that nobody thought of
            rows.append((getattr(part, "__name__", "part"), f"not read: {why!r}"))
    return rows
